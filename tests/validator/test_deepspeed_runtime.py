"""The harness around the real DeepSpeed engine: what it refuses, and that it can tell a right prediction from a wrong one."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from memplan.errors import CannotTell
from memplan.validator.runtimes.deepspeed import EngineCase, Mark, run_cases
from memplan.validator.zero_cases import CASES, MODELS, ZeroCase
from memplan.validator.zero_suite import compare, engine_case, ledger_of, predicted_marks, trace_of, write_models

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

LAST_RANK = next(c for c in CASES if c.stage == 2 and c.world_size == 8 and c.rank == 7)
PLAIN = [c for c in CASES if c.stage == 3 and c.settings.muon is None and c.adapter is None]
DEFAULT, TIGHT = (next(c for c in PLAIN if c.model == model) for model in ("llama", "bert"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    write_models(found)
    return found


@pytest.fixture(scope="module")
def real(folder: Path) -> dict[str, list[Mark]]:
    cases = [LAST_RANK, DEFAULT, TIGHT]
    marks = run_cases([engine_case(case, folder) for case in cases])
    return {case.name: found for case, found in zip(cases, marks, strict=True)}


def test_a_ledger_of_the_wrong_rank_is_told_apart(folder, real, monkeypatch):
    """The two ranks of one world differ where a parameter straddles their border."""
    monkeypatch.setenv("MEMPLAN_CACHE", str(folder / "cache"))
    trace = trace_of(LAST_RANK, folder)
    right, other = (
        compare("", predicted_marks(ledger_of(case, trace)), real[LAST_RANK.name])
        for case in (LAST_RANK, dataclasses.replace(LAST_RANK, rank=0))
    )
    assert all(row.is_right for row in right)
    assert {row.what for row in other if not row.is_right} >= {"grad"}


def test_tight_knobs_lower_the_real_peaks_too(real):
    """A comparison would not notice knobs that reach neither side."""

    def gathered(case: ZeroCase) -> float:
        bucket = case.settings.reduce_bucket_size * 2
        return (max(m.held["comm_buffer"] for m in real[case.name]) - bucket) / real[case.name][0].held["param"]

    assert gathered(DEFAULT) >= DEFAULT.world_size
    assert gathered(TIGHT) < 0.5 * TIGHT.world_size


def test_every_byte_that_the_structures_hold_is_seen_by_the_registry(real):
    for marks in real.values():
        assert all(sum(mark.held.values()) <= mark.live_bytes <= mark.peak_bytes for mark in marks)


def test_a_case_that_the_engine_refuses_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["gpt2"]))
    case = EngineCase(reference=str(tmp_path), config={"zero_optimization": {"stage": 4}})
    with pytest.raises(CannotTell, match="rank 0 of 2"):
        run_cases([case])
