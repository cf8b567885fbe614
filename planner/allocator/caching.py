"""PyTorch's CUDA caching allocator in Python: same rounding, pools, search, splitting, merging and flushing.

Written after `DeviceCachingAllocator` in `c10/cuda/CUDACachingAllocator.cpp` (PyTorch 2.6 to 2.13 agree in what is modelled).
Given the addresses that the driver returned in a real run, every block lands on its real address.

Known limitations: no private pools (CUDA graphs, `torch.cuda.MemPool`), and no free-memory callbacks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ...errors import MemplanError
from ...units import human
from . import expandable
from .blocks import ADDRESS_BITS, Block, Pool
from .config import MIN_BLOCK_BYTES, SMALL_BYTES, UNLIMITED, AllocConf
from .driver import DescendingDriver, Driver, SegmentEvent, SegmentListener


class OutOfMemory(MemplanError):
    """No room under the limit, even after every cached block was given back.  All figures in bytes, after that flush."""

    def __init__(self, requested_bytes: int, reserved_bytes: int, allocated_bytes: int, limit_bytes: int | None) -> None:
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes
        self.allocated_bytes = allocated_bytes
        self.limit_bytes = limit_bytes
        limit = "the driver's memory" if limit_bytes is None else human(limit_bytes)
        super().__init__(f"out of memory: {human(requested_bytes)} requested, {human(allocated_bytes)} allocated, "
                         f"{human(reserved_bytes)} reserved, limit {limit}")  # fmt: skip


class Flush(NamedTuple):
    """Cached memory that was given back because the driver had no more; `clock` as in `CachingAllocator.clock`."""

    clock: int
    reserved_before_bytes: int
    reserved_after_bytes: int


class Excursion(NamedTuple):
    """How far events went that left the allocator as it was: the highest figures above those before, and the event of each.

    Bytes; events counted from the first of them.
    """

    allocated: int
    allocated_event: int
    requested: int
    requested_event: int
    active: int


class CachingAllocator:
    """One device's allocator.  Current and peak figures, in bytes, are plain attributes.

    limit_bytes    what the driver can give in all; None: no limit
    allowed_bytes  the cap of `set_per_process_memory_fraction`, under which alone garbage collection works; None: not set
    total_bytes    the card's whole memory: of this `per_process_memory_fraction` is a fraction; None: the limit
    driver         gives the addresses of segments; by default they are invented, descending
    on_segment     is called with every SegmentEvent
    clock          set it to anything before a call: `peak_*_clock` and flushes are stamped with it
    """

    def __init__(self, conf: AllocConf | None = None, limit_bytes: int | None = None, driver: Driver | None = None, *,
                 allowed_bytes: int | None = None, total_bytes: int | None = None,
                 on_segment: SegmentListener | None = None) -> None:  # fmt: skip
        self.conf = conf = conf or AllocConf()
        self.limit_bytes = limit_bytes
        self.total_bytes = total_bytes
        whole = limit_bytes if total_bytes is None else total_bytes
        if allowed_bytes is None and whole is not None and conf.per_process_memory_fraction < 1.0:
            allowed_bytes = int(conf.per_process_memory_fraction * whole)
        self.allowed_bytes = allowed_bytes
        self.driver: Driver = driver or DescendingDriver()
        self.on_segment = on_segment
        self.clock = 0
        self.segments: dict[int, Block] = {}  # base address -> the first block of the segment
        self.allocated_bytes = self.requested_bytes = self.reserved_bytes = 0
        self.pending_bytes = 0  # freed, but still in use by another stream
        self.peak_allocated_bytes = self.peak_requested_bytes = self.peak_active_bytes = self.peak_reserved_bytes = 0
        self.peak_allocated_clock = self.peak_requested_clock = self.peak_reserved_clock = 0
        self.num_alloc_retries = self.num_ooms = 0
        self.num_syncs = 0  # how often all streams were waited for: what was pending before is complete
        self.flushes: list[Flush] = []
        self._pools: dict[int, tuple[Pool, Pool]] = {}  # stream -> small, large
        self._searches = ([0], [0])
        self._in_use: dict[int, Block] = {}  # address -> block, for callers that know addresses
        self._pending: dict[int, list[Block]] = {}  # stream -> blocks in the order in which they were freed
        self._collects = conf.garbage_collection_threshold > 0.0 and allowed_bytes is not None
        self._takes_best_fit = not (conf.expandable_segments or conf.max_split_size_bytes < UNLIMITED or self._collects)
        self._rounds_to_512 = all(divisions < 2 for divisions in conf.roundup_power2_divisions)
        self._split_below = UNLIMITED if conf.expandable_segments else conf.max_split_size_bytes

    # ---------------------------------------------------------------- for callers that know addresses

    def malloc(self, size: int, stream: int = 0) -> int:
        """The address of `size` bytes for `stream`; 0 for size 0.  Raises OutOfMemory."""
        if size == 0:
            return 0
        block = self.allocate(size, stream)
        self._in_use[block.address] = block
        return block.address

    def free(self, address: int) -> None:
        """Frees what malloc returned.  Memory that other streams use stays active until `complete`."""
        if address != 0:
            block = self._in_use[address]
            self.release(block)
            if block.event_count == 0:
                del self._in_use[address]

    def record_stream(self, address: int, stream: int) -> None:
        """Marks memory as used by another stream: `free` then only requests, and `complete` or a flush completes."""
        self.use_on(self._in_use[address], stream)

    def complete(self, address: int) -> None:
        """The streams have finished with memory that was freed; nothing happens when a flush has already waited for them."""
        block = self._in_use.get(address)
        if block is not None and block.event_count > 0:
            self.finish(block)

    def empty_cache(self) -> None:
        """Gives back every segment without live blocks, after waiting for all streams (torch.cuda.empty_cache)."""
        self.num_syncs += 1
        for blocks in list(self._pending.values()):
            for block in list(blocks):
                if block.event_count > 0:
                    self.finish(block)
        by_stream = sorted(self._pools.items())
        for is_large in (1, 0):  # the order in which PyTorch goes
            to_unmap = []
            for _, pools in by_stream:
                for block in list(pools[is_large].blocks):
                    if block.segment is not None:
                        to_unmap.append(block)
                    elif not block.is_split():
                        self._release_segment(block)
            for block in to_unmap:
                expandable.unmap(self, block)

    @property
    def active_bytes(self) -> int:
        """Allocated, and freed but not completed."""
        return self.allocated_bytes + self.pending_bytes

    @property
    def inactive_split_bytes(self) -> int:
        """Free bytes that cannot be given back, because their segment is partly in use; expandable segments do not count."""
        return sum(block.size for pools in self._pools.values() for pool in pools for block in pool.blocks
                   if block.segment is None and block.is_split())  # fmt: skip

    def ranges(self) -> Iterator[list[Block]]:
        """The blocks of every segment, or mapped range of an expandable one, by address (what a snapshot calls a segment)."""
        for base in sorted(self.segments):
            blocks: list[Block] = []
            block: Block | None = self.segments[base]
            while block is not None:
                if block.mapped:
                    blocks.append(block)
                elif blocks:
                    yield blocks
                    blocks = []
                block = block.next
            if blocks:
                yield blocks

    def pool(self, stream: int, is_large: bool) -> Pool:
        """The free list of a stream, made when it is first asked for."""
        return (self._pools.get(stream) or self._add_pools(stream))[is_large]

    # ---------------------------------------------------------------- the path of every event: keep it short

    def allocate(self, requested: int, stream: int = 0) -> Block:
        """The block for `requested` > 0 bytes.  Raises OutOfMemory."""
        size = (requested + 511) & -512 if self._rounds_to_512 else self.conf.round_size(requested)
        pools = self._pools.get(stream) or self._add_pools(stream)
        pool = pools[size > SMALL_BYTES]
        keys = pool.keys
        index = bisect_left(keys, size << ADDRESS_BITS)
        if not self._takes_best_fit:
            index = self._choose(pool, index, size)
        if index < len(keys):
            del keys[index]
            block = pool.blocks.pop(index)
            block.free = False
        else:
            block = self._grow(pool, size)
        spare = block.size - size
        if spare >= pool.min_spare and size < self._split_below:
            following = block.next
            rest = Block(block.address + size, spare, pool, block, following, block.segment)
            if following is not None:
                following.prev = rest
            block.next = rest
            block.size = size
            pool.insert(rest)
        else:
            size = block.size
        block.requested = requested
        allocated = self.allocated_bytes = self.allocated_bytes + size
        asked = self.requested_bytes = self.requested_bytes + requested
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
            self.peak_allocated_clock = self.clock
        if asked > self.peak_requested_bytes:
            self.peak_requested_bytes = asked
            self.peak_requested_clock = self.clock
        if allocated + self.pending_bytes > self.peak_active_bytes:
            self.peak_active_bytes = allocated + self.pending_bytes
        return block

    def release(self, block: Block) -> None:
        """Frees a block; one that other streams use becomes pending instead."""
        self.allocated_bytes -= block.size
        if block.stream_uses:
            self._await_streams(block)
        else:
            self._to_free_list(block)

    def use_on(self, block: Block, stream: int) -> None:
        """record_stream; uses on the block's own stream need no waiting."""
        if stream != block.pool.stream:
            block.stream_uses = {stream} | (block.stream_uses or set())

    def finish(self, block: Block) -> None:
        """All streams have finished with a pending block."""
        for blocks in self._pending.values():
            if block in blocks:
                blocks.remove(block)
        block.event_count = 0
        self.pending_bytes -= block.size
        if self._in_use.get(block.address) is block:
            del self._in_use[block.address]
        self._to_free_list(block)

    def _to_free_list(self, block: Block) -> None:
        self.requested_bytes -= block.requested
        pool = block.pool
        near = block.next
        if near is not None and near.free:
            pool.remove(near)
            block.absorb_next()
        near = block.prev
        if near is not None and near.free:
            pool.remove(near)
            near.absorb_next()
            block = near
        pool.insert(block)

    # ---------------------------------------------------------------- events that come again

    @property
    def is_memoryless(self) -> bool:
        """Whether what an allocation does depends only on the free blocks, and not on ages or unmapped pages."""
        return self._takes_best_fit

    def free_memory(self) -> tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]:
        """Every free block, by stream.

        It decides how events go that free only what they allocate: free blocks border on no other free memory of their
        segment, so that what is cut from one merges with nothing but its own pieces.
        """
        return tuple((stream, tuple(small.keys), tuple(large.keys)) for stream, (small, large) in self._pools.items())

    def excursion(self, play: Callable[[], bool], first_event: int) -> tuple[bool, Excursion]:
        """What `play` returned, and how far it went beyond where the allocator stands."""
        allocated, requested, active = self.allocated_bytes, self.requested_bytes, self.active_bytes
        peaks = self.peak_allocated_bytes, self.peak_requested_bytes, self.peak_active_bytes
        clocks = self.peak_allocated_clock, self.peak_requested_clock
        self.peak_allocated_bytes, self.peak_requested_bytes, self.peak_active_bytes = allocated, requested, active
        done = play()
        found = Excursion(
            self.peak_allocated_bytes - allocated, self.peak_allocated_clock - first_event,
            self.peak_requested_bytes - requested, self.peak_requested_clock - first_event,
            self.peak_active_bytes - active,
        )  # fmt: skip
        self.peak_allocated_bytes, self.peak_requested_bytes, self.peak_active_bytes = peaks
        self.peak_allocated_clock, self.peak_requested_clock = clocks
        self._reach(allocated, requested, active, found, first_event)
        return done, found

    def repeat(self, known: Excursion, first_event: int) -> None:
        """The same again, from where the allocator stands now."""
        self._reach(self.allocated_bytes, self.requested_bytes, self.active_bytes, known, first_event)

    def _reach(self, allocated: int, requested: int, active: int, known: Excursion, first_event: int) -> None:
        if allocated + known.allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated + known.allocated
            self.peak_allocated_clock = first_event + known.allocated_event
        if requested + known.requested > self.peak_requested_bytes:
            self.peak_requested_bytes = requested + known.requested
            self.peak_requested_clock = first_event + known.requested_event
        self.peak_active_bytes = max(self.peak_active_bytes, active + known.active)

    # ---------------------------------------------------------------- rarer paths

    def _add_pools(self, stream: int) -> tuple[Pool, Pool]:
        # should_split: of a large block only more than 1 MiB is split off, or useless slivers arise; with pages they merge.
        large_spare = MIN_BLOCK_BYTES if self.conf.expandable_segments else SMALL_BYTES + 1
        small = Pool(stream, True, MIN_BLOCK_BYTES, self._searches[0])
        pools = self._pools[stream] = small, Pool(stream, False, large_spare, self._searches[1])
        return pools

    def _await_streams(self, block: Block) -> None:
        uses = block.stream_uses or set()
        for stream in sorted(uses):
            self._pending.setdefault(stream, []).append(block)
        block.event_count = len(uses)
        block.stream_uses = None
        self.pending_bytes += block.size

    def _choose(self, pool: Pool, index: int, size: int) -> int:
        """The index of the free block to take, from the best fit at `index` on; len(pool.keys) for none (get_free_block)."""
        if self._collects:
            pool.searches[0] += 1
        blocks = pool.blocks
        none = len(blocks)
        if index == none:
            return none
        if blocks[index].segment is not None:
            if self.conf.expandable_segments:
                # A block with unmapped room behind it counts as large as it could become: better use up a smaller one.
                while index + 1 < none and blocks[index].segment is not None:
                    if _growable(blocks[index + 1]) >= _growable(blocks[index]):
                        break
                    index += 1
            else:  # expandable segments were switched off: their blocks are left alone
                while index < none and blocks[index].segment is not None:
                    index += 1
                if index == none:
                    return none
        found, most = blocks[index].size, self.conf.max_split_size_bytes
        too_good = found >= most if size < most else found >= size + self.conf.max_non_split_rounding_bytes
        return none if too_good else index

    def _grow(self, pool: Pool, size: int) -> Block:
        """A block from the driver; when it has none left, cached memory is given back first (the chain in `malloc`)."""
        if self._collects:
            self._collect_garbage()
        block = self._new_segment(pool, size)
        if block is not None:
            return block
        before = self.reserved_bytes
        if self._release_oversize(pool, size):
            self.flushes.append(Flush(self.clock, before, self.reserved_bytes))
            block = self._new_segment(pool, size)
            if block is not None:
                return block
            before = self.reserved_bytes
        self.empty_cache()
        self.num_alloc_retries += 1
        self.flushes.append(Flush(self.clock, before, self.reserved_bytes))
        block = self._new_segment(pool, size)
        if block is None:
            self.num_ooms += 1
            limits = [limit for limit in (self.limit_bytes, self.allowed_bytes) if limit is not None]
            raise OutOfMemory(size, self.reserved_bytes, self.allocated_bytes, min(limits, default=None))
        return block

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        segment_bytes = self.conf.segment_size(size)
        if self.allowed_bytes is not None and self.reserved_bytes + segment_bytes > self.allowed_bytes:
            return None
        if self.conf.expandable_segments:
            return expandable.allocate(self, pool, size)
        if self.limit_bytes is not None and self.reserved_bytes + segment_bytes > self.limit_bytes:
            return None
        address = self.driver.allocate(segment_bytes, pool.stream)
        if address is None:
            return None
        return self.add_segment(pool, address, segment_bytes)

    def add_segment(self, pool: Pool, address: int, size: int) -> Block:
        """Enters a new segment as one block that is in no list yet."""
        block = self.segments[address] = Block(address, size, pool, None, None, None)
        self.count_reserved("segment_alloc", address, size, pool.stream)
        return block

    def count_reserved(self, action: str, address: int, size: int, stream: int) -> None:
        """Keeps `reserved_bytes` and its peak, and tells the listener."""
        if action in ("segment_alloc", "segment_map"):
            self.reserved_bytes += size
            if self.reserved_bytes > self.peak_reserved_bytes:
                self.peak_reserved_bytes = self.reserved_bytes
                self.peak_reserved_clock = self.clock
        else:
            self.reserved_bytes -= size
        if self.on_segment is not None:
            self.on_segment(SegmentEvent(action, address, size, stream))

    def _release_segment(self, block: Block) -> None:
        block.pool.remove(block)
        del self.segments[block.address]
        self.count_reserved("segment_free", block.address, block.size, block.pool.stream)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Gives back just enough blocks that max_split_size kept whole (release_available_cached_blocks)."""
        most = self.conf.max_split_size_bytes
        if most == UNLIMITED:
            return False
        wanted = max(size, most)
        index = bisect_left(pool.keys, wanted << ADDRESS_BITS)
        if index < len(pool.keys):  # one block is enough
            if pool.blocks[index].segment is not None:
                return False
            self._release_segment(pool.blocks[index])
            return True
        released = 0
        for block in reversed(pool.blocks[:index]):
            if released >= wanted or block.size < most:
                break
            if block.segment is None:
                released += block.size
                self._release_segment(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Above the threshold, gives back the large segments that were longest unused (garbage_collect_cached_blocks)."""
        threshold = int(self.conf.garbage_collection_threshold * (self.allowed_bytes or 0))
        target = self.reserved_bytes - threshold
        now = self._searches[1][0]
        candidates = [block for _, pools in sorted(self._pools.items()) for block in pools[1].blocks
                      if not block.is_split() and block.segment is None]  # fmt: skip
        total_age = sum(now - block.gc_base for block in candidates)
        reclaimed = 0
        while reclaimed < target and candidates:
            mean_age = total_age / len(candidates)
            old = [block for block in candidates if now - block.gc_base >= mean_age]
            if not old:
                return
            candidates = [block for block in candidates if now - block.gc_base < mean_age]
            for block in old:
                reclaimed += block.size
                total_age -= now - block.gc_base
                self._release_segment(block)


def _growable(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)
