"""Several GPUs through the front door: the strategy that is named is the one that is simulated."""

from __future__ import annotations

import numpy as np
import pytest
from memplan.errors import UserError
from memplan.hardware.catalogue import device, nccl_bytes
from memplan.planner.api import fits, make_request
from memplan.planner.ledger import Tier
from memplan.planner.predict import ledger_of
from memplan.planner.prediction import Verdict
from memplan.planner.strategies import DISTRIBUTED, make_strategy
from memplan.planner.strategies.fsdp_settings import FsdpSettings
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import Phase

TINY = {"num_hidden_layers": "2", "hidden_size": "64", "intermediate_size": "128", "num_attention_heads": "4"}
TINY |= {"num_key_value_heads": "2", "head_dim": "16", "vocab_size": "512"}
MODEL = "meta-llama/Llama-3.2-1B"


@pytest.fixture(scope="module")
def traces() -> TraceSource:
    return TraceSource()


def ask(**options: object):
    given = {"micro_batch_size": 2, "seq_len": 64, "overrides": TINY, **options}
    return make_request(MODEL, "a100-80gb", **given)


@pytest.mark.parametrize("strategy", DISTRIBUTED)
def test_the_strategy_of_the_command_line_is_the_one_that_is_walked(traces, strategy):
    request = ask(strategy=strategy, gpus=4, nodes=2, precision="fp32")
    request.check()
    assert make_strategy(request, traces.step(request)).name == strategy.replace("hsdp", "fsdp2")


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_offloaded_shards_live_in_pinned_memory_and_the_optimizer_in_pageable(traces, strategy):
    request = ask(strategy=strategy, gpus=4, precision="fp32", offload=("optimizer", "param"))
    kept = ask(strategy=strategy, gpus=4, precision="fp32")
    ledger, on_gpu = ledger_of(request, traces.step(request)), ledger_of(kept, traces.step(kept))
    last = len(ledger) - 1
    shards = on_gpu.components_after(len(on_gpu) - 1)["param"]
    states = on_gpu.components_after(len(on_gpu) - 1)["optimizer_state"]

    assert ledger.components_after(last, Tier.HOST_PINNED)["param"] == shards
    assert ledger.components_after(last, Tier.HOST_PAGEABLE) == {"optimizer_state": states}
    assert "optimizer_state" not in ledger.components_after(last)
    assert ledger.peak_bytes() < on_gpu.peak_bytes()


def test_hybrid_shards_are_those_of_one_machine(traces):
    request = ask(strategy="hsdp", gpus=8, nodes=2, precision="fp32")
    alone = ask(strategy="fsdp2", gpus=4, precision="fp32")

    assert ledger_of(request, traces.step(request)).peak_bytes() == ledger_of(alone, traces.step(alone)).peak_bytes()


def test_hybrid_shards_of_the_first_version_are_its_own(traces):
    knobs = FsdpSettings(version=1, sharding_strategy="HYBRID_SHARD")
    request = ask(strategy="hsdp", gpus=8, nodes=2, precision="fp32", fsdp=knobs)
    request.check()
    found = make_strategy(request, traces.step(request))

    assert (found.name, found.world_size, found.replicas) == ("fsdp1", 4, 2)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_a_model_is_never_whole_on_the_gpu_of_a_shard(traces, strategy):
    request = ask(strategy=strategy, gpus=64, precision="fp32")
    trace = traces.step(request)
    ledger = ledger_of(request, trace)
    before = int(np.flatnonzero(ledger.phase == Phase.FORWARD)[0])

    assert ledger.live_bytes()[:before].max() < 0.75 * sum(p.nbytes for p in trace.params)


def test_sharded_states_are_smaller_the_more_ranks_share_them(traces):
    states = []
    for gpus in (2, 4, 8):
        ledger = ledger_of(request := ask(strategy="zero2", gpus=gpus, precision="bf16-mixed"), traces.step(request))
        states.append(ledger.components_after(len(ledger) - 1)["optimizer_state"])

    assert states[0] > states[1] > states[2]
    assert states[0] == pytest.approx(2 * states[1], rel=1e-3)  # exp_avg and exp_avg_sq of a half, of a quarter


def test_a_sharded_run_needs_less_than_ddp_on_each_card(traces):
    peaks = {}
    for strategy in ("ddp", "zero1", "zero3"):
        request = ask(strategy=strategy, gpus=8, precision="fp32", micro_batch_size=1, seq_len=32)
        ledger = ledger_of(request, traces.step(request))
        peaks[strategy] = ledger.components_after(len(ledger) - 1).get("optimizer_state", 0)

    assert peaks["zero1"] < peaks["ddp"] / 7
    assert peaks["zero3"] < peaks["ddp"] / 7


def test_nccl_takes_memory_that_torch_cannot_have():
    one, four = device("a100-80gb"), ask(strategy="ddp", gpus=4, precision="fp32").device

    assert one.usable_bytes - four.usable_bytes == nccl_bytes(4) == (748 + 688) * 2**20
    assert nccl_bytes(2) == (748 + 544) * 2**20


def test_16_bit_weights_under_deepspeed_have_fp32_masters_unless_said_otherwise():
    assert ask(strategy="zero3", gpus=2).precision == "bf16-mixed"
    assert ask(strategy="ddp", gpus=2).precision == "bf16"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"gpus": 2}, "--strategy single"),
        ({"gpus": 2, "strategy": "zero2", "precision": "bf16"}, "fp32 masters"),
        ({"gpus": 2, "strategy": "ddp", "precision": "bf16-mixed"}, "no fp32 masters"),
        ({"gpus": 2, "strategy": "zero1", "precision": "fp32", "mode": "inference"}, "--mode train"),
    ],
)
def test_pairs_that_are_not_modelled_are_answered_with_their_reason(options, word):
    answer = fits(MODEL, "a100-80gb", overrides=TINY, **options)

    assert answer.verdict is Verdict.UNKNOWN
    assert word in answer.reason


def test_a_sharding_strategy_needs_to_be_told_how_many_gpus_there_are():
    with pytest.raises(UserError, match="--gpus N"):
        fits(MODEL, "a100-80gb", overrides=TINY, strategy="zero1")
