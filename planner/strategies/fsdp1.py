"""FSDP1 (`FullyShardedDataParallel`): every unit's parameters are one flat tensor, of which each rank keeps an equal part.

Models torch 2.13, torch/distributed/fsdp: `_flat_param.py` (`FlatParamHandle`: `_init_flat_param_and_metadata`, `shard`,
`init_flat_param_attributes`, `pre_unshard`, `unshard`, `reshard`, `prepare_gradient_for_optim`) and `_runtime_utils.py`
(`_pre_forward`, `_post_forward`, `_pre_backward_hook`, `_post_backward_hook`, `_reduce_grad`, `_prefetch_handle`).

Formula.  F elements of a unit's flat tensor (with `use_orig_params` each parameter begins at a multiple of 16 bytes, and N
divides F), c = ceil(F / N) on every rank; a, r and o are the bytes of an element as computed, as reduced, and as stored.

* kept: o c of parameters and of gradients, and the optimizer's state for the same elements;
* a gather: a c N, and before it a c for the cast where the stored type is another;
* forward: one unit gathered and the root (`FULL_SHARD`); with `SHARD_GRAD_OP` all stay until their backward is over;
* backward: the unit's a c N, the one before it gathered ahead (`BACKWARD_PRE`), the gradients as autograd made them, a F of
  their concatenation, which the whole unit waits for; then r F cast, r c N padded, r c reduced, and o c of the gradient.

Under `no_sync` a F of every unit stays.  A unit of which only some parameters train, and one that runs twice, are refused.

A frozen unit inside a reentrant checkpoint (`units_inside_checkpoints`): its hook on the gradients of its inputs
(`_register_post_backward_reshard_only_hook`) lives until the whole backward is over, and with it what the hook refers to:
the accumulators of the recomputed call's inputs, so the inputs and their gradients.

Known limit: `record_stream` returns a freed block only when its stream is done, which shows in reserved memory alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import CannotTell, UserError
from ..clipping import clip_grad_norm_events
from ..ledger import Component, Tier
from ..optimizers.rule import OptimizerTensor, StepEvents, StepKind
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE, EventKind, Pass, Phase, StepTrace, TensorSlot
from .base import Strategy
from .fsdp_door import adapted, refuse_half_offload, settings_of, shards_of
from .fsdp_settings import FsdpSettings
from .fsdp_units import FLOATS, ROOT, CastInputs, depth, must_suit_narrow_trace, refuse_two_precisions, times_entered, units_of

if TYPE_CHECKING:
    from ..request import Request

_UNSHARD_STREAM, _REDUCE_STREAM, _PRE_UNSHARD_STREAM = 1, 2, 3  # `_unshard_stream`, `_post_backward_stream`, `_pre_...`
_ALIGNMENT = 16  # bytes; _flat_param.py, `_get_aligned_numel`


@dataclass(eq=False)
class _Unit:
    """One FlatParamHandle."""

    fqn: str
    params: list[TensorSlot]
    trains: bool
    flat: int = 0  # F
    pads: tuple[int, ...] = ()  # elements of each alignment padding, whose gradients are zeros
    shard: int = 0  # c
    gathered: Block | None = None
    prefetched: bool = False
    ticket: int | None = None  # of the gather that nothing has waited for yet
    needs_unshard: bool = False  # `_needs_pre_backward_unshard`
    in_backward: bool = False
    is_inside_reentrant: bool = False
    kept: int = 0  # bytes of the input that its hook holds
    place: int | None = None  # `_post_forward_index`
    is_over: bool = False  # the module's own backward, in this micro step
    grads: dict[str, Block] = field(default_factory=dict)  # as autograd made them
    flat_grad: Block | None = None  # `flat_param.grad`, unsharded
    shard_grad: Block | None = None
    new_grad: Block | None = None  # `_saved_grad_shard` on the device, where the gradient lives on the host


class FullySharded(Strategy):
    """`FullyShardedDataParallel(model, auto_wrap_policy=...)`, then the loop of one GPU.

    `world_size` ranks share each parameter; `replicas` groups of them average their gradients once more (HSDP).
    `from_host`: the model is made on the CPU, and `device_id` moves it unit by unit.
    """

    name = "fsdp1"

    def __init__(
        self,
        world_size: int = 1,
        settings: FsdpSettings | None = None,
        *,
        rank: int = 0,
        replicas: int = 1,
        from_host: bool = False,
    ) -> None:
        self.world_size = world_size
        self.from_host = from_host
        self.rank = rank
        self.replicas = replicas
        self.settings = settings or FsdpSettings(version=1)
        self._units: dict[int, _Unit] = {}  # by module
        self._unit_of: dict[str, _Unit] = {}  # by parameter
        self._order: list[_Unit] = []  # `handles_post_forward_order`
        self._cast_inputs: CastInputs | None = None
        self._wide_buffers: list[tuple[TensorSlot, Block]] = []  # until the first forward
        self._reduces = True
        self._held: list[Block] = []  # by the hooks of frozen units
        self._held_next = 0  # bytes of the gradient that the unit before is still computing with
        self._micro_batch = 0
        self._steps = 0
        self._is_initialised = False

    # -- sizes -----------------------------------------------------------------------------------------------------------

    def _stored(self, slot: TensorSlot) -> str:
        return slot.dtype if self.settings.param_dtype is None else self.settings.stored_dtype or "float32"

    def _reduced(self, slot: TensorSlot) -> str:
        return self.settings.reduce_dtype or slot.dtype

    def _casts(self, unit: _Unit) -> bool:
        return self._stored(unit.params[0]) != unit.params[0].dtype

    def _measure(self, unit: _Unit) -> None:
        """`_init_flat_param_and_metadata`."""
        total, pads = 0, []
        align = _ALIGNMENT // ITEMSIZE[unit.params[0].dtype] if self.settings.use_orig_params else 1
        for slot in unit.params:
            if total % align:
                pads.append(align - total % align)
                total += pads[-1]
            total += slot.numel
        if self.settings.use_orig_params and total % self.world_size:
            pads.append(self.world_size - total % self.world_size)
            total += pads[-1]
        unit.flat, unit.pads, unit.shard = total, tuple(pads), -(-total // self.world_size)

    def _inside(self, unit: _Unit) -> list[tuple[TensorSlot, int]]:
        """The optimizer's tensors of one unit on this rank: (parameter, elements)."""
        if not self.settings.use_orig_params:
            return [(unit.params[0], unit.shard)]
        start, stop = self.rank * unit.shard, (self.rank + 1) * unit.shard
        align = _ALIGNMENT // ITEMSIZE[unit.params[0].dtype]
        found, position = [], 0
        for slot in unit.params:
            position += -position % align
            inside = min(stop, position + slot.numel) - max(start, position)
            if inside > 0:
                found.append((slot, inside))
            position += slot.numel
        return found

    # -- the run ---------------------------------------------------------------------------------------------------------

    def at_init(self, sim: Simulation) -> None:
        trace = sim.trace
        if sim.trains and times_entered(trace, ROOT) != 1:
            raise CannotTell(f"--strategy {self.name}: only a step that runs the whole model once is modelled")
        self._cast_inputs = CastInputs(trace) if self.settings.param_dtype is not None else None
        self._make_units(trace)
        self._place_buffers(sim)
        from_host = self.from_host and sim.target != "cpu"  # there nothing is moved
        whole = {} if from_host else self._move(sim, trace.params)
        offloads = self.settings.cpu_offload
        for unit in sorted(self._units.values(), key=lambda u: depth(u.fqn)):
            if from_host:
                whole = self._move(sim, unit.params)
            itemsize = ITEMSIZE[self._stored(unit.params[0])]
            pads = [sim.alloc(Component.TEMP, pad * itemsize, unit.fqn, "padding") for pad in unit.pads]
            flat = sim.alloc(Component.PARAM, unit.flat * itemsize, unit.fqn, "flat parameter")
            for block in [*pads, *(whole.pop(s.fqn) for s in unit.params)]:
                sim.free(block)
            self._cut(sim, unit, itemsize)
            sim.free(flat)
            if offloads:
                sim.alloc(Component.PARAM, unit.shard * itemsize, unit.fqn, "sharded parameter", Tier.HOST_PINNED)
                if unit.trains:
                    sim.alloc(Component.GRAD, unit.shard * itemsize, unit.fqn, "sharded gradient", Tier.HOST_PINNED)
        if sim.trains and not offloads:
            sim.run_optimizer(self._rule(sim).init, self._names(sim))

    def _place_buffers(self, sim: Simulation) -> None:
        """As the model made them: a narrow trace shows those that will be cast as narrow as they become."""
        narrow = self.settings.buffer_dtype
        for slot in sim.trace.buffers:
            casts = narrow is not None and slot.dtype in FLOATS
            block = sim.place(Component.BUFFER, slot.fqn, slot.shape, "float32" if casts else slot.dtype)
            if casts:
                self._wide_buffers.append((slot, block))

    def _cast_buffers(self, sim: Simulation) -> None:
        """`_cast_buffers_to_dtype_and_device`, at the first forward."""
        for slot, wide in self._wide_buffers:
            sim.place(Component.BUFFER, slot.fqn, slot.shape, self.settings.buffer_dtype or slot.dtype)
            sim.free(wide)
        self._wide_buffers.clear()

    def _move(self, sim: Simulation, params: Sequence[TensorSlot]) -> dict[str, Block]:
        return {slot.fqn: sim.place(Component.PARAM, slot.fqn, slot.shape, self._stored(slot)) for slot in params}

    def _cut(self, sim: Simulation, unit: _Unit, itemsize: int) -> None:
        """`_get_shard`: a copy of this rank's chunk; a shorter one is padded in a second copy.  Offloaded shards go at once."""
        own = max(0, min(unit.shard, unit.flat - self.rank * unit.shard))
        shard = sim.alloc(Component.PARAM, own * itemsize, unit.fqn, "sharded parameter")
        if own < unit.shard:
            chunk, shard = shard, sim.alloc(Component.PARAM, unit.shard * itemsize, unit.fqn, "sharded parameter")
            sim.free(chunk)
        if self.settings.cpu_offload:
            sim.free(shard)

    def before_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        is_root = sim.trace.modules[module].fqn == ROOT
        if kind is Pass.FORWARD and is_root:
            self._reduces = not self.settings.no_sync or self._micro_batch == sim.loop.grad_accum_steps - 1
            if not self._is_initialised:
                self._first_forward(sim)
                self._cast_buffers(sim)
            if self.settings.use_orig_params:
                self._drop_cleared(sim)
            if self._cast_inputs is not None:
                self._cast_inputs.enter_root(sim)
        unit = self._units.get(module)
        if unit is None:
            return
        if kind is Pass.FORWARD:
            if not unit.prefetched:
                self._unshard(sim, unit)
            self._wait(sim, unit)
            if self.settings.forward_prefetch:
                self._prefetch(sim, self._next_forward(unit))
        elif kind is Pass.RECOMPUTE and not unit.in_backward:  # a forward like any other
            if not unit.prefetched:
                self._unshard(sim, unit)
            self._wait(sim, unit)
        elif kind is Pass.BACKWARD and not unit.in_backward and module not in self._inside_reentrant:
            self._enter_backward(sim, unit)

    def _enter_backward(self, sim: Simulation, unit: _Unit) -> None:
        unit.in_backward = True
        if unit.needs_unshard and not unit.prefetched:
            self._unshard(sim, unit)
        self._wait(sim, unit)
        unit.needs_unshard = False
        if self.settings.backward_prefetch == "BACKWARD_PRE":
            self._prefetch_backward(sim, unit)

    def after_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        if kind is Pass.FORWARD and sim.trace.modules[module].fqn == ROOT and self._cast_inputs is not None:
            self._cast_inputs.leave_root(sim)
        unit = self._units.get(module)
        if unit is None:
            return
        if kind is Pass.FORWARD:
            if unit.place is None or unit.place == 0:  # upstream's test takes place 0 for none
                unit.place = len(self._order)
            self._order.append(unit)
            unit.prefetched = False
            if unit.fqn != ROOT and self.settings.reshards:
                self._release(sim, unit)
            unit.needs_unshard = True
        elif kind is Pass.RECOMPUTE:
            if not unit.in_backward and self.settings.reshards:
                self._release(sim, unit)
                unit.needs_unshard = True
        elif kind is Pass.BACKWARD and module in self._inside_reentrant:
            pass
        elif kind is Pass.BACKWARD and not unit.trains:
            self._reshard_after_backward(sim, unit)
            if unit.kept:
                self._hold(sim, unit)
        elif kind is Pass.BACKWARD:
            unit.is_over = True
            self._join(sim, unit)

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        """The gradient waits in the input of the flat parameter's split until the whole unit's are there."""
        unit = self._unit_of[param.fqn]
        assert block is not None
        if unit.is_inside_reentrant and not unit.in_backward:
            self._enter_backward(sim, unit)
            unit.is_over = True
        unit.grads[param.fqn] = block
        if unit.is_over:
            self._join(sim, unit)

    def end_of_micro_step(self, sim: Simulation, micro_batch: int) -> None:
        """`_post_backward_final_callback`."""
        self._micro_batch = (micro_batch + 1) % sim.loop.grad_accum_steps
        for unit in self._units.values():
            self._join(sim, unit)
            unit.is_over = False
            if unit.gathered is not None and (self._reduces or self.settings.reshards):
                self._release(sim, unit)
            if unit.new_grad is not None:
                sim.free(unit.new_grad)
                unit.new_grad = None
            unit.in_backward = unit.prefetched = unit.needs_unshard = False
            unit.place = None
        for block in self._held:
            sim.free(block)
        self._held.clear()
        self._held_next = 0
        if self._cast_inputs is not None:
            self._cast_inputs.end_of_micro_step(sim)
        self._order.clear()

    def step(self, sim: Simulation) -> None:
        if self.settings.cpu_offload:
            if not self._steps:
                rule = self._rule(sim)
                for event in (*rule.init, *rule.first):
                    if event.kind is StepKind.STATE:
                        sim.alloc(Component.OPTIMIZER_STATE, event.nbytes, "", "optimizer state", Tier.HOST_PAGEABLE)
            sim.enqueue("host_step", sum(u.shard for u in self._trained()) * ITEMSIZE["float32"])
        else:
            if sim.loop.clip_grad_norm:
                shapes: list[tuple[int, ...]] = [(inside,) for _, inside in self._stepped(sim)]
                for nbytes in clip_grad_norm_events(shapes, sim.target):
                    sim.run_temporary(nbytes, "clip_grad_norm_")
            rule = self._rule(sim)
            sim.run_optimizer(rule.later if self._steps else rule.first, self._names(sim))
        self._steps += 1

    def zero_grad(self, sim: Simulation, set_to_none: bool) -> None:
        self._cleared = set_to_none
        if set_to_none and not self.settings.use_orig_params:
            self._drop_cleared(sim)

    def _drop_cleared(self, sim: Simulation) -> None:
        """`_reset_flat_param_grad_info_if_needed`: with `use_orig_params` the flat gradient outlives `zero_grad` until here."""
        if not self._cleared:
            return
        for unit in self._units.values():
            if unit.shard_grad is not None:
                sim.free(unit.shard_grad)
                unit.shard_grad = None
        self._cleared = False

    _cleared = False
    _reached: frozenset[str] = frozenset()
    _inside_reentrant: frozenset[int] = frozenset()
    """Modules that run again inside a reentrant checkpoint: of their backward the trace has the gradients' moments only."""

    # -- gather and release ----------------------------------------------------------------------------------------------

    def _first_forward(self, sim: Simulation) -> None:
        """`init_flat_param_attributes`: storages are made to learn their sizes, and emptied."""
        self._is_initialised = True
        for unit in sorted(self._units.values(), key=lambda u: u.fqn != ROOT):
            wide = ITEMSIZE[self._stored(unit.params[0])]
            narrow = ITEMSIZE[unit.params[0].dtype]
            sizes = [unit.shard * self.world_size * narrow]
            if self._casts(unit):
                sizes = [unit.shard * narrow, *sizes, unit.shard * self.world_size * wide]
            for nbytes in sizes:
                sim.run_temporary(nbytes, "storage made and emptied")

    def _unshard(self, sim: Simulation, unit: _Unit) -> None:
        """`_unshard`: the shard, cast or copied to the device where need be, then the all-gather's output."""
        if unit.gathered is not None:
            return
        slot = unit.params[0]
        narrow, wide = ITEMSIZE[slot.dtype], ITEMSIZE[self._stored(slot)]
        own: Block | None = None
        stream = _PRE_UNSHARD_STREAM
        if self._casts(unit):
            own = sim.alloc(Component.COMM_BUFFER, unit.shard * narrow, unit.fqn, "cast shard", stream=stream)
        if self.settings.cpu_offload:
            copy = sim.alloc(Component.OFFLOAD_BUFFER, unit.shard * wide, unit.fqn, "shard on the GPU", stream=stream)
            sim.enqueue("h2d", unit.shard * wide, stream)
            if own is None:
                own = copy
            else:
                sim.free(copy)
        nbytes = unit.shard * self.world_size * narrow
        unit.gathered = sim.alloc(Component.COMM_BUFFER, nbytes, unit.fqn, "gathered parameters", stream=_UNSHARD_STREAM)
        unit.ticket = sim.enqueue("all_gather", nbytes, _UNSHARD_STREAM, ranks=self.world_size)
        if own is not None:
            sim.free(own)

    def _wait(self, sim: Simulation, unit: _Unit) -> None:
        """`current_stream().wait_stream(_unshard_stream)`."""
        if unit.ticket is not None:
            sim.wait(unit.ticket)
            unit.ticket = None

    def _release(self, sim: Simulation, unit: _Unit) -> None:
        if unit.gathered is not None:
            sim.free(unit.gathered)
            unit.gathered = None
        unit.prefetched = False

    def _prefetch(self, sim: Simulation, unit: _Unit | None) -> None:
        if unit is not None and not unit.prefetched:
            self._unshard(sim, unit)
            unit.prefetched = True

    def _prefetch_backward(self, sim: Simulation, unit: _Unit) -> None:
        """`get_handle_to_backward_prefetch`: the unit whose forward ended before this one's."""
        if unit.place:
            before = self._order[unit.place - 1]
            if before.needs_unshard:
                self._prefetch(sim, before)

    def _next_forward(self, unit: _Unit) -> _Unit | None:
        order = list(self._units.values())
        place = order.index(unit) + 1
        return order[place] if place < len(order) and self._steps else None

    def _reshard_after_backward(self, sim: Simulation, unit: _Unit) -> None:
        """`_post_backward_reshard`."""
        if self._reduces or self.settings.reshards:
            self._release(sim, unit)
        if self.settings.backward_prefetch == "BACKWARD_POST":
            self._prefetch_backward(sim, unit)

    # -- gradients -------------------------------------------------------------------------------------------------------

    def _join(self, sim: Simulation, unit: _Unit) -> None:
        """The split is the unit's first node, so autograd comes back to it after all others of the unit's backward."""
        if unit.grads and len(unit.grads) == sum(1 for p in unit.params if p.fqn in self._reached):
            self._post_backward(sim, unit)

    def _post_backward(self, sim: Simulation, unit: _Unit) -> None:
        """The split's backward concatenates; then `_post_backward_hook`."""
        slot = unit.params[0]
        narrow = ITEMSIZE[slot.dtype]
        missing = [p.numel for p in unit.params if p.fqn not in unit.grads]
        zeros = [sim.alloc(Component.GRAD, n * narrow, unit.fqn, "zero gradient") for n in (*unit.pads, *missing)]
        flat = unit.grads.pop(slot.fqn) if len(unit.params) == 1 and not unit.pads else None
        if flat is None:
            flat = sim.alloc(Component.GRAD, unit.flat * narrow, unit.fqn, "flat gradient")
        for block in [*zeros, *unit.grads.values()]:
            sim.free(block)
        unit.grads.clear()
        if unit.flat_grad is None:
            unit.flat_grad = flat
        else:  # accumulated in place
            sim.free(flat)
        self._reshard_after_backward(sim, unit)
        if self._reduces:
            self._reduce(sim, unit)

    def _reduce(self, sim: Simulation, unit: _Unit) -> None:
        slot = unit.params[0]
        assert unit.flat_grad is not None
        going, unit.flat_grad = [unit.flat_grad], None
        reduced, stored = self._reduced(slot), self._stored(slot)
        r, stream = ITEMSIZE[reduced], _REDUCE_STREAM
        if reduced != slot.dtype:
            going.append(sim.alloc(Component.GRAD, unit.flat * r, unit.fqn, "gradient to reduce", stream=stream))
        if unit.flat % self.world_size:
            nbytes = unit.shard * self.world_size * r
            going.append(sim.alloc(Component.COMM_BUFFER, nbytes, unit.fqn, "padded gradient", stream=stream))
        output = sim.alloc(Component.GRAD, unit.shard * r, unit.fqn, "sharded gradient", stream=stream)
        sim.enqueue("reduce_scatter", unit.shard * self.world_size * r, stream, ranks=self.world_size)
        if self.replicas > 1:
            sim.enqueue("all_reduce", unit.shard * r, stream, ranks=self.replicas, stride=self.world_size)
        if reduced != stored:
            cast = sim.alloc(Component.GRAD, unit.shard * ITEMSIZE[stored], unit.fqn, "sharded gradient", stream=stream)
            sim.free(output)
            output = cast
        if self.settings.cpu_offload:
            sim.enqueue("d2h", unit.shard * ITEMSIZE[stored], stream)
            if unit.new_grad is not None:
                sim.free(unit.new_grad)
            unit.new_grad = output
        elif unit.shard_grad is None:
            unit.shard_grad = output
        else:
            sim.free(output)  # added to the gradient that is there
        for block in reversed(going):
            sim.free(block)

    def _hold(self, sim: Simulation, unit: _Unit) -> None:
        """The input stays, and its gradient, which is the one that the unit before begins its backward with."""
        for nbytes, what in ((unit.kept, "input held by a hook"), (self._held_next, "gradient held by a hook")):
            if nbytes:
                self._held.append(sim.alloc(Component.ACTIVATION, nbytes, unit.fqn, what))
        self._held_next = unit.kept

    # -- small parts -----------------------------------------------------------------------------------------------------

    def _make_units(self, trace: StepTrace) -> None:
        self._reached = frozenset(trace.params[i].fqn for i in trace.params_with_grad)
        kept: dict[int, int] = {}
        if trace.options["reentrant"]:
            self._inside_reentrant = _recomputed(trace)
            if self.settings.units_inside_checkpoints:
                kept = _kept_inputs(trace)
        for index, (fqn, params) in units_of(trace, self.settings).items():
            trains = {p.requires_grad for p in params}
            _must_be_of_one_type(self.name, fqn, params)
            if len(trains) > 1:
                raise _half_frozen(self.name, fqn, params, self.settings.use_orig_params)
            if fqn != ROOT and times_entered(trace, fqn) > 1:
                raise CannotTell(f"--strategy {self.name}: {fqn} runs more than once in a step, which is not modelled")
            unit = self._units[index] = _Unit(fqn, params, trains.pop() and any(p.fqn in self._reached for p in params))
            unit.is_inside_reentrant = index in self._inside_reentrant
            if fqn != ROOT and not unit.trains:
                unit.kept = kept.get(index, 0)
            self._measure(unit)
            self._unit_of.update((p.fqn, unit) for p in params)

    def _trained(self) -> list[_Unit]:
        return [u for u in sorted(self._units.values(), key=lambda u: u.fqn != ROOT) if u.trains]

    def _stepped(self, sim: Simulation) -> list[tuple[TensorSlot, int]]:
        """The optimizer's tensors in its order: the model's own for original parameters, else the root's flat one first."""
        parts = [part for unit in self._trained() for part in self._inside(unit)]
        if self.settings.use_orig_params:
            order = {slot.fqn: index for index, slot in enumerate(sim.trace.params)}
            parts.sort(key=lambda part: order[part[0].fqn])
        return parts

    def _names(self, sim: Simulation) -> list[str]:
        return [slot.fqn for slot, _ in self._stepped(sim)]

    def _rule(self, sim: Simulation) -> StepEvents:
        return sim.optimizer.step([OptimizerTensor((n,), self._stored(slot)) for slot, n in self._stepped(sim)])


def _recomputed(trace: StepTrace) -> frozenset[int]:
    calls = (arg for kind, arg, aux in trace.events() if kind is EventKind.ENTER and aux == Pass.RECOMPUTE)
    return frozenset(int(trace.call_module[arg]) for arg in calls)


def _kept_inputs(trace: StepTrace) -> dict[int, int]:
    """{module: bytes of its input}: what the call before of its class left, its own call reads, and outlives that call."""
    found: dict[int, int] = {}
    starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
    live: dict[int, int] = {}  # storage -> event that made it
    entered: dict[str, list[int]] = {}  # class -> events at which its calls begin
    first: dict[str, int] = {}
    reads: dict[int, set[int]] = {}  # running call -> storages
    for index, (kind, arg, aux) in enumerate(trace.events()):
        if kind is EventKind.PHASE and arg == Phase.BACKWARD:
            break
        if kind is EventKind.ALLOC:
            live[arg] = index
        elif kind is EventKind.FREE:
            live.pop(arg, None)
        elif kind is EventKind.OP:
            for read in reads.values():
                read.update(inputs[starts[arg] : starts[arg + 1]])
        elif kind in (EventKind.ENTER, EventKind.LEAVE) and aux == Pass.FORWARD:
            module = int(trace.call_module[arg])
            name = trace.modules[module].class_name
            if kind is EventKind.ENTER:
                entered.setdefault(name, []).append(index)
                first.setdefault(name, module)
                reads[arg] = set()
                continue
            read, calls = reads.pop(arg), entered[name]
            if len(calls) > 1:
                before, begun = calls[-2:]
                kept = [s for s in read if before < live.get(s, -1) < begun]
                found[module] = sum(int(trace.storage_bytes[s]) for s in kept)
                found.setdefault(first[name], found[module])  # the first: like the second
    return found


def _must_be_of_one_type(name: str, fqn: str, params: Sequence[TensorSlot]) -> None:
    """`_validate_tensors_to_flatten`."""
    dtypes = {p.dtype: p.fqn for p in params}
    if len(dtypes) > 1:
        listed = ", ".join(f"{param} in {dtype}" for dtype, param in sorted(dtypes.items()))
        raise UserError(
            f"--strategy {name}: FSDP flattens only parameters of one type, and {fqn or 'the root unit'} has {listed}",
            "Wrap them apart (transformer_layer_cls_to_wrap), or use --strategy fsdp2",
        )


def _half_frozen(name: str, fqn: str, params: Sequence[TensorSlot], use_orig_params: bool) -> Exception:
    frozen = next(p.fqn for p in params if not p.requires_grad)
    where = f"the unit {fqn!r}" if fqn else "the root unit"
    problem = f"--strategy {name}: {where} has frozen and trained parameters ({frozen} is frozen)"
    if use_orig_params:
        return CannotTell(f"{problem}, which is not modelled with use_orig_params")
    return UserError(problem, "FSDP refuses that: wrap them apart, or set use_orig_params")


def check(request: Request) -> None:
    settings = settings_of(request, version=1)
    refuse_two_precisions(request.precision, settings)
    if settings.sharding_strategy == "NO_SHARD":
        raise CannotTell("fsdp1 with sharding_strategy NO_SHARD is not modelled: torch calls it deprecated. Use --strategy ddp")
    refuse_half_offload(request.offload)


def traced_as(request: Request) -> Request:
    """An adapter's step runs under autocast: what is outside of its unit sees it as it is stored."""
    return adapted(request, narrow_base=False)


def make(request: Request, trace: StepTrace) -> Strategy:
    settings = settings_of(request, version=1)
    if settings.param_dtype is not None:
        casts = settings.buffer_dtype == settings.param_dtype
        must_suit_narrow_trace(request.strategy, trace, settings.param_dtype, casts_buffers=casts)
    shards, replicas = shards_of(request, settings)
    return FullySharded(shards, settings, rank=(request.rank or 0) % shards, replicas=replicas, from_host=True)


def said(request: Request) -> list[str]:
    settings = settings_of(request, version=1)
    what = "every block and the model are units" if settings.auto_wrap_policy != "NO_WRAP" else "the model is one unit"
    found = [f"FullyShardedDataParallel, {settings.sharding_strategy}: {what}; made on the CPU and moved unit by unit"]
    if request.adapter_settings is not None:
        found.append(
            "each trained leaf of the adapter is a unit of its own (peft's fsdp_auto_wrap_policy, as the Trainer sets)"
        )
    return found
