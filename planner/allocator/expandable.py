"""Expandable segments: a range of addresses per stream and pool, whose pages are mapped when needed and unmapped on a flush.

After `find_expandable_block`, `map_block`, `try_allocate_expandable_block` and `unmap_block` in CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...units import GiB
from .blocks import Block, Pool, VirtualRange
from .config import SMALL_SEGMENT_BYTES

if TYPE_CHECKING:
    from .caching import CachingAllocator

# PyTorch reserves 9/8 of the card's memory; where no card is named this is more than any has (and costs nothing).
_UNKNOWN_CARD_BYTES = 4096 * GiB


def allocate(allocator: CachingAllocator, pool: Pool, size: int) -> Block | None:
    """A block of at least `size` bytes that is in no list, at the lowest address where it fits; None when memory is out."""
    block = _find(allocator, pool, size)
    if not block.mapped:
        mapped = _map(allocator, block, min(block.size, size))
        if mapped is None:
            return None
        block = mapped
    while block.size < size:  # free, then unmapped: each round maps some of the unmapped and merges it
        following = block.next
        assert following is not None
        mapped = _map(allocator, following, min(size - block.size, following.size))
        if mapped is None:
            return None
        block = mapped
    pool.remove(block)
    return block


def unmap(allocator: CachingAllocator, block: Block) -> None:
    """Gives back the pages that lie wholly in a free block; what is left on either side stays free."""
    segment = block.segment
    assert segment is not None
    page, base, stop = segment.page_bytes, segment.base, block.address + block.size
    begin = base + -(-(block.address - base) // page) * page
    end = base + (stop - base) // page * page
    if begin >= end:
        return
    pool = block.pool
    pool.remove(block)
    hole = block
    if begin > block.address:
        block.size = begin - block.address
        hole = Block(begin, stop - begin, pool, None, None, segment)
        block.link_after(hole)
        pool.insert(block)
    if stop > end:
        tail = Block(end, stop - end, pool, None, None, segment)
        hole.link_after(tail)
        pool.insert(tail)
    hole.size = end - begin
    if hole.next is not None and not hole.next.mapped:
        pool.remove_unmapped(hole.next)
        hole.absorb_next()
    if hole.prev is not None and not hole.prev.mapped:
        before = hole.prev
        pool.remove_unmapped(before)
        before.absorb_next()
        hole = before
    allocator.count_reserved("segment_unmap", begin, end - begin, pool.stream)
    if hole.is_split():
        pool.insert_unmapped(hole)
    else:  # nothing of the range is mapped any more: the range goes too
        del allocator.segments[hole.address]


def add_range(allocator: CachingAllocator, pool: Pool, base: int, size: int) -> Block:
    """Enters a new range of addresses, all of it unmapped."""
    page = SMALL_SEGMENT_BYTES if pool.is_small else allocator.conf.large_segment_bytes
    segment = VirtualRange(base, size, page)
    block = allocator.segments[base] = Block(base, size, pool, None, None, segment)
    pool.insert_unmapped(block)
    return block


def range_size(allocator: CachingAllocator, pool: Pool) -> int:
    """How many bytes of addresses one segment reserves: 9/8 of the card, in whole pages."""
    page = SMALL_SEGMENT_BYTES if pool.is_small else allocator.conf.large_segment_bytes
    card = allocator.total_bytes or _UNKNOWN_CARD_BYTES
    return -(-(card + card // 8) // page) * page


def _find(allocator: CachingAllocator, pool: Pool, size: int) -> Block:
    for block in pool.unmapped:
        before = block.prev
        start = before if before is not None and (before.free or not before.mapped) else block
        room = 0
        reached: Block | None = start
        while room < size and reached is not None and (reached.free or not reached.mapped):
            room += reached.size
            reached = reached.next
        if room >= size:
            return start
    bytes_of_range = range_size(allocator, pool)
    base = allocator.driver.reserve(bytes_of_range, pool.stream, pool.is_small)
    return add_range(allocator, pool, base, bytes_of_range)


def _map(allocator: CachingAllocator, block: Block, size: int) -> Block | None:
    """Maps whole pages for the first `size` bytes of an unmapped block; the free block that they are now part of."""
    segment, pool = block.segment, block.pool
    assert segment is not None
    page, base, begin = segment.page_bytes, segment.base, block.address
    mapped = base + -(-(begin + size - base) // page) * page - begin
    if allocator.limit_bytes is not None and allocator.reserved_bytes + mapped > allocator.limit_bytes:
        return None
    pool.remove_unmapped(block)
    if mapped < block.size:
        rest = Block(begin + mapped, block.size - mapped, pool, None, None, segment)
        block.link_after(rest)
        block.size = mapped
        pool.insert_unmapped(rest)
    if block.next is not None and block.next.free:
        pool.remove(block.next)
        block.absorb_next()
    if block.prev is not None and block.prev.free:
        before = block.prev
        pool.remove(before)
        before.absorb_next()
        block = before
    pool.insert(block)
    allocator.count_reserved("segment_map", begin, mapped, pool.stream)
    return block
