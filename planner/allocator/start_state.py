"""What was allocated when a recording began, found by walking back from its end, and an allocator put into that state."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ...errors import UserError
from . import expandable
from .blocks import Block, Pool
from .caching import CachingAllocator
from .config import SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocConf
from .replay import ReplayState
from .snapshot import BlockState, SegmentState, TraceEvent


@dataclass(frozen=True)
class Mapped:
    """A segment, or a contiguous mapped range of an expandable one."""

    address: int
    size: int
    stream: int
    is_small: bool
    is_expandable: bool

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass
class StartState:
    """Segments and live blocks (by address) before the first event.  Empty for a recording that was complete."""

    segments: list[Mapped] = field(default_factory=list)
    blocks: dict[int, BlockState] = field(default_factory=dict)

    @property
    def reserved_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    def moved(self, distance: int) -> StartState:
        """The same state at addresses that are `distance` higher."""
        segments = [replace(segment, address=segment.address + distance) for segment in self.segments]
        blocks = {at + distance: block._replace(address=at + distance) for at, block in self.blocks.items()}
        return StartState(segments, blocks)


def walk_back(segments: Sequence[SegmentState], events: Sequence[TraceEvent], conf: AllocConf) -> StartState:
    """The state before one device's `events`, which end in `segments`.  Raises UserError where they contradict each other."""
    ranges = [Mapped(s.address, s.size, s.stream, s.is_small, s.is_expandable) for s in segments]
    blocks = {b.address: b for s in segments for b in s.blocks if b.state != "inactive"}
    plain = {r.address: r for r in ranges if not r.is_expandable}
    paged = [r for r in ranges if r.is_expandable]
    for position in range(len(events) - 1, -1, -1):
        action, address, size, stream = events[position]
        if action == "alloc":
            born = blocks.pop(address, None)
            if born is None or born.state != "active_allocated":
                raise _contradiction(position, action, address)
        elif action == "free_completed":
            if address in blocks:
                raise _contradiction(position, action, address)
            blocks[address] = BlockState(address, 0, size, "active_pending_free")
        elif action == "free_requested":
            dying = blocks.get(address)
            if dying is None or dying.state != "active_pending_free":
                raise _contradiction(position, action, address)
            blocks[address] = dying._replace(state="active_allocated")
        elif action == "segment_alloc":
            gone = plain.pop(address, None)
            if gone is None or gone.size != size:
                raise _contradiction(position, action, address)
        elif action == "segment_free":
            plain[address] = Mapped(address, size, stream, size == SMALL_SEGMENT_BYTES, False)
        elif action == "segment_map":
            _unmap(paged, address, size, position)
        elif action == "segment_unmap":
            near = min((r for r in paged if r.stream == stream), key=lambda r: abs(r.address - address), default=None)
            is_small = near.is_small if near else size % conf.large_segment_bytes != 0
            paged.append(Mapped(address, size, stream, is_small, True))
    start = StartState(sorted([*plain.values(), *_joined(paged)], key=lambda r: r.address), blocks)
    for before, after in pairwise(start.segments):
        if before.end > after.address:
            raise _contradiction(0, "before it: overlapping segments", after.address)
    _find_block_sizes(start, events, conf)
    return start


def _contradiction(position: int, action: str, address: int) -> UserError:
    return UserError(f"the snapshot's event {position} ({action} at {address}) contradicts its segments",
                     "Take the snapshot while recording is on, and before other threads go on allocating")  # fmt: skip


def _unmap(paged: list[Mapped], address: int, size: int, position: int) -> None:
    for index, r in enumerate(paged):
        if r.address <= address and address + size <= r.end:
            sides = ((r.address, address - r.address), (address + size, r.end - address - size))
            paged[index : index + 1] = [Mapped(at, n, r.stream, r.is_small, True) for at, n in sides if n]
            return
    joined = _joined(paged)
    if len(joined) == len(paged):
        raise _contradiction(position, "segment_map", address)
    paged[:] = joined
    _unmap(paged, address, size, position)


def _joined(paged: list[Mapped]) -> list[Mapped]:
    joined: list[Mapped] = []
    for r in sorted(paged, key=lambda r: r.address):
        last = joined[-1] if joined else None
        if last is not None and (last.end, last.stream, last.is_small) == (r.address, r.stream, r.is_small):
            joined[-1] = Mapped(last.address, last.size + r.size, r.stream, r.is_small, True)
        else:
            joined.append(r)
    return joined


def _find_block_sizes(start: StartState, events: Sequence[TraceEvent], conf: AllocConf) -> None:
    """Fills in the sizes of blocks that were freed while recording; the events give only what had been requested.

    A block of the large pool may be up to 1 MiB larger than its request, where the rest was not split off.  Such a rest is
    never a free block of its own, so a gap of at most 1 MiB belongs to the block before it; in a larger gap, the first block
    allocated while the one before it still lives shows where that one ends.
    """
    addresses = sorted(start.blocks)
    bases = [r.address for r in start.segments]
    unsure: dict[int, int] = {}  # end as requested -> address
    for index, address in enumerate(addresses):
        block = start.blocks[address]
        position = bisect_right(bases, address) - 1
        if position < 0 or start.segments[position].end <= address:
            raise UserError(f"the snapshot's block at {address} lies in no segment",
                            "Take the snapshot while recording is on, and before other threads go on allocating")  # fmt: skip
        segment = start.segments[position]
        if block.size == 0:
            size = conf.round_size(block.requested)
            limit = addresses[index + 1] if index + 1 < len(addresses) else segment.end
            gap = min(limit, segment.end) - address - size
            may_be_larger = not (segment.is_small or conf.expandable_segments)
            if may_be_larger and 0 < gap <= SMALL_BYTES:
                size += gap
            elif may_be_larger and gap:
                unsure[address + size] = address
            start.blocks[address] = block._replace(size=size)
    ends = sorted(unsure)
    for event in events:
        if not ends:
            return
        if event.action == "alloc":
            index = bisect_right(ends, event.address) - 1
            if index >= 0 and event.address - ends[index] <= SMALL_BYTES:
                end = ends.pop(index)
                at = unsure.pop(end)
                start.blocks[at] = start.blocks[at]._replace(size=event.address - at)
        elif event.action == "free_completed":
            freed = start.blocks.get(event.address)
            if freed is not None and unsure.get(freed.address + freed.size) == event.address:
                del unsure[freed.address + freed.size]
                ends.remove(freed.address + freed.size)


def restore(start: StartState, allocator: CachingAllocator) -> ReplayState:
    """Puts a fresh allocator into the start state; the keys of what lives are the real addresses."""
    state = ReplayState(allocator)
    addresses = sorted(start.blocks)
    grouped: dict[tuple[int, bool], list[Mapped]] = {}
    for segment in start.segments:
        pool = allocator.pool(segment.stream, not segment.is_small)
        if segment.is_expandable:
            insort(grouped.setdefault((segment.stream, segment.is_small), []), segment, key=lambda r: r.address)
        else:
            _fill(allocator.add_segment(pool, segment.address, segment.size), start, addresses, state)
    for (stream, is_small), ranges in grouped.items():
        _fill_range(allocator, allocator.pool(stream, not is_small), ranges, start, addresses, state)
    allocator.peak_allocated_bytes = allocator.allocated_bytes
    allocator.peak_requested_bytes = allocator.requested_bytes
    allocator.peak_active_bytes = allocator.active_bytes
    return state


def _fill_range(allocator: CachingAllocator, pool: Pool, ranges: list[Mapped], start: StartState, addresses: list[int],
                state: ReplayState) -> None:  # fmt: skip
    bytes_of_range = max(expandable.range_size(allocator, pool), ranges[-1].end - ranges[0].address)
    rest = expandable.add_range(allocator, pool, ranges[0].address, bytes_of_range)
    for mapped in ranges:
        pool.remove_unmapped(rest)
        if mapped.address > rest.address:  # a hole before it
            inner = Block(mapped.address, rest.address + rest.size - mapped.address, pool, None, None, rest.segment)
            rest.link_after(inner)
            rest.size = mapped.address - rest.address
            pool.insert_unmapped(rest)
            rest = inner
        block = rest
        if mapped.end < block.address + block.size:
            rest = Block(mapped.end, block.address + block.size - mapped.end, pool, None, None, block.segment)
            block.link_after(rest)
            block.size = mapped.size
            pool.insert_unmapped(rest)
        allocator.count_reserved("segment_map", mapped.address, mapped.size, pool.stream)
        _fill(block, start, addresses, state)


def _fill(block: Block, start: StartState, addresses: list[int], state: ReplayState) -> None:
    """Cuts one mapped block into the live blocks in it and free ones between."""
    allocator, pool = state.allocator, block.pool
    index = bisect_right(addresses, block.address - 1)
    while True:
        end = block.address + block.size
        live = start.blocks[addresses[index]] if index < len(addresses) and addresses[index] < end else None
        if live is None:
            pool.insert(block)
            return
        if live.address > block.address:
            inner = Block(live.address, end - live.address, pool, None, None, block.segment)
            block.link_after(inner)
            block.size = live.address - block.address
            pool.insert(block)
            block = inner
        if live.address + live.size > end or block.address != live.address:
            raise UserError(f"the snapshot's block at {live.address} runs over its neighbour or its segment",
                            "Take the snapshot while recording is on, and before other threads go on allocating")  # fmt: skip
        following = None
        if live.address + live.size < end:
            following = Block(live.address + live.size, end - live.address - live.size, pool, None, None, block.segment)
            block.link_after(following)
            block.size = live.size
        block.requested = live.requested
        allocator.requested_bytes += live.requested
        allocator.allocated_bytes += block.size
        if live.state == "active_pending_free":
            state.request_free(live.address, block)
        else:
            state.live[live.address] = block
        if following is None:
            return
        block = following
        index += 1
