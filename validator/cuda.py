"""Measures a real step on a GPU: torch's own counters per phase, the memory history, and what the driver says."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files import write_whole
from .loop import Running, run
from .measurement import DRIVER_USED, MOMENTS, STEPS, PhaseBytes, Usage
from .out_of_memory import explained
from .tensors import component_bytes

if TYPE_CHECKING:
    from ..planner.request import Request

_MAX_HISTORY = 1_000_000  # events of the memory history; a step of a 32-layer model has some ten thousand


@dataclass(frozen=True, kw_only=True)
class Reading:
    """torch.cuda's counters when a phase ended; the peaks are of that phase alone."""

    phase: str
    iteration: int
    allocated_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


class Meter:
    """Reads torch.cuda's counters of the current GPU whenever a phase ends.  Call `mark` as each phase begins.

    `where`: the phase that runs now, for whoever has to say where a run failed.
    """

    def __init__(self, running: Running, components_of: Callable[[Any, Any], Mapping[str, int]] | None = None) -> None:
        self.running = running
        self.where: tuple[str, int] | None = None
        self._components_of = components_of or (lambda module, optimizer: component_bytes(module, optimizer, "cuda"))
        self._readings: list[Reading] = []
        self._components: dict[str, Mapping[str, int]] = {}

    def mark(self, phase: str, iteration: int) -> None:
        import torch

        torch.cuda.synchronize()
        if self.where is not None:
            ended, at = self.where
            self._readings.append(
                Reading(
                    phase=ended,
                    iteration=at,
                    allocated_bytes=torch.cuda.memory_allocated(),
                    peak_allocated_bytes=torch.cuda.max_memory_allocated(),
                    peak_reserved_bytes=torch.cuda.max_memory_reserved(),
                )
            )
            if ended in MOMENTS and self.running.module is not None:
                self._components[ended] = self._components_of(self.running.module, self.running.optimizer)
        torch.cuda.reset_peak_memory_stats()
        self.where = (phase, iteration)

    def usage(self) -> Usage:
        """What was read so far, and what the driver says that this process holds."""
        import torch

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return usage(self._readings, self._components, gpu=properties.name, used_bytes=process_used_bytes(properties))


def measure(request: Request, *, snapshot: str | None = None) -> Usage:
    """Runs the steps of `request` on the first GPU.  `snapshot`: a file for the memory history, for pytorch.org/memory_viz."""
    import torch

    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU", "Use --device cpu")
    running = Running()
    meter = Meter(running)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.empty_cache()
    if snapshot is not None:
        torch.cuda.memory._record_memory_history(max_entries=_MAX_HISTORY, stacks="python")  # C++ frames take minutes
    try:
        with explained(running, lambda: meter.where, "cuda"):
            run(request, meter.mark, device="cuda", running=running)
        if snapshot is not None:
            write_snapshot(snapshot, torch.cuda.memory._snapshot())
    finally:
        if snapshot is not None:
            torch.cuda.memory._record_memory_history(enabled=None)
    return meter.usage()


def usage(
    readings: Sequence[Reading], components: Mapping[str, Mapping[str, int]], *, gpu: str, used_bytes: int | None = None
) -> Usage:
    """Readings, one a phase that ended, as peaks of the first step and of the later ones."""
    found: dict[tuple[str, str], PhaseBytes] = {}
    for reading in readings:
        if reading.phase not in MOMENTS:
            continue
        key = (reading.phase, STEPS[min(reading.iteration, 1)])
        known = found.get(key)
        peak = max(reading.peak_allocated_bytes, known.peak_bytes if known else 0)
        found[key] = PhaseBytes(phase=key[0], step=key[1], peak_bytes=peak, after_bytes=reading.allocated_bytes)
    reserved = [r.peak_reserved_bytes for r in readings if r.phase in MOMENTS]
    detail: dict[str, Any] = {"gpu": gpu}
    if used_bytes is not None:
        detail[DRIVER_USED] = used_bytes
    return Usage(
        counter="allocated",
        phases=tuple(found.values()),
        components=components,
        reserved_peak_bytes=max(reserved, default=0),
        detail=detail,
    )


def write_snapshot(path: str, snapshot: Any) -> None:
    """A memory history as pytorch.org/memory_viz reads it; written whole or not at all."""
    write_whole(path, pickle.dumps(snapshot))


def process_used_bytes(properties: Any, library: Callable[[], Any] | None = None) -> int | None:
    """What this process holds on its GPU, context included, as nvidia-smi shows it; None where the driver does not say.

    nvml.h: nvmlDeviceGetComputeRunningProcesses_v3 fills nvmlProcessInfo_t; inside a container the process ids differ, and the
    process is then not found.
    """
    import ctypes

    from ..hardware.detect import nvml

    class ProcessInfo(ctypes.Structure):
        _fields_ = (
            ("pid", ctypes.c_uint),
            ("used", ctypes.c_ulonglong),
            ("gpu_instance", ctypes.c_uint),
            ("compute_instance", ctypes.c_uint),
        )

    driver = (library or nvml)()
    uuid = getattr(properties, "uuid", None)
    if driver is None or uuid is None or driver.nvmlInit_v2() != 0:
        return None
    try:
        handle, count = ctypes.c_void_p(), ctypes.c_uint(256)
        table = (ProcessInfo * count.value)()
        if (
            driver.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)) != 0
            or driver.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), table) != 0
        ):
            return None
        unknown = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
        return next((int(p.used) for p in table[: count.value] if p.pid == os.getpid() and p.used != unknown), None)
    finally:
        driver.nvmlShutdown()
