"""ZO2's published table as rows of memplan's collection: what is asked, and how far the answers are off."""

from __future__ import annotations

from pathlib import Path

import pytest
from memplan import validator
from memplan.planner.trace.source import TraceSource
from memplan.validator.accuracy_question import question_of
from memplan.validator.accuracy_rows import read_rows
from memplan.validator.accuracy_score import score_row
from memplan.validator.accuracy_where import select

ROWS = Path(validator.__file__).with_name("published") / "rows.jsonl"


@pytest.fixture(scope="module")
def rows():
    found, _ = read_rows(ROWS)
    return {row.model.ref.partition("opt-")[2]: row for row in select(found, ["source=zo2"])}


def test_every_size_of_the_table_is_asked_as_zo2_runs_it(rows):
    assert list(rows) == ["1.3b", "2.7b", "6.7b", "13b", "30b", "66b", "175b"]
    for row in rows.values():
        request = question_of(row).request
        assert (request.method, request.precision, request.attention, request.loss) == ("zo2", "fp16", "eager", "shifted")
        assert request.model.config["tie_word_embeddings"] is False
        assert request.offload == ()


@pytest.mark.parametrize("size", ["1.3b", "30b", "175b"])
def test_what_nvml_shows_is_predicted_within_4_percent(rows, size):
    scored = score_row(rows[size], TraceSource())

    assert scored.reason == ""
    assert scored.ratio == pytest.approx(1, abs=0.04)


def test_the_source_counts_mebibytes_in_thousands_and_the_driver_with_them(rows):
    """README at 4bca25c: "3.75" is what test_memory.py prints as 3750 MB, and its MB are 2^20 bytes."""
    question = question_of(rows["1.3b"])
    device = question.request.device

    assert score_row(rows["1.3b"], TraceSource()).measured_bytes == 3750 << 20
    assert question.context_bytes - device.context_bytes == device.nominal_gb * 2**30 - device.total_bytes > 0
