"""What `memplan trace` writes: JSON that agrees with the trace, and a snapshot that PyTorch's own tools read."""

from __future__ import annotations

import argparse
import json
import pickle
import re
from pathlib import Path

import memplan
import numpy as np
import pytest
from memplan.errors import UserError
from memplan.planner import cli
from memplan.planner.api import make_request
from memplan.planner.export import trace_data, write_run, write_trace
from memplan.planner.predict import ledger_of, replay_ledger
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import EventKind
from memplan.planner.trace_report import params_table, summary

ROOT = Path(memplan.__file__).resolve().parent
SMALL = {"num_hidden_layers": "2", "vocab_size": "4096"}


@pytest.fixture(scope="module")
def made():
    """(trace, ledger) of a small GPT-2."""
    request = make_request("openai-community/gpt2", "l4", seq_len=16, overrides=SMALL)
    trace = TraceSource().step(request)
    return trace, ledger_of(request, trace)


@pytest.fixture(scope="module")
def data(made):
    """The trace after a journey through JSON text."""
    return json.loads(json.dumps(trace_data(made[0])))


@pytest.fixture(scope="module")
def snapshot_file(made, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.pickle"
    write_run(path, made[1])
    return path


@pytest.fixture(scope="module")
def snapshot(snapshot_file):
    with open(snapshot_file, "rb") as file:
        return pickle.load(file)


def run_trace(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers())
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    args = parser.parse_args(["trace", "openai-community/gpt2", "--seq", "16", *settings, *words])
    return int(args.run(args))


def test_flops_of_the_ops_sum_to_those_of_the_step(made, data):
    assert sum(op["flops"] for op in data["ops"]) == data["flops"] == made[0].flops


def test_every_op_says_in_which_module_and_pass_it_runs(made, data):
    paths = {module["fqn"] for module in data["modules"]}

    assert len(data["ops"]) == made[0].num_ops
    assert {op["fqn"] for op in data["ops"]} <= paths
    assert {op["pass"] for op in data["ops"]} == {"forward", "backward"}


def test_births_and_deaths_point_at_the_events_that_are_meant(data):
    born = dead = 0
    for index, storage in enumerate(data["storages"]):
        if storage["birth"] is not None:
            assert data["events"][storage["birth"]] == ["alloc", index]
            born += 1
        if storage["death"] is not None:
            assert data["events"][storage["death"]] == ["free", index]
            assert storage["birth"] is None or storage["birth"] < storage["death"]
            dead += 1
    assert born == sum(event[0] == "alloc" for event in data["events"])
    assert dead == sum(event[0] == "free" for event in data["events"])


def test_live_bytes_follow_from_the_events(made, data):
    """The peak of what the step itself allocates, from the JSON alone, is that of the columns."""
    live = peak = 0
    for event in data["events"]:
        if event[0] in ("alloc", "free"):
            live += data["storages"][event[1]]["bytes"] * (1 if event[0] == "alloc" else -1)
            peak = max(peak, live)
    columns = made[0]
    kind = {EventKind.ALLOC: 1, EventKind.FREE: -1}
    steps = [kind[k] * int(columns.storage_bytes[arg]) for k, arg, _ in columns.events() if k in kind]
    assert peak == np.cumsum(steps).max() > 0


def test_every_key_of_the_trace_is_documented(data):
    documented = set(re.findall(r"`([\w-]+)`", (ROOT / "docs" / "json.md").read_text(encoding="utf-8")))
    lists = ("modules", "params", "calls", "signatures", "ops", "storages")
    keys = set(data) | {key for name in lists for key in data[name][0]}

    assert keys <= documented, keys - documented
    assert {op["pass"] for op in data["ops"]} | {s["role"] for s in data["storages"]} <= documented


def test_a_trace_is_written_whole_or_not_at_all(made, tmp_path):
    (tmp_path / "taken").mkdir()

    with pytest.raises(UserError, match="cannot write"):
        write_trace(tmp_path / "taken", made[0])
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_torchs_own_tools_read_the_snapshot(snapshot):
    from torch.cuda import _memory_viz as viz

    segments = viz.segsum(snapshot)
    assert "segments:" in segments
    text = viz.trace(snapshot)
    assert "alloc(" in text
    assert len(viz.profile_plot(_profile_without_events())) > 1000  # the plots are pages around the data
    assert "snapshot" in viz.trace_plot(snapshot)
    assert "snapshot" in viz.segment_plot(snapshot)


def _profile_without_events():
    import torch

    with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True) as profile:
        torch.ones(4).sum()
    return profile


def test_the_events_of_the_snapshot_reach_the_predicted_peak(made, snapshot):
    live = peak = 0
    for event in snapshot["device_traces"][0]:
        live += event["size"] * {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
        peak = max(peak, live)

    assert peak == replay_ledger(made[1]).peak_requested_bytes == made[1].peak_bytes()


def test_the_segments_of_the_snapshot_are_what_is_reserved_at_the_end(made, snapshot):
    played = replay_ledger(made[1])

    assert sum(segment["total_size"] for segment in snapshot["segments"]) == played.reserved_series[-1]
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) == played.allocated_series[-1]


def test_events_carry_module_phase_and_op_instead_of_a_stack(snapshot):
    frames = {(frame["filename"], frame["name"]) for event in snapshot["device_traces"][0] for frame in event["frames"]}

    assert ("transformer.h.1.mlp.c_fc", "forward: aten.addmm.default") in frames
    assert ("transformer.wte.weight", "step: optimizer step") in frames
    assert ("(training loop)", "forward: input") in frames


def test_memplan_reads_its_own_snapshot_and_agrees_with_it(snapshot_file):
    from memplan.planner.allocator.snapshot import read_snapshot
    from memplan.planner.allocator.verify import compare

    assert not compare(read_snapshot(snapshot_file), 0).differences


def test_the_summary_names_parameters_flops_and_the_biggest_tensors(made):
    text = summary(*made, top=3)

    trains = sum(p.numel for p in made[0].params)
    assert f"{trains / 1e6:.2f} million train)" in text
    assert "forward for backward" in text
    assert "transformer.h.*.mlp" in text
    assert "The biggest tensors at the peak of forward and backward" in text


def test_top_limits_the_rows_of_a_list(made):
    def rows(top: int) -> int:
        return len(summary(*made, top=top).splitlines())

    assert rows(5) - rows(2) == 6  # three more in each of two lists


def test_the_list_of_parameters_shows_which_ones_train(made):
    lines = params_table(made[0]).splitlines()

    assert len(lines) == 1 + len(made[0].params)
    assert all(line.endswith("yes") for line in lines[1:])


def test_trace_writes_both_files(capsys, tmp_path):
    out, snapshot = tmp_path / "trace.json", tmp_path / "run.pickle"

    assert run_trace("--out", str(out), "--snapshot", str(snapshot), "--params") == 0

    assert json.loads(out.read_text())["format"] == "memplan-trace-1"
    assert snapshot.stat().st_size > 0
    assert "transformer.h.1.mlp.c_fc.weight" in capsys.readouterr().out


def test_trace_follows_the_cpu_where_asked(capsys):
    assert run_trace("--target", "cpu") == 0
    assert "for cpu" in capsys.readouterr().out


def test_a_missing_folder_is_said_before_the_work(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"):
        run_trace("--out", str(tmp_path / "nosuch" / "trace.json"))
