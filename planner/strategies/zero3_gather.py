"""ZeRO-3's gathers and releases: which parameters are whole, module call by module call.

Source: deepspeed 0.19.8, deepspeed/runtime/zero/partitioned_param_coordinator.py, `PartitionedParameterCoordinator`, and
partition_parameters.py, `all_gather_coalesced`; methods keep their names.  The first forward and backward record the order
of the module calls and release everything after use.  From then on the recorded order serves to gather ahead, and to keep
what is used again soon.

One parameter of n elements is gathered into ceil(n / N) * N elements that it keeps.  Several are gathered into one flat
buffer of the sum of these, and when the first of them is waited for each gets a copy of n elements; the flat buffer goes when
the last of them has been waited for.  With `stage3_allgather_sequential` each has a buffer of its own, and with
`stage3_use_all_reduce_for_fetch_params` all keep the flat one, without copies, until the last of them is released.

What autograd saves of a parameter decides whether a release frees it: the parameter itself is emptied with its storage; a view
of it (grouped matrix products of experts, a slice, a transposed weight) holds the gathered storage from forward until the
backward of that op has run, beside the one that is gathered for the backward.  What an autograd node holds as an attribute of
its own (bitsandbytes' packed weights) goes with the graph, after the backward.
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
    sequential: bool = False
    """`stage3_allgather_sequential`: every parameter is gathered into a buffer of its own, and one ahead."""
    all_reduce: bool = False
    """`stage3_use_all_reduce_for_fetch_params`: several are summed into one buffer that they are views of."""


@dataclass(slots=True)
class _Whole:
    """The storage of gathered parameters: of one, or of `users` that are views of it."""

    block: Block
    users: int = 1

    def drop(self, sim: Simulation) -> None:
        self.users -= 1
        if not self.users:
            sim.free(self.block)


@dataclass(slots=True)
class _Handle:
    """`AllGatherCoalescedHandle`: a gather of several parameters; `params` have not been waited for by their own modules."""

    flat: list[Block]  # one for each dtype
    params: set[int]
    copies: bool = True  # what is waited for gets a copy of its own
    complete: bool = False


@dataclass(slots=True)
class _Param:
    index: int
    slot: TensorSlot
    persist: bool = False
    whole: _Whole | None = None  # what the gathered parameter lies in
    handle: _Handle | None = None  # in the registry of what is in flight
    secondary: Block | None = None  # hpZ's partition of it
    available: bool = False
    active: set[int] = field(default_factory=set)  # modules that use it now
    is_viewed: bool = False  # a view that autograd has saved holds `whole`
    in_graph: bool = False  # an attribute of an autograd node holds `whole`

    @property
    def is_partitioned(self) -> bool:
        return not self.available and self.handle is None


class ParamCoordinator:
    """The state of every parameter.

    `own[m]` are the indices of the parameters that module m fetches; `deep[m]` those with all that is inside of it, where it
    differs (`deep` is looked at when a module of `leaves` is released).  `views` are the (module, parameter) where autograd
    saves a view, `in_graph` those where the graph holds the gathered parameter until it goes.
    """

    def __init__(
        self,
        params: Sequence[TensorSlot],
        own: Sequence[Sequence[int]],
        world_size: int,
        knobs: GatherKnobs,
        *,
        direct: Sequence[Sequence[int]] | None = None,
        deep: Sequence[Sequence[int]] | None = None,
        leaves: frozenset[int] = frozenset(),
        views: frozenset[tuple[int, int]] = frozenset(),
        in_graph: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        self._params = [_Param(index, slot) for index, slot in enumerate(params)]
        self._index = {slot.fqn: index for index, slot in enumerate(params)}
        self._own = own
        self._direct = own if direct is None else direct
        self._deep = own if deep is None else deep
        self._leaves = leaves
        self._views = views
        self._in_graph = in_graph
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
        self._left_to_graph: set[int] = set()  # parameters that the graph has held after their release
        self.most_viewed = 0  # elements that saved views kept whole after their release, at most
        self._backward: dict[int, None] = {}  # modules whose backward runs, oldest first
        self._saved: dict[int, list[_Whole]] = {}  # by module: gathered weights that a checkpoint holds
        self._viewed: dict[int, list[_Whole]] = {}  # by parameter: gathered storages that views of it hold
        self._released: dict[tuple[int, int], frozenset[int]] = {}
        total = 0
        for param in self._params:  # `mark_persistent_parameters`
            if param.slot.numel + total <= knobs.model_persistence and param.slot.numel <= knobs.persistence:
                param.persist = True
                total += param.slot.numel

    @property
    def bytes_in_graph(self) -> int:
        """Of gathered parameters that stayed whole after their release, as the graph held them."""
        return sum(self._params[index].slot.nbytes for index in self._left_to_graph)

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
        # A set's order decides which of a leaf module's flat buffers goes when: the least favourable is taken
        spent: list[Block] | None = [] if module in self._leaves else None
        for param in own:
            param.active.add(module)
            if param.handle is not None:
                self._wait(sim, param, spent)
        for block in spent or ():
            sim.free(block)
        if self._mode == "complete":
            self._prefetch(sim, own)
        self._step += 1

    def release(self, sim: Simulation, module: int, *, forward: bool, saves: bool = False) -> None:
        """`release_sub_module`.  `saves`: autograd has saved what the module's backward needs."""
        self._release(sim, module, forward=forward, saved_by=None, saves=saves)

    def leave_in_graph(self, module: int) -> None:
        """The forward of a module has run whose graph holds what it was given, also where a checkpoint drops what is saved."""
        for index in self._own[module]:
            self._params[index].in_graph |= (module, index) in self._in_graph

    def release_recomputed(self, sim: Simulation, module: int) -> None:
        """The same after a recompute: the checkpoint has saved detached views of the weights, which hold their storages until
        the backward node that needs them has run (torch/utils/checkpoint.py, `_recomputation_hook`)."""
        self._release(sim, module, forward=True, saved_by=module, saves=True)

    def grad_made(self, sim: Simulation, param: TensorSlot) -> None:
        """The node that made the parameter's gradient has let go of what it saved."""
        self._view_used(sim, self._index[param.fqn])
        for module in list(self._saved):
            if any(self._params[p].slot is param for p in self._own[module]):
                self.backward_ran(sim, module)

    def backward_ran(self, sim: Simulation, module: int) -> None:
        """What was saved for the module is used up."""
        for whole in self._saved.pop(module, ()):
            whole.drop(sim)
        for index in self._own[module]:
            if (module, index) in self._views:
                self._view_used(sim, index)

    def _view_used(self, sim: Simulation, index: int) -> None:
        self._params[index].is_viewed = False
        for whole in self._viewed.pop(index, ()):
            whole.drop(sim)

    def _release(self, sim: Simulation, module: int, *, forward: bool, saved_by: int | None, saves: bool) -> None:
        going = self._to_release(module) if self._mode == "complete" else frozenset(self._own[module])
        if not forward:
            self._backward.pop(module, None)
        for index in self._own[module]:
            param = self._params[index]
            param.active.discard(module)
            param.is_viewed |= saves and (module, index) in self._views
            if index in going:
                self._release_param(sim, param, saved_by)

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
        for index in range(len(self._params)):
            self._view_used(sim, index)

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
            param.whole = self._own_buffer(sim, param, self._padded(param), DEFAULT_STREAM)
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

    def _own_buffer(self, sim: Simulation, param: _Param, elements: int, stream: int) -> _Whole | None:
        block = self._buffer(sim, param, elements, stream)
        return _Whole(block) if block is not None else None

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
        sums = self._knobs.all_reduce and len(chosen) > 1 and chosen[0].secondary is None and not self._knobs.sequential
        nbytes = sum(self._padded(p) * ITEMSIZE[p.slot.dtype] for p in chosen)
        sim.enqueue("all_reduce" if sums else "all_gather", nbytes, self._stream)
        handle = _Handle([], {p.index for p in chosen}, copies=not (sums or self._knobs.sequential))
        if self._knobs.sequential or len(chosen) == 1:
            for param in chosen:
                param.whole = self._own_buffer(sim, param, self._padded(param), self._stream)
                for block in self._from_host(sim, [param], self._stream):
                    sim.free(block)
            handle.complete = len(chosen) == 1
        elif sums:  # partitions are copied straight into it
            whole = self._own_buffer(sim, chosen[0], elements, self._stream)
            if whole is not None:
                whole.users = len(chosen)
            for param in chosen:
                param.whole = whole
        else:
            handle.flat = self._flat_buffers(sim, chosen)
            for block in self._from_host(sim, chosen, self._stream):
                sim.free(block)
        for param in chosen:
            param.handle = handle

    def _wait(self, sim: Simulation, param: _Param, spent: list[Block] | None = None) -> None:
        """The parameter leaves the registry; its gather completes.  `spent` takes the flat buffer that would go."""
        handle = param.handle
        assert handle is not None
        if not handle.complete:
            for index in sorted(handle.params):
                other = self._params[index]
                if handle.copies:
                    other.whole = self._own_buffer(sim, other, other.slot.numel, self._stream)
                other.available = True
            handle.complete = True
        param.available = True
        param.handle = None
        handle.params.discard(param.index)
        if not handle.params:
            if spent is None:
                for block in handle.flat:
                    sim.free(block)
            else:
                spent += handle.flat
            handle.flat = []

    def _flat_buffers(self, sim: Simulation, params: Sequence[_Param]) -> list[Block]:
        """`_all_gather_dtype`: one flat tensor for each dtype among them."""
        parts: dict[str, list[_Param]] = {}
        for param in params:
            parts.setdefault(param.slot.dtype, []).append(param)
        buffers = [self._buffer(sim, part[0], sum(map(self._padded, part)), self._stream) for part in parts.values()]
        return [block for block in buffers if block is not None]

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
            if param.whole is not None and param.in_graph:
                sim.leave_to_graph(param.whole.block)
                self._left_to_graph.add(param.index)
            elif param.whole is not None and param.is_viewed:
                self._viewed.setdefault(param.index, []).append(param.whole)
                held = sum(self._params[index].slot.numel for index, blocks in self._viewed.items() if blocks)
                self.most_viewed = max(self.most_viewed, held)
            elif param.whole is not None and saved_by is not None and (saved_by, param.index) not in self._in_graph:
                self._saved.setdefault(saved_by, []).append(param.whole)
            elif param.whole is not None:
                param.whole.drop(sim)
            param.whole = None
            param.available = param.is_viewed = param.in_graph = False
            self._live -= param.slot.numel

    def _to_release(self, module: int) -> frozenset[int]:
        """`__params_to_release`; the first answer for a (module, step) is kept, as by upstream's cache."""
        key = (module, self._step)
        if key not in self._released:
            going = {p for p in self._own[module] if not self._params[p].persist}
            going -= {p for p in self._own[module] if self._fetched_for.get(p, _NEVER) > self._step}
            traversed = 0
            # upstream looks into later modules as deep as into the one that is released
            within = self._deep if module in self._leaves else self._direct
            for later in self._order[self._step :]:
                if not going or traversed >= self._knobs.reuse_distance:
                    break
                for index in within[later]:
                    going.discard(index)
                    traversed += self._params[index].slot.numel
            self._released[key] = frozenset(going)
        return self._released[key]
