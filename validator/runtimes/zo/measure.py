"""What lives where while a zeroth-order run goes on: on the GPU torch's own counters, on the CPU every storage from birth to
death.

On the CPU the "device" is a second copy in the same memory, so every storage carries the **tier** it stands for, the one
that was set when it was made.  A storage is born when an op returns it, with its size as asked for, and dies with its last
reference; blocks that a CPU kernel makes and drops inside one op are no storages (`validator.cpu` calls them kernel scratch
and leaves them out as well). This works over several threads, where torch's profiler reports no memory; on one thread both
give the same figures.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...measurement import PhaseBytes, Usage

Tier = Literal["device", "host_pinned", "host_pageable", "bookkeeping"]
DEVICE: Tier = "device"
PINNED: Tier = "host_pinned"
PAGEABLE: Tier = "host_pageable"
BOOKKEEPING: Tier = "bookkeeping"  # random states, which lie on the host whatever the device; counted nowhere
INIT = -1  # as a step: before the first one


@dataclass(frozen=True, slots=True)
class Event:
    """A storage is born (`delta_bytes` > 0) or dies.  `phase` indexes `RankMeasurement.phases`."""

    phase: int
    tier: Tier
    delta_bytes: int


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of one step: what a runtime does at one unit."""

    step: int
    """0 is the first, INIT comes before."""
    unit: str
    """The unit's name; "" where there is none, and the last unit's name for what the model does after it."""
    kind: str
    """init | batch | upload | offload | update | perturb | forward | between | flush | eval.  "between" is the model's code
    outside of units: masks, sums, the loss."""
    peak_bytes: int
    """On the device, the start included."""
    after_bytes: int
    host_pinned_bytes: int
    """The highest while it ran, every tensor rounded up to a power of two as torch's pinned allocator does."""
    host_pageable_bytes: int
    """The same of tensors in pageable memory; 0 on CUDA, where nothing counts it."""


@dataclass(frozen=True, kw_only=True)
class RankMeasurement:
    """What one process saw."""

    rank: int
    pert: int
    """Which sign it runs: 0 is +eps (and -eps where nobody shares), 1 is -eps alone."""
    data: int
    """Which part of the global batch."""
    counter: Literal["live", "allocated"]
    """live: bytes asked for; allocated: torch's counter on CUDA."""
    losses: tuple[tuple[float, float], ...]
    """Of every step, at +eps and at -eps, of the global batch."""
    projected_grads: tuple[float, ...]
    eval_loss: float | None
    phases: tuple[Phase, ...]
    events: tuple[Event, ...]
    """Empty on CUDA."""
    digest: str
    """SHA-256 of all parameters after the last update."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """The same by name, where the run keeps them."""

    @property
    def device_peak_bytes(self) -> int:
        """Of the steps; placing the model before the first is not part of it."""
        return max(p.peak_bytes for p in self.phases if p.step != INIT and p.kind not in ("flush", "eval"))

    @property
    def host_pinned_bytes(self) -> int:
        """The peak of the steps."""
        return max(p.host_pinned_bytes for p in self.phases if p.step != INIT)

    @property
    def host_pageable_bytes(self) -> int:
        """The peak of the last step: the model as it was loaded lies in pageable memory until the first one has replaced it."""
        last = max(p.step for p in self.phases)
        return max(p.host_pageable_bytes for p in self.phases if p.step == last)

    def _pageable_with_loading_bytes(self) -> int:
        """With the model as it was loaded, where a part of it stays on the host; elsewhere it is no part of the run."""
        stays = any(p.host_pinned_bytes or p.host_pageable_bytes for p in self.phases if p.step != INIT)
        return max(p.host_pageable_bytes for p in self.phases) if stays else 0

    def peaks(self, *, by: Literal["kind", "unit"] = "kind", step: Literal["first", "later"] = "later") -> dict[str, int]:
        """Device peaks by kind of phase or by unit, of the first step or of all later ones."""
        found: dict[str, int] = {}
        for p in self.phases:
            if p.step != INIT and (p.step == 0) == (step == "first"):
                name = p.kind if by == "kind" else p.unit
                found[name] = max(found.get(name, 0), p.peak_bytes)
        return found

    def usage(self) -> Usage:
        """In the form in which predictions are compared; "forward" is a whole training step."""
        steps = {"first": [p for p in self.phases if p.step == 0], "later": [p for p in self.phases if p.step > 0]}
        trained = {name: [p for p in found if p.kind not in ("flush", "eval")] for name, found in steps.items()}
        phases = [
            PhaseBytes(
                phase="forward", step=name, peak_bytes=max(p.peak_bytes for p in found), after_bytes=found[-1].after_bytes
            )
            for name, found in trained.items()
            if found
        ]
        placed = [p for p in self.phases if p.step == INIT]
        first = PhaseBytes(
            phase="init", step="first", peak_bytes=max(p.peak_bytes for p in placed), after_bytes=placed[-1].after_bytes
        )
        return Usage(
            counter=self.counter,
            phases=(first, *phases),
            components={},
            detail={"host_pinned_bytes": self.host_pinned_bytes, "host_pageable_bytes": self._pageable_with_loading_bytes()},
        )


@dataclass(frozen=True, kw_only=True)
class ZoMeasurement:
    """One run, rank by rank."""

    ranks: tuple[RankMeasurement, ...]
    canonical_rank: int = 0
    """Whose parameters count: partners restore theirs by other roundings, until a flush hands them this one's."""

    @property
    def losses(self) -> tuple[tuple[float, float], ...]:
        return self.ranks[self.canonical_rank].losses

    @property
    def projected_grads(self) -> tuple[float, ...]:
        return self.ranks[self.canonical_rank].projected_grads

    @property
    def device_peak_bytes(self) -> int:
        """Of the rank that needs most."""
        return max(r.device_peak_bytes for r in self.ranks)


class Recorder(Protocol):
    """What a runtime tells about itself while it runs."""

    counter: Literal["live", "allocated"]
    phases: list[Phase]
    events: list[Event]

    def thread(self) -> AbstractContextManager[Any]:
        """Every thread that runs ops has to be inside."""
        ...

    def tier(self, tier: Tier) -> AbstractContextManager[Any]:
        """Storages made inside stand for this tier."""
        ...

    def begin_step(self, step: int) -> None: ...

    def mark(self, kind: str, unit: str = "") -> None:
        """A phase begins; the one before it ends."""
        ...

    def adopt(self, module: nn.Module) -> None:
        """What the module holds lies in pageable host memory."""
        ...


class StorageRecorder:
    """Follows every storage of this process; for runs on the CPU."""

    counter: Literal["live", "allocated"] = "live"

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.events: list[Event] = []
        self._seen: set[int] = set()
        self._live: Counter[Tier] = Counter()
        self._peak: dict[Tier, int] = {}
        self._tier: Tier = DEVICE
        self._step = INIT
        self._open: tuple[str, str] | None = None

    def thread(self) -> AbstractContextManager[Any]:
        return _Watch(self)

    @contextlib.contextmanager
    def tier(self, tier: Tier) -> Iterator[None]:
        before, self._tier = self._tier, tier
        try:
            yield
        finally:
            self._tier = before

    def begin_step(self, step: int) -> None:
        self._close()
        self._step = step

    def mark(self, kind: str, unit: str = "") -> None:
        self._close()
        self._open, self._peak = (kind, unit), dict(self._live)

    def adopt(self, module: nn.Module) -> None:
        with self.tier(PAGEABLE):
            for tensor in (*module.parameters(), *module.buffers()):
                self.see(tensor)

    def see(self, tensor: Tensor) -> None:
        """Follows the tensor's storage from now on."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen or not nbytes:
            return
        self._seen.add(key)
        counted = _pinned_bytes(nbytes) if self._tier == PINNED else nbytes
        weakref.finalize(storage, self._died, key, self._tier, counted).atexit = False
        self._change(self._tier, counted)

    def _died(self, key: int, tier: Tier, counted_bytes: int) -> None:
        self._seen.discard(key)
        self._change(tier, -counted_bytes)

    def _change(self, tier: Tier, delta_bytes: int) -> None:
        self._live[tier] += delta_bytes
        self._peak[tier] = max(self._peak.get(tier, 0), self._live[tier])
        if tier != BOOKKEEPING:
            self.events.append(Event(len(self.phases), tier, delta_bytes))

    def _close(self) -> None:
        if self._open is None:
            return
        kind, unit = self._open
        device, pinned, pageable = (self._peak.get(tier, 0) for tier in (DEVICE, PINNED, PAGEABLE))
        self.phases.append(Phase(self._step, unit, kind, device, self._live[DEVICE], pinned, pageable))
        self._open = None


class _Watch(TorchDispatchMode):
    """Shows the recorder what every op of this thread returns."""

    def __init__(self, recorder: StorageRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; the mark that keeps the compiler out would load all of it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._recorder.see(leaf)
        return out


class NoRecorder:
    """For runs that train and measure nothing."""

    counter: Literal["live", "allocated"] = "live"

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.events: list[Event] = []

    def thread(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def tier(self, tier: Tier) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def begin_step(self, step: int) -> None:
        pass

    def mark(self, kind: str, unit: str = "") -> None:
        pass

    def adopt(self, module: nn.Module) -> None:
        pass


class CudaRecorder:
    """Reads torch's counters of the current GPU at every mark; they follow the host's order, so nothing is waited for."""

    counter: Literal["live", "allocated"] = "allocated"

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.events: list[Event] = []
        self._step = INIT
        self._open: tuple[str, str] | None = None

    def thread(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def tier(self, tier: Tier) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def begin_step(self, step: int) -> None:
        self._close()
        self._step = step

    def mark(self, kind: str, unit: str = "") -> None:
        self._close()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory.reset_peak_host_memory_stats()
        self._open = (kind, unit)

    def adopt(self, module: nn.Module) -> None:
        pass

    def _close(self) -> None:
        if self._open is None:
            return
        kind, unit = self._open
        pinned = torch.cuda.memory.host_memory_stats().get("allocated_bytes.peak", 0)
        now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        self.phases.append(Phase(self._step, unit, kind, peak, now, pinned, 0))
        self._open = None


def _pinned_bytes(nbytes: int) -> int:
    """What torch's pinned allocator takes: the next power of two (aten/src/ATen/core/CachingHostAllocator.h, torch 2.13)."""
    return 1 << (nbytes - 1).bit_length()
