"""What must hold after any program, checked from the answers alone and never from the allocator's own records.

1. Live blocks, as large as their rounded requests, do not overlap.
2. Each starts at a multiple of 512 bytes, and lies in memory that the driver gave and has not taken back.
3. requested <= allocated <= active <= reserved, and reserved is what the driver calls add up to, within the limit.
4. When everything is freed, empty_cache gives everything back.
5. The bulk replay and single calls are the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memplan.planner.allocator.caching import CachingAllocator, OutOfMemory
from memplan.planner.allocator.config import AllocConf
from memplan.planner.allocator.driver import SegmentEvent
from memplan.planner.allocator.replay import ALLOC, FREE, FREE_COMPLETED, FREE_REQUESTED, replay
from memplan.units import MiB

CONFS = ["", "expandable_segments:True", "max_split_size_mb:24", "roundup_power2_divisions:4",
         "garbage_collection_threshold:0.6", "expandable_segments:True,max_split_size_mb:24"]  # fmt: skip
SIZES = st.one_of(st.integers(1, 3000), st.integers(1, 2 * MiB), st.integers(MiB, 12 * MiB), st.integers(10 * MiB, 70 * MiB))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("free later"), st.integers(0, 1000), st.integers(0, 2)),
        st.tuples(st.just("complete"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    max_size=120,
)


@dataclass
class Ground:
    """Which pages the driver has given, kept from its events alone."""

    pages: set[int] = field(default_factory=set)  # in units of 2 MiB: every segment and page is a multiple
    reserved: int = 0

    def see(self, event: SegmentEvent) -> None:
        touched = set(range(event.address // (2 * MiB), (event.address + event.size) // (2 * MiB)))
        assert len(touched) * 2 * MiB == event.size
        if event.action in ("segment_alloc", "segment_map"):
            assert not touched & self.pages
            self.pages |= touched
            self.reserved += event.size
        else:
            assert touched <= self.pages
            self.pages -= touched
            self.reserved -= event.size

    def holds(self, address: int, size: int) -> bool:
        return set(range(address // (2 * MiB), -(-(address + size) // (2 * MiB)))) <= self.pages


@pytest.mark.parametrize("text", CONFS)
@settings(max_examples=120, deadline=None)
@given(steps=STEPS, limit_mib=st.sampled_from([None, 60, 200]))
def test_any_program_keeps_the_invariants(text: str, steps: list[tuple[str, int, int]], limit_mib: int | None) -> None:
    conf = AllocConf.parse(text)
    ground = Ground()
    limit = None if limit_mib is None else limit_mib * MiB
    allowed = limit if conf.garbage_collection_threshold else None
    allocator = CachingAllocator(conf, limit, allowed_bytes=allowed, on_segment=ground.see)
    live: dict[int, int] = {}
    later: dict[int, int] = {}
    for what, number, stream in steps:
        num_syncs = allocator.num_syncs
        if what == "malloc":
            try:
                live[allocator.malloc(number, stream)] = number
            except OutOfMemory:
                assert limit is not None
            if allocator.num_syncs != num_syncs:  # a flush has waited for all streams
                later.clear()
        elif what == "empty":
            allocator.empty_cache()
            later.clear()
        elif what == "complete" and later:
            address = sorted(later)[number % len(later)]
            del later[address]
            allocator.complete(address)
        elif what.startswith("free") and live:
            address = sorted(live)[number % len(live)]
            size = live.pop(address)
            if what == "free later":
                allocator.record_stream(address, stream + 10)
                later[address] = size
            allocator.free(address)
        check(allocator, ground, live, later, conf, limit)
    for address in live:
        allocator.free(address)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.active_bytes, allocator.requested_bytes, ground.reserved) == (0, 0, 0, 0)
    assert not ground.pages


def check(allocator: CachingAllocator, ground: Ground, live: dict[int, int], later: dict[int, int], conf: AllocConf,
          limit: int | None) -> None:  # fmt: skip
    spans = sorted((address, conf.round_size(size)) for address, size in [*live.items(), *later.items()])
    for (address, size), (following, _) in pairwise(spans):
        assert address + size <= following
    for address, size in spans:
        assert address % 512 == 0
        assert ground.holds(address, size)
    assert sum(live.values()) + sum(later.values()) == allocator.requested_bytes
    assert sum(conf.round_size(size) for size in live.values()) <= allocator.allocated_bytes
    assert allocator.allocated_bytes <= allocator.active_bytes <= allocator.reserved_bytes == ground.reserved
    assert allocator.allocated_bytes % 512 == 0
    assert limit is None or allocator.reserved_bytes <= limit


@pytest.mark.parametrize("text", CONFS[:3])
@settings(max_examples=80, deadline=None)
@given(steps=st.lists(st.tuples(SIZES, st.integers(0, 1000), st.integers(0, 1)), max_size=80))
def test_a_bulk_replay_is_the_same_as_step_by_step(text: str, steps: list[tuple[int, int, int]]) -> None:
    conf = AllocConf.parse(text)
    single = CachingAllocator(conf, 150 * MiB)
    columns: tuple[list[int], list[int], list[int], list[int]] = ([], [], [], [])
    live: list[tuple[int, int]] = []
    reserved: list[int] = []
    failed = None
    for key, (size, choice, stream) in enumerate(steps):
        if choice % 2 and live:
            old, address = live.pop(choice % len(live))
            row = (FREE, 0, old, stream)
            single.free(address)
        else:
            row = (ALLOC, size, key, stream)
            try:
                live.append((key, single.malloc(size, stream)))
            except OutOfMemory:
                failed = len(columns[0])
        for column, value in zip(columns, row, strict=True):
            column.append(value)
        if failed is not None:
            break
        reserved.append(single.reserved_bytes)

    result = replay(*columns, conf=conf, limit_bytes=150 * MiB, with_series=True)

    assert (None if result.failure is None else result.failure.event) == failed
    assert list(result.reserved_series) == reserved
    assert result.peak_allocated_bytes == single.peak_allocated_bytes
    assert result.peak_reserved_bytes == single.peak_reserved_bytes
    assert result.num_alloc_retries == single.num_alloc_retries


def test_a_delayed_free_after_a_flush_frees_nothing_twice() -> None:
    result = replay(
        [ALLOC, FREE_REQUESTED, ALLOC, FREE_COMPLETED, FREE],
        [30 * MiB, 0, 40 * MiB, 0, 0],
        [1, 1, 2, 1, 2],
        limit_bytes=50 * MiB,
        with_series=True,
    )

    assert result.fits
    assert result.allocated_series == (30 * MiB, 0, 40 * MiB, 40 * MiB, 0)
    assert [flush.clock for flush in result.flushes] == [2]


def test_more_memory_never_turns_a_fit_into_a_failure_of_this_program() -> None:
    columns = ([ALLOC, ALLOC, FREE, ALLOC], [30 * MiB, 20 * MiB, 0, 40 * MiB], [1, 2, 1, 3])

    fits = [replay(*columns, limit_bytes=limit * MiB).fits for limit in range(20, 120, 2)]

    assert fits == sorted(fits)
    assert not fits[0]
    assert fits[-1]


def test_a_failure_says_which_event_and_what_was_in_use() -> None:
    result = replay([ALLOC, ALLOC, ALLOC], [30 * MiB, 30 * MiB, 1], [1, 2, 3], limit_bytes=50 * MiB)

    assert result.failure is not None
    assert (result.failure.event, result.failure.requested_bytes) == (1, 30 * MiB)
    assert (result.failure.allocated_bytes, result.failure.reserved_bytes) == (30 * MiB, 30 * MiB)
    assert result.num_events == 2


def test_a_replay_can_go_on_where_another_ended() -> None:
    first = replay([ALLOC, ALLOC, FREE], [30 * MiB, 20 * MiB, 0], [1, 2, 1])
    second = replay([ALLOC, FREE, FREE], [25 * MiB, 0, 0], [3, 2, 3], state=first.state)

    assert second.peak_reserved_bytes == 50 * MiB
    assert second.state.allocator.allocated_bytes == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([FREE], [0], [1]), "event 0 frees key 1"),
        (([ALLOC, ALLOC], [1, 1], [1, 1]), "event 1 allocates key 1"),
        (([ALLOC], [-1], [1]), "-1 bytes"),
        (([ALLOC], [1], [1, 2]), "equal length"),
    ],
)
def test_a_stream_that_makes_no_sense_is_refused(columns: tuple[list[int], list[int], list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(*columns)


def test_the_replay_is_fast_enough_to_be_used_thousands_of_times() -> None:
    layers = 4000
    actions = [ALLOC] * (4 * layers) + [FREE] * (4 * layers)
    sizes = [3 * MiB, 512, 24 * MiB, 700_000] * layers + [0] * (4 * layers)
    keys = [*range(4 * layers), *reversed(range(4 * layers))]
    began = time.process_time()  # CPU seconds: other programs do not count
    for _ in range(3):
        replay(actions, sizes, keys)

    assert 3 * len(actions) / (time.process_time() - began) > 100_000  # about 1,000,000 on an idle core


def test_numpy_columns_are_the_same_as_lists() -> None:
    numpy = pytest.importorskip("numpy")
    columns = ([ALLOC, ALLOC, FREE], [30 * MiB, 3000, 0], [1, 2, 1])

    result = replay(*(numpy.asarray(column) for column in columns))

    assert result.peak_reserved_bytes == replay(*columns).peak_reserved_bytes == 32 * MiB
    assert type(result.peak_reserved_bytes) is int
