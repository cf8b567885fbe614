"""Errors by kind of run: of complete published rows, and of validations on real GPUs."""

from __future__ import annotations

import pytest
from memplan.planner import error_bars
from memplan.validator.accuracy_errors import own_errors
from memplan.validator.store import Record


def record(predicted: int, measured: int | None, device: str = "NVIDIA L4", **request) -> Record:
    return Record(
        made="2026-01-01T00:00:00+00:00",
        outcome="agrees",
        device=device,
        request=request,
        versions={},
        predicted={"peak_bytes": predicted, "reserved_peak_bytes": predicted},
        measured=None if measured is None else {"peak_bytes": measured, "reserved_peak_bytes": None},
        reason="",
    )


def test_errors_are_relative_to_what_was_measured_by_kind() -> None:
    found = own_errors([record(p, 100) for p in (101, 98, 100, 100, 110)] + [record(50, 100, method="lora", gpus=2)])
    alone, many = sorted(found, key=lambda b: b.gpus)
    assert (alone.figure, alone.method, alone.num_rows) == ("allocated", "full", 5)
    assert (alone.median, alone.p90, alone.own) == (pytest.approx(0.01), pytest.approx(0.1), True)
    assert (many.method, many.gpus, many.median) == ("adapter", "several", pytest.approx(0.5))


def test_runs_on_the_cpu_and_runs_that_failed_say_nothing_of_a_gpu() -> None:
    assert own_errors([record(1, 1, device="cpu"), record(1, None)]) == ()


def test_a_validation_on_a_gpu_renews_the_bars_of_later_predictions(tmp_path, monkeypatch) -> None:
    from memplan.validator.compare import Comparison, rows_of
    from memplan.validator.measurement import PhaseBytes, Usage
    from memplan.validator.store import remember

    monkeypatch.setenv("MEMPLAN_HOME", str(tmp_path))
    ours, theirs = (
        Usage(
            counter="allocated",
            phases=(PhaseBytes(phase="forward", step="first step", peak_bytes=size, after_bytes=0),),
            components={},
        )
        for size in (102, 100)
    )
    for device in ("cpu", "NVIDIA L4"):
        question = {"method": "full", "gpus": 1}
        rows = rows_of(ours, theirs)
        made = Comparison(question=question, device=device, tolerance=0.01, predicted=ours, measured=theirs, rows=rows)
        assert remember(made) is None
    (bar,) = error_bars.own()
    assert (bar.num_rows, bar.median) == (1, pytest.approx(0.02))
