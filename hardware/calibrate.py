"""Short kernels and copies on the machine at hand, and the fit of a profile to them.

A product [m, k] x [k, n] on a GPU of peak P and S multiprocessors is taken to last

    2 m k n / (P b q(m, n) k / (k + K)) + g

as in `planner/timeline/roofline.py`: b is the best share of the data sheet's rate, K the start-up of a tile's inner loop, g
what a kernel costs beside its work, and q the share of the tiles of 128 x 128 that work in the last wave.  b, K and g are
fitted with `scipy.optimize.least_squares` over the logarithms of the times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Protocol

import numpy as np

from .calibration import CPU, Calibration, Product
from .profile import Device

_TILE = 128
_COPY_BYTES = 256 << 20  # a copy this long reaches the link's rate
_ADAM_PARAMS = 8_000_000
# Shapes of products: squares, and the wide and short ones that training has; inner lengths from 256 on show the start-up.
SHAPES = (
    (8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048), (8192, 256, 8192), (8192, 1024, 8192), (4096, 4096, 14336),
    (2048, 14336, 4096), (1024, 4096, 1024), (512, 512, 512),
)  # fmt: skip
_CPU_SHAPES = ((1024, 1024, 1024), (512, 512, 512), (1024, 256, 1024))
_BUDGET_S = 60.0


class Bench(Protocol):
    """A device to measure on; every method returns seconds of one run, the median of some."""

    name: str
    dtypes: tuple[str, ...]

    def product(self, dtype: str, rows: int, inner: int, columns: int) -> float: ...
    def copy(self, direction: str, num_bytes: int, *, pinned: bool) -> float:
        """`direction`: h2d, d2h or d2d."""
        ...

    def launch(self) -> float: ...
    def memory(self) -> tuple[int, int]:
        """(total, context) in bytes."""
        ...


@dataclass(frozen=True)
class Fit:
    """The curve of matrix products."""

    best_share: float
    k_half: float
    gap_s: float
    median_error: float


def fit_products(products: Sequence[Product], peak_flops: float, sm_count: int) -> Fit:
    """The curve through `products` of one dtype; at least four.  `peak_flops`: the data sheet's rate."""
    from scipy.optimize import least_squares

    if len(products) < 4:
        raise ValueError(f"expected four products or more, got {len(products)}")
    flops = np.array([p.flops for p in products])
    inner = np.array([float(p.inner) for p in products])
    quantum = np.array([_last_wave(p.rows, p.columns, sm_count) for p in products])
    measured = np.array([p.seconds for p in products])

    def seconds(x: np.ndarray) -> np.ndarray:
        share, k_half, gap = np.exp(x)
        result: np.ndarray = flops / (peak_flops * share * quantum * inner / (inner + k_half)) + gap
        return result

    start = np.log([min(0.8, float((flops / measured).max() / peak_flops)), 100.0, 5e-6])
    bounds = (np.log([1e-4, 1e-3, 1e-8]), np.log([1.5, 1e5, 1e-2]))
    found = least_squares(lambda x: np.log(seconds(x) / measured), np.clip(start, *bounds), bounds=bounds, loss="soft_l1")
    share, k_half, gap = np.exp(found.x)
    error = float(np.median(np.abs(seconds(found.x) / measured - 1)))
    return Fit(float(share), float(k_half), float(gap), error)


def _last_wave(rows: int, columns: int, sm_count: int) -> float:
    tiles = -(-rows // _TILE) * -(-columns // _TILE)
    return max(tiles / (-(-tiles // sm_count) * sm_count), 0.25)


def calibrate(
    bench: Bench, device: Device | None, versions: dict[str, str], *, budget_s: float = _BUDGET_S, say: Callable[[str], None]
) -> Calibration:
    """Measures what `bench` can; `device` is the catalogue's, None for the CPU.  No product begins after `budget_s`."""
    deadline = time.perf_counter() + budget_s
    products = tuple(_products(bench, _CPU_SHAPES if device is None else SHAPES, deadline, say))
    figures: dict[str, Any] = {}
    missing: dict[str, str] = {}
    if device is None:
        say("copies in host memory")
        figures["host_copy_bytes_per_s"] = _COPY_BYTES / bench.copy("d2d", _COPY_BYTES, pinned=False)
        say("Adam on the CPU")
        figures["cpu_adam_params_per_s"] = _ADAM_PARAMS / cpu_adam_s(_ADAM_PARAMS)
        why = "no GPU on this machine"
        missing = dict.fromkeys(("total_bytes", "context_bytes", "memory_bytes_per_s", "h2d_bytes_per_s", "launch_s"), why)
    else:
        say("copies")
        for name, direction, pinned in (
            ("h2d_bytes_per_s", "h2d", True), ("d2h_bytes_per_s", "d2h", True), ("h2d_pageable_bytes_per_s", "h2d", False),
        ):  # fmt: skip
            figures[name] = _COPY_BYTES / bench.copy(direction, _COPY_BYTES, pinned=pinned)
        figures["memory_bytes_per_s"] = 2 * _COPY_BYTES / bench.copy("d2d", _COPY_BYTES, pinned=False)  # read and written
        figures["launch_s"] = bench.launch()
        figures["total_bytes"], figures["context_bytes"] = bench.memory()
        figures |= _fitted(products, device, missing)
    return Calibration(
        device=CPU if device is None else device.key,
        name=bench.name,
        made=date.today().isoformat(),
        versions=versions,
        products=products,
        not_measured=missing,
        **figures,
    )


def _products(
    bench: Bench, shapes: Iterable[tuple[int, int, int]], deadline: float, say: Callable[[str], None]
) -> Iterable[Product]:
    for dtype in bench.dtypes:
        for rows, inner, columns in shapes:
            if time.perf_counter() > deadline:
                return
            say(f"{dtype} product {rows} x {inner} x {columns}")
            seconds = bench.product(dtype, rows, inner, columns)
            yield Product(dtype=dtype, rows=rows, inner=inner, columns=columns, seconds=seconds)


def _fitted(products: Sequence[Product], device: Device, missing: dict[str, str]) -> dict[str, float]:
    """The curve of bf16 products, or of fp16 where there is no bf16."""
    for dtype in ("bf16", "fp16"):
        own = [p for p in products if p.dtype == dtype]
        peak = device.flops_per_s.get(dtype)  # type: ignore[call-overload]
        if len(own) >= 4 and peak:
            fit = fit_products(own, peak, device.sm_count)
            return {"best_matmul_share": fit.best_share, "matmul_k_half": fit.k_half, "fit_error": fit.median_error}
    missing["best_matmul_share"] = "fewer than four products in 16 bits, or no rate of the data sheet to compare with"
    return {}


# -- the machine at hand --------------------------------------------------------------------------------------------------


class CpuBench:
    """This machine's processor."""

    name = "cpu"
    dtypes: tuple[str, ...] = ("fp32",)

    def product(self, dtype: str, rows: int, inner: int, columns: int) -> float:
        import torch

        left, right = torch.rand(rows, inner), torch.rand(inner, columns)
        return _median(lambda: torch.mm(left, right), runs=5)

    def copy(self, direction: str, num_bytes: int, *, pinned: bool) -> float:
        import torch

        source = torch.ones(num_bytes, dtype=torch.uint8)
        target = torch.empty_like(source)
        return _median(lambda: target.copy_(source), runs=5)

    def launch(self) -> float:
        raise NotImplementedError("a CPU launches no kernels")

    def memory(self) -> tuple[int, int]:
        raise NotImplementedError("a CPU has no context")


class CudaBench:
    """This machine's first GPU, by CUDA events."""

    dtypes: tuple[str, ...] = ("bf16", "fp32")

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.name = torch.cuda.get_device_name(0)
        if not torch.cuda.is_bf16_supported():
            self.dtypes = ("fp16", "fp32")
        torch.ones(1, device="cuda")

    def product(self, dtype: str, rows: int, inner: int, columns: int) -> float:
        torch = self._torch
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
        left = torch.randn(rows, inner, device="cuda", dtype=kind)
        right = torch.randn(inner, columns, device="cuda", dtype=kind)
        out = torch.empty(rows, columns, device="cuda", dtype=kind)
        return self._timed(lambda: torch.mm(left, right, out=out))

    def copy(self, direction: str, num_bytes: int, *, pinned: bool) -> float:
        torch = self._torch
        there = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        other = torch.empty(num_bytes, dtype=torch.uint8, device="cuda" if direction == "d2d" else "cpu", pin_memory=pinned)
        source, target = (there, other) if direction == "d2h" else (other, there)
        return self._timed(lambda: target.copy_(source, non_blocking=pinned))

    def launch(self) -> float:
        """Seconds between two small kernels of a queue that is full."""
        torch, count = self._torch, 2000
        small = torch.zeros(1, device="cuda")

        def many() -> None:
            for _ in range(count):
                small.add_(1)

        return self._timed(many, runs=3) / count

    def memory(self) -> tuple[int, int]:
        """What is gone and not torch's is taken for the context: nothing else may run on the card."""
        torch = self._torch
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(0)
        return int(total), int(total) - int(free) - int(torch.cuda.memory_reserved(0))

    def _timed(self, run: Callable[[], Any], runs: int = 10) -> float:
        torch = self._torch
        run()
        times = []
        for _ in range(runs):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)


def cpu_adam_s(params: int) -> float:
    """Seconds of one fused AdamW step on the CPU over `params` fp32 parameters."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(params))
    weight.grad = torch.ones(params)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()  # makes the state
    return _median(optimizer.step, runs=3)


def _median(run: Callable[[], Any], runs: int) -> float:
    run()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
