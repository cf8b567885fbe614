"""Memory snapshots as files: read, refused when damaged or hostile, written, and replayed from the command line."""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from memplan.errors import CannotTell, MemplanError, UserError
from memplan.planner import allocator_cli
from memplan.planner.allocator.caching import CachingAllocator
from memplan.planner.allocator.config import AllocConf
from memplan.planner.allocator.export import export_replay, segment_states
from memplan.planner.allocator.replay import ALLOC, FREE, FREE_COMPLETED, FREE_REQUESTED, ReplayState
from memplan.planner.allocator.snapshot import BlockState, read_snapshot
from memplan.planner.allocator.start_state import restore, walk_back
from memplan.planner.allocator.verify import compare
from memplan.units import MiB

ACTIONS = ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"]
PROGRAM = (
    [ALLOC, ALLOC, ALLOC, FREE_REQUESTED, FREE, ALLOC, FREE_COMPLETED, ALLOC],
    [30 * MiB, 1000, 5 * MiB, 0, 0, 19 * MiB, 0, 2 * MiB],
    [1, 2, 3, 1, 3, 4, 1, 5],
    [0, 0, 0, 0, 0, 7, 0, 0],
)


def written(folder: Path, conf: str = "", limit: int | None = None) -> Path:
    path = folder / "snapshot.pickle"
    export_replay(path, *PROGRAM, conf=AllocConf.parse(conf), limit_bytes=limit)
    return path


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    allocator_cli.add_commands(parser.add_subparsers())
    args = parser.parse_args(["replay", *words])
    return int(args.run(args))


def content(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = pickle.loads(path.read_bytes())
    return loaded


# ---------------------------------------------------------------- round trip


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
@pytest.mark.parametrize("blind", [False, True])
def test_what_was_written_replays_exactly(tmp_path: Path, conf: str, blind: bool) -> None:
    snapshot = read_snapshot(written(tmp_path, conf))

    result = compare(snapshot, 0, blind=blind)

    assert result.differences == ()
    assert result.predicted == result.measured
    assert result.cold


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_a_recording_that_began_late_replays_exactly(tmp_path: Path, conf: str) -> None:
    path = written(tmp_path, conf)
    whole = content(path)

    for first in range(len(whole["device_traces"][0])):
        late = copy.deepcopy(whole)
        del late["device_traces"][0][:first]
        late["device_traces"][0].append({"action": "snapshot", "size": 0, "stream": 0})
        path.write_bytes(pickle.dumps(late))
        result = compare(read_snapshot(path), 0)
        assert (first, result.differences) == (first, ())


def test_json_and_gzip_are_read_like_a_pickle(tmp_path: Path) -> None:
    path = written(tmp_path)
    as_json = tmp_path / "snapshot.json.gz"
    as_json.write_bytes(gzip.compress(json.dumps(content(path)).encode()))

    assert read_snapshot(as_json) == read_snapshot(path)


def test_a_flush_of_the_recording_comes_out_by_itself(tmp_path: Path) -> None:
    path = written(tmp_path, limit=60 * MiB)  # the 19 MiB of stream 7 find no room beside 30 pending, 20 cached and 2 in use
    assert [e["action"] for e in content(path)["device_traces"][0]].count("segment_free") == 2

    result = compare(read_snapshot(path), 0)

    assert result.differences == ()
    assert (result.num_flushes, result.num_ooms) == (1, 0)


def test_an_out_of_memory_of_the_recording_comes_out_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    export_replay(path, [ALLOC, ALLOC], [30 * MiB, 40 * MiB], [1, 2], limit_bytes=60 * MiB)
    assert content(path)["device_traces"][0][-1]["action"] == "oom"

    for blind in (False, True):
        result = compare(read_snapshot(path), 0, blind=blind)
        assert (result.differences, result.num_ooms) == ((), 1)


def test_pytorch_itself_draws_a_written_snapshot(tmp_path: Path) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    path = tmp_path / "run.pickle"
    frames = [(f"model.layers.{i}", "aten::mm") for i in range(len(PROGRAM[0]))]
    export_replay(path, *PROGRAM, frames=frames)
    snapshot = content(path)

    assert snapshot["device_traces"][0][1]["frames"] == [{"filename": "model.layers.0", "name": "aten::mm", "line": 0}]
    assert "b = a[0:30.0MiB]" in viz.trace(snapshot)
    assert "total_reserved: 72.0MiB" in viz.segsum(snapshot)
    assert "<script" in viz.trace_plot(snapshot)


def test_a_snapshot_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()

    with pytest.raises(UserError, match="cannot write"):
        export_replay(tmp_path / "missing" / "run.pickle", *PROGRAM)
    with pytest.raises(UserError, match="cannot write"):
        export_replay(tmp_path / "taken", *PROGRAM)

    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_rest_that_was_not_split_off_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "run.pickle"
    export_replay(path, [ALLOC, ALLOC, FREE], [19 * MiB + 5, 3 * MiB, 0], [1, 2, 1])
    late = content(path)
    late["device_traces"][0] = late["device_traces"][0][-2:]  # only the free: nothing says that the block had 20 MiB
    path.write_bytes(pickle.dumps(late))
    snapshot = read_snapshot(path)

    start = walk_back(snapshot.segments, snapshot.traces[0], AllocConf())
    allocator = CachingAllocator()
    restore(start, allocator)

    assert allocator.allocated_bytes == 23 * MiB
    assert allocator.reserved_bytes == 40 * MiB


def test_a_wrong_setting_shows_as_differences(tmp_path: Path) -> None:
    snapshot = read_snapshot(written(tmp_path))

    assert compare(snapshot, 0, conf=AllocConf.parse("expandable_segments:True")).differences


# ---------------------------------------------------------------- refused files


class Evil:
    """Runs a shell command when it is unpickled the careless way."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_names_a_function_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    path, target = tmp_path / "evil.pickle", tmp_path / "ran"
    path.write_bytes(pickle.dumps({"segments": [Evil(target)], "device_traces": []}, protocol=protocol))

    with pytest.raises(UserError) as caught:
        read_snapshot(path)

    assert not target.exists()
    assert "\n" not in str(caught.value)
    if protocol >= 2:
        assert "system" in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"\x80",
        b"\x80\x04",
        b"\x80\x04}",
        b"\x80\x04N.",
        b"\x80\x04K\x01.",
        b"\x80\x04cos\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x04\x82\x01.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x04r\xff\xff\xff\xff.",
        b"\x80\x02PX\n.",
        b"\x80\x04}b.",
        b"[" * 100_000,
        b"[1, 2]",
        b'{"segments": 3}',
        b'{"segments": [], "device_traces": {}}',
        b'{"segments": [], "device_traces": [3]}',
        b'{"segments": [], "device_traces": [[3]]}',
        b'{"segments": [], "device_traces": [[{"action": "alloc"}]]}',
        b'{"segments": [], "device_traces": [[{"action": "dance", "size": 1, "stream": 0, "addr": 0}]]}',
        b'{"segments": [], "device_traces": [[{"action": "alloc", "size": 1, "stream": 0, "addr": -1}]]}',
        b'{"segments": [], "device_traces": [[{"action": "alloc", "size": 1e3, "stream": 0, "addr": 1}]]}',
        b'{"segments": [], "device_traces": [[{"action": "alloc", "size": true, "stream": 0, "addr": 1}]]}',
        b'{"segments": [], "device_traces": [], "x": 1' + b"0" * 10_000 + b"}",
        b"\x1f\x8b",
        b"\x1f\x8b\x08\x00nonsense",
        gzip.compress(b"{" * 1000, mtime=0)[:-8],
        b"\xff\xfe\x00\x01",
    ],
)
def test_a_damaged_file_is_answered_with_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(data)

    with pytest.raises(UserError) as caught:
        read_snapshot(path)

    assert "\n" not in str(caught.value)
    assert "damaged" in str(caught.value)


def test_a_small_gzip_file_cannot_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.planner.allocator.snapshot._MAX_FILE_BYTES", 10 * MiB)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(50 * MiB)))

    with pytest.raises(UserError, match="unpacks to more"):
        read_snapshot(path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path, "a\0b"):
        with pytest.raises(UserError, match="cannot read"):
            read_snapshot(path)


def test_every_field_of_a_segment_is_checked(tmp_path: Path) -> None:
    path = written(tmp_path)
    good = content(path)
    for name, value in [("address", -1), ("address", "x"), ("total_size", 0), ("total_size", 2**60), ("segment_type", "tiny"),
                        ("segment_type", None), ("blocks", None), ("blocks", [1]), ("blocks", [{}]), ("device", []),
                        ("stream", 1.5)]:  # fmt: skip
        bad = copy.deepcopy(good)
        bad["segments"][0][name] = value
        path.write_bytes(pickle.dumps(bad))
        with pytest.raises(UserError, match=r"segments\[0\]"):
            read_snapshot(path)


def test_private_pools_are_not_modelled_and_said_so(tmp_path: Path) -> None:
    path = written(tmp_path)
    graph = content(path)
    graph["segments"][0]["segment_pool_id"] = (0, 1)
    path.write_bytes(pickle.dumps(graph))

    with pytest.raises(CannotTell, match="private pool"):
        read_snapshot(path)


def test_events_that_contradict_the_segments_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    bad = content(path)
    bad["segments"] = []
    path.write_bytes(pickle.dumps(bad))

    with pytest.raises(UserError, match="contradicts"):
        compare(read_snapshot(path), 0)


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_a_snapshot_with_any_damage_never_ends_in_a_traceback(tmp_path: Path, conf: str) -> None:
    path = written(tmp_path, conf, limit=60 * MiB)
    good = content(path)
    chance = random.Random(5)
    outcomes = set()
    for _ in range(300):
        bad = copy.deepcopy(good)
        for _ in range(chance.randint(1, 2)):
            trace, segment = bad["device_traces"][0], chance.choice(bad["segments"])
            where = chance.choice([chance.choice(trace), segment, chance.choice(segment["blocks"])])
            name = chance.choice([key for key in where if key not in ("frames", "blocks")])
            value = where[name]
            others = [*ACTIONS, "inactive", "active_allocated", "active_pending_free", "large", "small", 0, 1, 2**40, None]
            where[name] = value + chance.choice([512, -512, 2 * MiB, -1]) if type(value) is int else chance.choice(others)
            if chance.random() < 0.3:
                trace.insert(chance.randrange(len(trace)), trace.pop(chance.randrange(len(trace))))
        path.write_bytes(pickle.dumps(bad))
        for blind in (False, True):
            try:
                outcomes.add(bool(compare(read_snapshot(path), 0, blind=blind).differences))
            except MemplanError:
                outcomes.add("refused")

    assert {True, False, "refused"} <= outcomes


# ---------------------------------------------------------------- the command


def test_the_command_says_when_a_snapshot_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(written(tmp_path))) == 0

    out = capsys.readouterr().out
    assert "peak reserved" in out
    assert "1.00000" in out
    assert "events/s; agrees" in out


def test_the_command_fails_and_names_the_first_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(written(tmp_path)), "--alloc-conf", "expandable_segments:True") == 1

    out = capsys.readouterr().out
    assert "DOES NOT AGREE" in out
    assert "real address" in out


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(written(tmp_path)), "--json", "--blind", "--device", "0") == 0

    answer = json.loads(capsys.readouterr().out)
    assert answer["agrees"] is True
    assert answer["devices"][0]["reserved_ratio"] == 1.0


def test_the_command_knows_the_devices_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no events of device 3\. Devices with events: 0"):
        command(str(written(tmp_path)), "--device", "3")


def test_a_file_without_events_is_answered_with_how_to_record_them(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text('{"segments": [], "device_traces": [[]]}')

    with pytest.raises(UserError, match="_record_memory_history"):
        command(str(path))


def test_the_state_of_each_block_is_shown_in_words() -> None:
    state = ReplayState(CachingAllocator())
    block = state.allocator.allocate(30 * MiB)
    assert [b.state for s in segment_states(state.allocator) for b in s.blocks] == ["active_allocated"]

    state.request_free(1, block)
    assert [b.state for s in segment_states(state.allocator) for b in s.blocks] == ["active_pending_free"]

    state.complete_free(1)
    assert [s.blocks for s in segment_states(state.allocator)] == [(BlockState(block.address, 30 * MiB, 30 * MiB, "inactive"),)]
