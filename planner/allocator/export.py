"""A simulated run as a memory snapshot that PyTorch's memory_viz opens: the same picture as of a real run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .caching import CachingAllocator
from .config import AllocConf
from .driver import DescendingDriver, SegmentEvent
from .replay import ALLOC, FREE, FREE_COMPLETED, FREE_REQUESTED, ReplayState, replay
from .snapshot import BlockState, SegmentState, write_snapshot

_BELOW = 2**52  # memory_viz reads addresses as JavaScript numbers, which are exact up to 2^53


def segment_states(allocator: CachingAllocator, device: int = 0) -> list[SegmentState]:
    """The allocator's segments and blocks as a snapshot shows them."""
    states = []
    for blocks in allocator.ranges():
        first, last = blocks[0], blocks[-1]
        shown = tuple(BlockState(block.address, block.size, block.requested, _state(block.free, block.event_count))
                      for block in blocks)  # fmt: skip
        states.append(SegmentState(device, first.address, last.address + last.size - first.address, first.pool.stream,
                                   first.pool.is_small, first.segment is not None, shown))  # fmt: skip
    return states


def _state(free: bool, event_count: int) -> str:
    return "inactive" if free else "active_pending_free" if event_count else "active_allocated"


def export_replay(path: str | os.PathLike[str], actions: Sequence[int], sizes: Sequence[int], keys: Sequence[int],
                  streams: Sequence[int] | None = None, *, frames: Sequence[tuple[str, str]] | None = None,
                  conf: AllocConf | None = None, limit_bytes: int | None = None) -> ReplayState:  # fmt: skip
    """Replays a stream (as `replay.replay`) and writes it as a snapshot pickle; gives the state after the last event.

    frames   one (module path, op) per event, shown by memory_viz where it shows the stack of a real run
    An allocation that finds no room becomes an `oom` event, and the last one.
    Raises UserError when the file cannot be written.
    """
    rows: list[dict[str, Any]] = []
    stack: list[dict[str, Any]] = []

    def record(action: str, address: int, size: int, stream: int) -> None:
        rows.append({"action": action, "addr": address, "size": size, "stream": stream, "frames": stack})

    def on_segment(event: SegmentEvent) -> None:
        record(*event)

    conf = conf or AllocConf()
    state = ReplayState(CachingAllocator(conf, limit_bytes, DescendingDriver(_BELOW), on_segment=on_segment))
    placed: dict[int, tuple[int, int, int]] = {}  # key -> address, size, stream of what is allocated or pending
    for index in range(len(actions)):
        action, size, key = int(actions[index]), int(sizes[index]), int(keys[index])
        stream = 0 if streams is None else int(streams[index])
        if frames is not None:
            stack = [{"filename": frames[index][0], "name": frames[index][1], "line": 0}]
        first_row, num_syncs = len(rows), state.allocator.num_syncs
        result = replay([action], [size], [key], [stream], state=state)
        if state.allocator.num_syncs != num_syncs:  # a flush waited for all streams: what was pending was completed before it
            later = rows[first_row:]
            del rows[first_row:]
            for waiting in state.waiting:
                if waiting in placed:
                    record("free_completed", *placed.pop(waiting))
            rows += later
        if result.failure is not None:
            free_bytes = max(0, (limit_bytes or 0) - result.failure.reserved_bytes)
            rows.append({"action": "oom", "device_free": free_bytes, "size": size, "stream": stream, "frames": stack})
            break
        if action == ALLOC and key in state.live:
            placed[key] = state.live[key].address, size, stream
            record("alloc", *placed[key])
        if action in (FREE, FREE_REQUESTED) and key in placed:
            record("free_requested", *placed[key])
        if action in (FREE, FREE_COMPLETED) and key in placed:
            record("free_completed", *placed.pop(key))
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" if conf.expandable_segments else "",
                "expandable_segments": conf.expandable_segments}  # fmt: skip
    write_snapshot(path, segment_states(state.allocator), rows, settings=settings)
    return state
