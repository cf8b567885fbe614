"""DistributedDataParallel: every rank holds the whole model; gradients are averaged in flat buckets.

Models torch 2.13: torch/nn/parallel/distributed.py (`DistributedDataParallel.__init__`, `_pre_forward`, `_sync_buffers`) and
torch/csrc/distributed/c10d/reducer.cpp (`initialize_buckets`, `mark_variable_ready_dense`, `finalize_bucket_dense`,
`rebuild_buckets`, `compute_bucket_assignment_by_size`).

Formula, in bytes of the gradients G (= bytes of the trainable parameters), beside what one GPU needs:

* buckets: G, from construction on, whatever the world size;
* gradients: another G from backward to `zero_grad`, or none with `gradient_as_bucket_view` (each lives until it is copied).

The buckets are made in the order of the parameters (one a dtype), and once more, in the order in which gradients became ready,
when the second forward begins.  Gradients that are views then (a loop that clears late, or with zeros) keep the old buckets
alive until they are copied into the new ones: for that moment there are 2 G.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import CannotTell
from ...models.quantised import is_statistic
from ..clipping import clip_grad_norm_events
from ..ledger import Component
from ..optimizers.rule import OptimizerTensor, StepEvents
from ..simulate import Block, Simulation
from ..trace.steptrace import EventKind, Pass, TensorSlot
from .base import Strategy

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.steptrace import StepTrace

_MIB = 1 << 20
_FIRST_BUCKET_BYTES = 1 * _MIB  # c10d/reducer.hpp, kDefaultFirstBucketBytes
_BUCKET_CAP_MB = 25  # nn/parallel/distributed.py, _DEFAULT_BUCKET_CAP_MB
_BROADCAST_BYTES = 250 * _MIB  # nn/parallel/distributed.py, broadcast_bucket_size
_BROADCASTS_IN_FLIGHT = 2  # c10d/comm.cpp, broadcast_coalesced


@dataclass(frozen=True, kw_only=True)
class DdpSettings:
    """The arguments of DistributedDataParallel that memory depends on, and how the loop accumulates."""

    bucket_cap_mb: float | None = None
    """Size at which a bucket is full, in MiB; None: 25, and 1 for the first.  A given value counts for the first one too."""
    gradient_as_bucket_view: bool = False
    """Gradients are views of the buckets instead of tensors of their own."""
    broadcast_buffers: bool = True
    """The module's buffers are broadcast when a forward begins."""
    no_sync: bool = True
    """The loop accumulates under `no_sync()`: only the last micro step averages.  False averages in each."""

    @property
    def bucket_limits(self) -> tuple[int, int]:
        """Bytes at which the first and every later bucket is full, once they are rebuilt."""
        if self.bucket_cap_mb is None:
            return _FIRST_BUCKET_BYTES, _BUCKET_CAP_MB * _MIB
        return (int(self.bucket_cap_mb * _MIB),) * 2


@dataclass(eq=False, slots=True)
class _Bucket:
    """A flat tensor, alive while the reducer or a gradient refers to it."""

    block: Block
    owners: set[str] = field(default_factory=set)


_REDUCER = ""  # as an owner of a bucket: no parameter is called that


class DistributedDataParallel(Strategy):
    """`DistributedDataParallel(model.to(device))` with one process a GPU; then the loop of one GPU."""

    name = "ddp"

    def __init__(self, world_size: int = 1, settings: DdpSettings | None = None) -> None:
        self.world_size = world_size
        self.settings = settings or DdpSettings()
        self._own: dict[str, Block] = {}  # gradients that are tensors of their own
        self._viewed: dict[str, _Bucket] = {}  # gradients that are views of a bucket
        self._bucket_of: dict[str, _Bucket] = {}  # of the reducer's current buckets
        self._ready: list[TensorSlot] = []  # in the order of the first backward that averages
        self._rebuilt = False
        self._averages = True
        self._buffers_are_due = True
        self._micro_batch = 0
        self._steps = 0

    def at_init(self, sim: Simulation) -> None:
        for slot in sim.trace.params:
            sim.place(Component.PARAM, slot.fqn, slot.shape, slot.dtype)
        for slot in sim.trace.buffers:
            sim.place(Component.BUFFER, slot.fqn, slot.shape, slot.dtype)
        if not sim.trains:
            return
        without = [p.fqn for i, p in enumerate(sim.trace.params) if p.requires_grad and i not in sim.trace.params_with_grad]
        if without:
            raise CannotTell(
                f"--strategy ddp: {without[0]} trains but the loss does not reach it: DDP stops in the second step, "
                "or needs find_unused_parameters=True, which is not modelled. Freeze it"
            )
        if not any(kind is EventKind.ENTER and not sim.trace.call_fqn(arg) for kind, arg, _ in sim.trace.events()):
            raise CannotTell(
                "--strategy ddp: the step never calls the whole model, so DDP would average nothing. Use another loss"
            )
        self._broadcast(sim, [*sim.trace.params, *self._buffers(sim)])
        for part in _by_dtype(self._trained(sim)):
            self._make_bucket(sim, part)
        sim.run_optimizer(self._rule(sim).init, self._names(sim))

    def before_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        """DDP's own forward: buckets are rebuilt once, buffers are broadcast."""
        if kind is not Pass.FORWARD or sim.trace.modules[module].fqn or not sim.trains:
            return
        last = self._micro_batch == sim.loop.grad_accum_steps - 1
        self._averages = last or not self.settings.no_sync
        if self._ready and not self._rebuilt:
            self._rebuild(sim)
        if self._buffers_are_due and self.settings.broadcast_buffers:
            self._broadcast(sim, self._buffers(sim))
        self._buffers_are_due = self._averages

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        fqn = param.fqn
        if block is not None:
            if self.holds_grad(sim, param):  # AccumulateGrad: `.grad += new`, in place; the new one goes
                sim.free(block)
            else:
                self._own[fqn] = block
        if not self._averages:
            return
        if not self._rebuilt:
            self._ready.append(param)
        sim.enqueue("all_reduce", param.nbytes)
        if self.settings.gradient_as_bucket_view and fqn not in self._viewed:
            self._view(sim, fqn)

    def holds_grad(self, sim: Simulation, param: TensorSlot) -> bool:
        return param.fqn in self._own or param.fqn in self._viewed

    def end_of_micro_step(self, sim: Simulation, micro_batch: int) -> None:
        self._micro_batch = (micro_batch + 1) % sim.loop.grad_accum_steps

    def step(self, sim: Simulation) -> None:
        if sim.loop.clip_grad_norm:
            for event in clip_grad_norm_events([p.shape for p in self._trained(sim)], sim.target):
                sim.run_temporary(event, "clip_grad_norm_")
        rule = self._rule(sim)
        sim.run_optimizer(rule.later if self._steps else rule.first, self._names(sim))
        self._steps += 1

    def zero_grad(self, sim: Simulation, set_to_none: bool) -> None:
        if set_to_none:
            for param in sim.trace.params:
                self._drop(sim, param.fqn)

    # -- buckets ---------------------------------------------------------------------------------------------------------

    def _make_bucket(self, sim: Simulation, params: list[TensorSlot]) -> None:
        component = Component.GRAD if self.settings.gradient_as_bucket_view else Component.COMM_BUFFER
        bucket = _Bucket(sim.alloc(component, sum(p.nbytes for p in params), what="gradient bucket"), {_REDUCER})
        for param in params:
            self._bucket_of[param.fqn] = bucket
            if param.fqn in self._viewed:
                self._view(sim, param.fqn)

    def _view(self, sim: Simulation, fqn: str) -> None:
        """The gradient is copied into its bucket, and is a view of it from here."""
        self._drop(sim, fqn)
        self._viewed[fqn] = self._bucket_of[fqn]
        self._viewed[fqn].owners.add(fqn)

    def _rebuild(self, sim: Simulation) -> None:
        """The reducer lets go of its buckets, then makes them again in the order of the gradients (`rebuild_buckets`)."""
        for bucket in dict.fromkeys(self._bucket_of.values()):
            self._release(sim, bucket, _REDUCER)
        limits = self.settings.bucket_limits
        for part in _by_dtype(self._ready):
            full, nbytes, limit = [], 0, limits[0]
            for param in part:
                full.append(param)
                nbytes += param.nbytes
                if nbytes >= limit:
                    self._make_bucket(sim, full)
                    full, nbytes, limit = [], 0, limits[1]
            if full:
                self._make_bucket(sim, full)
        self._rebuilt = True

    def _drop(self, sim: Simulation, fqn: str) -> None:
        """`.grad` no longer refers to what it was."""
        if fqn in self._own:
            sim.free(self._own.pop(fqn))
        elif fqn in self._viewed:
            self._release(sim, self._viewed.pop(fqn), fqn)

    def _release(self, sim: Simulation, bucket: _Bucket, owner: str) -> None:
        bucket.owners.discard(owner)
        if not bucket.owners:
            sim.free(bucket.block)

    def _buffers(self, sim: Simulation) -> list[TensorSlot]:
        """What DDP knows as the module's buffers."""
        return [slot for slot in sim.trace.buffers if not is_statistic(slot.fqn)]

    def _broadcast(self, sim: Simulation, slots: Iterable[TensorSlot]) -> None:
        """`broadcast_coalesced`: flat copies of up to 250 MiB, two on their way at once; one tensor alone is not copied."""
        flying: deque[Block | None] = deque()
        for part in _by_dtype(slots):
            for chunk in _chunks(part, _BROADCAST_BYTES):
                nbytes = sum(s.nbytes for s in chunk)
                flat = sim.alloc(Component.COMM_BUFFER, nbytes, what="broadcast") if len(chunk) > 1 else None
                flying.append(flat)
                if len(flying) > _BROADCASTS_IN_FLIGHT:
                    _finish(sim, flying.popleft())
        for flat in flying:
            _finish(sim, flat)

    # -- the optimizer ---------------------------------------------------------------------------------------------------

    def _trained(self, sim: Simulation) -> list[TensorSlot]:
        return [sim.trace.params[i] for i in sorted(sim.trace.params_with_grad)]

    def _names(self, sim: Simulation) -> list[str]:
        return [p.fqn for p in self._trained(sim)]

    def _rule(self, sim: Simulation) -> StepEvents:
        return sim.optimizer.step([OptimizerTensor.of(sim.trace, p) for p in self._trained(sim)])


def _finish(sim: Simulation, flat: Block | None) -> None:
    if flat is not None:
        sim.free(flat)


def _by_dtype(slots: Iterable[TensorSlot]) -> list[list[TensorSlot]]:
    parts: dict[str, list[TensorSlot]] = {}
    for slot in slots:
        parts.setdefault(slot.dtype, []).append(slot)
    return list(parts.values())


def _chunks(slots: list[TensorSlot], limit: int) -> list[list[TensorSlot]]:
    found: list[list[TensorSlot]] = [[]]
    nbytes = 0
    for slot in slots:
        found[-1].append(slot)
        nbytes += slot.nbytes
        if nbytes >= limit:
            found.append([])
            nbytes = 0
    return [chunk for chunk in found if chunk]


def check(request: Request) -> None:
    from . import MIXED

    if request.precision in MIXED:
        raise CannotTell(f"--precision {request.precision}: DDP keeps no fp32 masters. Use bf16, bf16-autocast or fp32")
    if request.offload:
        raise CannotTell(f"--offload {'+'.join(request.offload)}: DDP keeps everything on the GPU. Use zero2, zero3 or fsdp2")


def make(request: Request, trace: StepTrace) -> Strategy:
    return DistributedDataParallel(request.gpus)


def said(request: Request) -> list[str]:
    return ["DistributedDataParallel with its defaults: buckets of 25 MiB, gradients beside them"]
