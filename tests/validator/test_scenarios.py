"""The scenario table: which published runs bear on a question, and what the table says of a plan."""

import argparse

import pytest
from memplan.errors import UserError
from memplan.planner.prediction import Verdict
from memplan.planner.search.plan import Candidate, Plan, Refused
from memplan.validator import scenarios_cli
from memplan.validator.scenarios import BEGIN, END, SCENARIOS, Answer, Scenario, cells, put_between, table


def planned(candidates=(), **more):
    return Plan(
        question={"model": "m"}, base={}, gpu="card", usable_bytes=23 << 30, global_batch_size=8, seq_len=1024,
        objective="throughput", candidates=candidates, **more,
    )  # fmt: skip


def row(**more):
    plain = {
        "method": "full", "strategy": "single", "precision": "bf16", "optimizer": "adamw", "optimizer_impl": "fused",
        "recompute": "none", "offload": (), "gpus": 1, "nodes": 1, "micro_batch_size": 2, "grad_accum_steps": 4,
        "verdict": Verdict.FITS, "reserved_peak_bytes": 20 << 30, "headroom_bytes": 3 << 30, "host_bytes": 0, "nvme_bytes": 0,
        "step_s": 1.0, "tokens_per_s": 8192.0,
    }  # fmt: skip
    return Candidate(**{**plain, **more})


ASKED = Scenario(asked="Does it fit?", options="m")


def test_a_plan_that_fits_is_one_line_with_its_memory_and_speed():
    shown = cells(Answer(scenario=ASKED, plan=planned((row(),)), published="x: 1 of 1 ran", agrees=True))
    assert shown == ("Does it fit?", "single, bf16", "2 x 4", "20.0 of 23.0", "8,192 tokens/s", "agree (x: 1 of 1 ran)")


def test_what_is_given_up_is_said_beside_the_configuration():
    shown = cells(Answer(scenario=ASKED, plan=planned((row(gives_up=("lora: only an adapter trains",)),))))
    assert shown[1].endswith("gives up: lora: only an adapter trains")


def test_where_nothing_fits_the_table_says_what_comes_closest():
    closest = Refused(name="zo2", micro_batch_size=1, needs_bytes=31 << 30, simulated=True, reason="too much")
    shown = cells(Answer(scenario=ASKED, plan=planned(closest=closest, would_fit=("a larger card",))))
    assert shown[1] == "no plan fits: closest needs 31.00 GiB; it would fit with a larger card"


def test_the_table_is_put_between_its_markers_and_nowhere_else():
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert put_between(text, table([])) == f"before\n{BEGIN}\n{table([])}\n{END}\nafter\n"
    with pytest.raises(ValueError, match="no <!-- scenarios -->"):
        put_between("no markers", "x")


def test_there_are_twelve_questions_or_more_and_every_one_can_be_asked():
    from memplan.planner.search.cli import add_commands

    assert len({s.asked for s in SCENARIOS}) == len(SCENARIOS) >= 12
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    for scenario in SCENARIOS:
        assert parser.parse_args(["plan", *scenario.options.split()]).global_batch


@pytest.mark.parametrize("only", ["0", "99", "x"])
def test_a_question_that_does_not_exist_is_refused(only):
    with pytest.raises(UserError, match="expected numbers of 1 to"):
        scenarios_cli._numbers(only, len(SCENARIOS))
