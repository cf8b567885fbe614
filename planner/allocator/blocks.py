"""The allocator's own records: a block of device memory, and the sorted lists of free blocks that are searched."""

from __future__ import annotations

from bisect import bisect_left

ADDRESS_BITS = 64  # a free block sorts by (size, address), packed into one int: comparing two ints is one C call


class VirtualRange:
    """The address range of one expandable segment; `page_bytes` is what is mapped and unmapped as one piece."""

    __slots__ = ("base", "page_bytes", "size")

    def __init__(self, base: int, size: int, page_bytes: int) -> None:
        self.base, self.size, self.page_bytes = base, size, page_bytes


class Block:
    """A piece of a segment, linked to its neighbours by address.

    `free`: it lies in its pool's free list.  `mapped`: memory is behind it (only blocks of expandable segments can lack it).
    Neither: it is in use, by a tensor or (`event_count` > 0) by streams that have not finished with it.
    """

    __slots__ = ("address", "event_count", "free", "gc_base", "key", "mapped", "next", "pool", "prev", "requested", "segment",
                 "size", "stream_uses")  # fmt: skip

    def __init__(self, address: int, size: int, pool: Pool, prev: Block | None, following: Block | None,
                 segment: VirtualRange | None) -> None:  # fmt: skip
        self.address = address
        self.size = size
        self.pool = pool
        self.prev = prev
        self.next = following
        self.segment = segment
        self.free = False
        self.mapped = True
        self.event_count = 0
        self.requested = 0  # bytes that were last asked for
        self.stream_uses: set[int] | None = None

    key: int  # where it sorts in the free list, valid while free
    gc_base: int  # Pool.searches when it became free, valid while free and only under garbage collection

    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    def link_after(self, new: Block) -> None:
        """Puts `new` between this block and the next."""
        new.prev, new.next = self, self.next
        if self.next is not None:
            self.next.prev = new
        self.next = new

    def absorb_next(self) -> None:
        """Takes over the next block, which must be in no list any more."""
        gone = self.next
        assert gone is not None
        self.size += gone.size
        self.next = gone.next
        if gone.next is not None:
            gone.next.prev = self


class Pool:
    """The free blocks of one stream, small (up to 1 MiB) or large, sorted by size and then address.

    PyTorch keeps one set per size class, sorted by stream first; a list per stream gives the same answers.
    """

    __slots__ = ("blocks", "is_small", "keys", "min_spare", "searches", "stream", "unmapped")

    def __init__(self, stream: int, is_small: bool, min_spare: int, searches: list[int]) -> None:
        self.stream = stream
        self.is_small = is_small
        self.min_spare = min_spare  # a found block is split when at least this many bytes are left over
        self.keys: list[int] = []
        self.blocks: list[Block] = []  # parallel to `keys`
        self.unmapped: list[Block] = []  # by address
        self.searches = searches  # [number of searches], shared by all streams: the clock of garbage collection

    def insert(self, block: Block) -> None:
        block.free = True
        block.gc_base = self.searches[0]
        block.key = key = block.size << ADDRESS_BITS | block.address
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.blocks.insert(index, block)

    def remove(self, block: Block) -> None:
        index = bisect_left(self.keys, block.key)
        del self.keys[index]
        del self.blocks[index]
        block.free = False

    def insert_unmapped(self, block: Block) -> None:
        block.mapped = False
        self.unmapped.insert(bisect_left(self.unmapped, block.address, key=_address), block)

    def remove_unmapped(self, block: Block) -> None:
        del self.unmapped[bisect_left(self.unmapped, block.address, key=_address)]
        block.mapped = True


def _address(block: Block) -> int:
    return block.address
