"""ZeRO-3's gathers and releases: which parameters are whole, module call by module call.

Source: deepspeed 0.19.8, deepspeed/runtime/zero/partitioned_param_coordinator.py, `PartitionedParameterCoordinator`, and
partition_parameters.py, `all_gather_coalesced`; methods keep their names.  The first forward and backward record the order
of the module calls and release everything after use.  From then on the recorded order serves to gather ahead, and to keep
what is used again soon.

One parameter of n elements is gathered into ceil(n / N) * N elements that it keeps.  Several are gathered into one flat
buffer of the sum of these, and when the first of them is waited for each gets a copy of n elements; the flat buffer goes when
the last of them has been waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..ledger import DEFAULT_STREAM, Component
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE, TensorSlot

_GATHER_STREAM = 2  # `__allgather_stream`, with overlap_comm
_NEVER = -(10**10)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherKnobs:
    """`stage3_*` of the configuration, in elements."""

    prefetch: int
    max_live: int
    reuse_distance: int
    persistence: int
    model_persistence: int
    overlap: bool
    secondary: int = 1
    """`zero_hpz_partition_size`: ranks among which a gathered parameter is partitioned once more, for the backward; 1: none."""
    from_host: bool = False
    """Partitions are on the host: what is gathered is copied to the GPU first."""


@dataclass(slots=True)
class _Handle:
    """`AllGatherCoalescedHandle`: a gather of several parameters; `params` have not been waited for by their own modules."""

    flat: Block | None
    params: set[int]
    complete: bool = False


@dataclass(slots=True)
class _Param:
    index: int
    slot: TensorSlot
    persist: bool = False
    block: Block | None = None  # of the gathered parameter
    handle: _Handle | None = None  # in the registry of what is in flight
    secondary: Block | None = None  # hpZ's partition of it
    available: bool = False
    active: set[int] = field(default_factory=set)  # modules that use it now

    @property
    def is_partitioned(self) -> bool:
        return not self.available and self.handle is None


class ParamCoordinator:
    """The state of every parameter.  `own[m]` are the indices of module m's parameters."""

    def __init__(self, params: Sequence[TensorSlot], own: Sequence[Sequence[int]], world_size: int, knobs: GatherKnobs) -> None:
        self._params = [_Param(index, slot) for index, slot in enumerate(params)]
        self._index = {slot.fqn: index for index, slot in enumerate(params)}
        self._own = own
        self._world_size = world_size
        self._knobs = knobs
        self._mode = "invalid"  # invalid | record | complete, as ZeRoTraceMode
        self._order: list[int] = []  # modules, in the order in which they fetch
        self._queue: deque[tuple[int, int]] = deque()  # (parameter, step of its use) still to be gathered
        self._fetched_for: dict[int, int] = {}
        self._step = 0
        self._live = 0  # elements, as far as DeepSpeed counts them
        self.num_elements = sum(slot.numel for slot in params)
        self.most_live = 0  # elements that were whole at once, at most
        self._backward: dict[int, None] = {}  # modules whose backward runs, oldest first
        self._saved: dict[int, list[Block]] = {}  # by module: gathered weights that a checkpoint holds
        self._released: dict[tuple[int, int], frozenset[int]] = {}
        total = 0
        for param in self._params:  # `mark_persistent_parameters`
            if param.slot.numel + total <= knobs.model_persistence and param.slot.numel <= knobs.persistence:
                param.persist = True
                total += param.slot.numel

    # -- the module hooks ----------------------------------------------------------------------------------------------------

    def reset_step(self, sim: Simulation) -> None:
        """The root module begins its forward."""
        for param in self._params:
            if param.handle is not None:
                self._wait(sim, param)
                self._release_param(sim, param)
        if self._mode == "record":
            self._mode = "complete"
        elif self._mode == "invalid":
            self._mode = "record"
        self._queue = deque((p, step) for step, module in enumerate(self._order) for p in self._own[module])
        self._fetched_for = {}
        self._step = self._live = 0

    def fetch(self, sim: Simulation, module: int, *, forward: bool) -> None:
        """`fetch_sub_module`: gather what the module needs, wait for it, gather ahead."""
        if self._mode == "record":
            self._order.append(module)
        if not forward:
            self._backward[module] = None
        own = [self._params[p] for p in self._own[module]]
        self._gather(sim, own)
        for param in own:
            param.active.add(module)
            if param.handle is not None:
                self._wait(sim, param)
        if self._mode == "complete":
            self._prefetch(sim, own)
        self._step += 1

    def release(self, sim: Simulation, module: int, *, forward: bool) -> None:
        """`release_sub_module`."""
        self._release(sim, module, forward=forward, saved_by=None)

    def release_recomputed(self, sim: Simulation, module: int) -> None:
        """The same after a recompute: the checkpoint has saved detached views of the weights, which hold their storages until
        the backward node that needs them has run (torch/utils/checkpoint.py, `_recomputation_hook`)."""
        self._release(sim, module, forward=True, saved_by=module)

    def grad_made(self, sim: Simulation, param: TensorSlot) -> None:
        """The node that made the parameter's gradient has let go of what it saved."""
        for module in list(self._saved):
            if any(self._params[p].slot is param for p in self._own[module]):
                self.backward_ran(sim, module)

    def backward_ran(self, sim: Simulation, module: int) -> None:
        """What a checkpoint saved for the module is used up."""
        for block in self._saved.pop(module, ()):
            sim.free(block)

    def _release(self, sim: Simulation, module: int, *, forward: bool, saved_by: int | None) -> None:
        going = self._to_release(module) if self._mode == "complete" else frozenset(self._own[module])
        if not forward:
            self._backward.pop(module, None)
        for index in self._own[module]:
            self._params[index].active.discard(module)
            if index in going:
                self._release_param(sim, self._params[index], saved_by)

    def end_of_backward(self, sim: Simulation) -> None:
        """`release_backward_leftovers`: modules whose second backward hook was not called."""
        while self._backward:
            module, _ = self._backward.popitem()
            for index in self._own[module]:
                param = self._params[index]
                param.active.discard(module)
                if not param.persist:
                    self._release_param(sim, param)
        for module in list(self._saved):
            self.backward_ran(sim, module)

    def release_all(self, sim: Simulation) -> None:
        """`release_and_reset_all`, as a step begins."""
        for param in self._params:
            if param.handle is not None:
                self._wait(sim, param)
            param.active.clear()
            self._release_param(sim, param)

    def gather_persistent(self, sim: Simulation) -> None:
        """`_post_step`: each into a buffer of its own; the secondary partitions go."""
        chosen = [p for p in self._params if p.persist and p.is_partitioned]
        copies = self._from_host(sim, chosen, DEFAULT_STREAM) if len(chosen) > 1 else []
        for param in chosen:
            param.block = self._buffer(sim, param, self._padded(param), DEFAULT_STREAM)
            param.available = True
        copies += self._from_host(sim, chosen, DEFAULT_STREAM) if len(chosen) == 1 else []
        for block in copies:
            sim.free(block)
        for param in self._params:
            if param.secondary is not None and param.slot.requires_grad:
                sim.free(param.secondary)
                param.secondary = None

    def gather_once(self, sim: Simulation, slot: TensorSlot) -> None:
        """A parameter is whole for a moment, while its hook is made."""
        param = self._of(slot)
        whole = sim.alloc(Component.TEMP, self._padded(param) * ITEMSIZE[slot.dtype], what="gathered for its hook")
        for block in self._from_host(sim, [param], DEFAULT_STREAM):
            sim.free(block)
        sim.free(whole)

    def partition_secondary(self, sim: Simulation, slot: TensorSlot) -> None:
        """The same for the first partitioning of a parameter."""
        param = self._of(slot)
        self._partition_secondary(sim, param)

    def _partition_secondary(self, sim: Simulation, param: _Param) -> None:
        """`_partition_param_sec`: until the step, a copy among fewer ranks."""
        if self._knobs.secondary > 1 and param.secondary is None:
            elements = self._padded(param) // self._knobs.secondary
            param.secondary = sim.place(Component.COMM_BUFFER, param.slot.fqn, (elements,), param.slot.dtype)

    def _of(self, slot: TensorSlot) -> _Param:
        return self._params[self._index[slot.fqn]]

    def persistent(self) -> set[str]:
        """Names of the parameters that stay gathered."""
        return {p.slot.fqn for p in self._params if p.persist}

    # -- gathers -------------------------------------------------------------------------------------------------------------

    def _padded(self, param: _Param) -> int:
        return -(-param.slot.numel // self._world_size) * self._world_size

    @property
    def _stream(self) -> int:
        return _GATHER_STREAM if self._knobs.overlap else DEFAULT_STREAM

    def _buffer(self, sim: Simulation, param: _Param, elements: int, stream: int) -> Block | None:
        if self._world_size == 1:
            return None  # the partition is the parameter
        return sim.place(Component.COMM_BUFFER, param.slot.fqn, (elements,), param.slot.dtype, stream=stream)

    def _from_host(self, sim: Simulation, params: Sequence[_Param], stream: int) -> list[Block]:
        """Partitions on their way: they are there until the gather has begun."""
        if not self._knobs.from_host or self._world_size == 1:
            return []
        nbytes = [-(-p.slot.numel // self._world_size) * ITEMSIZE[p.slot.dtype] for p in params]
        sim.enqueue("h2d", sum(nbytes), stream)
        if sim.target == "cpu":
            return []  # one memory
        return [
            sim.alloc(Component.OFFLOAD_BUFFER, size, p.slot.fqn, "partition from the host", stream=stream)
            for p, size in zip(params, nbytes, strict=True)
        ]

    def _gather(self, sim: Simulation, params: Iterable[_Param]) -> None:
        """`__all_gather_params`: starts the gather of those that are partitioned."""
        chosen = [p for p in params if p.is_partitioned]
        if not chosen:
            return
        elements = sum(self._padded(p) for p in chosen)
        self._live += sum(p.slot.numel for p in chosen)
        self.most_live = max(self.most_live, self._live)
        sim.enqueue("all_gather", elements * ITEMSIZE[chosen[0].slot.dtype], self._stream)
        handle = _Handle(None, {p.index for p in chosen})
        buffer = self._buffer(sim, chosen[0], elements, self._stream)
        for block in self._from_host(sim, chosen, self._stream):
            sim.free(block)
        if len(chosen) == 1:
            chosen[0].block = buffer
            handle.complete = True
        else:
            handle.flat = buffer
        for param in chosen:
            param.handle = handle

    def _wait(self, sim: Simulation, param: _Param) -> None:
        """The parameter leaves the registry; its gather completes."""
        handle = param.handle
        assert handle is not None
        if not handle.complete:
            for index in sorted(handle.params):
                other = self._params[index]
                other.block = self._buffer(sim, other, other.slot.numel, self._stream)
                other.available = True
            handle.complete = True
        param.available = True
        param.handle = None
        handle.params.discard(param.index)
        if not handle.params and handle.flat is not None:
            sim.free(handle.flat)
            handle.flat = None

    def _prefetch(self, sim: Simulation, own: list[_Param]) -> None:
        behind = {p.index for p in own if self._fetched_for.get(p.index, _NEVER) < self._step}
        popped: set[int] = set()
        while self._queue and len(popped) < len(behind):
            index, step = self._queue.popleft()
            self._fetched_for[index] = step
            popped.add(index)
        if self._knobs.prefetch <= 0:
            return
        room = min(self._knobs.max_live - self._live, self._knobs.prefetch)
        ahead: dict[int, None] = {}
        elements = 0
        while self._queue and elements < room:
            index, step = self._queue.popleft()
            self._fetched_for[index] = max(self._fetched_for.get(index, _NEVER), step)
            if self._params[index].is_partitioned and index not in ahead:
                ahead[index] = None
                elements += self._params[index].slot.numel
        self._gather(sim, [self._params[index] for index in sorted(ahead)])

    # -- releases ------------------------------------------------------------------------------------------------------------

    def _release_param(self, sim: Simulation, param: _Param, saved_by: int | None = None) -> None:
        if param.available and not param.active:
            self._partition_secondary(sim, param)
            if param.block is not None and saved_by is not None:
                self._saved.setdefault(saved_by, []).append(param.block)
            elif param.block is not None:
                sim.free(param.block)
            param.block = None
            param.available = False
            self._live -= param.slot.numel

    def _to_release(self, module: int) -> frozenset[int]:
        """`__params_to_release`; the first answer for a (module, step) is kept, as by upstream's cache."""
        key = (module, self._step)
        if key not in self._released:
            going = {p for p in self._own[module] if not self._params[p].persist}
            going -= {p for p in self._own[module] if self._fetched_for.get(p, _NEVER) > self._step}
            traversed = 0
            for later in self._order[self._step :]:
                if not going or traversed >= self._knobs.reuse_distance:
                    break
                for index in self._own[later]:
                    going.discard(index)
                    traversed += self._params[index].slot.numel
            self._released[key] = frozenset(going)
        return self._released[key]
