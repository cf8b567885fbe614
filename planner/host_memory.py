"""Host memory as PyTorch takes it: pinned blocks in powers of two that are never given back, pageable ones as they are.

Pinned memory comes from torch's caching host allocator: a request is rounded up to a power of two, and a block that is freed
waits for the next request of its own size class (ATen/core/CachingHostAllocator.h, `allocate`, `free_block`; torch 2.4 to 2.14,
whose `pinned_max_round_threshold_mb` is unlimited by default).  Measured: 8.1 GiB asked for take 16.4 GB
(https://github.com/pytorch/pytorch/issues/95823).  Pageable memory comes from malloc, by the byte.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from .ledger import Ledger, Tier

# Buffers of DeepSpeed's swapper: posix_memalign and mlock, by the byte (csrc/aio/py_lib/deepspeed_pin_tensor.cpp, 0.19.8).
_LOCKED = frozenset({"swap buffer", "swap buffers", "swap space"})


def pinned_bytes(nbytes: int) -> int:
    """Bytes that the host allocator takes for a pinned tensor of `nbytes`: the next power of two; 0 for none."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def pinned_reserved_bytes(ledger: Ledger) -> np.ndarray:
    """What the host allocator of one process has taken after each row of the pinned tier.  It never falls: a freed block waits
    for the next request of its size class."""
    rows = ledger.rows(Tier.HOST_PINNED)
    waiting: dict[int, int] = defaultdict(int)
    taken = np.zeros(len(rows), np.int64)
    total = 0
    locked = {number for number, (_, what) in enumerate(ledger.labels) if what in _LOCKED}
    exact: set[int] = set()  # blocks that the caching allocator knows nothing of
    columns = (ledger.delta_bytes[rows].tolist(), ledger.block[rows].tolist(), ledger.label[rows].tolist())
    for position, (delta, block, label) in enumerate(zip(*columns, strict=True)):
        size = pinned_bytes(abs(delta))
        if block in exact or (delta > 0 and label in locked):
            exact.add(block)
            total += delta
        elif delta < 0:
            waiting[size] += 1
        elif waiting[size]:
            waiting[size] -= 1
        else:
            total += size
        taken[position] = total
    return taken


def host_reserved_peak_bytes(ledger: Ledger) -> int:
    """The most host memory that one process has at any moment: pinned as the allocator takes it, pageable as it is."""
    change = np.zeros(len(ledger) + 1, np.int64)
    pinned, pageable = ledger.rows(Tier.HOST_PINNED), ledger.rows(Tier.HOST_PAGEABLE)
    change[pinned] = np.diff(pinned_reserved_bytes(ledger), prepend=0)
    change[pageable] = ledger.delta_bytes[pageable]
    return int(np.cumsum(change).max())
