"""Any depth from a shallow trace: blocks of one kind do the same, so one of them stands for all.

A *stack* is a list of blocks (`model.layers`, `encoder.block`).  Its blocks' kinds (structure hashes) become periodic after
some first ones: Llama has period 1, Gemma 3 has 6 (five local layers, one global), DeepSeek begins with dense layers.  A
shallow model keeps the first blocks, two periods and the last blocks.  Its trace is cut into segments, one per block for
forward and one for backward.  Two segments one period apart show what a block refers to: the same distance in both is a
neighbour (the hidden state), the same place in both is a fixed block (T5's position bias of block 0); anything else is not
periodic.  `deepen` writes the trace of the full depth by repeating such a segment; ids come out as a full trace would number
them, so equality with a full trace is plain equality of the columns, which is how tests prove it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .steptrace import EventKind, ModuleInfo, Pass, Phase, StepTrace, TensorSlot

_MIN_BLOCKS = 6  # fewer blocks are traced as they are


class NotPeriodic(Exception):
    """The trace cannot be deepened; the model is traced at its full depth instead."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A list of blocks: its path, full length, and which of its blocks the shallow model keeps."""

    path: str
    blocks: int  # of the full model
    head: int  # first blocks that are kept as they are
    period: int
    shallow: int  # blocks of the shallow model: head, two periods (and a remainder), and one period of last blocks

    def source(self, block: int) -> int:
        """The block of the shallow model that `block` of the full model equals."""
        if block < self.head:
            return block
        if block >= self.blocks - self.period:
            return self.shallow - (self.blocks - block)
        # the last period before those, counted from the end: in step with the last blocks
        return self.shallow - self.period - 1 - (self.blocks - self.period - 1 - block) % self.period

    def is_middle(self, source: int) -> bool:
        return self.head <= source < self.shallow - self.period


def find_stacks(module: Any) -> list[Stack]:
    """The stacks of `module` (a torch module) that are worth cutting."""
    import torch

    stacks: list[Stack] = []
    for path, child in module.named_modules():
        if not isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) or len(child) < _MIN_BLOCKS:
            continue
        if any(path.startswith(s.path + ".") for s in stacks):
            continue
        kinds = _kinds(list(child))
        found = _period(kinds)
        if found is None:
            continue
        head, period = found
        shallow = head + 3 * period + (len(kinds) - head) % period
        if shallow < len(kinds):
            stacks.append(Stack(path, len(kinds), head, period, shallow))
    return stacks


def _period(kinds: Sequence[int]) -> tuple[int, int] | None:
    """(blocks kept at the start, period) such that the kinds repeat from there on; None when they do not.

    The first period is kept too: the first block of each kind has other neighbours than later ones, and in backward it is the
    last to need what all blocks of its kind share (a mask, rotary tables).
    """
    n = len(kinds)
    for period in range(1, n // 2):
        for first in range(min(8, n - 2 * period)):
            if all(kinds[i] == kinds[i - period] for i in range(first + period, n)):
                return first + period, period
    return None


def _kinds(blocks: Sequence[Any]) -> list[int]:
    """A number per block; equal numbers, equal structure (classes, parameters, plain attributes but the block's own index)."""
    described = [_describe(b) for b in blocks]
    indexed = {key for key in described[0] if all(d.get(key) == ("attr", i) for i, d in enumerate(described))}
    numbers: dict[Any, int] = {}
    return [
        numbers.setdefault(tuple((k, v) for k, v in sorted(d.items()) if k not in indexed), len(numbers)) for d in described
    ]


def _describe(block: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in block.named_modules():
        found[f"{name}:class"] = ("class", type(module).__name__)
        for key, value in vars(module).items():
            if value is None or isinstance(value, (bool, int, float, str)):
                found[f"{name}:{key}"] = ("attr", value)
    for name, parameter in (*block.named_parameters(), *block.named_buffers()):
        found[f"{name}:tensor"] = ("tensor", f"{tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}")
    return found


# -- cutting a trace into segments ---------------------------------------------------------------------------------------

# A segment: ("G", 0, k) the k-th stretch outside all blocks; ("F", stack, block), ("B", stack, block).
_Place = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class _Segment:
    place: _Place
    events: list[tuple[int, Any, Any]]  # (kind, symbolic arg, symbolic aux)
    op_rows: list[tuple[int, Any, int, tuple[Any, ...]]]  # (original op, call, pass, inputs)
    storages: list[int]  # originals, in the order of their ids
    calls: list[int]


@dataclass(frozen=True)
class Expansion:
    """How the columns of a deep trace follow from those of a shallow one: for each row, the row that it equals."""

    storage: np.ndarray
    op: np.ndarray
    trace: StepTrace  # deep structure; its sizes are the shallow trace's, row by row


class _Cut:
    """A shallow trace as segments with symbolic references."""

    def __init__(self, trace: StepTrace, stacks: Sequence[Stack]) -> None:
        self.trace = trace
        self.stacks = stacks
        self._patterns = [re.compile(re.escape(s.path) + r"\.(\d+)(\.|$)") for s in stacks]
        self._module_place = [self._of_fqn(m.fqn) for m in trace.modules]
        self._param_place = [self._of_fqn(p.fqn) for p in trace.params]
        self._buffer_place = [self._of_fqn(b.fqn) for b in trace.buffers]
        self.segments: list[_Segment] = []
        self._storage_home: dict[int, tuple[Any, int]] = {}
        self._call_home: dict[int, tuple[Any, int]] = {}
        self._param_local = _local_indices(self._param_place)
        self._buffer_local = _local_indices(self._buffer_place)
        self._cut()

    def _of_fqn(self, fqn: str) -> tuple[int, int] | None:
        for index, pattern in enumerate(self._patterns):
            match = pattern.match(fqn)
            if match:
                return index, int(match.group(1))
        return None

    def _top(self, call: int) -> tuple[int, int] | None:
        """(stack, block) when `call` is a call of a block itself."""
        module = int(self.trace.call_module[call])
        place = self._module_place[module]
        if place is None or self.trace.modules[module].fqn != f"{self.stacks[place[0]].path}.{place[1]}":
            return None
        return place

    def _cut(self) -> None:
        trace = self.trace
        for i, slot in enumerate(trace.params):
            self._storage_home[slot.storage] = (("P", self._param_place[i]), self._param_local[i])
        for i, slot in enumerate(trace.buffers):
            self._storage_home.setdefault(slot.storage, (("Q", self._buffer_place[i]), self._buffer_local[i]))
        for i, storage in enumerate(trace.batch_storages):
            self._storage_home[storage] = (("BATCH", None), i)
        self._open(("G", 0, 0))
        outside = 0
        starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
        op_call, op_pass = trace.op_call.tolist(), trace.op_pass.tolist()
        backward = False
        for kind, arg, aux in zip(trace.event_kind.tolist(), trace.event_arg.tolist(), trace.event_aux.tolist(), strict=True):
            segment = self.segments[-1]
            if kind == EventKind.PHASE:
                backward = arg == Phase.BACKWARD
                outside += 1
                segment = self._open(("G", 0, outside))
                segment.events.append((kind, arg, aux))
                continue
            if kind == EventKind.ENTER and (place := self._top(arg)) is not None:
                wanted: _Place = ("B" if backward else "F", *place)
                if segment.place != wanted:
                    if any(s.place == wanted for s in self.segments):
                        raise NotPeriodic(f"block {place[1]} of {self.stacks[place[0]].path} runs more than once")
                    before = [s.place[2] for s in self.segments if s.place[:2] == wanted[:2]]
                    if before and (before[-1] > place[1]) != backward:
                        raise NotPeriodic(f"the blocks of {self.stacks[place[0]].path} do not run in their order")
                    segment = self._open(wanted)
            if kind == EventKind.OP:
                self._own_constants(segment, inputs[starts[arg] : starts[arg + 1]])
                refs = tuple(self._storage(s, segment) for s in inputs[starts[arg] : starts[arg + 1]])
                segment.events.append((kind, len(segment.op_rows), 0))
                segment.op_rows.append((arg, self._call(op_call[arg], segment), op_pass[arg], refs))
            elif kind == EventKind.ALLOC:
                self._own(segment, arg)
                segment.events.append((kind, self._storage(arg, segment), 0))
            elif kind == EventKind.FREE:
                segment.events.append((kind, self._storage(arg, segment), 0))
            elif kind in (EventKind.ENTER, EventKind.LEAVE):
                if kind == EventKind.ENTER and arg not in self._call_home:
                    self._call_home[arg] = (segment.place, len(segment.calls))
                    segment.calls.append(arg)
                segment.events.append((kind, self._call(arg, segment), aux))
            elif kind == EventKind.GRAD:
                segment.events.append((kind, self._param(arg, segment), self._storage(aux, segment)))
            if kind == EventKind.LEAVE and (place := self._top(arg)) is not None:
                last = aux == Pass.FORWARD and place[1] == self.stacks[place[0]].shallow - 1
                first = aux == Pass.BACKWARD and place[1] == 0
                if last or first:
                    outside += 1
                    self._open(("G", 0, outside))

    def _open(self, place: _Place) -> _Segment:
        self.segments.append(_Segment(place, [], [], [], []))
        return self.segments[-1]

    def _own(self, segment: _Segment, storage: int) -> None:
        self._storage_home[storage] = (segment.place, len(segment.storages))
        segment.storages.append(storage)

    def _own_constants(self, segment: _Segment, storages: Sequence[int]) -> None:
        for storage in storages:
            if storage not in self._storage_home:  # a tensor that no op made, first seen here
                self._own(segment, storage)

    def _relative(self, home: Any, local: int, segment: _Segment) -> Any:
        """A reference as seen from `segment`: the block of the same stack as an offset, others as they are."""
        kind, where = home[0], home[1:] if home[0] in "GFB" else home[1]
        if kind == "G":
            return ("G", home[2], local)
        place = where if kind in ("F", "B") else home[1]
        if place is None:
            return (kind, None, local)
        stack, block = place
        if segment.place[0] in ("F", "B") and segment.place[1] == stack:
            return (kind, stack, "rel", block - segment.place[2], local)
        return (kind, stack, "abs", block, local)

    def _storage(self, storage: int, segment: _Segment) -> Any:
        if storage < 0:
            return None
        home, local = self._storage_home[storage]
        return self._relative(home, local, segment)

    def _call(self, call: int, segment: _Segment) -> Any:
        if call < 0:
            return None
        home, local = self._call_home[call]
        return self._relative(home, local, segment)

    def _param(self, param: int, segment: _Segment) -> Any:
        return self._relative(("P", self._param_place[param]), self._param_local[param], segment)


def _local_indices(places: Sequence[Any]) -> list[int]:
    """Each item's index among the items of its own place."""
    count: dict[Any, int] = {}
    local = []
    for place in places:
        local.append(count.get(place, 0))
        count[place] = local[-1] + 1
    return local


# -- writing the deep trace ----------------------------------------------------------------------------------------------


def deepen(trace: StepTrace, stacks: Sequence[Stack]) -> Expansion:
    """The trace of the full model from that of the shallow one.  Raises NotPeriodic where the pattern does not hold."""
    if not stacks:
        identity = np.arange(len(trace.storage_bytes)), np.arange(trace.num_ops)
        return Expansion(*identity, trace)
    return _Writer(_Cut(trace, stacks)).write()


class _Writer:
    def __init__(self, cut: _Cut) -> None:
        self.cut = cut
        self.trace = cut.trace
        self.stacks = cut.stacks
        self.by_place = {s.place: s for s in cut.segments}
        self.templates: dict[_Place, _Segment] = {}
        self.storage_ids: dict[Any, int] = {}  # (home, local) of the deep model -> id
        self.call_ids: dict[Any, int] = {}
        self.storage_source: list[int] = []
        self.op_source: list[int] = []
        self.call_source: list[int] = []
        self.kind: list[int] = []
        self.arg: list[int] = []
        self.aux: list[int] = []
        self.op_call: list[int] = []
        self.op_inputs: list[int] = []
        self.op_start: list[int] = [0]
        self.call_module: list[int] = []
        self.call_parent: list[int] = []

    def write(self) -> Expansion:
        trace, cut = self.trace, self.cut
        self.modules, self.module_of = self._spread(
            trace.modules, cut._module_place, lambda m, name: ModuleInfo(name, m.class_name)
        )
        params, self.param_of = self._spread(trace.params, cut._param_place, self._slot)
        buffers, buffer_of = self._spread(trace.buffers, cut._buffer_place, self._slot)
        new_params = self._number(params, self.param_of, "P")
        new_buffers = self._number(buffers, buffer_of, "Q")
        batch = [self._new_storage((("BATCH", None), i), s) for i, s in enumerate(trace.batch_storages)]
        for segment, block in self._order():
            self._emit(segment, block)
        outputs = self._outputs()
        self._must_end_alike(outputs)
        deep = replace(
            trace,
            modules=tuple(self.modules),
            params=tuple(new_params),
            buffers=tuple(new_buffers),
            event_kind=np.array(self.kind, np.int8),
            event_arg=np.array(self.arg, np.int32),
            event_aux=np.array(self.aux, np.int32),
            op_signature=trace.op_signature[self.op_source],
            op_call=np.array(self.op_call, np.int32),
            op_pass=trace.op_pass[self.op_source],
            op_input_start=np.array(self.op_start, np.int32),
            op_inputs=np.array(self.op_inputs, np.int32),
            storage_bytes=trace.storage_bytes[self.storage_source],
            storage_role=trace.storage_role[self.storage_source],
            storage_op=self._storage_ops(),
            storage_output=trace.storage_output[self.storage_source],
            call_module=np.array(self.call_module, np.int32),
            call_parent=np.array(self.call_parent, np.int32),
            batch_storages=tuple(batch),
            output_storages=outputs,
            loss_storage=self._find(trace.loss_storage) if trace.loss_storage >= 0 else -1,
            graph=None,
        )
        return Expansion(np.array(self.storage_source), np.array(self.op_source), deep)

    # names: modules, parameters, buffers of the full model

    def _spread(self, items: Sequence[Any], places: Sequence[Any], rename: Any) -> tuple[list[Any], dict[Any, int]]:
        """The full model's list of `items`, in its order, and (place, local index) -> index in it."""
        grouped: dict[Any, list[int]] = {}
        for i, place in enumerate(places):
            grouped.setdefault(place, []).append(i)
        spread: list[Any] = []
        index: dict[Any, int] = {}
        done: set[int] = set()
        for i, place in enumerate(places):
            if place is None:
                index[None, grouped[None].index(i)] = len(spread)
                spread.append(items[i])
            elif place[0] not in done:  # the first item of a stack: write all of its blocks here
                done.add(place[0])
                stack = self.stacks[place[0]]
                for block in range(stack.blocks):
                    source = stack.source(block)
                    for local, j in enumerate(grouped.get((place[0], source), [])):
                        name = items[j].fqn
                        prefix = f"{stack.path}.{source}"
                        index[(place[0], block), local] = len(spread)
                        spread.append(rename(items[j], f"{stack.path}.{block}" + name[len(prefix) :]))
        return spread, index

    def _slot(self, slot: TensorSlot, name: str) -> TensorSlot:
        return replace(slot, fqn=name)

    def _number(self, slots: list[TensorSlot], index: dict[Any, int], kind: str) -> list[TensorSlot]:
        """Gives parameters (buffers) of the full model their storages, in order; tied ones share."""
        sources = {i: key for key, i in index.items()}
        owner_of = {m.fqn: i for i, m in enumerate(self.modules)}
        numbered = []
        shallow = self.trace.params if kind == "P" else self.trace.buffers
        places = self.cut._param_place if kind == "P" else self.cut._buffer_place
        grouped: dict[Any, list[int]] = {}
        for i, place in enumerate(places):
            grouped.setdefault(place, []).append(i)
        for i, slot in enumerate(slots):
            place, local = sources[i]
            source_place = None if place is None else (place[0], self.stacks[place[0]].source(place[1]))
            original = shallow[grouped[source_place][local]]
            storage = self._new_storage(((kind, place), local), original.storage)
            owner = owner_of.get(slot.fqn.rpartition(".")[0], 0)
            numbered.append(replace(slot, storage=storage, module=owner))
        return numbered

    # segments

    def _order(self) -> list[tuple[_Segment, int]]:
        """(segment of the shallow trace, block of the full model) in the order of the full trace."""
        order: list[tuple[_Segment, int]] = []
        written: set[tuple[str, int]] = set()
        for segment in self.cut.segments:
            kind, stack_index, _ = segment.place
            if kind == "G":
                order.append((segment, -1))
                continue
            if (kind, stack_index) in written:
                continue
            written.add((kind, stack_index))
            stack = self.stacks[stack_index]
            blocks = range(stack.blocks) if kind == "F" else range(stack.blocks - 1, -1, -1)
            for block in blocks:
                order.append((self._template(kind, stack_index, stack.source(block)), block))
        return order

    def _template(self, kind: str, stack_index: int, source: int) -> _Segment:
        """The segment that stands for every block with this source, its references decided."""
        found = self.templates.get((kind, stack_index, source))
        if found is not None:
            return found
        stack = self.stacks[stack_index]
        segment = self.by_place.get((kind, stack_index, source))
        if segment is None:
            raise NotPeriodic(f"{stack.path}.{source} has no segment of its own")
        if stack.is_middle(source):
            sibling = source - stack.period if stack.is_middle(source - stack.period) else source + stack.period
            other = self.by_place.get((kind, stack_index, sibling))
            if other is None:
                raise NotPeriodic(f"{stack.path}.{sibling} has no segment of its own")
            segment = _agree(segment, other, self.trace)
        else:
            segment = _mapped(segment, lambda ref: _fixed(ref, source) if _offset(ref) > stack.period else ref)
        self.templates[kind, stack_index, source] = segment
        return segment

    def _emit(self, segment: _Segment, block: int) -> None:
        events = segment.events if segment.place[0] != "G" else list(self._unrolled(segment))
        place: _Place = segment.place if block < 0 else (segment.place[0], segment.place[1], block)
        new_storages = new_calls = 0
        ops: dict[int, int] = {}
        for kind, arg, aux in events:
            if kind == EventKind.OP:
                original, call, _, refs = segment.op_rows[arg]
                for ref in refs:  # constants of the module get their id when first used
                    key = self._key(ref, block)
                    if key not in self.storage_ids:
                        self._new_storage(key, segment.storages[new_storages])
                        new_storages += 1
                op = ops[arg] = len(self.op_source)
                self.op_source.append(original)
                self.op_call.append(-1 if call is None else self.call_ids[self._key(call, block)])
                self.op_inputs += [self.storage_ids[self._key(ref, block)] for ref in refs]
                self.op_start.append(len(self.op_inputs))
                self._event(kind, op, 0)
            elif kind == EventKind.ALLOC:
                self._event(kind, self._new_storage(self._key(arg, block), segment.storages[new_storages]), 0)
                new_storages += 1
            elif kind == EventKind.FREE:
                self._event(kind, self._id(self.storage_ids, arg, block), 0)
            elif kind in (EventKind.ENTER, EventKind.LEAVE):
                key = self._key(arg, block)
                if kind == EventKind.ENTER and key not in self.call_ids:
                    self._new_call(key, segment.calls[new_calls], place, segment.place[2])
                    new_calls += 1
                self._event(kind, self._id(self.call_ids, arg, block), aux)
            elif kind == EventKind.GRAD:
                where, local = self._key(arg, block)
                self._event(kind, self.param_of[where[1], local], -1 if aux is None else self._id(self.storage_ids, aux, block))
            else:
                self._event(kind, arg, aux)

    def _event(self, kind: int, arg: int, aux: int) -> None:
        self.kind.append(kind)
        self.arg.append(arg)
        self.aux.append(aux)

    def _id(self, table: dict[Any, int], ref: Any, block: int) -> int:
        try:
            return table[self._key(ref, block)]
        except KeyError:
            raise NotPeriodic("a block refers to something that its neighbours do not have") from None

    def _key(self, ref: Any, block: int) -> Any:
        """(home, local) in the full model of a symbolic reference seen from `block`."""
        kind = ref[0]
        if kind == "G":
            return ("G", 0, ref[1]), ref[2]
        if ref[1] is None:
            return (kind, None), ref[2]
        _, stack, mode, number, local = ref
        target = block + number if mode == "rel" else number if mode == "full" else self._far(stack, number)
        return ((kind, stack, target) if kind in ("F", "B") else (kind, (stack, target))), local

    def _far(self, stack: int, block: int) -> int:
        """A block named from outside its stack: the first ones keep their number, the last ones count from the end."""
        s = self.stacks[stack]
        return block if block < s.shallow // 2 else s.blocks - (s.shallow - block)

    def _unrolled(self, segment: _Segment) -> list[tuple[int, Any, Any]]:
        """The events of a stretch outside the blocks, with runs that go through the blocks one by one made as long as the full
        stack: what each block left behind (a key-value cache) is freed here, for instance."""
        events: list[tuple[int, Any, Any]] = []
        position = 0
        while position < len(segment.events):
            stop = position
            while stop < len(segment.events) and _far_block(segment.events[stop]) is not None:
                stop += 1
            if stop == position:
                events.append(segment.events[position])
                position += 1
                continue
            events += self._unroll(segment.events[position:stop])
            position = stop
        return events

    def _unroll(self, run: Sequence[tuple[int, Any, Any]]) -> list[tuple[int, Any, Any]]:
        """A run of events about blocks, split into walks through one stack; each walk is made as long as the full stack."""
        walks: list[list[tuple[int, int, list[Any]]]] = []  # walk -> (stack, block, events)
        for event in run:
            where = _far_block(event)
            assert where is not None
            walk = walks[-1] if walks else []
            if walk and walk[-1][:2] == where:
                walk[-1][2].append(event)
            elif walk and walk[-1][0] == where[0] and (
                where[1] - walk[-1][1] in (1, -1) if len(walk) == 1 else where[1] - walk[-1][1] == walk[-1][1] - walk[-2][1]
            ):  # fmt: skip
                walk.append((*where, [event]))
            else:
                walks.append([(*where, [event])])
        return [event for walk in walks for event in self._lengthen(walk)]

    def _lengthen(self, walk: list[tuple[int, int, list[Any]]]) -> list[tuple[int, Any, Any]]:
        stack = self.stacks[walk[0][0]]
        by_block = {block: events for _, block, events in walk}
        first, last = min(by_block), max(by_block)
        if (
            first > stack.head or last < stack.shallow - stack.period - 1
        ):  # a few blocks at one end, not a walk through the stack
            return [event for _, _, events in walk for event in events]
        full = range(first, stack.blocks - (stack.shallow - last) + 1)
        long = []
        for block in full if walk[0][1] == first else reversed(full):
            events = by_block.get(stack.source(block))
            if events is None:
                raise NotPeriodic(f"what {stack.path} leaves behind is not the same for every block")
            long += [_moved(event, block) for event in events]
        return long

    def _must_end_alike(self, outputs: tuple[int, ...]) -> None:
        """Every storage of the deep trace ends as the one that it equals: freed, handed over, returned, or kept."""

        def ends(
            kinds: Sequence[int], args: Sequence[int], auxs: Sequence[int], count: int, returned: tuple[int, ...]
        ) -> np.ndarray:
            end = np.zeros((3, count), np.int8)
            for kind, arg, aux in zip(kinds, args, auxs, strict=True):
                if kind == EventKind.FREE:
                    end[0, arg] += 1
                elif kind == EventKind.GRAD and aux >= 0:
                    end[1, aux] += 1
            end[2, list(returned)] = 1
            return end

        shallow = self.trace
        columns = shallow.event_kind.tolist(), shallow.event_arg.tolist(), shallow.event_aux.tolist()
        wanted = ends(*columns, len(shallow.storage_bytes), shallow.output_storages)[:, self.storage_source]
        if not np.array_equal(wanted, ends(self.kind, self.arg, self.aux, len(self.storage_source), outputs)):
            raise NotPeriodic("what the blocks leave behind is not the same for every block")

    # rows

    def _new_storage(self, key: Any, original: int) -> int:
        if key in self.storage_ids:
            return self.storage_ids[key]
        self.storage_ids[key] = len(self.storage_source)
        self.storage_source.append(original)
        return self.storage_ids[key]

    def _new_call(self, key: Any, original: int, place: _Place, source_block: int) -> None:
        self.call_ids[key] = len(self.call_module)
        self.call_source.append(original)
        module = int(self.trace.call_module[original])
        home = self.cut._module_place[module]
        fqn = self.trace.modules[module].fqn
        if home is not None and place[0] != "G" and home[1] == source_block:  # else a module that several blocks share
            stack = self.stacks[home[0]]
            fqn = f"{stack.path}.{place[2]}" + fqn[len(f"{stack.path}.{home[1]}") :]
        self.call_module.append(self._module_index[fqn])
        parent = int(self.trace.call_parent[original])
        if parent < 0:
            self.call_parent.append(-1)
            return
        parent_home, local = self.cut._call_home[parent]
        if parent_home[0] in ("F", "B") and place[0] != "G":
            parent_home = (parent_home[0], parent_home[1], place[2])
        self.call_parent.append(self.call_ids[parent_home, local])

    @property
    def _module_index(self) -> dict[str, int]:
        if not hasattr(self, "_modules_by_name"):
            self._modules_by_name = {m.fqn: i for i, m in enumerate(self.modules)}
        return self._modules_by_name

    def _storage_ops(self) -> np.ndarray:
        """The op that made each storage, in the deep numbering."""
        made = np.full(len(self.storage_source), -1, np.int32)
        op = -1
        for kind, arg in zip(self.kind, self.arg, strict=True):
            if kind == EventKind.OP:
                op = arg
            elif kind == EventKind.ALLOC:
                made[arg] = op
        return made

    def _find(self, storage: int) -> int:
        home, local = self.cut._storage_home[storage]
        if home[0] in ("F", "B"):
            home = (home[0], home[1], self._far(home[1], home[2]))
        elif home[0] in ("P", "Q") and home[1] is not None:
            home = (home[0], (home[1][0], self._far(*home[1])))
        return self.storage_ids[home, local]

    def _outputs(self) -> tuple[int, ...]:
        """Storages of the output; what each block contributed (a key-value cache) is walked through the stack."""
        refs: list[tuple[int, Any, Any]] = []
        outside = _Segment(("G", 0, -1), [], [], [], [])
        for storage in self.trace.output_storages:
            refs.append((EventKind.FREE, self.cut._storage(storage, outside), 0))
        segment = _Segment(("G", 0, -1), refs, [], [], [])
        return tuple(self._id(self.storage_ids, ref, -1) for _, ref, _ in self._unrolled(segment))


def _offset(ref: Any) -> int:
    """How many blocks away a relative reference points; 0 for any other."""
    return abs(ref[3]) if isinstance(ref, tuple) and len(ref) == 5 and ref[2] == "rel" else 0


def _fixed(ref: Any, block: int) -> Any:
    """The relative reference as one to a fixed block."""
    return (*ref[:2], "abs", block + ref[3], ref[4])


def _mapped(segment: _Segment, change: Any) -> _Segment:
    """The segment with `change` applied to every reference."""
    events = [(kind, change(arg), change(aux)) for kind, arg, aux in segment.events]
    rows = [(op, change(call), run, tuple(map(change, refs))) for op, call, run, refs in segment.op_rows]
    return replace(segment, events=events, op_rows=rows)


def _agree(segment: _Segment, other: _Segment, trace: StepTrace) -> _Segment:
    """`segment` with each reference decided by its twin one period away: neighbour or fixed block.  Raises NotPeriodic."""
    if len(segment.events) != len(other.events) or len(segment.op_rows) != len(other.op_rows):
        raise NotPeriodic("blocks of one kind do not do the same")
    here, there = segment.place[2], other.place[2]

    def decide(mine: Any, twin: Any) -> Any:
        if mine == twin:
            return mine
        if _offset(mine) or _offset(twin):
            fixed = _fixed(mine, here)
            if fixed == _fixed(twin, there):
                return fixed
        raise NotPeriodic("blocks of one kind refer to different things")

    events = []
    for mine, twin in zip(segment.events, other.events, strict=True):
        if mine[0] != twin[0]:
            raise NotPeriodic("blocks of one kind do not do the same")
        events.append((mine[0], decide(mine[1], twin[1]), decide(mine[2], twin[2])))
    rows = []
    for mine_row, twin_row in zip(segment.op_rows, other.op_rows, strict=True):
        if trace.op_signature[mine_row[0]] != trace.op_signature[twin_row[0]] or len(mine_row[3]) != len(twin_row[3]):
            raise NotPeriodic("blocks of one kind run different ops")
        refs = tuple(decide(a, b) for a, b in zip(mine_row[3], twin_row[3], strict=True))
        rows.append((mine_row[0], decide(mine_row[1], twin_row[1]), mine_row[2], refs))
    return replace(segment, events=events, op_rows=rows)


def same_structure(a: StepTrace, b: StepTrace) -> bool:
    """Whether two traces are equal in every column; signatures are compared by content, the fx graph is not compared."""
    columns = (
        "event_kind", "event_arg", "event_aux", "op_call", "op_pass", "op_input_start", "op_inputs", "storage_bytes",
        "storage_role", "storage_op", "storage_output", "call_module", "call_parent",
    )  # fmt: skip
    plain = ("modules", "params", "buffers", "batch_storages", "output_storages", "loss_storage")
    if any(getattr(a, name) != getattr(b, name) for name in plain):
        return False
    if any(not np.array_equal(getattr(a, name), getattr(b, name)) for name in columns):
        return False
    ours = [a.signatures[i] for i in a.op_signature.tolist()]
    return ours == [b.signatures[i] for i in b.op_signature.tolist()]


def _far_block(event: tuple[int, Any, Any]) -> tuple[int, int] | None:
    """(stack, block) of an event outside the blocks that refers to one."""
    kind, arg, _ = event
    if kind in (EventKind.OP, EventKind.PHASE) or not isinstance(arg, tuple):
        return None
    return (arg[1], arg[3]) if len(arg) == 5 and arg[2] == "abs" else None


def _moved(event: tuple[int, Any, Any], block: int) -> tuple[int, Any, Any]:
    """The event about `block` of the full model instead."""

    def move(ref: Any) -> Any:
        return (*ref[:2], "full", block, ref[4]) if isinstance(ref, tuple) and len(ref) == 5 else ref

    kind, arg, aux = event
    return kind, move(arg), move(aux) if kind == EventKind.GRAD else aux
