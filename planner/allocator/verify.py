"""A recorded snapshot played through the allocator and compared with what the real one did.

Two ways.  *Exact*: the driver's real addresses are given, and every allocation must land on its real address, with every
segment event matched.  *Blind*: only sizes, streams and order are given, as for a run that has not happened; the peaks must
agree.  Calls of `empty_cache` are part of the program, so both ways are told of them.  A flush because the driver had no more
memory is the allocator's own doing: it must come out by itself, from one limit that is found from the recording.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .caching import CachingAllocator, OutOfMemory
from .config import AllocConf
from .driver import DescendingDriver, SegmentEvent
from .export import segment_states
from .replay import ALLOC, FREE_COMPLETED, FREE_REQUESTED, ReplayState, replay
from .snapshot import SEGMENT_ACTIONS, SegmentState, Snapshot, TraceEvent
from .start_state import StartState, restore, walk_back

_ROOM_BELOW = 2**60  # a blind replay's start state is moved up by this, so that no invented address falls below zero
_GROWS = ("segment_alloc", "segment_map")


@dataclass
class Step:
    """One event of the program, and the driver events that came with it.

    `flushes`: memory was given back in the course of it, since the driver had none left; else an `empty_cache` came before it.
    """

    event: int
    action: str  # alloc, free_requested, free_completed, oom, or end for what follows the last event
    address: int
    size: int
    stream: int
    driver: list[SegmentEvent] = field(default_factory=list)
    flushes: bool = False

    @property
    def gives_back(self) -> bool:
        return any(event.action not in _GROWS for event in self.driver)


@dataclass(frozen=True)
class Figures:
    """What a run needed; bytes, except `num_segment_events` (calls to the driver)."""

    peak_requested_bytes: int
    peak_reserved_bytes: int
    allocated_at_end_bytes: int
    num_segment_events: int


@dataclass(frozen=True)
class Comparison:
    """One device's recording against its simulation.  `differences` is empty when the replay was exact."""

    device: int
    blind: bool
    cold: bool  # the recording began before the first allocation
    num_events: int
    measured: Figures
    predicted: Figures
    predicted_peak_allocated_bytes: int
    limit_bytes: int | None
    num_flushes: int
    num_ooms: int
    differences: tuple[str, ...]
    seconds: float

    @property
    def reserved_ratio(self) -> float:
        """Predicted over measured peak reserved."""
        measured = self.measured.peak_reserved_bytes
        return self.predicted.peak_reserved_bytes / measured if measured else 1.0


class RecordedDriver:
    """Answers with the addresses that the real driver gave, as long as it is asked for the same."""

    def __init__(self) -> None:
        self.expected: deque[SegmentEvent] = deque()
        self._invented = DescendingDriver()  # for what the real allocator did not ask

    def allocate(self, size: int, stream: int) -> int | None:
        while self.expected:
            event = self.expected.popleft()
            if event.action == "segment_alloc":
                if (event.size, event.stream) == (size, stream):
                    return event.address
                break
        return self._invented.allocate(size, stream)

    def reserve(self, size: int, stream: int, is_small: bool) -> int:
        base = next((event.address for event in self.expected if event.action == "segment_map"), None)
        return self._invented.reserve(size, stream, is_small) if base is None else base


def split_steps(events: Sequence[TraceEvent]) -> list[Step]:
    """The events of the program, each with the driver events before it."""
    steps = []
    pending: list[SegmentEvent] = []
    for index, (action, address, size, stream) in enumerate(events):
        if action in SEGMENT_ACTIONS:
            pending.append(SegmentEvent(action, address, size, stream))
        else:
            steps.append(Step(index, action, address, size, stream, pending))
            pending = []
    if pending:
        steps.append(Step(len(events), "end", -1, 0, 0, pending))
    return steps


def measure(start: StartState, events: Sequence[TraceEvent], end: Sequence[SegmentState]) -> Figures:
    """The figures of the recording itself: from its events, and from the segments at its end."""
    reserved = peak_reserved = start.reserved_bytes
    requested = peak_requested = sum(block.requested for block in start.blocks.values())
    num_segment_events = 0
    for action, _, size, _ in events:
        if action in SEGMENT_ACTIONS:
            num_segment_events += 1
            reserved += size if action in _GROWS else -size
            peak_reserved = max(peak_reserved, reserved)
        elif action == "alloc":
            requested += size
            peak_requested = max(peak_requested, requested)
        elif action == "free_completed":
            requested -= size
    allocated = sum(block.size for segment in end for block in segment.blocks if block.state == "active_allocated")
    return Figures(peak_requested, peak_reserved, allocated, num_segment_events)


def find_limit(steps: Sequence[Step], start: StartState, conf: AllocConf, given: int | None) -> int | None:
    """Marks the steps in which the driver ran out of memory, and gives the limit that explains them; None if it never did.

    The device can give at least what was reserved at the peak.  Memory that was given back just before more was taken is a
    flush when both together would have passed the limit; else the program called empty_cache.
    """
    reserved = peak = start.reserved_bytes
    for step in steps:
        for event in step.driver:
            reserved += event.size if event.action in _GROWS else -event.size
            peak = max(peak, reserved)
    limit = peak if given is None else given
    reserved = start.reserved_bytes
    ran_out = False
    for step in steps:
        grown = sum(event.size for event in step.driver if event.action in _GROWS)
        returned = sum(event.size for event in step.driver if event.action not in _GROWS)
        if step.action == "oom":
            step.flushes = reserved + conf.segment_size(conf.round_size(step.size)) > limit
            ran_out = True
        else:
            step.flushes = step.action == "alloc" and grown > 0 and returned > 0 and reserved + grown > limit
            ran_out = ran_out or step.flushes
        reserved += grown - returned
    return limit if ran_out or given is not None else None


def compare(snapshot: Snapshot, device: int, *, blind: bool = False, conf: AllocConf | None = None,
            limit_bytes: int | None = None) -> Comparison:  # fmt: skip
    """Replays one device's recording.  Settings and limit are the snapshot's own unless given.  Raises UserError."""
    conf = conf or snapshot.conf or conf_from_events(snapshot)
    events = snapshot.traces[device]
    end = [segment for segment in snapshot.segments if segment.device == device]
    start = walk_back(end, events, conf)
    steps = split_steps(events)
    limit = find_limit(steps, start, conf, limit_bytes)
    seen: list[SegmentEvent] = []
    driver = RecordedDriver()
    if blind:
        moved = start.moved(_ROOM_BELOW)
        below = min((segment.address for segment in moved.segments), default=_ROOM_BELOW)
        allocator = CachingAllocator(conf, limit, DescendingDriver(below))
        state = restore(moved, allocator)
    else:
        allocator = CachingAllocator(conf, limit, driver)
        state = restore(start, allocator)
    allocator.on_segment = seen.append
    began = time.perf_counter()
    differences = _play_blind(steps, start, state) if blind else play_exact(steps, state, driver, seen)
    seconds = time.perf_counter() - began
    if not blind and not differences:
        differences = _compare_ends(end, segment_states(allocator, device))
    return Comparison(
        device=device,
        blind=blind,
        cold=not start.segments,
        num_events=len(events),
        measured=measure(start, events, end),
        predicted=Figures(allocator.peak_requested_bytes, allocator.peak_reserved_bytes, allocator.allocated_bytes, len(seen)),
        predicted_peak_allocated_bytes=allocator.peak_allocated_bytes,
        limit_bytes=limit,
        num_flushes=len(allocator.flushes),
        num_ooms=allocator.num_ooms,
        differences=tuple(differences),
        seconds=seconds,
    )


def conf_from_events(snapshot: Snapshot) -> AllocConf:
    """Old snapshots name no settings; only expandable segments can be seen in the events."""
    mapped = (event.action == "segment_map" for trace in snapshot.traces for event in trace)
    return AllocConf(expandable_segments=any(segment.is_expandable for segment in snapshot.segments) or any(mapped))


def play_exact(steps: Sequence[Step], state: ReplayState, driver: RecordedDriver, seen: list[SegmentEvent]) -> list[str]:
    allocator = state.allocator
    differences: list[str] = []
    for step in steps:
        first = len(seen)
        address, size = step.address, step.size
        driver.expected = deque(step.driver)
        allocator.clock = step.event
        where = f"event {step.event} ({step.action} of {size} bytes)"
        if step.gives_back and not step.flushes:
            allocator.empty_cache()
        if step.action in ("alloc", "oom"):
            try:
                block = allocator.allocate(size, step.stream)
                if step.action == "oom":
                    return [*differences, f"{where}: the real allocator ran out of memory, the simulation found room"]
                state.live[address] = block
                if block.address != address:
                    differences.append(f"{where}: real address {address}, simulated {block.address}")
            except OutOfMemory as error:
                if step.action == "alloc":
                    return [*differences, f"{where}: {error}; the real allocator found room"]
        elif step.action == "free_requested":
            state.request_free(address, state.live.pop(address))
        elif step.action == "free_completed":
            state.complete_free(address)
        if len(seen) - first != len(step.driver) or seen[first:] != step.driver:
            differences.append(f"{where}: real driver calls {_shown(step.driver)}, simulated {_shown(seen[first:])}")
    return differences


def _compare_ends(real: Sequence[SegmentState], simulated: Sequence[SegmentState]) -> list[str]:
    """Every block at the end of the recording, in use or free: where it lies, how large it is, and its state."""

    def blocks(segments: Sequence[SegmentState]) -> set[tuple[int, int, int, str]]:
        return {(segment.stream, block.address, block.size, block.state) for segment in segments for block in segment.blocks}

    only_real, only_simulated = blocks(real) - blocks(simulated), blocks(simulated) - blocks(real)
    return [f"at the end {whose}: a block of {size} bytes at {address}, {state}"
            for whose, rest in (("only in reality", only_real), ("only in the simulation", only_simulated))
            for _, address, size, state in sorted(rest)]  # fmt: skip


def _shown(events: Sequence[SegmentEvent]) -> str:
    words = [f"{event.action} {event.size} at {event.address}" for event in events[:3]]
    return ", ".join(words) + (f" and {len(events) - 3} more" if len(events) > 3 else "") if words else "none"


def _play_blind(steps: Sequence[Step], start: StartState, state: ReplayState) -> list[str]:
    """Plays the stretches between calls of empty_cache at full speed, keyed by number: no real address is looked at."""
    number = {address: index for index, address in enumerate(start.blocks)}
    state = ReplayState(
        state.allocator,
        {number[address - _ROOM_BELOW]: block for address, block in state.live.items()},
        {number[address - _ROOM_BELOW]: pair for address, pair in state.waiting.items()},
    )
    next_number = len(number)
    codes = {"alloc": ALLOC, "free_requested": FREE_REQUESTED, "free_completed": FREE_COMPLETED}
    rows: list[tuple[int, int, int, int]] = []
    for step in steps:
        if step.gives_back and not step.flushes:
            _play_rows(rows, state)
            state.allocator.empty_cache()
        if step.action in ("alloc", "oom"):
            number[step.address] = next_number
            next_number += 1
        if step.action == "oom":
            _play_rows(rows, state)
            if replay([ALLOC], [step.size], [number[step.address]], [step.stream], state=state).fits:
                return [f"event {step.event}: the real allocator ran out of memory, the simulation found room"]
        elif step.action in codes:
            rows.append((codes[step.action], step.size, number[step.address], step.stream))
    failed = _play_rows(rows, state)
    return [failed] if failed else []


def _play_rows(rows: list[tuple[int, int, int, int]], state: ReplayState) -> str:
    if not rows:
        return ""
    actions, sizes, keys, streams = zip(*rows, strict=True)
    failure = replay(actions, sizes, keys, streams, state=state).failure
    rows.clear()
    return "" if failure is None else f"out of memory at {failure.requested_bytes} bytes, where the real allocator found room"
