"""The settings of PyTorch's CUDA caching allocator that change device memory, read from `PYTORCH_ALLOC_CONF` text.

Rules and limits follow `c10/core/AllocatorConfig.cpp` and `c10/cuda/CUDAAllocatorConfig.cpp` of PyTorch 2.13.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from ...errors import UserError, did_you_mean
from ...units import MiB

MIN_BLOCK_BYTES = 512  # kMinBlockSize: every block is a multiple of it
SMALL_BYTES = 1 * MiB  # kSmallSize: largest block of the small pool
SMALL_SEGMENT_BYTES = 2 * MiB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MiB  # kLargeBuffer: segment for blocks between 1 and 10 MiB
MIN_LARGE_SEGMENT_BYTES = 10 * MiB  # kMinLargeAlloc: from here on a segment is made to measure
ROUND_LARGE_BYTES = 2 * MiB  # kRoundLarge
UNLIMITED = 2**63  # stands for the numeric_limits<size_t>::max() of an unset option
_INTERVALS = 16  # roundup_power2_divisions has one entry per power of two, 1 MiB (index 0) .. 32 GiB and above (index 15)

# Known to PyTorch, without effect on how much device memory the native allocator takes.
_WITHOUT_EFFECT = frozenset(
    {"release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
     "pinned_num_register_threads", "pinned_use_background_threads", "pinned_reserve_segment_size_mb", "pinned_free_catch_all",
     "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb", "pinned_max_power2_size_mb",
     "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom"}
)  # fmt: skip
_KEYS = ("expandable_segments", "max_split_size_mb", "max_non_split_rounding_mb", "roundup_power2_divisions",
         "garbage_collection_threshold", "per_process_memory_fraction", "large_segment_size_mb", "backend")  # fmt: skip
_SIZES = {"max_split_size_mb": "max_split_size_bytes", "max_non_split_rounding_mb": "max_non_split_rounding_bytes",
          "large_segment_size_mb": "large_segment_bytes"}  # fmt: skip


@dataclass(frozen=True)
class AllocConf:
    """What `PYTORCH_ALLOC_CONF` sets; the defaults are PyTorch's.

    `roundup_power2_divisions` holds one number per power of two from 1 MiB on (0 and 1: round to 512 bytes as usual).
    `garbage_collection_threshold` 0.0 is off; PyTorch applies it only under a memory fraction (`allowed_bytes` of the
    allocator, or `per_process_memory_fraction` below 1 of the whole card).
    """

    expandable_segments: bool = False
    max_split_size_bytes: int = UNLIMITED
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0
    large_segment_bytes: int = LARGE_SEGMENT_BYTES

    @classmethod
    def parse(cls, text: str) -> AllocConf:
        """Reads "expandable_segments:True,max_split_size_mb:128" as PyTorch does; spaces do not matter.

        Raises UserError for an unknown key, a value out of PyTorch's range, and `backend:cudaMallocAsync` (another allocator).
        """
        changes: dict[str, Any] = {}
        for key, value in _pairs(text):
            if key in _WITHOUT_EFFECT:
                continue
            if key not in _KEYS:
                known = sorted({*_KEYS, *_WITHOUT_EFFECT})
                raise UserError(f"allocator setting {key!r} is not known to PyTorch",
                                did_you_mean(key, known) or f"Known settings: {', '.join(known)}")  # fmt: skip
            name, setting = _setting(key, value)
            if name:
                changes[name] = setting
        conf = replace(cls(), **changes)
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            size = changes.get(_SIZES[name], UNLIMITED)
            if size < conf.large_segment_bytes:
                raise _wrong(name, size // MiB, f"at least {conf.large_segment_bytes // MiB}")
        return conf

    def divisions(self, size_bytes: int) -> int:
        """The entry of `roundup_power2_divisions` that holds for a request of `size_bytes`."""
        return self.roundup_power2_divisions[min(max(0, size_bytes.bit_length() - 21), _INTERVALS - 1)]

    def round_size(self, size_bytes: int) -> int:
        """The size of the block that a request of `size_bytes` gets, before any segment is looked at."""
        if size_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        divisions = self.divisions(size_bytes)
        if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
            floor = 1 << (size_bytes.bit_length() - 1)
            step = floor >> (divisions.bit_length() - 1)
            return floor << 1 if step == 0 else -(-size_bytes // step) * step
        return -(-size_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def segment_size(self, block_bytes: int) -> int:
        """What is asked from cudaMalloc for a block of `block_bytes` that no cached block can hold."""
        if block_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < MIN_LARGE_SEGMENT_BYTES:
            return self.large_segment_bytes
        return -(-block_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def _wrong(key: str, value: object, expected: str) -> UserError:
    problem = f"allocator setting {key}: got {str(value)[:60]!r}, expected {expected}"
    return UserError(problem, "Correct the value or leave the setting out")


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for item in re.findall(r"(?:\[[^\]]*\]?|[^,\[])+", re.sub(r"\s", "", text)):
        key, colon, value = item.partition(":")
        if not colon or not value:
            raise UserError(f"allocator setting {item!r} has no value", "Write key:value, for example expandable_segments:True")
        pairs.append((key, value))
    return pairs


def _integer(key: str, value: str, least: int, expected: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value) or int(value) < least:
        raise _wrong(key, value, expected)
    return int(value)


def _setting(key: str, value: str) -> tuple[str, Any]:
    """The field of AllocConf that `key` sets and its value; ("", None) where nothing changes."""
    if key == "backend":
        if value in ("cudaMallocAsync", "hipMallocAsync"):
            raise UserError(f"allocator setting backend:{value} is the driver's own allocator, which memplan does not model",
                            "Leave `backend` out to plan with PyTorch's native allocator")  # fmt: skip
        if value != "native":
            raise _wrong(key, value, "native")
        return "", None
    if key == "expandable_segments":
        if value not in ("True", "False"):
            raise _wrong(key, value, "True or False")
        return key, value == "True"
    if key == "roundup_power2_divisions":
        return key, _divisions(key, value)
    if key in _SIZES:
        return _SIZES[key], _integer(key, value, 11, "a whole number of MiB, more than 10") * MiB
    try:
        fraction = float(value)
    except ValueError:
        fraction = -1.0
    if not 0.0 < fraction <= 1.0 or (key == "garbage_collection_threshold" and fraction == 1.0):
        raise _wrong(key, value, "a fraction between 0 and 1")
    return key, fraction


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """`4` for every size, or `[256:1,512:2,>:8]`: per power of two in MiB, the first entry also for all smaller sizes."""
    expected = "a power of two, or a list such as [256:1,512:2,1024:4,>:8]"

    def power(text: str, zero_allowed: bool) -> int:
        number = _integer(key, text, 0 if zero_allowed else 1, expected)
        if number & (number - 1):
            raise _wrong(key, value, expected)
        return number

    if not value.startswith("["):
        return (power(value, zero_allowed=False),) * _INTERVALS
    if not value.endswith("]"):
        raise _wrong(key, value, expected)
    table = [0] * _INTERVALS
    last = 0
    for position, entry in enumerate(value[1:-1].split(",")):
        upto, _, divisions = entry.partition(":")
        number = power(divisions, zero_allowed=True)
        if upto == ">":
            table[last + 1 :] = [number] * (_INTERVALS - last - 1)
            continue
        last = min(power(upto, zero_allowed=False).bit_length() - 1, _INTERVALS - 1)
        if position == 0:
            table[:last] = [number] * last
        table[last] = number
    return tuple(table)
