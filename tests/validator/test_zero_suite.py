"""The ZeRO strategies against the real DeepSpeed engine: every number of every mark; and how the suite judges and says so."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest
from memplan.validator.runtimes.deepspeed import Mark
from memplan.validator.zero_cases import CASES, ZeroCase
from memplan.validator.zero_suite import LIVE, PEAK, Predicted, ZeroRow, compare, render, run

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
QUICK = [case for case in CASES if case.quick]


def _judged(cases: Sequence[ZeroCase], tmp_path, monkeypatch) -> list[ZeroRow]:
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))
    return run(cases)


@needs_deepspeed
def test_the_quick_cases_are_predicted_as_the_real_engine_runs_them(tmp_path, monkeypatch):
    rows = _judged(QUICK, tmp_path, monkeypatch)
    assert {row.case for row in rows} == {case.name for case in QUICK}
    assert all(row.is_right for row in rows), render(rows)


@needs_deepspeed
@pytest.mark.slow
def test_all_cases_are_predicted_as_the_real_engine_runs_them(tmp_path, monkeypatch):
    rows = _judged([case for case in CASES if not case.quick], tmp_path, monkeypatch)
    assert all(row.is_right for row in rows), render(rows)


def test_no_two_cases_are_the_same():
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_cases_span_what_zero_is_used_with():
    assert {case.precision for case in CASES} == {"bf16", "fp16", "fp32"}
    assert {case.model for case in CASES} >= {"bert", "opt", "llama", "gpt2", "t5"}
    assert {case.world_size for case in CASES} >= {2, 3, 8, 64}
    assert any(case.rank == case.world_size - 1 for case in CASES)


def _row(what: str, predicted: int, measured: int) -> ZeroRow:
    return ZeroRow("a case", "step", 1, what, predicted, measured)


def test_a_component_must_be_equal_to_the_byte():
    assert _row("grad", 8, 8).is_right
    assert not _row("grad", 9, 8).is_right


def test_a_peak_may_be_wrong_by_a_hundredth():
    assert _row(PEAK, 1_009_999, 1_000_000).is_right
    assert not _row(PEAK, 1_010_001, 1_000_000).is_right


def test_all_live_bytes_may_differ_by_scalars_only():
    assert _row(LIVE, 1_000_200, 1_000_000).is_right
    assert not _row(LIVE, 1_000_201, 1_000_000).is_right


def test_what_only_one_side_holds_is_wrong():
    ours = Predicted("step", 0, {"grad": 4}, 4, 4, 0)
    real = Mark(phase="step", iteration=0, micro_batch=0, held={"host grad": 4}, live_bytes=4, peak_bytes=4)
    wrong = {row.what for row in compare("a case", [ours], [real]) if not row.is_right}
    assert wrong == {"grad", "host grad"}


def test_other_phases_than_the_engine_s_cannot_be_compared():
    with pytest.raises(ValueError, match="goes through step 0, the engine does not"):
        compare("a case", [Predicted("step", 0, {}, 0, 0, 0)], [])


def test_a_phase_without_an_allocation_is_as_the_one_before_left_it():
    ours = Predicted("backward", 0, {"grad": 4}, 4, 9, 0)
    real = [Mark(phase=p, iteration=0, micro_batch=0, held={"grad": 4}, live_bytes=4, peak_bytes=peak)
            for p, peak in (("backward", 9), ("step", 4))]  # fmt: skip
    rows = compare("a case", [ours], real)
    assert len(rows) == 6
    assert all(row.is_right for row in rows)


def test_the_report_shows_predicted_measured_and_ratio_of_what_is_wrong():
    said = render([_row("grad", 9, 8), _row(PEAK, 100, 100)])
    assert "a case: 1 of 2 WRONG" in said
    assert "9              8  1.1250  step 1, grad" in said
    assert said.endswith("2 numbers of 1 cases; cases with a wrong one: 1")


def test_the_report_of_right_cases_names_no_number():
    said = render([_row("grad", 8, 8), _row(PEAK, 100, 100)])
    assert "right; 2 numbers, peaks 1.0000 to 1.0000" in said
    assert "step 1" not in said
