"""The check against a real GPU, as far as it goes without one: its cases, its predictions, what becomes of every outcome."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from memplan.models import build
from memplan.planner.export import write_run
from memplan.planner.predict import ledger_of
from memplan.planner.trace.source import TraceSource
from memplan.validator import api, gpu_check
from memplan.validator.gpu_cases import CASES, Case
from memplan.validator.gpu_check import Forecast, Worker, compare_events, forecast, judge, main, request_of
from memplan.validator.job import Job, Outcome
from memplan.validator.measurement import PhaseBytes, Usage

TINY = Case(
    name="tiny",
    model="gpt2",
    options={
        "overrides": {"num_hidden_layers": "2", "hidden_size": "64", "num_attention_heads": "4", "vocab_size": "1000"},
        "micro_batch_size": 2,
        "seq_len": 64,
        "precision": "fp32",
    },
)
GPU = "h200-141gb"
OOM = Outcome(reason="the run raised OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")


class Inline:
    """Predicts in this process."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def inline():
    yield Inline()


@pytest.fixture
def small_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check` on a machine that seems to have an H200."""
    monkeypatch.setattr(api, "resolve_device", lambda device: "cuda")
    monkeypatch.setattr(gpu_check, "_processes", inline)
    monkeypatch.setattr(gpu_check, "request_of", lambda case, gpu: request_of(case, GPU))


def worker_with(*outcomes: Outcome) -> type:
    """A stand-in that answers with `outcomes` in turn."""

    class Fake:
        def __init__(self) -> None:
            self.left = list(outcomes)

        def run(self, job: Job, timeout_s: float) -> tuple[Outcome, dict[str, str]]:
            assert job.device == "cuda"
            return self.left.pop(0), {"cuda": "13.0", "driver": "580.1"}

        def end(self) -> None:
            pass

    return Fake


def tiny_forecast() -> Forecast:
    return forecast(request_of(TINY, GPU))


def judged(outcome: Outcome, expected: Forecast) -> gpu_check.Result:
    return judge(TINY, request_of(TINY, GPU), expected, outcome, {"cuda": "13.0"}, 1.0)


# -- cases -------------------------------------------------------------------------------------------------------------


def test_every_case_is_a_question_that_can_be_asked() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 25
    for case in CASES:
        request_of(case, GPU).check()


def test_the_cases_cover_precisions_recompute_optimizers_and_the_loop() -> None:
    requests = [request_of(case, GPU) for case in CASES]

    assert {"fp32", "bf16", "bf16-autocast"} <= {r.precision for r in requests}
    assert {"none", "full", "every-k:4"} <= {r.recompute for r in requests}
    assert {("adamw", "default"), ("adamw", "fused"), ("adamw", "for-loop"), ("sgd", "default"), ("adafactor", "default")} <= {
        (r.optimizer, r.optimizer_impl) for r in requests
    }
    assert {"sdpa", "eager"} <= {r.attention for r in requests}
    assert any(r.loop.grad_accum_steps > 1 for r in requests)
    assert any(not r.loop.set_to_none for r in requests)
    assert any(r.loop.keep_outputs for r in requests)


# -- the command -------------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if api.resolve_device("auto") == "cuda":
        pytest.skip("this machine has a GPU")

    assert main([]) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "gpu_check: torch can use no GPU on this machine. Use --dry-run --gpu h200-141gb to see the predictions\n"
    )


def test_a_dry_run_prints_the_predictions_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "_processes", inline)

    assert main(["--dry-run", "--gpu", GPU, "--only", "gpt2-fp32"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "predicted for H200 SXM 141GB"
    assert lines[2].startswith("gpt2-fp32-efficient")
    assert lines[2].endswith("fits")


@pytest.mark.slow
def test_a_dry_run_predicts_in_processes_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--gpu", GPU, "--only", "gpt2-eager"]) == 0
    assert "gpt2-eager" in capsys.readouterr().out


def test_a_case_that_does_not_exist_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--gpu", GPU, "--only", "no-such-case"]) == 2
    assert "no case has that in its name. Cases: gpt2-fp32-efficient" in capsys.readouterr().err


def test_a_run_that_measures_what_was_predicted_agrees_and_becomes_a_row(
    small_check: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "Worker", worker_with(Outcome(usage=tiny_forecast().usage)))

    assert gpu_check.check([TINY], budget_s=100, folder=tmp_path) == 0

    assert "1 of 1 agree within 1%" in capsys.readouterr().out
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("h200-sxm-141gb-20")
    (row,) = map(json.loads, file.read_text().splitlines())
    assert row["case"] == "tiny"
    assert row["outcome"] == "agrees"
    assert row["device"] == "H200 SXM 141GB"
    assert row["rows"][0]["ratio"] == 1.0
    assert row["versions"]["cuda"] == "13.0"
    assert row["versions"]["driver"] == "580.1"
    assert "transformers" in row["versions"]


def test_an_out_of_memory_and_a_crash_are_rows_and_the_next_case_runs(
    small_check: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = (OOM, Outcome(reason="the run ended with code -11: "), Outcome(usage=tiny_forecast().usage))
    monkeypatch.setattr(gpu_check, "Worker", worker_with(*outcomes))
    cases = [Case(name=name, model=TINY.model, options=TINY.options) for name in ("first", "second", "third")]

    assert gpu_check.check(cases, budget_s=100, folder=tmp_path) == 1

    shown = capsys.readouterr().out
    assert "1 of 3 agree" in shown
    assert "do not agree: first, second" in shown
    (file,) = tmp_path.iterdir()
    assert [json.loads(line)["outcome"] for line in file.read_text().splitlines()] == [
        "out_of_memory", "could_not_run", "agrees",
    ]  # fmt: skip


def test_cases_that_the_budget_leaves_no_time_for_are_named(
    small_check: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "Worker", worker_with())

    assert gpu_check.check([TINY], budget_s=0, folder=tmp_path) == 0
    assert "no time left for: tiny" in capsys.readouterr().out


# -- one case ----------------------------------------------------------------------------------------------------------


def test_an_out_of_memory_agrees_only_where_it_was_predicted() -> None:
    assert judged(OOM, Forecast(verdict="does_not_fit")).agrees
    assert not judged(OOM, Forecast(verdict="fits")).agrees
    assert judged(OOM, Forecast(verdict="fits")).to_json()["outcome"] == "out_of_memory"


def test_a_run_that_was_said_not_to_fit_does_not_agree_however_close_the_peak() -> None:
    expected = tiny_forecast()
    measured = Outcome(usage=expected.usage)

    assert judged(measured, expected).agrees
    assert not judged(measured, Forecast(usage=expected.usage, verdict="does_not_fit")).agrees


def test_a_peak_two_percent_off_does_not_agree() -> None:
    expected = tiny_forecast()
    peak = PhaseBytes(phase="backward", step="later", peak_bytes=int(expected.usage.peak_bytes * 1.02), after_bytes=0)

    assert not judged(Outcome(usage=Usage(counter="allocated", phases=(peak,), components={})), expected).agrees


def test_the_card_stands_in_where_the_driver_does_not_name_the_process() -> None:
    def measured(**detail: int) -> int | None:
        usage = Usage(counter="allocated", phases=(), components={}, detail=detail)
        return judged(Outcome(usage=usage), Forecast()).measured_device_bytes

    assert measured(driver_used_bytes=5, card_used_bytes=7) == 5
    assert measured(card_used_bytes=7) == 7
    assert judged(OOM, Forecast()).measured_device_bytes is None


def test_a_history_of_the_whole_run_is_compared_event_by_event(tmp_path: Path) -> None:
    request = request_of(TINY, GPU)
    write_run(tmp_path / "run.pickle", ledger_of(request, TraceSource(exact=True).step(request)))

    events = compare_events(tmp_path / "run.pickle", request)

    assert events.num_equal == events.num_predicted == events.num_recorded > 100
    assert events.allocated_ratio == events.reserved_ratio == 1.0


# -- the worker --------------------------------------------------------------------------------------------------------


def worker_that(code: str) -> Worker:
    worker = Worker()
    worker.command = (sys.executable, "-c", code)
    return worker


def tiny_job() -> Job:
    return Job(request=request_of(TINY, GPU), device="cuda")


def test_a_worker_answers_job_after_job() -> None:
    answer = json.dumps({"outcome": {"usage": None, "reason": "heard"}, "versions": {"torch": "2"}})
    worker = worker_that(f"import sys\nfor line in sys.stdin: print({answer!r}, flush=True)")

    for _ in range(2):
        assert worker.run(tiny_job(), 20) == (Outcome(reason="heard"), {"torch": "2"})
    worker.end()


def test_a_worker_that_dies_is_an_outcome_with_its_last_words_and_another_one_starts() -> None:
    worker = worker_that("import sys; sys.stdin.readline(); sys.exit('an illegal memory access')")

    for _ in range(2):
        outcome, _ = worker.run(tiny_job(), 20)
        assert outcome.reason.startswith("the run ended with code 1")
        assert outcome.reason.endswith("an illegal memory access")
    worker.end()


def test_a_worker_that_takes_too_long_is_stopped() -> None:
    worker = worker_that("import time; time.sleep(60)")

    outcome, _ = worker.run(tiny_job(), 0.5)

    assert outcome.reason == "stopped after 0 s"
    worker.end()


IN_THE_WORKER = """
import sys, torch
from memplan.validator import gpu_check, worker
from memplan.validator.job import Outcome
from memplan.validator.measurement import Usage
torch.cuda.mem_get_info = lambda: (5, 12)
torch.cuda.memory_allocated = lambda: {left}
torch._C._cuda_clearCublasWorkspaces = lambda: None

def run_job(job):
    print("a library says something")
    return Outcome(usage=Usage(counter="allocated", phases=(), components={{}}, detail={{"gpu": "a card"}}))

worker.run_job = run_job
sys.exit(gpu_check.run_worker())
"""


def test_the_worker_adds_the_cards_own_count_and_its_versions() -> None:
    worker = worker_that(IN_THE_WORKER.format(left=0))

    answers = [worker.run(tiny_job(), 60) for _ in range(2)]

    for outcome, versions in answers:
        assert outcome.usage is not None
        assert outcome.usage.detail == {"gpu": "a card", "card_used_bytes": 7}
        assert {"torch", "cuda", "cudnn", "driver"} <= set(versions)
    assert worker._process is not None
    assert worker._process.poll() is None  # one process took both
    worker.end()


def test_a_worker_that_cannot_give_all_memory_back_makes_room_for_another() -> None:
    worker = worker_that(IN_THE_WORKER.format(left=512))

    outcome, _ = worker.run(tiny_job(), 60)

    assert outcome.usage is not None
    assert worker._process is not None
    assert worker._process.wait(20) == 0
    worker.end()


def test_models_are_made_with_zeros_and_keep_their_ties() -> None:
    import torch

    spec = request_of(TINY, GPU).model
    with gpu_check._without_initialisation():
        module = build(spec, dtype=torch.float32).module
    usual = build(spec, dtype=torch.float32).module

    assert module.lm_head.weight is module.transformer.wte.weight
    assert all(not param.any() for param in module.parameters())
    assert usual.lm_head.weight.any()
    assert {n: p.shape for n, p in module.named_parameters()} == {n: p.shape for n, p in usual.named_parameters()}


@pytest.mark.parametrize(("status", "expected"), [(0, "580.65.06"), (3, None)])
def test_the_driver_says_its_version(monkeypatch: pytest.MonkeyPatch, status: int, expected: str | None) -> None:
    class Library:
        def nvmlInit_v2(self) -> int:
            return 0

        def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
            text.value = b"580.65.06"
            return status

        def nvmlShutdown(self) -> None:
            pass

    monkeypatch.setattr("memplan.hardware.detect.nvml", Library)
    assert gpu_check.driver_version() == expected
