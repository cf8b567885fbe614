"""Reads the machine that memplan runs on: GPUs, host memory, processor, disk.

Nothing here needs a GPU or a driver: what cannot be read is None or an empty tuple.  torch is imported only when a driver is
there, since it takes seconds, and no CUDA context is made: reading device properties costs no GPU memory.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..units import gib
from . import catalogue
from .profile import Device, Pcie

_NVML_NAMES = ("libnvidia-ml.so.1", "nvml.dll")
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA, NVIDIA under WSL2, AMD
# A 24 GB card that reports 23.51 or 23.69 GiB is the same card with another driver; a modded one differs by far more.
_SAME_CARD_TOLERANCE = 0.10


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine.  `total_bytes` is torch's figure, or the driver's total less its own part of it."""

    name: str
    total_bytes: int
    compute_capability: tuple[int, int] | None
    sm_count: int | None
    gfx: str | None
    pcie_gen: int | None  # of the slot and the card together, at most
    pcie_lanes: int | None
    read_by: str  # "torch" or "nvml"


@dataclass(frozen=True)
class Machine:
    """What this machine offers.  None: could not be read."""

    gpus: tuple[Gpu, ...]
    cpu_model: str | None
    cpu_cores: int  # usable by this process
    ram_bytes: int | None  # of the container, where it limits the process
    ram_available_bytes: int | None
    disk_path: str
    disk_free_bytes: int


def machine(path: str | os.PathLike[str] = ".") -> Machine:
    """Reads this machine; `path` chooses the disk."""
    total, available = _ram()
    return Machine(
        gpus=gpus(),
        cpu_model=_cpu_model(),
        cpu_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        ram_bytes=total,
        ram_available_bytes=available,
        disk_path=str(Path(path).resolve()),
        disk_free_bytes=shutil.disk_usage(path).free,
    )


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process can use, in torch's order; empty without a driver."""
    library = nvml()
    if library is None and not any(os.path.exists(file) for file in _DRIVER_FILES):
        return ()
    return _gpus_of_torch() or (_gpus_of_nvml(library) if library is not None else ())


def this_gpu() -> tuple[Device, str]:
    """This machine's first GPU as a Device with the memory that it really reports, and a sentence that says so.

    A card that the catalogue does not know takes the speeds of the known card that is most like it.
    Raises UserError when there is no GPU, or none like it is known.
    """
    found = gpus()
    if not found:
        raise UserError("--gpu auto: no GPU was found on this machine", "Name the card, for example --gpu rtx-4090")
    from .calibration import applied

    device, note = as_device(found[0])
    calibrated = applied(device)
    return calibrated, note if calibrated is device else f"{note}, as calibrated here"


def as_device(gpu: Gpu) -> tuple[Device, str]:
    """The catalogue's Device for `gpu`, with this card's own memory, SM count and PCIe link; and the sentence of `this_gpu`."""
    known = [device for device in catalogue.devices() if gpu.name in device.device_names]
    if not known and (key := catalogue.find(gpu.name)) is not None:
        known = [catalogue.device(key)]
    if known:  # one name can stand for boards of two sizes ("NVIDIA H100")
        base = min(known, key=lambda device: abs(device.total_bytes - gpu.total_bytes))
        note = f"auto means this machine's {gpu.name} ({base.key}) with {gib(gpu.total_bytes)}"
        if abs(gpu.total_bytes - base.total_bytes) > _SAME_CARD_TOLERANCE * base.total_bytes:
            note += f", unlike the {gib(base.total_bytes)} of the catalogue"
        return _as_read(base, gpu), note
    alike = _most_like(gpu)
    if alike is None:
        raise UserError(f"--gpu auto: nothing like this machine's {gpu.name!r} is known", "Name a similar card")
    note = (
        f"auto means this machine's {gpu.name} with {gib(gpu.total_bytes)}; it is not in the catalogue, "
        f"so its speeds are those of the {alike.name} ({alike.key}), scaled by the number of SMs"
    )
    share = (gpu.sm_count or alike.sm_count) / alike.sm_count
    reason = f"unverified; as {alike.key}, scaled by the number of SMs"
    scaled = {
        "name": gpu.name,
        "flops_per_s": {dtype: int(rate * share) for dtype, rate in alike.flops_per_s.items()},
        "memory_bandwidth_bytes_per_s": int(alike.memory_bandwidth_bytes_per_s * share),
    }
    sources = {**alike.sources, "flops_per_s": reason, "memory_bandwidth_bytes_per_s": reason}
    return _as_read(alike.model_copy(update={**scaled, "sources": sources}), gpu), note


def _as_read(base: Device, gpu: Gpu) -> Device:
    """`base` with what this machine itself says about the card."""
    read = f"measured; this machine, by {gpu.read_by}"
    changes: dict[str, Any] = {"total_bytes": gpu.total_bytes, "total_status": "measured"}
    sources = {**base.sources, "total_bytes": read}
    if gpu.sm_count is not None:
        changes["sm_count"] = gpu.sm_count
        sources["sm_count"] = read
    if base.pcie is not None and gpu.pcie_gen is not None and gpu.pcie_lanes is not None:
        # A generation doubles the rate of a lane; the share of it that copies reach stays the same.
        share = 2.0 ** (gpu.pcie_gen - base.pcie.gen) * gpu.pcie_lanes / base.pcie.lanes
        changes["pcie"] = Pcie(
            gen=gpu.pcie_gen,
            lanes=gpu.pcie_lanes,
            h2d_bytes_per_s=int(base.pcie.h2d_bytes_per_s * share),
            d2h_bytes_per_s=int(base.pcie.d2h_bytes_per_s * share),
        )
        sources["pcie"] = read
    return base.model_copy(update={**changes, "sources": sources})


def _most_like(gpu: Gpu) -> Device | None:
    """The known card of the same architecture with the nearest number of SMs."""
    if gpu.gfx is not None:
        same = [device for device in catalogue.devices() if device.gfx == gpu.gfx]
    else:
        capability = gpu.compute_capability
        cards = [device for device in catalogue.devices() if device.compute_capability is not None]
        same = [device for device in cards if device.compute_capability == capability]
        if not same and capability is not None:
            same = [device for device in cards if device.compute_capability and device.compute_capability[0] == capability[0]]
    wanted = gpu.sm_count
    return min(same, key=lambda device: abs(device.sm_count - wanted) if wanted else device.sm_count, default=None)


def _gpus_of_torch() -> tuple[Gpu, ...]:
    """What torch sees, or nothing when torch is missing or has no CUDA."""
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found = [torch.cuda.get_device_properties(index) for index in range(count)]
    except (ImportError, OSError, RuntimeError, AssertionError):  # a broken driver is a machine without a GPU
        return ()
    return tuple(_gpu_of_properties(properties) for properties in found)


def _gpu_of_properties(properties: Any) -> Gpu:
    gfx = str(getattr(properties, "gcnArchName", "")).split(":")[0]
    bus = getattr(properties, "pci_bus_id", None)
    address = None
    if bus is not None:
        address = f"{getattr(properties, 'pci_domain_id', 0):04x}:{bus:02x}:{getattr(properties, 'pci_device_id', 0):02x}.0"
    gen, lanes = pcie_link(address) if address else (None, None)
    on_amd = gfx.startswith("gfx")
    return Gpu(
        name=str(properties.name),
        total_bytes=int(properties.total_memory),
        compute_capability=None if on_amd else (int(properties.major), int(properties.minor)),
        sm_count=int(properties.multi_processor_count),
        gfx=gfx if on_amd else None,
        pcie_gen=gen,
        pcie_lanes=lanes,
        read_by="torch",
    )


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_v2_t of nvml.h: the total is the board's, `reserved` is the driver's own part of it."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def nvml() -> Any | None:
    """The driver's management library, or None where there is no NVIDIA driver."""
    for name in _NVML_NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _gpus_of_nvml(library: Any) -> tuple[Gpu, ...]:
    """What the driver reports; every call of NVML returns 0 for success."""
    if library.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        found = (_gpu_of_nvml(library, index) for index in range(count.value))
        return tuple(gpu for gpu in found if gpu is not None)
    finally:
        library.nvmlShutdown()


def _gpu_of_nvml(library: Any, index: int) -> Gpu | None:
    handle = ctypes.c_void_p()
    name = ctypes.create_string_buffer(96)  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
    memory = _NvmlMemory(version=ctypes.sizeof(_NvmlMemory) | 2 << 24)  # NVML's way to number structures
    if (
        library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0
        or library.nvmlDeviceGetName(handle, name, len(name)) != 0
        or library.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)) != 0
    ):
        return None
    major, minor, gen, lanes = (ctypes.c_int() for _ in range(4))
    capable = library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0
    linked = (
        library.nvmlDeviceGetMaxPcieLinkGeneration(handle, ctypes.byref(gen)) == 0
        and library.nvmlDeviceGetMaxPcieLinkWidth(handle, ctypes.byref(lanes)) == 0
    )
    return Gpu(
        name=name.value.decode(errors="replace"),
        total_bytes=int(memory.total - memory.reserved),
        compute_capability=(major.value, minor.value) if capable else None,
        sm_count=None,  # NVML does not say
        gfx=None,
        pcie_gen=gen.value if linked else None,
        pcie_lanes=lanes.value if linked else None,
        read_by="nvml",
    )


_GENERATION_OF_GT_S = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # PCI-SIG, transfers per second and lane


def pcie_link(address: str, root: Path = Path("/sys/bus/pci/devices")) -> tuple[int | None, int | None]:
    """The best (generation, lanes) of the card at `address` ("0000:01:00.0") and of the port above it together.

    The current speed is of no use: an idle card lowers it.
    """
    card = root / address
    if not card.exists():
        return None, None
    ends = [link for place in (card, card.resolve().parent) if (link := _link_of(place)) is not None]
    if not ends:
        return None, None
    return min(gen for gen, _ in ends), min(lanes for _, lanes in ends)


def _link_of(place: Path) -> tuple[int, int] | None:
    try:
        speed = re.match(r"[0-9.]+", (place / "max_link_speed").read_text())
        lanes = int((place / "max_link_width").read_text())
    except (OSError, ValueError):
        return None
    gen = _GENERATION_OF_GT_S.get(float(speed.group())) if speed else None
    return (gen, lanes) if gen and lanes else None


def _ram(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup/memory.max")
) -> tuple[int | None, int | None]:
    """(total, available) bytes of host memory; a container's limit counts where it is lower."""
    try:
        lines = (line.partition(":") for line in meminfo.read_text().splitlines())
        kib = {name: int(rest.split()[0]) for name, _, rest in lines}
        total, available = kib["MemTotal"] * 1024, kib.get("MemAvailable", kib["MemFree"]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
        except (ValueError, OSError, AttributeError):
            return None, None
    try:
        limit = int(cgroup.read_text())
    except (OSError, ValueError):  # "max" means no limit
        return total, available
    return min(total, limit), min(available, limit)


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or None
