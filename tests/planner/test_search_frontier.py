"""The frontier: no row is beaten in both speed and memory, and every row is found again by a search under its own limit."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from memplan.planner.search.api import make_plan, questions
from memplan.planner.search.frontier import frontier
from memplan.planner.search.plan import Plan
from memplan.planner.search.space import Wanted
from memplan.planner.search.table import render
from memplan.planner.show.figure import _saved, draw_frontier
from memplan.planner.trace.source import TraceSource

GPT2 = {"n_layer": "4", "n_embd": "256", "n_head": "4", "vocab_size": "1024"}
WANTED = Wanted(global_batch_size=32, strategies=("single", "ddp", "zero2", "fsdp2"), recomputes=("none", "full"))


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMPLAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield TraceSource()


@pytest.fixture(scope="module")
def bases():
    return questions("openai-community/gpt2", "l4", 2, WANTED, overrides=GPT2, seq_len=256)


@pytest.fixture(scope="module")
def plan(bases, traces) -> Plan:
    return frontier(bases, WANTED, traces)


def test_each_row_is_slower_and_smaller_than_the_one_before(plan) -> None:
    assert len(plan.candidates) > 2
    for faster, smaller in pairwise(plan.candidates):
        assert smaller.step_s > faster.step_s
        assert smaller.reserved_peak_bytes < faster.reserved_peak_bytes


def test_the_first_row_is_the_fastest_plan(plan, bases, traces) -> None:
    assert plan.candidates[0].name == make_plan(bases, WANTED, traces, top=1).best.name


def test_no_configuration_beats_a_row_in_both(plan, bases, traces) -> None:
    everything = make_plan(bases, WANTED, traces, top=10_000)
    for row in plan.candidates:
        better = [c.name for c in everything.candidates
                  if c.step_s < row.step_s * (1 - 1e-9) and c.reserved_peak_bytes <= row.reserved_peak_bytes]  # fmt: skip
        assert better == []


def test_headroom_is_that_of_the_whole_card(plan) -> None:
    assert all(c.headroom_bytes == plan.usable_bytes - c.reserved_peak_bytes for c in plan.candidates)


def test_it_is_printed_and_drawn(plan) -> None:
    assert "the frontier: fastest first" in " ".join(render(plan).split())
    pytest.importorskip("matplotlib")
    assert _saved(lambda: draw_frontier(plan), "png").startswith(b"\x89PNG")
    assert Plan.from_json(json.loads(plan.text())).text() == plan.text()
