"""Where the driver puts segments.  Addresses matter: among free blocks of one size the lowest address is taken first."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from ...units import MiB


class SegmentEvent(NamedTuple):
    """One call to the driver; `action` is `segment_alloc`, `segment_free`, `segment_map` or `segment_unmap`."""

    action: str
    address: int
    size: int
    stream: int


SegmentListener = Callable[[SegmentEvent], object]


class Driver(Protocol):
    """Answers with addresses; the allocator itself keeps the limit."""

    def allocate(self, size: int, stream: int) -> int | None:
        """The address of a new segment (cudaMalloc), or None when there is no memory."""

    def reserve(self, size: int, stream: int, is_small: bool) -> int:
        """The base of a new range of addresses without memory (cuMemAddressReserve)."""


class DescendingDriver:
    """Invents addresses, each below the last, as cudaMalloc mostly does for segments that fill a page; none is given twice."""

    _ALIGNMENT = 2 * MiB  # the GPU's page; real segments start on it

    def __init__(self, below: int = 2**62) -> None:
        self._next = below // self._ALIGNMENT * self._ALIGNMENT

    def allocate(self, size: int, stream: int) -> int | None:
        self._next -= -(-size // self._ALIGNMENT) * self._ALIGNMENT
        return self._next

    def reserve(self, size: int, stream: int, is_small: bool) -> int:
        self._next -= -(-size // self._ALIGNMENT) * self._ALIGNMENT
        return self._next
