"""Each rule of the caching allocator on a case small enough to work out by hand."""

from __future__ import annotations

import pytest
from memplan.planner.allocator.caching import CachingAllocator, OutOfMemory
from memplan.planner.allocator.config import AllocConf
from memplan.planner.allocator.driver import SegmentEvent
from memplan.units import GiB, KiB, MiB


class Rising:
    """Segments at 0x1000000000, then upwards, far apart."""

    def __init__(self) -> None:
        self.next = 2**36

    def allocate(self, size: int, stream: int) -> int | None:
        self.next += 2**36
        return self.next - 2**36

    def reserve(self, size: int, stream: int, is_small: bool) -> int:
        return self.allocate(size, stream) or 0


def make(conf: str = "", limit: int | None = None, allowed: int | None = None) -> tuple[CachingAllocator, list[SegmentEvent]]:
    events: list[SegmentEvent] = []
    return CachingAllocator(AllocConf.parse(conf), limit, Rising(), allowed_bytes=allowed, on_segment=events.append), events


def actions(events: list[SegmentEvent]) -> list[tuple[str, int]]:
    return [(event.action, event.size // MiB) for event in events]


# ---------------------------------------------------------------- pools, search, splitting, merging


def test_a_small_block_is_split_from_a_2_mib_segment() -> None:
    allocator, events = make()

    first, second = allocator.malloc(1000), allocator.malloc(1)

    assert second == first + 1024
    assert actions(events) == [("segment_alloc", 2)]
    assert (allocator.allocated_bytes, allocator.requested_bytes, allocator.reserved_bytes) == (1536, 1001, 2 * MiB)
    assert allocator.inactive_split_bytes == 2 * MiB - 1536


def test_nothing_is_allocated_for_zero_bytes() -> None:
    allocator, events = make()

    assert allocator.malloc(0) == 0
    allocator.free(0)

    assert events == []


def test_a_large_block_never_uses_the_small_pool() -> None:
    allocator, events = make()
    allocator.malloc(MiB)

    allocator.malloc(MiB + 1)

    assert actions(events) == [("segment_alloc", 2), ("segment_alloc", 20)]


def test_a_rest_of_at_most_1_mib_stays_with_a_large_block() -> None:
    allocator, _ = make()

    allocator.malloc(19 * MiB)  # its segment is made to measure: 20 MiB
    assert allocator.allocated_bytes == 20 * MiB

    allocator.malloc(9 * MiB + 512)  # from a 20 MiB segment: more than 1 MiB is left and split off
    assert allocator.allocated_bytes == 20 * MiB + 9 * MiB + 512


def test_the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_lowest() -> None:
    allocator, _ = make()
    big, low, high = allocator.malloc(40 * MiB), allocator.malloc(30 * MiB), allocator.malloc(30 * MiB)
    for address in (high, big, low):
        allocator.free(address)

    assert [allocator.malloc(29 * MiB) for _ in range(3)] == [low, high, big]


def test_a_free_block_merges_with_both_neighbours() -> None:
    allocator, _ = make()
    first, middle, last = (allocator.malloc(4 * MiB) for _ in range(3))
    allocator.free(first)
    allocator.free(last)
    assert allocator.inactive_split_bytes == 16 * MiB

    allocator.free(middle)

    assert allocator.inactive_split_bytes == 0  # one whole segment: it could be given back
    assert allocator.malloc(20 * MiB) == first


def test_streams_do_not_share_free_blocks() -> None:
    allocator, events = make()
    allocator.free(allocator.malloc(5 * MiB, stream=1))

    allocator.malloc(5 * MiB, stream=2)

    assert actions(events) == [("segment_alloc", 20)] * 2


def test_peaks_stay_when_memory_is_freed() -> None:
    allocator, _ = make()
    allocator.clock = 7
    address = allocator.malloc(30 * MiB)
    allocator.clock = 8
    allocator.free(address)
    allocator.empty_cache()

    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (30 * MiB, 30 * MiB)
    assert (allocator.peak_allocated_clock, allocator.peak_reserved_clock) == (7, 7)


# ---------------------------------------------------------------- limits


def test_a_full_device_flushes_the_cache_and_tries_again() -> None:
    allocator, events = make(limit=100 * MiB)
    allocator.free(allocator.malloc(60 * MiB))
    keep = allocator.malloc(20 * MiB)  # splits the cached 60

    allocator.free(keep)
    allocator.malloc(80 * MiB)

    assert actions(events) == [("segment_alloc", 60), ("segment_free", 60), ("segment_alloc", 80)]
    assert allocator.num_alloc_retries == 1
    assert [(flush.reserved_before_bytes, flush.reserved_after_bytes) for flush in allocator.flushes] == [(60 * MiB, 0)]


def test_a_segment_that_is_partly_in_use_is_not_given_back() -> None:
    allocator, events = make(limit=100 * MiB)
    allocator.free(allocator.malloc(60 * MiB))
    allocator.malloc(20 * MiB)

    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(80 * MiB)

    error = caught.value
    assert actions(events) == [("segment_alloc", 60)]
    assert (error.requested_bytes, error.reserved_bytes, error.allocated_bytes, error.limit_bytes) == (
        80 * MiB, 60 * MiB, 20 * MiB, 100 * MiB)  # fmt: skip
    assert allocator.num_ooms == 1


def test_the_last_byte_of_the_limit_can_be_used() -> None:
    allocator, _ = make(limit=100 * MiB)
    allocator.malloc(100 * MiB)

    with pytest.raises(OutOfMemory):
        allocator.malloc(1)


def test_a_memory_fraction_limits_like_the_device() -> None:
    allocator = CachingAllocator(AllocConf.parse("per_process_memory_fraction:0.5"), 100 * MiB)
    allocator.malloc(50 * MiB)

    with pytest.raises(OutOfMemory, match=r"50\.0 MiB"):
        allocator.malloc(1)


# ---------------------------------------------------------------- record_stream


def test_memory_that_another_stream_uses_stays_active_until_it_has_finished() -> None:
    allocator, _ = make()
    address = allocator.malloc(30 * MiB, stream=1)
    allocator.record_stream(address, 2)
    allocator.free(address)
    assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 30 * MiB)
    assert allocator.malloc(30 * MiB, stream=1) != address

    allocator.complete(address)

    assert allocator.active_bytes == 30 * MiB
    assert allocator.malloc(30 * MiB, stream=1) == address


def test_a_use_on_the_own_stream_delays_nothing() -> None:
    allocator, _ = make()
    address = allocator.malloc(30 * MiB, stream=1)
    allocator.record_stream(address, 1)
    allocator.free(address)

    assert allocator.active_bytes == 0


def test_a_flush_waits_for_the_other_streams() -> None:
    allocator, events = make(limit=50 * MiB)
    address = allocator.malloc(30 * MiB)
    allocator.record_stream(address, 2)
    allocator.record_stream(address, 3)
    allocator.free(address)

    allocator.malloc(40 * MiB)
    allocator.complete(address)  # too late to matter

    assert actions(events) == [("segment_alloc", 30), ("segment_free", 30), ("segment_alloc", 40)]
    assert allocator.active_bytes == 40 * MiB


def test_a_pending_block_does_not_merge() -> None:
    allocator, _ = make()
    first, second = allocator.malloc(4 * MiB), allocator.malloc(4 * MiB)
    allocator.record_stream(first, 5)
    allocator.free(first)
    allocator.free(second)

    assert allocator.inactive_split_bytes == 16 * MiB
    assert allocator.malloc(17 * MiB) not in (first, second)


# ---------------------------------------------------------------- max_split_size, garbage collection


def test_a_block_above_max_split_size_is_kept_whole() -> None:
    allocator, events = make("max_split_size_mb:32")
    big = allocator.malloc(64 * MiB)
    allocator.free(big)

    assert allocator.malloc(8 * MiB) != big  # too good for a small request
    assert allocator.malloc(40 * MiB) != big  # 24 MiB would be lost: more than 20
    assert allocator.malloc(50 * MiB) == big
    assert allocator.allocated_bytes == (8 + 40 + 64) * MiB
    assert actions(events) == [("segment_alloc", 64), ("segment_alloc", 20), ("segment_alloc", 40)]


def test_a_block_of_just_max_split_size_counts_as_oversize() -> None:
    allocator, _ = make("max_split_size_mb:32")
    exact = allocator.malloc(32 * MiB)
    allocator.free(exact)

    assert allocator.malloc(8 * MiB) != exact


def test_an_oversize_block_may_waste_less_than_20_mib() -> None:
    allocator, _ = make("max_split_size_mb:32")
    big = allocator.malloc(64 * MiB)
    allocator.free(big)

    assert allocator.malloc(44 * MiB) != big
    assert allocator.malloc(44 * MiB + 512) == big


def test_only_enough_oversize_blocks_are_given_back() -> None:
    allocator, events = make("max_split_size_mb:32", limit=240 * MiB)
    for address in [allocator.malloc(size * MiB) for size in (34, 40, 60, 90)]:
        allocator.free(address)

    allocator.malloc(38 * MiB)  # takes the 40 whole
    allocator.malloc(120 * MiB)  # no single block is that large: the 90 and then the 60 go, the 34 can stay

    assert actions(events)[4:] == [("segment_free", 90), ("segment_free", 60), ("segment_alloc", 120)]
    assert allocator.num_alloc_retries == 0
    assert len(allocator.flushes) == 1


def test_garbage_collection_gives_back_what_was_longest_unused() -> None:
    allocator, events = make("garbage_collection_threshold:0.5", allowed=200 * MiB)
    old, young = allocator.malloc(60 * MiB), allocator.malloc(62 * MiB)
    allocator.malloc(4 * MiB, stream=1)
    allocator.free(old)
    for _ in range(4):  # searches of the large pool, by which age is counted
        allocator.free(allocator.malloc(4 * MiB, stream=1))
    allocator.free(young)

    allocator.malloc(70 * MiB)  # 142 MiB are reserved, 100 would be half: the older of the two free segments is enough

    assert actions(events)[3:] == [("segment_free", 60), ("segment_alloc", 70)]


def test_garbage_collection_is_idle_without_a_memory_fraction() -> None:
    allocator, events = make("garbage_collection_threshold:0.1", limit=200 * MiB)
    allocator.free(allocator.malloc(60 * MiB))

    allocator.malloc(70 * MiB)

    assert actions(events) == [("segment_alloc", 60), ("segment_alloc", 70)]


# ---------------------------------------------------------------- expandable segments


def test_an_expandable_segment_grows_by_whole_pages() -> None:
    allocator, events = make("expandable_segments:True")

    first = allocator.malloc(15 * MiB)
    second = allocator.malloc(15 * MiB)  # 5 MiB are left of the first page
    small = allocator.malloc(100)

    assert second == first + 15 * MiB
    assert actions(events) == [("segment_map", 20), ("segment_map", 20), ("segment_map", 2)]
    assert events[1].address == first + 20 * MiB
    assert not first <= small < first + GiB
    assert allocator.reserved_bytes == 42 * MiB


def test_an_expandable_block_is_split_down_to_512_bytes() -> None:
    allocator, _ = make("expandable_segments:True")

    allocator.malloc(20 * MiB - 512)

    assert allocator.allocated_bytes == 20 * MiB - 512


def test_a_flush_unmaps_only_pages_that_are_wholly_free() -> None:
    allocator, events = make("expandable_segments:True")
    low, middle, high = (allocator.malloc(25 * MiB) for _ in range(3))
    allocator.free(middle)  # 25..50: the page 40..60 is shared with the block above, 20..40 with the one below

    allocator.empty_cache()
    assert actions(events) == [("segment_map", 40), ("segment_map", 20), ("segment_map", 20)]

    allocator.free(low)
    allocator.empty_cache()
    assert events[-1] == SegmentEvent("segment_unmap", low, 40 * MiB, 0)
    assert allocator.reserved_bytes == 40 * MiB

    allocator.free(high)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert not allocator.segments


def test_unmapped_holes_are_filled_before_the_segment_grows() -> None:
    allocator, events = make("expandable_segments:True")
    low, high = allocator.malloc(40 * MiB), allocator.malloc(40 * MiB)
    allocator.free(low)
    allocator.empty_cache()

    assert allocator.malloc(30 * MiB) == low
    assert events[-1] == SegmentEvent("segment_map", low, 40 * MiB, 0)
    assert allocator.malloc(30 * MiB) == high + 40 * MiB


def test_a_free_block_below_unmapped_room_counts_as_large_as_it_can_become() -> None:
    allocator, _ = make("expandable_segments:True")
    first, _, tail = allocator.malloc(30 * MiB), allocator.malloc(10 * MiB), allocator.malloc(20 * MiB)
    allocator.free(first)
    allocator.free(tail)  # 20 MiB that can grow; best fit for 15 MiB by size alone, but the 30 MiB are used up first

    assert allocator.malloc(15 * MiB) == first


def test_of_two_equal_free_blocks_of_a_segment_the_lower_is_taken() -> None:
    allocator, _ = make("expandable_segments:True")
    low, _, high, _ = (allocator.malloc(20 * MiB) for _ in range(4))
    allocator.free(high)
    allocator.free(low)

    assert allocator.malloc(15 * MiB) == low


def test_a_segment_is_used_to_its_last_page_before_a_second_one_is_begun() -> None:
    rising = Rising()
    allocator = CachingAllocator(AllocConf(expandable_segments=True), driver=rising, total_bytes=32 * MiB)  # 9/8: two pages

    first, second, third = (allocator.malloc(20 * MiB) for _ in range(3))

    assert second == first + 20 * MiB
    assert third == first + 2**36


def test_mapping_stops_at_the_limit() -> None:
    allocator, events = make("expandable_segments:True", limit=50 * MiB)
    allocator.free(allocator.malloc(15 * MiB))

    with pytest.raises(OutOfMemory):
        allocator.malloc(45 * MiB)  # needs three pages of 20 MiB
    assert actions(events) == [("segment_map", 20), ("segment_unmap", 20)]
    assert allocator.malloc(40 * MiB) > 0


def test_blocks_of_1_mib_are_rounded_as_small_ones() -> None:
    allocator, _ = make("roundup_power2_divisions:2")
    allocator.malloc(700 * KiB)

    assert allocator.allocated_bytes == 768 * KiB
