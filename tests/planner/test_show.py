"""Pictures and pages: they lose no peak, they open without a network, and no name breaks out of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from memplan.errors import UserError
from memplan.planner.api import make_request
from memplan.planner.ledger import Component, LedgerBuilder
from memplan.planner.prediction import Verdict
from memplan.planner.search import cli as search_cli
from memplan.planner.show import cli
from memplan.planner.show.figure import picture
from memplan.planner.show.html import candidates, prediction_html
from memplan.planner.show.memory import course
from memplan.planner.show.page import frontier, lanes, memory, page, phases
from memplan.planner.timeline.engine import Span
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import Phase
from memplan.units import GiB, gib

GPT2 = {"n_layer": "2", "n_embd": "64", "n_head": "4", "vocab_size": "512"}
HOSTILE = '</script><script>alert("x")</script><b>&'


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMPLAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def shown():
    request = make_request("openai-community/gpt2", "l4", overrides=GPT2, seq_len=64, grad_accum_steps=2)
    return cli.simulate_again(request, TraceSource())


@pytest.fixture(scope="module")
def plan():
    import argparse

    from memplan.planner.search.api import make_plan

    parser = argparse.ArgumentParser()
    search_cli.add_commands(parser.add_subparsers())
    words = ["plan", "openai-community/gpt2", "--gpu", "l4", "--gpus", "2", "--seq", "64", "--strategy", "ddp,zero2"]
    words += [f"--set={key}={value}" for key, value in GPT2.items()]
    wanted, bases = search_cli.asked(parser.parse_args(words))
    return make_plan(bases, wanted, TraceSource())


def spiky(spike: int, length: int = 5000):
    """A run whose peak lives for one event."""
    builder = LedgerBuilder()
    builder.now_phase = int(Phase.FORWARD)
    for i in range(length):
        block = builder.alloc(1000 if i == spike else 10, Component.TEMP, "x")
        builder.free(block)
    return builder.finish(lambda key: ("", key))


@pytest.mark.parametrize("spike", [0, 1, 777, 4999])
def test_a_peak_of_one_event_is_among_the_events_that_are_drawn(spike: int) -> None:
    run = course(spiky(spike), points=50)
    assert run.peak_bytes == 1000
    assert len(run.events) <= 55
    assert max(run.components["temp"]) == 1000
    assert run.events[int(run.components["temp"].argmax())] == run.peak


def test_components_sum_to_what_is_live_at_each_drawn_event(shown) -> None:
    _, ledger, _ = shown
    run = course(ledger, points=100)
    assert np.array_equal(sum(run.components.values()), ledger.live_bytes()[run.events])
    assert run.peak_bytes == ledger.peak_bytes()


def test_stretches_follow_each_other_and_cover_the_run(shown) -> None:
    _, ledger, _ = shown
    stretches = course(ledger).stretches
    assert [s.start for s in stretches[1:]] == [s.stop for s in stretches[:-1]]
    assert (stretches[0].start, stretches[-1].stop) == (0, len(ledger.rows()))
    assert [s.phase for s in stretches[1:5]] == ["forward", "backward", "forward", "backward"]


def test_plotly_takes_every_picture(shown, plan) -> None:
    plotly = pytest.importorskip("plotly.graph_objects")
    prediction, ledger, spans = shown
    for figure in (memory(prediction, ledger), phases(prediction), lanes(spans), frontier(plan)):
        plotly.Figure(**figure)  # raises for a property that does not exist


def test_very_many_spans_are_joined_without_losing_busy_time() -> None:
    spans = [Span(i, "compute", f"op {i % 3}", i * 1e-3, i * 1e-3 + 9e-4, {}) for i in range(10_000)]
    drawn = lanes(spans)["data"][0]
    assert len(drawn["x"]) <= 2001
    assert max(b + x for b, x in zip(drawn["base"], drawn["x"], strict=True)) == pytest.approx(9.9999, abs=1e-3)


def test_a_row_that_fits_because_the_cache_is_emptied_is_shown_within_the_card(plan) -> None:
    held = plan.candidates[0].reserved_peak_bytes
    tight = replace(plan.candidates[0], reserved_peak_bytes=held + 3 * GiB, headroom_bytes=-3 * GiB, verdict=Verdict.TIGHT)
    alone = replace(plan, candidates=(tight,))

    assert frontier(alone)["data"][-1]["x"] == [pytest.approx(held / GiB)]
    assert gib(held + 3 * GiB) not in candidates(alone)
    assert gib(-3 * GiB) not in candidates(alone)


def test_a_page_loads_nothing_and_holds_every_part(shown, plan) -> None:
    pytest.importorskip("plotly")
    text = page(*shown, plan)
    body = text[text.index("<body>") :]
    assert not re.search(r'(src|href)="', text[: text.index("<script>")] + body)
    assert all(f'id="{name}"' in body for name in ("frontier", "course", "phases", "lanes"))
    assert body.count("Plotly.newPlot(") == 4


def test_names_of_the_user_stay_text(shown) -> None:
    pytest.importorskip("plotly")
    prediction, ledger, spans = shown
    evil = replace(prediction, question={**prediction.question, "model": HOSTILE}, gpu=HOSTILE, assumptions=(HOSTILE,))
    marked = [replace(span, name=HOSTILE) for span in spans]
    body = page(evil, ledger, marked)
    body = body[body.index("<body>") :]
    assert "alert" in body  # the name is there ...
    assert "<script>alert" not in body  # ... and runs nothing
    assert body.count("</script>") == 1
    assert "<script" not in prediction_html(evil)


def test_notebooks_show_answers_and_plans(shown, plan) -> None:
    prediction, _, _ = shown
    assert "held by PyTorch" in prediction._repr_html_()
    assert all(c.name in plan._repr_html_() for c in plan.candidates)
    assert plan.best.name in str(plan)


def test_one_answer_is_one_picture(shown) -> None:
    pytest.importorskip("matplotlib")
    prediction, ledger, _ = shown
    assert picture(prediction, ledger, "svg") == picture(prediction, ledger, "svg")
    assert picture(prediction, ledger, "png").startswith(b"\x89PNG")


def test_an_answer_and_each_row_of_a_plan_are_read_back(shown, plan, tmp_path) -> None:
    prediction, _, _ = shown
    (tmp_path / "fit.json").write_text(json.dumps(prediction.to_json()))
    (tmp_path / "plan.json").write_text(plan.text())
    request, none = cli.read(str(tmp_path / "fit.json"))
    assert none is None
    again, _, _ = cli.simulate_again(request, TraceSource())
    assert again.to_json()["peak"] == prediction.to_json()["peak"]
    for row, candidate in enumerate(plan.candidates, 1):
        request, read = cli.read(str(tmp_path), row)
        assert read is not None
        assert read.text() == plan.text()
        again, _, _ = cli.simulate_again(request, TraceSource())
        assert again.reserved_peak_bytes == candidate.reserved_peak_bytes


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "is not JSON"), ("[]", "no answer of memplan"), ("{}", "no answer of memplan"), (None, "cannot read")],
)
def test_what_is_no_answer_is_said(tmp_path, text, said) -> None:
    file = tmp_path / "x.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=said):
        cli.read(str(file))


def test_a_plan_of_a_newer_memplan_is_refused(tmp_path, plan) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**plan.to_json(), "format": 99}))
    with pytest.raises(UserError, match="written by a newer memplan"):
        cli.read(str(tmp_path))
