"""FSDP2 (`fully_shard` on every block, then on the root): parameters, gradients and states are sharded by rows.

Models torch 2.13, torch/distributed/fsdp/_fully_shard: `_fsdp_param.py` (`FSDPParam._init_sharded_param`, `to_unsharded`,
`free_unsharded_param`), `_fsdp_param_group.py` (`unshard`, `wait_for_unshard`, `pre_backward`, `post_backward`,
`_backward_prefetch`), `_fsdp_collectives.py` (`foreach_all_gather`, `foreach_all_gather_copy_out`, `foreach_reduce`) and
`_fsdp_state.py` (`_post_forward`, `_root_post_backward_final_callback`).

Formula.  A parameter of d rows keeps ceil(d / N) rows on every rank, the last ranks padded.  B is what a group's padded rows
make together over N ranks, in elements; a, r and o are the bytes of an element as computed, as reduced, and as stored.

* kept: o B / N of parameters and of gradients, and the optimizer's state for the rows without padding;
* forward: a B of gathered parameters, a B of all-gather output until the next group has copied its own out (so there are
  a B + a B' + a B' at that copy), and a B / N for the cast where the stored type is another;
* backward: a B gathered, a B' of the previous group's all-gather output (prefetched), a B of gradients, r B'' of the input of
  the last reduce-scatter; then r B of its own input, r B / N of its output, which becomes the gradient (cast as stored).

The root is gathered until its backward is over, unless `reshard_after_forward` says otherwise.

With `param_dtype` the root casts floating-point inputs (images, sound), which `CastInputs` adds to the trace of a wholly narrow
model; large floating-point buffers, which stay as they are, are refused.

Known limit.  Clipping sharded gradients makes a few scalars more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ...errors import CannotTell, UserError
from ..clipping import clip_grad_norm_events
from ..ledger import DEFAULT_STREAM, Component, Tier
from ..optimizers.rule import OptimizerTensor, StepEvents, StepKind
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE, EventKind, Pass, Phase, StepTrace, TensorSlot
from .base import Strategy
from .fsdp_door import adapted, refuse_half_offload, settings_of, shards_of
from .fsdp_settings import FsdpSettings
from .fsdp_units import (
    ROOT,
    CastInputs,
    depth,
    embedding_and_head,
    longest_list,
    must_suit_narrow_trace,
    refuse_two_precisions,
    times_entered,
    wrapped_by,
)

if TYPE_CHECKING:
    from ..request import Request

_COPY_IN_STREAM, _REDUCE_STREAM = 1, 2  # FSDPCommContext: all_gather_copy_in_stream, reduce_scatter_stream
_NO_DTENSORS = ("adafactor",)  # torch 2.13: aten.pow_ on a partial norm raises


@dataclass(frozen=True, kw_only=True)
class Fsdp2Settings:
    """The arguments of `fully_shard` that memory depends on, and how the loop accumulates."""

    reshard_after_forward: bool | None = None
    """None: blocks drop their gathered parameters after forward, the root keeps them.  True: all drop.  False: all keep."""
    root_reshard_after_forward: bool | None = None
    """The root's own, where it is wrapped with another value than the blocks; None: as above."""
    param_dtype: str | None = None
    """`MixedPrecisionPolicy(param_dtype=...)`: gathered and computed with, so the trace is of this type; None: as stored."""
    reduce_dtype: str | None = None
    """`MixedPrecisionPolicy(reduce_dtype=...)`: what gradients are reduced in; None: as computed."""
    stored_dtype: str = "float32"
    """Of the sharded parameters where `param_dtype` is given."""
    blocks: tuple[str, ...] = ()
    """Modules that are wrapped beside the root; empty: every block of the longest list of equal modules."""
    embedding: str = ""
    """A module that is wrapped after the blocks, and as they are."""
    head: tuple[str, ...] = ()
    """Modules that are one unit, in the order of their forward: `fully_shard([norm, head], reshard_after_forward=False)`."""
    no_sync: bool = True
    """The loop accumulates with `set_requires_gradient_sync(False)`: only the last micro step reduces."""
    cpu_offload: bool = False
    """`CPUOffloadPolicy()`: shards, their gradients and the optimizer live on the host, the first two pinned."""


@dataclass(eq=False)
class _Group:
    """One FSDPParamGroup."""

    modules: tuple[str, ...]
    """In the order of their forward; nearly always one."""
    params: list[TensorSlot]
    drops: bool
    """Whether gathered parameters go after forward."""
    unsharded: list[Block] = field(default_factory=list)
    gathered: Block | None = None  # the all-gather's output, until it is copied out
    pending: bool = False  # a gather has begun
    ticket: int | None = None  # of that gather
    grads: dict[str, Block] = field(default_factory=dict)  # as autograd made them
    upcast: dict[str, Block] = field(default_factory=dict)  # accumulated without reducing, in the type of the reduction
    shard_grad: Block | None = None
    shard_owners: set[str] = field(default_factory=set)
    host_grads: dict[str, Block] = field(default_factory=dict)  # with offload
    places: list[int] = field(default_factory=list)  # in the order of the forward
    in_backward: bool = False
    reduced: bool = False

    @property
    def fqn(self) -> str:
        return self.modules[0]


class FullyShard(Strategy):
    """`fully_shard(block)` for every block, `fully_shard(model)`, then the loop of one GPU.

    `world_size` ranks share each parameter; `replicas` groups of them average their gradients once more (HSDP).
    `from_host`: the model is made on the CPU, and `fully_shard` moves what it shards (`_move_states_to_device`).
    """

    name = "fsdp2"

    def __init__(
        self, world_size: int = 1, settings: Fsdp2Settings | None = None, *, replicas: int = 1, from_host: bool = False
    ) -> None:
        self.world_size = world_size
        self.replicas = replicas
        self.from_host = from_host
        self.settings = settings or Fsdp2Settings()
        self._wrapped: list[_Group] = []  # in the order in which it is done
        self._groups: dict[int, _Group] = {}  # by module
        self._group_of: dict[str, _Group] = {}  # by parameter
        self._order: list[_Group] = []  # groups as their forwards ended
        self._last_gather: Block | None = None  # kept until the next group has copied its own out
        self._reduce_inputs: list[Block] = []
        self._early: Mapping[int, int] = {}  # module -> calls whose input has a gradient
        self._left: dict[int, int] = {}
        self._cast_inputs: CastInputs | None = None
        self._reduces = True
        self._adapts = False  # the frozen base of an adapter has no wide copy
        self._micro_batch = 0
        self._steps = 0

    def block_fqns(self, modules: Sequence[tuple[str, str]]) -> list[str]:
        """The modules that are wrapped beside the root, in order; `modules`: (fqn, class name) of all."""
        names = [fqn for fqn, _ in modules]
        for fqn in self.settings.blocks:
            if fqn not in names:
                raise UserError(f"fsdp2: the model has no module {fqn!r} to wrap", "`memplan trace MODEL` lists its modules")
        return list(self.settings.blocks) or longest_list(modules)

    # -- sizes -----------------------------------------------------------------------------------------------------------

    def _padded(self, slot: TensorSlot) -> int:
        """Elements of one rank's shard, padding included."""
        rows = slot.shape[0]
        return -(-rows // self.world_size) * (slot.numel // rows) if rows else 0

    def _shard(self, slot: TensorSlot, rank: int) -> tuple[int, ...]:
        """The shape of the shard of `rank`, without padding."""
        chunk = -(-slot.shape[0] // self.world_size)
        return (max(0, min(chunk, slot.shape[0] - rank * chunk)), *slot.shape[1:])

    def _stored(self, slot: TensorSlot) -> str:
        if self.settings.param_dtype is None or (self._adapts and not slot.requires_grad):
            return slot.dtype
        return self.settings.stored_dtype

    def _casts(self, slot: TensorSlot) -> bool:
        return self._stored(slot) != slot.dtype

    def _reduce_dtype(self, slot: TensorSlot) -> str:
        return self.settings.reduce_dtype or slot.dtype

    # -- the run ---------------------------------------------------------------------------------------------------------

    def at_init(self, sim: Simulation) -> None:
        trace = sim.trace
        self._adapts = trace.options.get("adapter") is not None
        for slot in trace.params:
            if not slot.shape:
                raise CannotTell(f"--strategy fsdp2: fully_shard refuses the scalar parameter {slot.fqn}")
            if self.settings.param_dtype not in (None, slot.dtype):
                raise CannotTell(
                    f"--strategy {self.name}: the model keeps {slot.fqn} in {slot.dtype}, and FSDP gathers it in "
                    f"{self.settings.param_dtype}, which is not modelled. Use bf16-mixed or fp32"
                )
        if sim.trains and times_entered(trace, ROOT) != 1:
            raise CannotTell("--strategy fsdp2: only a step that runs the whole model once is modelled")
        if sim.trains and sim.optimizer.name in _NO_DTENSORS:
            raise CannotTell(
                f"--strategy fsdp2: torch's {sim.optimizer.name} cannot step sharded parameters. Use another optimizer"
            )
        self._cast_inputs = CastInputs(trace) if self.settings.param_dtype is not None else None
        self._make_groups(trace)
        self._early = calls_with_input_gradient(trace, self._groups)
        from_host = self.from_host and sim.target != "cpu"  # there nothing is moved
        full = {} if from_host else self._move(sim, trace.params)
        for slot in trace.buffers:
            sim.place(Component.BUFFER, slot.fqn, slot.shape, slot.dtype)
        offloads = self.settings.cpu_offload
        for group in self._wrapped:
            if from_host:
                full = self._move(sim, group.params)
            for slot in group.params:
                shard = sim.place(Component.PARAM, slot.fqn, (self._padded(slot),), self._stored(slot))
                if offloads:
                    sim.place(Component.PARAM, slot.fqn, (self._padded(slot),), self._stored(slot), Tier.HOST_PINNED)
                    sim.free(shard)
            for slot in group.params:  # `fully_shard` held on to them
                sim.free(full[slot.fqn])
        if sim.trains and not offloads:
            sim.run_optimizer(self._rule(sim).init, self._names(sim))

    def _move(self, sim: Simulation, params: Sequence[TensorSlot]) -> dict[str, Block]:
        return {slot.fqn: sim.place(Component.PARAM, slot.fqn, slot.shape, self._stored(slot)) for slot in params}

    def before_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        if kind is Pass.FORWARD and sim.trace.modules[module].fqn == ROOT:
            if self._cast_inputs is not None:
                self._cast_inputs.enter_root(sim)
            self._reduces = not self.settings.no_sync or self._micro_batch == sim.loop.grad_accum_steps - 1
        group = self._groups.get(module)
        if group is None:
            return
        if kind is Pass.FORWARD:
            self._gather(sim, group)
            self._copy_out(sim, group, forward=True)
        elif kind is Pass.BACKWARD and not group.in_backward:
            group.in_backward = True
            self._gather(sim, group)
            self._copy_out(sim, group, forward=False)
            place = group.places.pop() if group.places else 0
            if place > 0:
                self._gather(sim, self._order[place - 1])

    def after_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        group = self._groups.get(module)
        fqn = sim.trace.modules[module].fqn
        if kind is Pass.FORWARD:
            if group is not None and fqn == group.modules[-1]:
                if group.drops:
                    self._reshard(sim, group)
                group.places.append(len(self._order))
                self._order.append(group)
            if fqn == ROOT and self._last_gather is not None:
                sim.free(self._last_gather)
                self._last_gather = None
            if fqn == ROOT and self._cast_inputs is not None:
                self._cast_inputs.leave_root(sim)
        elif kind is Pass.BACKWARD and group is not None and fqn == group.fqn != ROOT:
            self._left[module] = self._left.get(module, 0) + 1
            if self._left[module] <= self._early.get(module, 0):
                self._post_backward(sim, group)

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        group = self._group_of[param.fqn]
        if block is not None and param.fqn in group.grads:
            sim.free(block)
        elif block is not None:
            group.grads[param.fqn] = block

    def holds_grad(self, sim: Simulation, param: TensorSlot) -> bool:
        return param.fqn in self._group_of[param.fqn].grads

    def end_of_micro_step(self, sim: Simulation, micro_batch: int) -> None:
        """`_root_post_backward_final_callback`: what has not been reduced yet, root first; then all buffers go."""
        self._micro_batch = (micro_batch + 1) % sim.loop.grad_accum_steps
        for group in dict.fromkeys(self._groups.values()):
            if sim.trains and not group.reduced:
                self._post_backward(sim, group)
            group.reduced = group.in_backward = False
            group.places.clear()
            if group.gathered is not None:  # gathered ahead for a backward that never came
                sim.free(group.gathered)
            group.gathered, group.pending, group.ticket = None, False, None
        self._drop_reduce_inputs(sim)
        if self._cast_inputs is not None:
            self._cast_inputs.end_of_micro_step(sim)
        self._order.clear()
        self._left.clear()

    def step(self, sim: Simulation) -> None:
        if self.settings.cpu_offload:
            self._step_on_host(sim)
            return
        if sim.loop.clip_grad_norm:
            for event in clip_grad_norm_events([self._shard(p, sim.rank) for p in self._trained(sim)], sim.target):
                sim.run_temporary(event, "clip_grad_norm_")
        rule = self._rule(sim)
        sim.run_optimizer(rule.later if self._steps else rule.first, self._names(sim))
        self._steps += 1

    def _step_on_host(self, sim: Simulation) -> None:
        rule = self._rule(sim)
        for event in (*rule.init, *rule.first) if not self._steps else ():
            if event.kind is StepKind.STATE:
                sim.alloc(Component.OPTIMIZER_STATE, event.nbytes, "", "optimizer state", Tier.HOST_PAGEABLE)
        sim.enqueue("host_step", sum(self._padded(p) for p in self._trained(sim)) * ITEMSIZE["float32"])
        self._steps += 1

    def zero_grad(self, sim: Simulation, set_to_none: bool) -> None:
        if not set_to_none:
            return
        for param in sim.trace.params:
            group = self._group_of[param.fqn]
            group.shard_owners.discard(param.fqn)
            if param.fqn in group.host_grads:
                sim.free(group.host_grads.pop(param.fqn))
            if group.shard_grad is not None and not group.shard_owners:
                sim.free(group.shard_grad)
                group.shard_grad = None

    # -- gather and release ----------------------------------------------------------------------------------------------

    def _gather(self, sim: Simulation, group: _Group) -> None:
        """`unshard`: the shards, cast where need be, go into the flat output of the all-gather."""
        if group.pending or group.unsharded:
            return
        group.pending = True
        if self.world_size == 1:
            return
        nbytes = sum(self._padded(p) * ITEMSIZE[p.dtype] for p in group.params)
        stream = _COPY_IN_STREAM
        inputs = self._inputs_from_host(sim, group) if self.settings.cpu_offload else []
        cast = sum(self._padded(p) * ITEMSIZE[p.dtype] for p in group.params if self._casts(p))
        if not inputs and cast:
            inputs = [self._buffer(sim, cast, group, "cast shards", stream)]
        group.gathered = self._buffer(sim, nbytes * self.world_size, group, "all-gather output", stream)
        group.ticket = sim.enqueue("all_gather", nbytes * self.world_size, stream, ranks=self.world_size)
        for block in inputs:
            sim.free(block)

    def _inputs_from_host(self, sim: Simulation, group: _Group) -> list[Block]:
        """`FSDPParam.all_gather_inputs`: each shard is copied to the GPU, and cast there where need be."""
        inputs = []
        for slot in group.params:
            nbytes = self._padded(slot) * ITEMSIZE[self._stored(slot)]
            copy = sim.alloc(Component.OFFLOAD_BUFFER, nbytes, slot.fqn, "shard on the GPU", stream=_COPY_IN_STREAM)
            sim.enqueue("h2d", nbytes, _COPY_IN_STREAM)
            if self._casts(slot):
                cast = self._padded(slot) * ITEMSIZE[slot.dtype]
                inputs.append(self._buffer(sim, cast, group, "cast shard", _COPY_IN_STREAM))
                sim.free(copy)
            else:
                inputs.append(copy)
        return inputs

    def _copy_out(self, sim: Simulation, group: _Group, *, forward: bool) -> None:
        """`wait_for_unshard`.  In forward the output outlives the copy, so that the next gather cannot overwrite it."""
        if not group.pending:
            return
        group.pending = False
        if group.ticket is not None:
            sim.wait(group.ticket)
            group.ticket = None
        cast: Block | None = None
        for slot in group.params:
            nbytes = self._padded(slot) * ITEMSIZE[slot.dtype]
            if self.world_size == 1 and self._casts(slot):
                last, cast = cast, self._buffer(sim, nbytes, group, "cast shard")
                if last is not None:
                    sim.free(last)
            what = "gathered parameter"
            group.unsharded.append(sim.alloc(Component.COMM_BUFFER, nbytes * self.world_size, slot.fqn, what))
        if cast is not None:
            sim.free(cast)
        gathered, group.gathered = group.gathered, None
        if gathered is None:
            return
        gone: Block | None = gathered
        if forward:
            gone, self._last_gather = self._last_gather, gathered
        if gone is not None:
            sim.free(gone)

    def _reshard(self, sim: Simulation, group: _Group) -> None:
        for block in group.unsharded:
            sim.free(block)
        group.unsharded.clear()

    # -- gradients -------------------------------------------------------------------------------------------------------

    def _post_backward(self, sim: Simulation, group: _Group) -> None:
        group.reduced, group.in_backward = True, False
        for fqn in group.upcast:
            if fqn in group.grads:
                sim.free(group.grads.pop(fqn))
        self._reshard(sim, group)
        if not self._reduces:
            for slot in group.params:
                if slot.fqn in group.grads and self._reduce_dtype(slot) != slot.dtype:
                    nbytes = slot.numel * ITEMSIZE[self._reduce_dtype(slot)]
                    group.upcast[slot.fqn] = sim.alloc(Component.GRAD, nbytes, slot.fqn, "accumulated gradient")
                    sim.free(group.grads.pop(slot.fqn))
            return
        self._drop_reduce_inputs(sim)
        slots = [p for p in group.params if p.fqn in group.grads or p.fqn in group.upcast]
        if slots:
            self._reduce(sim, group, slots)

    def _reduce(self, sim: Simulation, group: _Group, slots: list[TensorSlot]) -> None:
        """`foreach_reduce`; the last gradient is a loop variable there, which lives until the function returns."""
        elements = sum(self._padded(p) for p in slots)
        dtype, stored = self._reduce_dtype(slots[0]), self._stored(slots[0])
        nbytes = elements * ITEMSIZE[dtype]
        self._reduce_inputs.append(self._buffer(sim, nbytes * self.world_size, group, "reduce-scatter input"))
        grads = [group.upcast.pop(p.fqn) if p.fqn in group.upcast else group.grads.pop(p.fqn) for p in slots]
        held = grads.pop() if self.world_size > 1 else None
        for block in grads:
            sim.free(block)
        output = sim.alloc(Component.GRAD, nbytes, group.fqn, "sharded gradients", stream=_REDUCE_STREAM)
        sim.enqueue("reduce_scatter", nbytes * self.world_size, _REDUCE_STREAM, ranks=self.world_size)
        if self.replicas > 1:
            sim.enqueue("all_reduce", nbytes, _REDUCE_STREAM, ranks=self.replicas, stride=self.world_size)
        if stored != dtype:
            reduced = output
            size = elements * ITEMSIZE[stored]
            output = sim.alloc(Component.GRAD, size, group.fqn, "sharded gradients", stream=_REDUCE_STREAM)
            sim.free(reduced)
        if self.settings.cpu_offload:
            for slot in slots:
                size = self._padded(slot) * ITEMSIZE[stored]
                sim.enqueue("d2h", size, _REDUCE_STREAM)
                new = sim.alloc(Component.GRAD, size, slot.fqn, "sharded gradient", Tier.HOST_PINNED)
                if slot.fqn in group.host_grads:
                    sim.free(new)  # added to the gradient that is there
                else:
                    group.host_grads[slot.fqn] = new
            sim.free(output)
        elif group.shard_grad is None:
            group.shard_grad = output
            group.shard_owners = {p.fqn for p in slots}
        else:
            sim.free(output)  # added to the gradients that are there
        if held is not None:
            sim.free(held)

    def _drop_reduce_inputs(self, sim: Simulation) -> None:
        for block in self._reduce_inputs:
            sim.free(block)
        self._reduce_inputs.clear()

    # -- small parts -----------------------------------------------------------------------------------------------------

    def _buffer(self, sim: Simulation, nbytes: int, group: _Group, what: str, stream: int = DEFAULT_STREAM) -> Block:
        return sim.alloc(Component.COMM_BUFFER, nbytes, group.fqn, what, stream=stream)

    def _make_groups(self, trace: StepTrace) -> None:
        index = {module.fqn: number for number, module in enumerate(trace.modules)}
        blocks = sorted(self.block_fqns([(m.fqn, m.class_name) for m in trace.modules]), key=lambda b: (depth(b), index[b]))
        head = self.settings.head
        units = [(fqn,) for fqn in (*blocks, self.settings.embedding) if fqn] + [head] * bool(head) + [(ROOT,)]
        names = [fqn for unit in units for fqn in unit if fqn != ROOT]
        parts: dict[str, list[TensorSlot]] = {}
        for slot in trace.params:
            parts.setdefault(wrapped_by(slot.fqn, names), []).append(slot)
        reshard = self.settings.reshard_after_forward
        for unit in units:
            params = [slot for fqn in unit for slot in parts.get(fqn, [])]
            if params:
                own = self.settings.root_reshard_after_forward if unit == (ROOT,) else False if unit == head else None
                drops = own if own is not None else unit != (ROOT,) if reshard is None else reshard
                group = _Group(unit, params, drops)
                self._wrapped.append(group)
                self._groups.update((index[fqn], group) for fqn in unit)
                self._group_of.update((p.fqn, group) for p in params)
        self._groups = dict(sorted(self._groups.items()))  # what is left to reduce goes in the model's order

    def _trained(self, sim: Simulation) -> list[TensorSlot]:
        return [sim.trace.params[i] for i in sorted(sim.trace.params_with_grad)]

    def _names(self, sim: Simulation) -> list[str]:
        return [p.fqn for p in self._trained(sim)]

    def _rule(self, sim: Simulation) -> StepEvents:
        wholes = [OptimizerTensor.of(sim.trace, p) for p in self._trained(sim)]
        shards = [(self._shard(p, sim.rank), self._stored(p)) for p in self._trained(sim)]
        return sim.optimizer.step(
            [replace(whole, shape=shape, dtype=dtype) for whole, (shape, dtype) in zip(wholes, shards, strict=True)]
        )


def calls_with_input_gradient(trace: StepTrace, modules: Iterable[int]) -> Mapping[int, int]:
    """Module -> how many of its calls hand a gradient to what came before: it touched a storage that is read after it.

    Only those reduce as soon as their backward is over; the others wait for the end of the whole backward.
    """
    wanted = frozenset(modules)
    key = (calls_with_input_gradient, wanted)
    if key not in trace.worked_out:
        trace.worked_out[key] = _calls_with_input_gradient(trace, wanted)
    found: Mapping[int, int] = trace.worked_out[key]
    return found


def _calls_with_input_gradient(trace: StepTrace, wanted: frozenset[int]) -> dict[int, int]:
    starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
    kinds, args, auxs = trace.event_kind.tolist(), trace.event_arg.tolist(), trace.event_aux.tolist()
    module_of = trace.call_module.tolist()
    last_read: dict[int, int] = {}
    touched: dict[int, set[int]] = {}  # running call -> storages
    done: list[tuple[int, int, set[int]]] = []
    backward = np.flatnonzero((trace.event_kind == EventKind.PHASE) & (trace.event_arg == Phase.BACKWARD))
    # Plain numbers, not the enumerations: every event of the backward is compared with them.
    op, alloc, grad, enter, leave = map(int, (EventKind.OP, EventKind.ALLOC, EventKind.GRAD, EventKind.ENTER, EventKind.LEAVE))
    for index in range(int(backward[0]) if len(backward) else len(kinds), len(kinds)):
        kind, arg = kinds[index], args[index]
        if kind == op:
            read = inputs[starts[arg] : starts[arg + 1]]
            for storage in read:
                last_read[storage] = index
            for storages in touched.values():
                storages.update(read)
        elif kind == alloc:
            for storages in touched.values():
                storages.add(arg)
        elif kind == grad:
            last_read[auxs[index]] = index
        elif kind in (enter, leave) and auxs[index] == Pass.BACKWARD and module_of[arg] in wanted:
            if kind == enter:
                touched[arg] = set()
            else:
                done.append((index, module_of[arg], touched.pop(arg)))
    found: dict[int, int] = {}
    for index, module, storages in done:
        if any(last_read.get(storage, -1) > index for storage in storages):
            found[module] = found.get(module, 0) + 1
    return found


def check(request: Request) -> None:
    settings = settings_of(request, version=2)
    refuse_two_precisions(request.precision, settings)
    refuse_half_offload(request.offload)
    if not isinstance(settings.reshard_after_forward, bool | None):
        raise CannotTell(
            f"reshard_after_forward {settings.reshard_after_forward}: resharding to some ranks is not modelled yet"
        )
    if settings.auto_wrap_policy == "SIZE_BASED_WRAP":
        raise CannotTell("auto_wrap_policy SIZE_BASED_WRAP under FSDP2 is not modelled yet. Use TRANSFORMER_BASED_WRAP")
    if request.strategy == "hsdp" and settings.replicas(request.nodes) == 1 and request.nodes == 1:
        raise UserError(
            "--strategy hsdp: parameters are shared inside a machine and copied over machines, and there is one machine",
            "Say --nodes N, or use --strategy fsdp2",
        )


def traced_as(request: Request) -> Request:
    return adapted(request, narrow_base=True)


def make(request: Request, trace: StepTrace) -> Strategy:
    settings = settings_of(request, version=2)
    if settings.param_dtype is not None:
        must_suit_narrow_trace(request.strategy, trace, settings.param_dtype)
    shards, replicas = shards_of(request, settings)
    return FullyShard(shards, _knobs(settings, trace), replicas=replicas, from_host=True)


def _knobs(settings: FsdpSettings, trace: StepTrace) -> Fsdp2Settings:
    assert isinstance(settings.reshard_after_forward, bool | None)
    classes = settings.transformer_layer_cls_to_wrap
    root_reshards = settings.root_reshard_after_forward
    if settings.wrap_embeddings and root_reshards is None:
        root_reshards = False
    embedding, head = embedding_and_head(trace) if settings.wrap_embeddings else ("", ())
    blocks = tuple(m.fqn for m in trace.modules if m.class_name in classes and m.fqn != ROOT)
    if classes and not blocks:
        what = f"transformer_layer_cls_to_wrap: the model has no module of class {', '.join(classes)}"
        raise UserError(what, "`memplan trace MODEL` lists its modules")
    return Fsdp2Settings(
        reshard_after_forward=settings.reshard_after_forward,
        root_reshard_after_forward=root_reshards,
        param_dtype=settings.param_dtype,
        reduce_dtype=settings.reduce_dtype,
        stored_dtype=settings.stored_dtype or "float32",
        blocks=blocks,
        embedding=embedding,
        head=head,
        no_sync=settings.no_sync,
        cpu_offload=settings.cpu_offload,
    )


def said(request: Request) -> list[str]:
    settings = settings_of(request, version=2)
    copies = settings.replicas(request.nodes)
    said = "fully_shard on every block and on the model, made on the CPU and moved block by block"
    if settings.wrap_embeddings:
        said += "; embedding and head are units of their own, as accelerate 1.15 wraps them"
    elif settings.reshard_after_forward is None:
        said += "; parameters are dropped after forward but the root's"
    if copies > 1:
        said += f"; {copies} copies of the model, each shared by {request.gpus // copies} ranks"
    return [said]
