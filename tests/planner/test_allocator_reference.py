"""The allocator against a second one that is slow and obvious: a list of pieces per segment, searched from end to end.

The reference shares no structure with the allocator: no linked blocks, no sorted lists, no counters.  Both must give the same
addresses, the same calls to the driver in the same order, and run out of memory at the same point, for any program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memplan.planner.allocator.caching import CachingAllocator, OutOfMemory
from memplan.planner.allocator.config import AllocConf
from memplan.planner.allocator.driver import DescendingDriver, SegmentEvent
from memplan.units import MiB

ROOM = 64 * 20 * MiB  # of one expandable segment: small enough that a program can use it up


@dataclass
class Piece:
    address: int
    size: int
    kind: str  # used, pending, free, hole
    age: int = 0  # the search count when it became free


@dataclass
class Segment:
    stream: int
    small: bool
    pieces: list[Piece]
    page: int = 0  # 0: from cudaMalloc


class Slow:
    def __init__(self, conf: AllocConf, limit: int | None, allowed: int | None) -> None:
        self.conf, self.limit, self.allowed = conf, limit, allowed
        self.driver = DescendingDriver()
        self.segments: list[Segment] = []
        self.events: list[SegmentEvent] = []
        self.searches = {True: 0, False: 0}
        self.collects = conf.garbage_collection_threshold > 0 and allowed is not None

    def reserved(self) -> int:
        return sum(piece.size for segment in self.segments for piece in segment.pieces if piece.kind != "hole")

    def cached(self, small: bool, stream: int | None = None) -> list[tuple[Segment, Piece]]:
        """Free pieces of a pool in PyTorch's order: stream, size, address."""
        mine = [s for s in self.segments if s.small == small and stream in (None, s.stream)]
        found = [(segment, piece) for segment in mine for piece in segment.pieces if piece.kind == "free"]
        return sorted(found, key=lambda pair: (pair[0].stream, pair[1].size, pair[1].address))

    def tidy(self, segment: Segment) -> None:
        """Joins neighbours of one kind, when they are free or holes."""
        joined: list[Piece] = []
        for piece in segment.pieces:
            if joined and joined[-1].kind == piece.kind and piece.kind in ("free", "hole"):
                joined[-1] = Piece(joined[-1].address, joined[-1].size + piece.size, piece.kind, self.searches[segment.small])
            else:
                joined.append(piece)
        segment.pieces = joined

    def find(self, address: int) -> tuple[Segment, Piece]:
        return next((s, p) for s in self.segments for p in s.pieces if p.address == address and p.kind in ("used", "pending"))

    def malloc(self, requested: int, stream: int) -> int | None:
        size = self.conf.round_size(requested)
        small = size <= MiB
        self.searches[small] += self.collects
        place = self.search(size, small, stream)
        if place is None:
            if self.collects:
                self.collect()
            place = self.grow(size, small, stream)
            if place is None and self.drop_oversize(size, small, stream):
                place = self.grow(size, small, stream)
            if place is None:
                self.empty()
                place = self.grow(size, small, stream)
            if place is None:
                return None
        segment, piece = place
        rest = piece.size - size
        paged = self.conf.expandable_segments
        split = rest >= 512 if small or paged else rest > MiB and size < self.conf.max_split_size_bytes
        at = segment.pieces.index(piece)
        new = [Piece(piece.address, size if split else piece.size, "used")]
        if split:
            new.append(Piece(piece.address + size, rest, "free", self.searches[small]))
        segment.pieces[at : at + 1] = new
        return piece.address

    def search(self, size: int, small: bool, stream: int) -> tuple[Segment, Piece] | None:
        fitting = [pair for pair in self.cached(small, stream) if pair[1].size >= size]
        if not fitting:
            return None
        best = fitting[0]
        if self.conf.expandable_segments:
            for other in fitting[1:]:
                if self.growable(other) >= self.growable(best):
                    break
                best = other
        most = self.conf.max_split_size_bytes
        if size < most <= best[1].size or (size >= most and best[1].size >= size + self.conf.max_non_split_rounding_bytes):
            return None
        return best

    def growable(self, pair: tuple[Segment, Piece]) -> int:
        segment, piece = pair
        after = segment.pieces[segment.pieces.index(piece) + 1 :]
        return piece.size + (after[0].size if after and after[0].kind == "hole" else 0)

    def grow(self, size: int, small: bool, stream: int) -> tuple[Segment, Piece] | None:
        want = self.conf.segment_size(size)
        if self.allowed is not None and self.reserved() + want > self.allowed:
            return None
        if self.conf.expandable_segments:
            return self.grow_paged(size, small, stream)
        if self.limit is not None and self.reserved() + want > self.limit:
            return None
        address = self.driver.allocate(want, stream)
        assert address is not None
        segment = Segment(stream, small, [Piece(address, want, "free", self.searches[small])])
        self.segments.append(segment)
        self.events.append(SegmentEvent("segment_alloc", address, want, stream))
        return segment, segment.pieces[0]

    def grow_paged(self, size: int, small: bool, stream: int) -> tuple[Segment, Piece] | None:
        """Walks up from the lowest hole before or after which there is room, mapping whole pages until the request fits."""
        page = 2 * MiB if small else 20 * MiB
        mine = [s for s in self.segments if s.small == small and s.stream == stream]
        holes = sorted((p.address, s, i) for s in mine for i, p in enumerate(s.pieces) if p.kind == "hole")
        for _, segment, i in holes:
            start = i - 1 if i and segment.pieces[i - 1].kind == "free" else i
            room, j = 0, start
            while j < len(segment.pieces) and segment.pieces[j].kind in ("free", "hole") and room < size:
                room += segment.pieces[j].size
                j += 1
            if room >= size:
                begin = segment.pieces[start].address
                break
        else:
            whole = -(-ROOM * 9 // 8 // page) * page
            begin = self.driver.reserve(whole, stream, small)
            segment = Segment(stream, small, [Piece(begin, whole, "hole")], page)
            self.segments.append(segment)
        while True:
            at = next(k for k, p in enumerate(segment.pieces) if p.address == begin)
            piece = segment.pieces[at]
            if piece.kind == "free" and piece.size >= size:
                return segment, piece
            have = piece.size if piece.kind == "free" else 0
            hole = segment.pieces[at + 1] if piece.kind == "free" else piece
            wanted = min(size - have, hole.size)
            mapped = -(-wanted // page) * page
            if self.limit is not None and self.reserved() + mapped > self.limit:
                return None
            k = segment.pieces.index(hole)
            segment.pieces[k : k + 1] = [Piece(hole.address, mapped, "free", self.searches[small])]
            if hole.size > mapped:
                segment.pieces.insert(k + 1, Piece(hole.address + mapped, hole.size - mapped, "hole"))
            self.events.append(SegmentEvent("segment_map", hole.address, mapped, stream))
            self.tidy(segment)

    def drop(self, segment: Segment) -> None:
        piece = segment.pieces[0]
        self.segments.remove(segment)
        self.events.append(SegmentEvent("segment_free", piece.address, piece.size, segment.stream))

    def drop_oversize(self, size: int, small: bool, stream: int) -> bool:
        most = self.conf.max_split_size_bytes
        if most == AllocConf().max_split_size_bytes:
            return False
        wanted = max(size, most)
        cached = self.cached(small, stream)
        enough = [segment for segment, piece in cached if piece.size >= wanted]
        if enough:
            if enough[0].page:
                return False
            self.drop(enough[0])
            return True
        dropped = 0
        for segment, piece in reversed(cached):
            if dropped >= wanted or piece.size < most:
                break
            if not segment.page:
                dropped += piece.size
                self.drop(segment)
        return dropped >= wanted

    def collect(self) -> None:
        assert self.allowed is not None
        target = self.reserved() - int(self.conf.garbage_collection_threshold * self.allowed)
        whole = [(s, self.searches[False] - p.age) for s, p in self.cached(False) if len(s.pieces) == 1]
        while target > 0 and whole:
            mean = sum(age for _, age in whole) / len(whole)
            for segment, age in whole:
                if age >= mean:
                    target -= segment.pieces[0].size
                    self.drop(segment)
            whole = [(segment, age) for segment, age in whole if age < mean]

    def free(self, address: int, later: bool) -> None:
        segment, piece = self.find(address)
        piece.kind = "pending" if later else "free"
        piece.age = self.searches[segment.small]
        self.tidy(segment)

    def complete(self, address: int) -> None:
        if any(p.address == address and p.kind == "pending" for s in self.segments for p in s.pieces):
            self.free(address, later=False)

    def empty(self) -> None:
        for segment in self.segments:
            for piece in segment.pieces:
                if piece.kind == "pending":
                    piece.kind, piece.age = "free", self.searches[segment.small]
            self.tidy(segment)
        for small in (False, True):
            cached = self.cached(small)
            for segment, _ in cached:
                if not segment.page and len(segment.pieces) == 1:
                    self.drop(segment)
            for segment, piece in cached:
                if segment.page:
                    self.unmap(segment, piece)

    def unmap(self, segment: Segment, piece: Piece) -> None:
        base, page, stop = segment.pieces[0].address, segment.page, piece.address + piece.size
        begin, end = base + -(-(piece.address - base) // page) * page, base + (stop - base) // page * page
        if begin >= end:
            return
        at = segment.pieces.index(piece)
        parts = [(piece.address, begin - piece.address, "free"), (begin, end - begin, "hole"), (end, stop - end, "free")]
        age = self.searches[segment.small]
        segment.pieces[at : at + 1] = [Piece(address, size, kind, age) for address, size, kind in parts if size]
        self.tidy(segment)
        self.events.append(SegmentEvent("segment_unmap", begin, end - begin, segment.stream))
        if len(segment.pieces) == 1:
            self.segments.remove(segment)


CONFS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:24",
    "max_split_size_mb:40,max_non_split_rounding_mb:30",
    "roundup_power2_divisions:[4:2,16:4,>:8]",
    "garbage_collection_threshold:0.4",
    "expandable_segments:True,max_split_size_mb:24",
]
SIZES = st.one_of(st.integers(1, 3000), st.integers(1, 2 * MiB), st.integers(MiB, 12 * MiB), st.integers(10 * MiB, 70 * MiB),
                  st.sampled_from([512, MiB, MiB + 1, 5 * MiB, 10 * MiB, 20 * MiB, 30 * MiB, 44 * MiB, 64 * MiB]))  # fmt: skip
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 1)),
        st.tuples(st.sampled_from(["free", "free", "free later", "complete"]), st.integers(0, 1000), st.just(0)),
        st.tuples(st.sampled_from(["empty", "free", "malloc"]), st.integers(1, 30 * MiB), st.just(0)),
    ),
    max_size=70,
)


@pytest.mark.parametrize("text", CONFS)
@settings(max_examples=150, deadline=None)
@given(steps=STEPS, limit_mib=st.sampled_from([None, 64, 130, 230]))
def test_any_program_runs_as_in_the_slow_reference(text: str, steps: list[tuple[str, int, int]], limit_mib: int | None) -> None:
    conf = AllocConf.parse(text)
    limit = None if limit_mib is None else limit_mib * MiB
    allowed = limit if conf.garbage_collection_threshold else None
    events: list[SegmentEvent] = []
    fast = CachingAllocator(conf, limit, allowed_bytes=allowed, total_bytes=ROOM, on_segment=events.append)
    slow = Slow(conf, limit, allowed)
    live: list[int] = []
    later: list[int] = []
    for what, number, stream in steps:
        answer: Any = None
        if what == "malloc":
            try:
                answer = fast.malloc(number, stream)
            except OutOfMemory:
                answer = None
            assert answer == slow.malloc(number, stream)
            if answer is not None:
                live.append(answer)
        elif what == "empty":
            fast.empty_cache()
            slow.empty()
        elif what == "complete" and later:
            address = later.pop(number % len(later))
            if address not in live:
                fast.complete(address)
                slow.complete(address)
        elif what.startswith("free") and live:
            address = live.pop(number % len(live))
            if what == "free later":
                fast.record_stream(address, 9)
                later.append(address)
            fast.free(address)
            slow.free(address, later=what == "free later")
        assert events == slow.events
        assert fast.reserved_bytes == slow.reserved()
    pieces = [piece for segment in slow.segments for piece in segment.pieces]
    assert fast.allocated_bytes == sum(piece.size for piece in pieces if piece.kind == "used")
    assert fast.active_bytes == sum(piece.size for piece in pieces if piece.kind in ("used", "pending"))
    split = [piece for segment in slow.segments if not segment.page and len(segment.pieces) > 1 for piece in segment.pieces]
    assert fast.inactive_split_bytes == sum(piece.size for piece in split if piece.kind == "free")
