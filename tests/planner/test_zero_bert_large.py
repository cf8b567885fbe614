"""BERT-Large at its true size on four ranks, against figures that were measured before these strategies were written.

Measured with deepspeed 0.19.8 on the CPU: torch's fake process group, a registry of all storages, one sample of 32 tokens,
335,143,938 parameters in bf16, fused AdamW, and the bucket, prefetch and persistence that transformers' Trainer derives from
the width ("auto": h * h, 0.9 * h * h, 10 * h).  All in MiB, with one decimal.
"""

from __future__ import annotations

import numpy as np
import pytest
from memplan.models import load
from memplan.planner.ledger import Ledger
from memplan.planner.loop import LoopFacts
from memplan.planner.optimizers.traced import traced_rule
from memplan.planner.simulate import simulate
from memplan.planner.strategies.base import Strategy
from memplan.planner.strategies.deepspeed_settings import DeepSpeedSettings
from memplan.planner.strategies.zero3 import Zero3
from memplan.planner.strategies.zero12 import Zero2
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.steptrace import Phase, StepTrace
from memplan.planner.trace.tracer import trace_step

MIB = 2**20
WIDTH = 1024
AUTO = {
    "reduce_bucket_size": WIDTH * WIDTH,
    "stage3_prefetch_bucket_size": int(0.9 * WIDTH * WIDTH),
    "stage3_param_persistence_threshold": 10 * WIDTH,
}


@pytest.fixture(scope="module")
def bert_large(tmp_path_factory) -> StepTrace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMPLAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        return trace_step(
            load("bert-large-uncased", task="seq-classification"),
            TraceOptions(batch_size=1, seq_len=32, precision="bf16", target="cpu"),
            with_graph=False,
        )


def run(trace: StepTrace, strategy: Strategy) -> Ledger:
    rule = traced_rule("adamw", "fused", target="cpu")
    return simulate(trace, strategy, optimizer=rule, loop=LoopFacts(iterations=3))[0]


def peak_mib(ledger: Ledger, phase: Phase) -> float:
    """Of the third iteration: one like all later ones."""
    rows = ledger.rows()
    return round(float(ledger.live_bytes()[(ledger.phase[rows] == phase) & (ledger.iteration[rows] == 2)].max()) / MIB, 1)


def after_mib(ledger: Ledger, phase: Phase, iteration: int) -> float:
    last = np.flatnonzero((ledger.phase == phase) & (ledger.iteration == iteration))[-1]
    return round(float(ledger.live_bytes()[last]) / MIB, 1)


def test_the_model_is_the_one_that_was_measured(bert_large):
    assert sum(p.numel for p in bert_large.params) == 335_143_938


def test_zero3_with_default_knobs_gathers_the_whole_model(bert_large):
    strategy = Zero3(4, 0, DeepSpeedSettings(**AUTO))
    ledger = run(bert_large, strategy)
    assert after_mib(ledger, Phase.INIT, 0) == 641.2
    assert after_mib(ledger, Phase.STEP, 2) == 1281.1
    assert [peak_mib(ledger, p) for p in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)] == [1956.0, 1962.1, 1759.9]


def test_the_advice_names_the_two_settings_that_keep_it_in_parts(bert_large):
    default, tight = (
        Zero3(4),
        Zero3(4, 0, DeepSpeedSettings(stage3_max_live_parameters=30_000_000, stage3_max_reuse_distance=0)),
    )
    for strategy in (default, tight):
        run(bert_large, strategy)

    (hint,) = default.hints()
    assert "335 of 335 million parameters" in hint
    assert "stage3_max_live_parameters" in hint
    assert "stage3_max_reuse_distance" in hint
    assert tight.hints() == []


def test_zero3_with_tight_knobs_peaks_at_the_step(bert_large):
    knobs = DeepSpeedSettings(**AUTO, stage3_max_live_parameters=30_000_000, stage3_max_reuse_distance=0)
    ledger = run(bert_large, Zero3(4, 0, knobs))
    assert [peak_mib(ledger, p) for p in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)] == [1377.9, 1403.7, 1759.9]


def test_zero2_peaks_at_the_step(bert_large):
    ledger = run(bert_large, Zero2(4, 2, DeepSpeedSettings(reduce_bucket_size=AUTO["reduce_bucket_size"])))
    assert after_mib(ledger, Phase.STEP, 2) == 1598.1
    assert after_mib(ledger, Phase.BACKWARD, 2) == 1766.3
    assert [peak_mib(ledger, p) for p in (Phase.BACKWARD, Phase.STEP)] == [1827.9, 2245.7]
