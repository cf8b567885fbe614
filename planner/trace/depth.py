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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .segments import Cut, Place, Segment, agree, far_block, fixed, mapped, moved, offset
from .stacks import NotPeriodic, Stack
from .steptrace import EventKind, ModuleInfo, StepTrace, TensorSlot


@dataclass(frozen=True)
class Expansion:
    """How the columns of a deep trace follow from those of a shallow one: for each row, the row that it equals."""

    storage: np.ndarray
    op: np.ndarray
    trace: StepTrace  # deep structure; its sizes are the shallow trace's, row by row


def deepen(trace: StepTrace, stacks: Sequence[Stack]) -> Expansion:
    """The trace of the full model from that of the shallow one.  Raises NotPeriodic where the pattern does not hold."""
    if not stacks:
        identity = np.arange(len(trace.storage_bytes)), np.arange(trace.num_ops)
        return Expansion(*identity, trace)
    return _Writer(Cut(trace, stacks)).write()


class _Writer:
    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.trace = cut.trace
        self.stacks = cut.stacks
        self.by_place = {s.place: s for s in cut.segments}
        self.templates: dict[Place, Segment] = {}
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
            trace.modules, cut.module_place, lambda m, name: ModuleInfo(name, m.class_name)
        )
        params, self.param_of = self._spread(trace.params, cut.param_place, self._slot)
        buffers, buffer_of = self._spread(trace.buffers, cut.buffer_place, self._slot)
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
        places = self.cut.param_place if kind == "P" else self.cut.buffer_place
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

    def _order(self) -> list[tuple[Segment, int]]:
        """(segment of the shallow trace, block of the full model) in the order of the full trace."""
        order: list[tuple[Segment, int]] = []
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

    def _template(self, kind: str, stack_index: int, source: int) -> Segment:
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
            segment = agree(segment, other, self.trace)
        else:
            segment = mapped(segment, lambda ref: fixed(ref, source) if offset(ref) > stack.period else ref)
        self.templates[kind, stack_index, source] = segment
        return segment

    def _emit(self, segment: Segment, block: int) -> None:
        events = segment.events if segment.place[0] != "G" else list(self._unrolled(segment))
        place: Place = segment.place if block < 0 else (segment.place[0], segment.place[1], block)
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

    def _unrolled(self, segment: Segment) -> list[tuple[int, Any, Any]]:
        """The events of a stretch outside the blocks, with runs that go through the blocks one by one made as long as the full
        stack: what each block left behind (a key-value cache) is freed here, for instance."""
        events: list[tuple[int, Any, Any]] = []
        position = 0
        while position < len(segment.events):
            stop = position
            while stop < len(segment.events) and far_block(segment.events[stop]) is not None:
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
            where = far_block(event)
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
            long += [moved(event, block) for event in events]
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

    def _new_call(self, key: Any, original: int, place: Place, source_block: int) -> None:
        self.call_ids[key] = len(self.call_module)
        self.call_source.append(original)
        module = int(self.trace.call_module[original])
        home = self.cut.module_place[module]
        fqn = self.trace.modules[module].fqn
        if home is not None and place[0] != "G" and home[1] == source_block:  # else a module that several blocks share
            stack = self.stacks[home[0]]
            fqn = f"{stack.path}.{place[2]}" + fqn[len(f"{stack.path}.{home[1]}") :]
        self.call_module.append(self._module_index[fqn])
        parent = int(self.trace.call_parent[original])
        if parent < 0:
            self.call_parent.append(-1)
            return
        parent_home, local = self.cut.call_home[parent]
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
        home, local = self.cut.storage_home[storage]
        if home[0] in ("F", "B"):
            home = (home[0], home[1], self._far(home[1], home[2]))
        elif home[0] in ("P", "Q") and home[1] is not None:
            home = (home[0], (home[1][0], self._far(*home[1])))
        return self.storage_ids[home, local]

    def _outputs(self) -> tuple[int, ...]:
        """Storages of the output; what each block contributed (a key-value cache) is walked through the stack."""
        refs: list[tuple[int, Any, Any]] = []
        outside = Segment(("G", 0, -1), [], [], [], [])
        for storage in self.trace.output_storages:
            refs.append((EventKind.FREE, self.cut.storage(storage, outside), 0))
        segment = Segment(("G", 0, -1), refs, [], [], [])
        return tuple(self._id(self.storage_ids, ref, -1) for _, ref, _ in self._unrolled(segment))


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
