"""PyTorch's memory snapshots: what `torch.cuda.memory._dump_snapshot` writes, and the same as (gzipped) JSON.

A snapshot holds the segments and blocks at its end, and per device the events that led there (as many as were kept).
Files come from anywhere: every field that is used is checked, nothing in them is run.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import CannotTell, UserError
from ...files import write_for_user
from ...units import GiB, human
from .config import AllocConf
from .safe_pickle import load_plain

SEGMENT_ACTIONS = frozenset({"segment_alloc", "segment_free", "segment_map", "segment_unmap"})
_BLOCK_ACTIONS = frozenset({"alloc", "free_requested", "free_completed"})
_IGNORED_ACTIONS = frozenset({"snapshot", "user_defined", "workspace_snapshot"})
_MAX_FILE_BYTES = 4 * GiB  # unpacked; a snapshot with stacks takes about 1 KiB an event, so this is some millions of events
_MAX_BYTES = 2**44  # 16 TiB: larger than any device: sizes above it are damage
_MAX_ADDRESS = 2**63


class BlockState(NamedTuple):
    """A block of a segment; `state` is `active_allocated`, `active_pending_free` or `inactive`."""

    address: int
    size: int
    requested: int
    state: str


@dataclass(frozen=True)
class SegmentState:
    """A segment (or a contiguous mapped range of an expandable one) and its blocks, by address."""

    device: int
    address: int
    size: int
    stream: int
    is_small: bool
    is_expandable: bool
    blocks: tuple[BlockState, ...]


class TraceEvent(NamedTuple):
    """One recorded event; `address` is -1 for `oom`."""

    action: str
    address: int
    size: int
    stream: int


@dataclass(frozen=True)
class Snapshot:
    """A checked snapshot.  `traces[d]` belongs to device d; `conf` is None where the file does not name its settings."""

    segments: tuple[SegmentState, ...]
    traces: tuple[tuple[TraceEvent, ...], ...]
    conf: AllocConf | None

    def devices(self) -> list[int]:
        """The devices that have events."""
        return [device for device, trace in enumerate(self.traces) if trace]


def read_snapshot(path: str | os.PathLike[str]) -> Snapshot:
    """Reads a snapshot, pickle or JSON, gzipped or not.

    Raises UserError for what is not a readable snapshot, and CannotTell for private pools (CUDA graphs): they are not modelled.
    """
    shown = str(path)
    data = _unpack(_read_bytes(path), shown)
    try:
        raw = load_plain(data) if data[:1] == b"\x80" else json.loads(data)
    except UserError as error:
        raise UserError(f"{shown}: {error.problem}", error.next_step) from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(shown, str(error)[:200] or type(error).__name__) from error
    return _checked(raw, shown)


def _unreadable(shown: str, why: str) -> UserError:
    return UserError(f"{shown} is not a memory snapshot: {why}", "Write one with torch.cuda.memory._dump_snapshot(path)")


def _read_bytes(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"cannot read {str(path)!r}: {reason}", "Give the path of a memory snapshot") from error
    if len(data) > _MAX_FILE_BYTES:
        raise _unreadable(str(path), f"it is larger than {human(_MAX_FILE_BYTES)}")
    return data


def _unpack(data: bytes, shown: str) -> bytes:
    if data[:2] != b"\x1f\x8b":
        return data
    unpacker = zlib.decompressobj(wbits=31)  # gzip; counts while it unpacks, so that a small file cannot fill the memory
    try:
        unpacked = unpacker.decompress(data, _MAX_FILE_BYTES + 1)
        if len(unpacked) > _MAX_FILE_BYTES:
            raise _unreadable(shown, f"it unpacks to more than {human(_MAX_FILE_BYTES)}")
        if not unpacker.eof:
            raise _unreadable(shown, "the gzip file is cut short")
    except zlib.error as error:
        raise _unreadable(shown, f"damaged gzip file ({error})") from error
    return unpacked


class _Fields:
    """One dict of the file, with where it stands in it: gives fields of the right type and range, or a UserError."""

    def __init__(self, raw: Any, shown: str, where: str) -> None:
        if not isinstance(raw, dict):
            raise _unreadable(shown, f"{where} is a {type(raw).__name__}, expected a dict")
        self.raw, self.shown, self.where = raw, shown, where

    def fail(self, name: str, expected: str) -> UserError:
        got = "nothing" if name not in self.raw else repr(self.raw[name])[:40]
        return _unreadable(self.shown, f"{self.where}.{name}: got {got}, expected {expected}")

    def integer(self, name: str, most: int, default: int | None = None, least: int = 0) -> int:
        value = self.raw.get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.fail(name, f"a whole number between {least} and {most}")
        return value

    def text(self, name: str) -> str:
        value = self.raw.get(name)
        if not isinstance(value, str):
            raise self.fail(name, "text")
        return value

    def items(self, name: str) -> list[Any]:
        value = self.raw.get(name)
        if not isinstance(value, list):
            raise self.fail(name, "a list")
        return value


def _checked(raw: Any, shown: str) -> Snapshot:
    top = _Fields(raw, shown, "the file")
    segments = [_segment(_Fields(item, shown, f"segments[{i}]")) for i, item in enumerate(top.items("segments"))]
    segments.sort(key=lambda segment: (segment.device, segment.address))
    for before, after in pairwise(segments):
        if before.device == after.device and before.address + before.size > after.address:
            raise _unreadable(shown, f"segments at {before.address} and {after.address} overlap")
    traces = []
    for device, items in enumerate(top.items("device_traces")):
        if not isinstance(items, list):
            raise _unreadable(shown, f"device_traces[{device}] is a {type(items).__name__}, expected a list")
        where = f"device_traces[{device}]"
        events = (_event(_Fields(item, shown, f"{where}[{i}]")) for i, item in enumerate(items))
        traces.append(tuple(event for event in events if event.action not in _IGNORED_ACTIONS))
    try:
        conf = _conf(raw.get("allocator_settings"))
    except UserError as error:
        raise UserError(f"{shown}: {error.problem}", error.next_step) from error
    return Snapshot(tuple(segments), tuple(traces), conf)


def _segment(fields: _Fields) -> SegmentState:
    address, size = fields.integer("address", _MAX_ADDRESS), fields.integer("total_size", _MAX_BYTES)
    pool = fields.raw.get("segment_pool_id", (0, 0))
    if pool not in ((0, 0), [0, 0]):
        raise CannotTell(f"{fields.shown}: {fields.where} is of a private pool (CUDA graphs or MemPool), which is not modelled")
    kind = fields.text("segment_type")
    if kind not in ("small", "large"):
        raise fields.fail("segment_type", "'small' or 'large'")
    blocks, at = [], address
    for i, item in enumerate(fields.items("blocks")):
        block = _Fields(item, fields.shown, f"{fields.where}.blocks[{i}]")
        block_bytes = block.integer("size", _MAX_BYTES, least=1)
        state = block.text("state").replace("awaiting", "pending")  # newer PyTorch says active_awaiting_free
        if state not in ("active_allocated", "active_pending_free", "inactive"):
            raise block.fail("state", "active_allocated, active_pending_free or inactive")
        if block.integer("address", _MAX_ADDRESS, default=at) != at:
            raise block.fail("address", f"{at}, where the block before it ends")
        blocks.append(BlockState(at, block_bytes, block.integer("requested_size", _MAX_BYTES, default=block_bytes), state))
        at += block_bytes
    if at != address + size:
        raise _unreadable(fields.shown, f"the blocks of {fields.where} add up to {at - address} bytes, expected {size}")
    return SegmentState(fields.integer("device", 1024), address, size, fields.integer("stream", _MAX_ADDRESS), kind == "small",
                        fields.raw.get("is_expandable") is True, tuple(blocks))  # fmt: skip


def _event(fields: _Fields) -> TraceEvent:
    action = fields.text("action")
    if action in _IGNORED_ACTIONS:
        return TraceEvent(action, -1, 0, 0)
    size, stream = fields.integer("size", _MAX_BYTES, least=1), fields.integer("stream", _MAX_ADDRESS)
    if action == "oom":
        return TraceEvent(action, -1, size, stream)
    if action not in SEGMENT_ACTIONS and action not in _BLOCK_ACTIONS:
        raise fields.fail("action", f"one of {', '.join(sorted(SEGMENT_ACTIONS | _BLOCK_ACTIONS))}")
    return TraceEvent(action, fields.integer("addr", _MAX_ADDRESS), size, stream)


def _conf(settings: Any) -> AllocConf | None:
    """The settings that the snapshot names, as the text that was parsed, or as the single values of older versions."""
    if not isinstance(settings, dict):
        return None
    text = settings.get("PYTORCH_CUDA_ALLOC_CONF") or settings.get("PYTORCH_ALLOC_CONF")
    if isinstance(text, str) and text:
        return AllocConf.parse(text)
    if settings.get("expandable_segments") is True:  # switched on later, by torch.cuda.memory._set_allocator_settings
        return AllocConf(expandable_segments=True)
    return AllocConf()


def write_snapshot(path: str | os.PathLike[str], segments: Iterable[SegmentState], events: Iterable[Mapping[str, Any]], *,
                   device: int = 0, settings: Mapping[str, Any] | None = None) -> None:  # fmt: skip
    """Writes a pickle that PyTorch's memory_viz opens.

    events   dicts with action, addr, size, stream; perhaps `frames` (dicts of filename, name, line), `time_us` (or the index)
    Raises UserError when the file cannot be written; an unfinished file never stays behind.
    """
    trace = [{"device": device, "time_us": index, "frames": [], **event} for index, event in enumerate(events)]
    content = {
        "segments": [_plain_segment(segment) for segment in segments],
        "device_traces": [[] for _ in range(device)] + [trace],
        "allocator_settings": dict(settings or {}),
        "external_annotations": [],
    }
    target = Path(path)
    data = pickle.dumps(content, protocol=4)
    if target.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    write_for_user(target, data)


def _plain_segment(segment: SegmentState) -> dict[str, Any]:
    active = [block for block in segment.blocks if block.state != "inactive"]
    return {
        "device": segment.device,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": sum(block.size for block in active if block.state == "active_allocated"),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested for block in active),
        "stream": segment.stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": segment.is_expandable,
        "frames": [],
        "blocks": [{"address": block.address, "size": block.size, "requested_size": block.requested, "state": block.state,
                    "frames": []} for block in segment.blocks],
    }  # fmt: skip
