"""`memplan hardware`: the catalogue of GPUs and what this machine has."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..units import gib

if TYPE_CHECKING:
    from .calibration import Calibration
    from .detect import Gpu
    from .profile import Device


_CALIBRATE = """Runs short kernels and copies for a minute at most: memory and context, copies both ways, matrix products by
    shape.  Nothing else should run meanwhile.  The figures are kept beside the data sheet's.  Exit code 0: measured."""


def add_commands(commands: Any) -> None:
    """Adds `hardware list | show | detect` to the sub-parsers of the command line."""
    part = commands.add_parser("hardware", help="the GPUs that memplan knows, and what this machine has")
    verbs = part.add_subparsers(dest="verb", metavar="VERB", required=True)

    listing = verbs.add_parser("list", help="every known GPU with its usable memory")
    listing.add_argument("--vendor", choices=("nvidia", "amd", "intel"), help="only the cards of one vendor")
    listing.add_argument("--json", action="store_true", help="print JSON: bytes, bytes per second, FLOP per second")
    listing.set_defaults(run=run_list)

    show = verbs.add_parser("show", help="everything known about one GPU, with the source of each figure")
    show.add_argument("key", metavar="KEY", help="a key or another name, such as rtx-4090, a100-80gb, auto")
    show.add_argument("--json", action="store_true", help="print JSON: bytes, bytes per second, FLOP per second")
    show.set_defaults(run=run_show)

    detect = verbs.add_parser("detect", help="the GPUs, memory, processor and disk of this machine")
    detect.add_argument("--json", action="store_true", help="print JSON; sizes in bytes")
    detect.set_defaults(run=run_detect)

    calibrate = verbs.add_parser("calibrate", help="measure this machine, and let `--gpu auto` use it", description=_CALIBRATE)
    calibrate.add_argument("--dry-run", action="store_true", help="print the figures, keep nothing")
    calibrate.add_argument("--json", action="store_true", help="print JSON; bytes per second, seconds")
    calibrate.set_defaults(run=run_calibrate)


def run_list(args: argparse.Namespace) -> int:
    """Prints the catalogue."""
    from . import catalogue

    devices = [device for device in catalogue.devices() if args.vendor in (None, device.vendor)]
    if args.json:
        print(json.dumps([_as_json(device) for device in devices], indent=1))
        return 0
    header = ("key", "arch", "total GiB", "usable GiB", "memory is", "GB/s", "bf16 TFLOPS", "host link")
    print(_table(header, [_row(device) for device in devices]))
    print(
        "\ntotal: what torch reports on Linux. usable: total less the context of one process."
        f"\n{len(devices)} cards. `memplan hardware show KEY` gives every figure with its source."
    )
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Prints one card."""
    from . import catalogue

    device, note = catalogue.resolve(args.key)
    if args.json:
        print(json.dumps({**_as_json(device), "resolved_note": note}, indent=1))
        return 0
    if note:
        print(f"{note}\n")
    rows = [(field, value, device.sources.get(source, "")) for field, value, source in _details(device)]
    print(f"{device.name} ({device.key}), figures of {device.made}\n")
    print(_table(("what", "value", "source"), rows))
    if device.note:
        print(f"\nnote: {device.note}")
    names = sorted(alias for alias, key in catalogue.aliases().items() if key == device.key)
    if names:
        print(f"\nother names: {', '.join(names)}")
    return 0


def run_detect(args: argparse.Namespace) -> int:
    """Prints what this machine has; a machine without a GPU is an answer, not a failure."""
    import dataclasses

    from . import detect

    found = detect.machine()
    if args.json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
        return 0
    for index, gpu in enumerate(found.gpus):
        print(_gpu_line(index, gpu))
    if not found.gpus:
        print("gpu     none found; name a card with --gpu, for example --gpu rtx-4090")
    print(f"cpu     {found.cpu_model or 'unknown'}, {found.cpu_cores} usable cores")
    total, free = found.ram_bytes, found.ram_available_bytes
    available = f", {gib(free)} available" if free is not None else ""
    print(f"ram     {gib(total) + available if total is not None else 'unknown'}")
    print(f"disk    {gib(found.disk_free_bytes)} free at {found.disk_path}")
    return 0


def run_calibrate(args: argparse.Namespace) -> int:
    """Measures the first GPU, or the processor where there is none; keeps what it found."""
    import platform
    import sys

    import torch

    from . import calibration, detect
    from .calibrate import CpuBench, CudaBench, calibrate

    def say(what: str) -> None:
        if not args.json:
            print(f"  {what}", file=sys.stderr)

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        device, _ = detect.as_device(detect.gpus()[0])
        found = calibrate(CudaBench(), device, versions, say=say)
    else:
        device = None
        found = calibrate(CpuBench(), None, versions, say=say)
    if args.json:
        print(json.dumps(found.model_dump(mode="json"), indent=1))
    else:
        print(_calibrated(found, device))
    if not args.dry_run:
        print(f"wrote {calibration.store(found)}", file=sys.stderr)
    return 0


def _calibrated(found: Calibration, device: Device | None) -> str:
    """Measured beside the data sheet."""
    link = device.host_link if device else None
    rows = [("what", "measured", "data sheet")]

    def rate(what: str, measured: float | None, stated: float | None = None) -> None:
        if measured is not None:
            rows.append((what, f"{measured / 1e9:.1f} GB/s", f"{stated / 1e9:.1f} GB/s" if stated else "-"))

    if found.total_bytes is not None and device:
        rows.append(("memory", gib(found.total_bytes), gib(device.total_bytes)))
    if found.context_bytes is not None and device:
        rows.append(("context", gib(found.context_bytes), gib(device.context_bytes)))
    rate("device memory, read and written", found.memory_bytes_per_s, device.memory_bandwidth_bytes_per_s if device else None)
    rate("host to device, pinned", found.h2d_bytes_per_s, link.h2d_bytes_per_s if link else None)
    rate("device to host, pinned", found.d2h_bytes_per_s, link.d2h_bytes_per_s if link else None)
    rate("host to device, pageable", found.h2d_pageable_bytes_per_s)
    rate("copies in host memory", found.host_copy_bytes_per_s)
    if found.launch_s is not None:
        rows.append(("between two small kernels", f"{found.launch_s * 1e6:.1f} us", "-"))
    if found.cpu_adam_params_per_s is not None:
        rows.append(("Adam on the CPU", f"{found.cpu_adam_params_per_s / 1e9:.2f} billion parameters/s", "-"))
    for product in found.products:
        peak = device.flops_per_s.get(product.dtype) if device else None  # type: ignore[call-overload]
        done = f"{product.flops / product.seconds / 1e12:.2f} TFLOPS"
        shape = f"{product.dtype} product {product.rows} x {product.inner} x {product.columns}"
        rows.append((shape, done, f"{peak / 1e12:.1f} TFLOPS" if peak else "-"))
    if found.best_matmul_share is not None and found.fit_error is not None:
        error = f"curve off by {found.fit_error:.1%} at the median"
        rows.append(("best share of the 16-bit rate, fitted", f"{found.best_matmul_share:.0%}", error))
    lines = [f"{found.name} ({found.device})", "", _table(rows[0], rows[1:])]
    reasons: dict[str, list[str]] = {}
    for what, why in found.not_measured.items():
        reasons.setdefault(why, []).append(what)
    lines += [f"not measured: {', '.join(names)}: {why}" for why, names in reasons.items()]
    return "\n".join(lines)


def _gpu_line(index: int, gpu: Gpu) -> str:
    from ..errors import UserError
    from . import detect

    try:
        known = f"as {detect.as_device(gpu)[0].key}"
    except UserError:
        known = "not in the catalogue"
    link = f", PCIe {gpu.pcie_gen} x{gpu.pcie_lanes}" if gpu.pcie_gen else ""
    return f"gpu {index:<3} {gpu.name}: {gib(gpu.total_bytes)}{link}, {known} (read by {gpu.read_by})"


def _as_json(device: Device) -> dict[str, Any]:
    return {**device.model_dump(mode="json"), "usable_bytes": device.usable_bytes}


def _link(device: Device) -> str:
    return f"PCIe {device.pcie.gen} x{device.pcie.lanes}" if device.pcie else "C2C"


def _row(device: Device) -> tuple[str, ...]:
    bf16 = device.flops_per_s.get("bf16")
    return (
        device.key,
        device.arch,
        f"{device.total_bytes / 2**30:.2f}",
        f"{device.usable_bytes / 2**30:.2f}",
        device.total_status,
        f"{device.memory_bandwidth_bytes_per_s / 1e9:.0f}",
        f"{bf16 / 1e12:.1f}" if bf16 else "-",
        _link(device),
    )


def _details(device: Device) -> list[tuple[str, str, str]]:
    """(what, value for people, the field whose source it is)."""
    capability = device.compute_capability
    version = f"compute capability {capability[0]}.{capability[1]}" if capability else device.gfx or "-"
    flops = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in device.flops_per_s.items())
    host = device.host_link
    rates = f"{host.h2d_bytes_per_s / 1e9:g} to the card, {host.d2h_bytes_per_s / 1e9:g} back"
    link = device.nvlink
    fabric = f"{link.kind}: {link.per_direction_bytes_per_s / 1e9:g} GB/s each way" if link else "none"
    shared = device.max_shared_memory_per_block_optin // 1024
    return [
        ("architecture", f"{device.arch}, {version}", "compute_capability"),
        ("memory, nominal", f"{device.nominal_gb} GB {device.memory_type}", ""),
        ("memory, as torch reports it", gib(device.total_bytes), "total_bytes"),
        ("context of one process", gib(device.context_bytes), "context_bytes"),
        ("usable", gib(device.usable_bytes), ""),
        ("ECC", device.ecc, "ecc"),
        ("memory bandwidth", f"{device.memory_bandwidth_bytes_per_s / 1e9:.0f} GB/s", "memory_bandwidth_bytes_per_s"),
        ("dense TFLOPS", flops, "flops_per_s"),
        ("SMs or compute units", str(device.sm_count), "sm_count"),
        ("threads per SM", str(device.max_threads_per_sm), "max_threads_per_sm"),
        ("shared memory per block", f"{shared} KiB", "max_shared_memory_per_block_optin"),
        ("host link", f"{_link(device)}: {rates} GB/s", "pcie.bytes_per_s" if device.pcie else "c2c"),
        ("link between cards", fabric, "nvlink"),
        ("power", f"{device.tdp_w} W", "tdp_w"),
    ]


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Aligned columns; numbers to the right.  Plain text, so that it pipes."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    columns = zip(*rows, strict=True)
    numeric = [all(text == "-" or text.replace(".", "", 1).isdigit() for text in column) for column in columns]

    def cells(line: tuple[str, ...]) -> str:
        pairs = zip(line, widths, numeric, strict=True)
        return "  ".join(text.rjust(width) if right else text.ljust(width) for text, width, right in pairs).rstrip()

    return "\n".join(map(cells, lines))
