"""Predictions say how far off such predictions have been, with the number of runs that this is known from."""

from __future__ import annotations

import json

import pytest
from memplan.planner import error_bars as bars
from memplan.planner.api import make_request
from memplan.planner.error_bars import ErrorBar, as_text, in_words, kind_of


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_HOME", str(tmp_path))
    return tmp_path


def bar(**changes) -> ErrorBar:
    values = {"figure": "reserved", "method": "full", "gpus": "one", "num_rows": 19, "median": 0.004, "p90": 0.055}
    return ErrorBar(**{**values, **changes})


def test_what_memplan_ships_is_of_enough_rows_and_in_order() -> None:
    shipped = bars.published()
    assert {(b.figure, b.method, b.gpus) for b in shipped} >= {("allocated", "full", "one"), ("reserved", "full", "one")}
    assert all(0 <= b.median <= b.p90 < 1 for b in shipped)
    assert not any(b.own for b in shipped)


def test_the_kind_of_a_run_is_its_method_and_whether_there_are_several_gpus() -> None:
    assert kind_of("full", 1) == ("full", "one")
    assert kind_of("qlora", 8) == ("adapter", "several")
    assert kind_of("zo2", 1) == ("zeroth-order", "one")


def test_too_few_rows_say_nothing(monkeypatch) -> None:
    monkeypatch.setattr(bars, "published", lambda: (bar(num_rows=4), bar(figure="allocated", num_rows=5)))
    found = bars.error_bars(make_request("openai-community/gpt2", "l4"))
    assert [b.figure for b in found] == ["allocated"]


def test_own_runs_come_before_published_ones(home, monkeypatch) -> None:
    monkeypatch.setattr(bars, "published", lambda: (bar(), bar(figure="allocated")))
    (home / "errors.json").write_text(as_text([bar(median=0.02, num_rows=7, own=True)]))
    found = {b.figure: b for b in bars.error_bars(make_request("openai-community/gpt2", "l4"))}
    assert found["reserved"].own
    assert found["reserved"].num_rows == 7
    assert not found["allocated"].own


@pytest.mark.parametrize("text", ["", "{", '{"format": 99}', '{"format": 1, "bars": [{"x": 1}]}', "[]"])
def test_a_file_of_own_figures_that_cannot_be_read_costs_nothing(home, text) -> None:
    (home / "errors.json").write_text(text)
    assert bars.own() == ()


def test_the_sentence_has_both_errors_and_the_number_of_runs() -> None:
    text = in_words((bar(figure="allocated", num_rows=60, median=0.0004, p90=0.003), bar()))
    assert text == (
        "allocated was off by 0.1% at the median, 0.3% in nine of ten (60 measured runs like this); reserved by 0.4%, 5.5% (19)"
    )
    assert in_words(()) == ""


def test_bars_survive_their_file() -> None:
    text = as_text([bar(), bar(gpus="several")])
    assert [ErrorBar(**b) for b in json.loads(text)["bars"]] == [bar(), bar(gpus="several")]
