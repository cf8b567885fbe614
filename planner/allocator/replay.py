"""A stream of allocations and frees played through the allocator at once: peaks, flushes, and where it fails under a limit."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .blocks import Block
from .caching import CachingAllocator, Excursion, Flush, OutOfMemory
from .config import AllocConf
from .driver import Driver, SegmentListener

# Actions of a stream.  FREE_REQUESTED and FREE_COMPLETED are the halves of FREE, apart where record_stream delays the second.
ALLOC, FREE, FREE_REQUESTED, FREE_COMPLETED = 0, 1, 2, 3
_DELAYED_BY = -1  # the stream that a pending block waits for: which one does not matter, the events say when it has finished


@dataclass(frozen=True)
class Failure:
    """The allocation that found no room under the limit; sizes in bytes, after the cache was flushed."""

    event: int
    requested_bytes: int
    reserved_bytes: int
    allocated_bytes: int


@dataclass
class ReplayState:
    """An allocator and the keys of what is allocated in it: pass it on to play the next stream where the last one ended."""

    allocator: CachingAllocator
    live: dict[int, Block] = field(default_factory=dict)
    waiting: dict[int, tuple[Block, int]] = field(default_factory=dict)  # free requested: block, and `num_syncs` at that time
    empty: set[int] = field(default_factory=set)  # keys of allocations of 0 bytes

    def request_free(self, key: int, block: Block) -> None:
        """The first half of a delayed free: the block stays active until `complete_free`, or a flush."""
        self.allocator.use_on(block, _DELAYED_BY)
        self.allocator.release(block)
        self.waiting[key] = block, self.allocator.num_syncs

    def complete_free(self, key: int) -> None:
        """The second half; nothing is left to do where a flush has waited for the stream in the meantime."""
        block, num_syncs = self.waiting.pop(key)
        if num_syncs == self.allocator.num_syncs:
            self.allocator.finish(block)


@dataclass(frozen=True)
class ReplayResult:
    """What a stream of events needs.  Bytes; `*_event` is the index of the event at which a peak was first reached.

    `failure` is None when every allocation found room; after a failure no further event was played.
    The two series are empty unless asked for; else entry i holds after event i.
    """

    num_events: int
    peak_requested_bytes: int
    peak_requested_event: int
    peak_allocated_bytes: int
    peak_allocated_event: int
    peak_active_bytes: int
    peak_reserved_bytes: int
    peak_reserved_event: int
    num_alloc_retries: int
    flushes: tuple[Flush, ...]  # `clock` is the index of the event
    failure: Failure | None
    allocated_series: tuple[int, ...]
    reserved_series: tuple[int, ...]
    state: ReplayState  # as it stands after the last event

    @property
    def fits(self) -> bool:
        return self.failure is None


def replay(actions: Sequence[int], sizes: Sequence[int], keys: Sequence[int], streams: Sequence[int] | None = None, *,
           conf: AllocConf | None = None, limit_bytes: int | None = None, allowed_bytes: int | None = None,
           driver: Driver | None = None, on_segment: SegmentListener | None = None, with_series: bool = False,
           state: ReplayState | None = None, repeats: Sequence[tuple[int, int, int]] = ()) -> ReplayResult:  # fmt: skip
    """Plays events in order: lists or numpy columns of equal length.

    actions    ALLOC, FREE, FREE_REQUESTED or FREE_COMPLETED
    sizes      requested bytes of an ALLOC (0: nothing is allocated, as in PyTorch); not read for frees
    keys       names the allocation; a key may be used again once it is free
    streams    the stream of each event; None: all on stream 0
    state      goes on where an earlier replay ended, and is changed; `conf`, limits, driver and listener are then those of its
               allocator, and the peaks of the result are over everything that it has played
    repeats    (start, stop, number) of event ranges in order, which free all that they allocate and nothing else; ranges of
               one number are the same events under other keys.  It saves time and changes no figure

    Running out of memory is an answer (`failure`), not an exception.  Raises ValueError for a stream that makes no sense.
    """
    if state is None:
        state = ReplayState(CachingAllocator(conf, limit_bytes, driver, allowed_bytes=allowed_bytes, on_segment=on_segment))
    columns = [_as_list(column) for column in (actions, sizes, keys)]
    columns.append([0] * len(columns[0]) if streams is None else _as_list(streams))
    if len({*map(len, columns)}) != 1:
        raise ValueError("the columns of a replay must have equal length")
    allocator = state.allocator
    first_flush = len(allocator.flushes)
    first_retry = allocator.num_alloc_retries
    player = _Player(state, columns, with_series)
    num_events = player.play_all(repeats)
    return ReplayResult(
        num_events=num_events,
        peak_requested_bytes=allocator.peak_requested_bytes,
        peak_requested_event=allocator.peak_requested_clock,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_allocated_event=allocator.peak_allocated_clock,
        peak_active_bytes=allocator.peak_active_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_reserved_event=allocator.peak_reserved_clock,
        num_alloc_retries=allocator.num_alloc_retries - first_retry,
        flushes=tuple(allocator.flushes[first_flush:]),
        failure=player.failure,
        allocated_series=tuple(player.allocated_series),
        reserved_series=tuple(player.reserved_series),
        state=state,
    )


class _Player:
    """Plays ranges of the columns; `failure` is set where one ended early."""

    def __init__(self, state: ReplayState, columns: list[list[int]], with_series: bool) -> None:
        self.failure: Failure | None = None
        self.allocated_series: list[int] = []
        self.reserved_series: list[int] = []
        self._state = state
        self._columns = columns
        self._with_series = with_series
        self._known: dict[Hashable, tuple[Excursion, list[int]]] = {}

    def play_all(self, repeats: Sequence[tuple[int, int, int]]) -> int:
        """The number of events that were played, a failed one included."""
        position, count = 0, len(self._columns[0])
        for start, stop, number in repeats if self._state.allocator.is_memoryless else ():
            if self.play(position, start) and start < stop:
                self._play_again(start, stop, number)
            if self.failure is not None:
                return self.failure.event + 1
            position = stop
        self.play(position, count)
        return count if self.failure is None else self.failure.event + 1

    def _play_again(self, start: int, stop: int, number: int) -> None:
        """Where the free memory is the same as an earlier time, and was left as it had been, all goes as it did then."""
        allocator = self._state.allocator
        before = allocator.free_memory()
        key = (number, before)
        known = self._known.get(key)
        if known is not None:
            went, allocated_above = known
            allocator.repeat(went, start)
            if self._with_series:
                base = allocator.allocated_bytes
                self.allocated_series += [base + above for above in allocated_above]
                self.reserved_series += [allocator.reserved_bytes] * (stop - start)
            return
        done, went = allocator.excursion(lambda: self.play(start, stop), start)
        if done and allocator.free_memory() == before:
            base = allocator.allocated_bytes
            above = [value - base for value in self.allocated_series[start - stop :]] if self._with_series else []
            self._known[key] = went, above

    def play(self, start: int, stop: int) -> bool:
        """Whether all went well."""
        state, with_series = self._state, self._with_series
        allocator, live, waiting, empty = state.allocator, state.live, state.waiting, state.empty
        allocated_series, reserved_series = self.allocated_series, self.reserved_series
        allocate, release = allocator.allocate, allocator.release
        columns = [column[start:stop] for column in self._columns]
        for event, (action, size, key, stream) in enumerate(zip(*columns, strict=True), start):
            if action == ALLOC:
                if key in live:
                    raise ValueError(f"event {event} allocates key {key}, which is still allocated")
                if size <= 0:
                    if size < 0:
                        raise ValueError(f"event {event} allocates {size} bytes")
                    empty.add(key)
                else:
                    allocator.clock = event
                    try:
                        live[key] = allocate(size, stream)
                    except OutOfMemory as error:
                        self.failure = Failure(event, size, error.reserved_bytes, error.allocated_bytes)
                        return False
            elif key in live:
                block = live.pop(key)
                if action == FREE_REQUESTED:
                    state.request_free(key, block)
                else:
                    release(block)
            elif key in waiting and action == FREE_COMPLETED:
                state.complete_free(key)
            elif key in empty:
                if action != FREE_REQUESTED:
                    empty.discard(key)
            else:
                raise ValueError(f"event {event} frees key {key}, which is not allocated")
            if with_series:
                allocated_series.append(allocator.allocated_bytes)
                reserved_series.append(allocator.reserved_bytes)
        return True


def _as_list(column: Sequence[int]) -> list[int]:
    to_list = getattr(column, "tolist", None)  # numpy integers are several times slower than Python's in this loop
    return list(column) if to_list is None else list(to_list())
