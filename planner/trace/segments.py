"""Cuts the trace of a shallow model into segments, one per block and pass, with references that are relative to the block."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .stacks import NotPeriodic, Stack
from .steptrace import EventKind, Pass, Phase, StepTrace

# A segment: ("G", 0, k) the k-th stretch outside all blocks; ("F", stack, block), ("B", stack, block).
Place = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    place: Place
    events: list[tuple[int, Any, Any]]  # (kind, symbolic arg, symbolic aux)
    op_rows: list[tuple[int, Any, int, tuple[Any, ...]]]  # (original op, call, pass, inputs)
    storages: list[int]  # originals, in the order of their ids
    calls: list[int]


def offset(ref: Any) -> int:
    """How many blocks away a relative reference points; 0 for any other."""
    return abs(ref[3]) if isinstance(ref, tuple) and len(ref) == 5 and ref[2] == "rel" else 0


def fixed(ref: Any, block: int) -> Any:
    """The relative reference as one to a fixed block."""
    return (*ref[:2], "abs", block + ref[3], ref[4])


def mapped(segment: Segment, change: Any) -> Segment:
    """The segment with `change` applied to every reference."""
    events = [(kind, change(arg), change(aux)) for kind, arg, aux in segment.events]
    rows = [(op, change(call), run, tuple(map(change, refs))) for op, call, run, refs in segment.op_rows]
    return replace(segment, events=events, op_rows=rows)


def agree(segment: Segment, other: Segment, trace: StepTrace) -> Segment:
    """`segment` with each reference decided by its twin one period away: neighbour or fixed block.  Raises NotPeriodic."""
    if len(segment.events) != len(other.events) or len(segment.op_rows) != len(other.op_rows):
        raise NotPeriodic("blocks of one kind do not do the same")
    here, there = segment.place[2], other.place[2]

    def decide(mine: Any, twin: Any) -> Any:
        if mine == twin:
            return mine
        if offset(mine) or offset(twin):
            place = fixed(mine, here)
            if place == fixed(twin, there):
                return place
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


class Cut:
    """A shallow trace as segments with symbolic references."""

    def __init__(self, trace: StepTrace, stacks: Sequence[Stack]) -> None:
        self.trace = trace
        self.stacks = stacks
        self._patterns = [re.compile(re.escape(s.path) + r"\.(\d+)(\.|$)") for s in stacks]
        self.module_place = [self._of_fqn(m.fqn) for m in trace.modules]
        self.param_place = [self._of_fqn(p.fqn) for p in trace.params]
        self.buffer_place = [self._of_fqn(b.fqn) for b in trace.buffers]
        self.segments: list[Segment] = []
        self.storage_home: dict[int, tuple[Any, int]] = {}
        self.call_home: dict[int, tuple[Any, int]] = {}
        self.param_local = _local_indices(self.param_place)
        self.buffer_local = _local_indices(self.buffer_place)
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
        place = self.module_place[module]
        if place is None or self.trace.modules[module].fqn != f"{self.stacks[place[0]].path}.{place[1]}":
            return None
        return place

    def _cut(self) -> None:
        trace = self.trace
        for i, slot in enumerate(trace.params):
            self.storage_home[slot.storage] = (("P", self.param_place[i]), self.param_local[i])
        for i, slot in enumerate(trace.buffers):
            self.storage_home.setdefault(slot.storage, (("Q", self.buffer_place[i]), self.buffer_local[i]))
        for i, storage in enumerate(trace.batch_storages):
            self.storage_home[storage] = (("BATCH", None), i)
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
                wanted: Place = ("B" if backward else "F", *place)
                if segment.place != wanted:
                    if any(s.place == wanted for s in self.segments):
                        raise NotPeriodic(f"block {place[1]} of {self.stacks[place[0]].path} runs more than once")
                    before = [s.place[2] for s in self.segments if s.place[:2] == wanted[:2]]
                    if before and (before[-1] > place[1]) != backward:
                        raise NotPeriodic(f"the blocks of {self.stacks[place[0]].path} do not run in their order")
                    segment = self._open(wanted)
            if kind == EventKind.OP:
                self._own_constants(segment, inputs[starts[arg] : starts[arg + 1]])
                refs = tuple(self.storage(s, segment) for s in inputs[starts[arg] : starts[arg + 1]])
                segment.events.append((kind, len(segment.op_rows), 0))
                segment.op_rows.append((arg, self._call(op_call[arg], segment), op_pass[arg], refs))
            elif kind == EventKind.ALLOC:
                self._own(segment, arg)
                segment.events.append((kind, self.storage(arg, segment), 0))
            elif kind == EventKind.FREE:
                segment.events.append((kind, self.storage(arg, segment), 0))
            elif kind in (EventKind.ENTER, EventKind.LEAVE):
                if kind == EventKind.ENTER and arg not in self.call_home:
                    self.call_home[arg] = (segment.place, len(segment.calls))
                    segment.calls.append(arg)
                segment.events.append((kind, self._call(arg, segment), aux))
            elif kind == EventKind.GRAD:
                segment.events.append((kind, self._param(arg, segment), self.storage(aux, segment)))
            if kind == EventKind.LEAVE and (place := self._top(arg)) is not None:
                last = aux == Pass.FORWARD and place[1] == self.stacks[place[0]].shallow - 1
                first = aux == Pass.BACKWARD and place[1] == 0
                if last or first:
                    outside += 1
                    self._open(("G", 0, outside))

    def _open(self, place: Place) -> Segment:
        self.segments.append(Segment(place, [], [], [], []))
        return self.segments[-1]

    def _own(self, segment: Segment, storage: int) -> None:
        self.storage_home[storage] = (segment.place, len(segment.storages))
        segment.storages.append(storage)

    def _own_constants(self, segment: Segment, storages: Sequence[int]) -> None:
        for storage in storages:
            if storage not in self.storage_home:  # a tensor that no op made, first seen here
                self._own(segment, storage)

    def _relative(self, home: Any, local: int, segment: Segment) -> Any:
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

    def storage(self, storage: int, segment: Segment) -> Any:
        if storage < 0:
            return None
        home, local = self.storage_home[storage]
        return self._relative(home, local, segment)

    def _call(self, call: int, segment: Segment) -> Any:
        if call < 0:
            return None
        home, local = self.call_home[call]
        return self._relative(home, local, segment)

    def _param(self, param: int, segment: Segment) -> Any:
        return self._relative(("P", self.param_place[param]), self.param_local[param], segment)


def _local_indices(places: Sequence[Any]) -> list[int]:
    """Each item's index among the items of its own place."""
    count: dict[Any, int] = {}
    local = []
    for place in places:
        local.append(count.get(place, 0))
        count[place] = local[-1] + 1
    return local


def far_block(event: tuple[int, Any, Any]) -> tuple[int, int] | None:
    """(stack, block) of an event outside the blocks that refers to one."""
    kind, arg, _ = event
    if kind in (EventKind.OP, EventKind.PHASE) or not isinstance(arg, tuple):
        return None
    return (arg[1], arg[3]) if len(arg) == 5 and arg[2] == "abs" else None


def moved(event: tuple[int, Any, Any], block: int) -> tuple[int, Any, Any]:
    """The event about `block` of the full model instead."""

    def move(ref: Any) -> Any:
        return (*ref[:2], "full", block, ref[4]) if isinstance(ref, tuple) and len(ref) == 5 else ref

    kind, arg, aux = event
    return kind, move(arg), move(aux) if kind == EventKind.GRAD else aux
