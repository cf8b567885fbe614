"""Every rank in a process of its own: what they measure, and what becomes of them when one dies, hangs or finds no memory."""

import os
import time
from pathlib import Path

import pytest
from memplan.errors import CannotTell, UserError
from memplan.planner.trace.source import TraceSource
from memplan.validator.api import request_for, resolve_device, run
from memplan.validator.compare import Comparison, rows_of
from memplan.validator.cuda import Reading, usage
from memplan.validator.launch import run_together
from memplan.validator.measurement import COMPONENTS, DRIVER_USED, PhaseBytes, Usage
from memplan.validator.out_of_memory import in_words
from memplan.validator.ranks import check, run_ranks
from memplan.validator.report import render
from memplan.validator.store import records, remember
from memplan.validator.zoo import find

USER = Path(__file__).with_name("user_models.py")
LLAMA = find("llama").spec(num_hidden_layers=2)


def asked(model=LLAMA, **options):
    return request_for(model, "cpu", **{"micro_batch_size": 2, "seq_len": 16, "precision": "fp32", "gpus": 2, **options})


def together(*programs, **options):
    """Python programs, run at once."""
    import sys

    return run_together([[sys.executable, "-c", program] for program in programs], **options)


def test_two_real_processes_measure_what_is_predicted_of_each(tmp_path):
    found = run_ranks(asked(strategy="fsdp2", precision="bf16-mixed"), TraceSource(), "cpu")

    assert found.reason == ""
    assert [rank.rank for rank in found.ranks] == [0, 1]
    for rank in found.ranks:
        assert_right(rank)
    assert {row.what for row in found.rows} == {"peak", "after", *COMPONENTS}
    assert found.agrees
    text = render(found)
    assert "rank 0  " in text
    assert "rank 1  " in text
    assert "2 processes over gloo" in text
    assert remember(found, tmp_path / "records") is None
    kept = records(tmp_path / "records")[0].measured["detail"]["ranks"]
    assert [(r["rank"], r["peak_bytes"]) for r in kept] == [(r.rank, r.measured.peak_bytes) for r in found.ranks]


def assert_right(rank):
    """States to the byte; at a peak gloo's threads may hold a message too, which is never more than the model."""
    states = [row for row in rank.rows if row.what in set(COMPONENTS) - {"buffer"}]
    assert len(states) == 3
    assert not [row for row in states if row.difference_bytes]
    peaks = [row for row in rank.rows if row.what == "peak"]
    assert len(peaks) == 7
    assert all(row.within(0.05 if not row.phase else 0.1) for row in peaks), peaks


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "zero2", "zero3"])
def test_every_engine_runs_in_processes(strategy):
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    precision = "fp32" if strategy == "ddp" else "bf16-mixed"
    found = run(asked(strategy=strategy, precision=precision), "cpu", processes=True, traces=TraceSource())

    assert found.reason == ""
    assert found.agrees
    for rank in found.ranks:
        assert_right(rank)


@pytest.mark.slow
def test_a_wrong_prediction_is_seen_in_processes(monkeypatch):
    """The engine of another strategy runs than the one that was predicted."""
    from memplan.validator import ranks

    right = ranks.predicted_on_cpu
    monkeypatch.setattr(ranks, "predicted_on_cpu", lambda request, trace: right(request.but(strategy="fsdp2"), trace))
    found = run_ranks(asked(strategy="ddp"), TraceSource(), "cpu")
    assert found.reason == ""
    assert found.exit_code == 1


def test_a_process_that_dies_ends_the_others_and_is_the_one_that_is_blamed():
    began = time.monotonic()
    dead, alive = together("import sys; sys.exit('no such table')", "import time; time.sleep(600)", grace_s=0.2)
    assert dead.reason == "the run ended with exit code 1: no such table"
    assert alive.reason == "stopped, because another process of the run had failed"
    assert (dead.order, alive.order) == (0, 1)
    assert time.monotonic() - began < 60


def test_a_process_that_is_killed_is_told_from_those_that_follow_it():
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    follow, killed = together("import time; time.sleep(1); raise SystemExit('connection closed by peer')", kill, grace_s=30)
    assert "killed (SIGKILL)" in killed.reason
    assert killed.order < follow.order


def test_processes_that_hang_are_stopped_and_say_where_they_were(tmp_path):
    program = tmp_path / "stuck.py"
    program.write_text("import time\n\n\ndef waits():\n    time.sleep(600)\n\n\nwaits()\n")
    says = "import runpy; from memplan.validator.launch import says_where; says_where(); "
    says += f"runpy.run_path({str(program)!r}); print('over')"
    for ended in together(says, says, timeout_s=8):
        assert ended.reason == ("the run took longer than 8 s and was stopped (--timeout); it was in waits (stuck.py:5)")


def test_nothing_that_a_process_started_is_left_running(tmp_path):
    note = tmp_path / "child"
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    child += f"open({str(note)!r}, 'w').write(str(p.pid)); time.sleep(600)"
    wait = f"import os, time\nwhile not os.path.exists({str(note)!r}): time.sleep(0.05)\ntime.sleep(0.2); raise SystemExit(1)"
    together(child, wait, grace_s=0.1)
    pid = int(note.read_text())
    for _ in range(100):
        if not _runs(pid):
            return
        time.sleep(0.05)
    pytest.fail("the child is still there")


def _runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.slow
def test_a_rank_whose_model_raises_is_an_outcome_that_names_the_rank():
    request = asked(f"{USER}:only_rank_0", strategy="ddp", seq_len=8)
    found = run_ranks(request, TraceSource(), "cpu", timeout_s=120, grace_s=1)

    assert found.exit_code == 2
    assert found.reason.startswith("rank 1 of 2: ")
    assert "RuntimeError: no card here (at " in found.reason
    assert "COULD NOT RUN  rank 1 of 2" in render(found)
    assert len(found.ranks) == 2


def test_an_allocation_that_fails_is_explained():
    said = "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 23.5 GiB"
    live = {"allocated": 7 << 30, "reserved": 9 << 30}
    parts = {"param": 4 << 30, "grad": 2 << 30, "optimizer_state": 0}
    line = in_words(said, ("backward", 0), parts, live)
    assert "GPU memory in the backward pass of step 1: it asked for 512.00 MiB" in line
    assert "when 7.00 GiB were allocated and 9.00 GiB held by PyTorch" in line
    assert "live: weights 4.00 GiB, gradients 2.00 GiB, and 1.00 GiB of activations" in line
    assert "optimizer state" not in line


def test_an_allocation_that_fails_on_the_cpu_is_explained_in_the_run_itself():
    from memplan.validator.loop import Running
    from memplan.validator.out_of_memory import OutOfMemory, explained

    with (
        pytest.raises(OutOfMemory, match=r"host memory in the forward pass of step 2: it asked for 9 B"),
        explained(Running(), lambda: ("forward", 1), "cpu"),
    ):
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes")


def card(read_by="torch"):
    from types import SimpleNamespace

    return SimpleNamespace(read_by=read_by)


def test_a_machine_with_fewer_gpus_is_refused_with_what_to_do():
    with pytest.raises(UserError, match=r"--gpus 2: torch finds 1 here.*--device cpu"):
        check(asked(strategy="ddp"), "cuda", [card()], 8)
    check(asked(strategy="ddp"), "cuda", [card(), card()], 8)


def test_more_processes_than_the_cores_can_run_are_refused():
    with pytest.raises(UserError, match=r"9 processes on 2 cores.*Use up to 8"):
        check(asked(strategy="ddp", gpus=9), "cpu", [], 2)
    check(asked(strategy="ddp", gpus=8), "cpu", [], 2)


def test_several_machines_and_other_methods_are_refused():
    with pytest.raises(CannotTell, match="one machine"):
        check(asked(strategy="ddp", gpus=4, nodes=2), "cpu", [], 8)
    with pytest.raises(UserError, match="--processes"):
        run(asked(gpus=1), "cpu", processes=True)


def test_auto_takes_the_cpu_where_there_are_too_few_gpus(monkeypatch):
    from memplan.hardware import detect

    monkeypatch.setattr(detect, "gpus", lambda: (card(), card(), card("nvml")))
    assert resolve_device("auto", 2) == "cuda"
    assert resolve_device("auto", 3) == "cpu"
    assert resolve_device("cuda", 3) == "cuda"


def figures(peak, driver=None):
    phases = (PhaseBytes(phase="forward", step="first", peak_bytes=peak, after_bytes=peak),)
    detail = {} if driver is None else {DRIVER_USED: driver}
    return Usage(counter="allocated", phases=phases, components={}, reserved_peak_bytes=2 * peak, detail=detail)


def test_one_rank_that_differs_is_a_difference_of_the_whole():
    def of(peak, **more):
        ours, theirs = figures(100), figures(peak)
        return Comparison(
            question={}, device="cpu", tolerance=0.01, predicted=ours, measured=theirs, rows=rows_of(ours, theirs), **more
        )

    assert of(100, ranks=(of(100, rank=0), of(100, rank=1))).agrees
    found = of(100, ranks=(of(100, rank=0), of(150, rank=1)))
    assert not found.agrees
    assert found.exit_code == 1
    assert [rank["outcome"] for rank in found.to_json()["ranks"]] == ["agrees", "differs"]


def test_what_the_driver_shows_is_compared_where_both_sides_know_it():
    assert not [r for r in rows_of(figures(100), figures(100, 300)) if r.what == "device"]
    row = next(r for r in rows_of(figures(100, 330), figures(100, 300)) if r.what == "device")
    assert (row.predicted_bytes, row.measured_bytes) == (330, 300)


def test_a_gpus_readings_keep_the_drivers_figure():
    reading = Reading(phase="forward", iteration=0, allocated_bytes=1, peak_allocated_bytes=2, peak_reserved_bytes=3)
    assert usage([reading], {}, gpu="a card", used_bytes=9).detail[DRIVER_USED] == 9


def test_the_environment_of_the_caller_stays_as_it_was():
    before = dict(os.environ)
    together("pass", "pass", environments=[{"RANK": "0"}, {"RANK": "1"}])
    assert dict(os.environ) == before
