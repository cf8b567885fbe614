"""ZeRO-1 and ZeRO-2 checked by hand on a chain of square layers, and against invariants."""

from __future__ import annotations

import json
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memplan.errors import UserError
from memplan.models import load
from memplan.planner.ledger import Component, Ledger, Tier
from memplan.planner.loop import LoopFacts
from memplan.planner.optimizers.traced import traced_rule
from memplan.planner.simulate import simulate
from memplan.planner.strategies.deepspeed_settings import DeepSpeedSettings, OffloadOptimizer
from memplan.planner.strategies.flat import flat_group, heaviest_rank, optimizer_groups
from memplan.planner.strategies.zero12 import Zero1, Zero2
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.steptrace import Phase, StepTrace, TensorSlot
from memplan.planner.trace.tracer import trace_step

WIDTH = 64
P = WIDTH * WIDTH  # elements of one layer; the chain has four
CHAIN = """
    import torch

    def build():
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(4)])
        return model, lambda batch, seq: {"input": torch.ones(batch, 64)}, lambda m, b: m(**b).sum()
"""


@pytest.fixture
def chain(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "chain.py"
    file.write_text(textwrap.dedent(CHAIN))
    return lambda precision="bf16": trace_step(
        load(f"{file}:build"), TraceOptions(batch_size=8, seq_len=1, precision=precision, target="cpu"), with_graph=False
    )


def run(trace: StepTrace, strategy, *, micro_steps: int = 1) -> Ledger:
    rule = traced_rule("adamw", "for-loop", target="cpu")
    ledger, _ = simulate(trace, strategy, optimizer=rule, loop=LoopFacts(grad_accum_steps=micro_steps))
    ledger.check()
    return ledger


def peak_of(ledger: Ledger, component: Component, phase: Phase, iteration: int = 1) -> int:
    live = np.cumsum(np.where(ledger.component == component, ledger.delta_bytes, 0))
    return int(live[(ledger.phase == phase) & (ledger.iteration == iteration)].max())


def test_muon_keeps_two_momentums_of_every_matrix_that_touches_the_partition(chain):
    strategy = Zero2(3, 1, DeepSpeedSettings(reduce_bucket_size=1000, muon="gram"), own_adam=True)
    ledger = run(chain(), strategy)
    assert ledger.components_after(10**9)["optimizer_state"] == 2 * 2 * 2 * P  # bf16; two matrices are cut by the rank
    assert peak_of(ledger, Component.GRAD, Phase.BACKWARD) >= 2 * 2 * 2 * P  # gradients and updates


def test_muon_on_the_host_keeps_one_momentum_of_the_partition(chain):
    settings = DeepSpeedSettings(reduce_bucket_size=1000, muon="gram", offload_optimizer=OffloadOptimizer())
    ledger = run(chain(), Zero2(2, 0, settings, own_adam=True))
    assert ledger.components_after(10**9, Tier.HOST_PAGEABLE)["optimizer_state"] == 4 * 2 * P
    assert "optimizer_state" not in ledger.components_after(10**9, Tier.GPU)


def test_the_rank_that_muon_loads_most_is_not_the_one_that_adam_does(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                    "num_attention_heads": 2, "vocab_size": 1000, "architectures": ["LlamaForCausalLM"]})
    )  # fmt: skip
    options = TraceOptions(batch_size=1, seq_len=4, precision="bf16", target="cpu")
    trace = trace_step(load(str(tmp_path)), options, with_graph=False)

    def kept(rank: int) -> int:
        settings = DeepSpeedSettings(reduce_bucket_size=1000, muon="gram")
        ledger = run(trace, Zero2(5, rank, settings, own_adam=True))
        return peak_of(ledger, Component.GRAD, Phase.BACKWARD) + ledger.components_after(10**9)["optimizer_state"]

    most = [kept(rank) for rank in range(5)]
    assert most.index(max(most)) == heaviest_rank(trace, 5, muon=True) != heaviest_rank(trace, 5)


@pytest.mark.parametrize("stage", [Zero1, Zero2])
def test_masters_and_states_are_sharded_and_parameters_are_not(chain, stage):
    states = run(chain(), stage(4)).components_after(10**9)
    assert states["param"] == 4 * P * 2
    assert states["master_weight"] == P * 4  # a fourth of four layers
    assert states["optimizer_state"] == 2 * P * 4 + 4  # m, v and the step count


def test_an_fp32_model_is_kept_twice(chain):
    states = run(chain("fp32"), Zero2(4)).components_after(10**9)
    assert states["param"] == 4 * P * 4
    assert states["master_weight"] == P * 4


def test_a_gradient_that_straddles_two_ranks_is_kept_whole_by_both(chain):
    options = DeepSpeedSettings(reduce_bucket_size=P)
    # three ranks share four layers: the middle one owns parts of layers 1 and 2, the first all of 0 and a third of 1
    for rank in range(3):
        ledger = run(chain(), Zero2(3, rank, options))
        before_step = int(np.flatnonzero(ledger.phase == Phase.STEP)[0]) - 1
        pad = -(4 * P) % 6 if rank == 2 else 0  # the flat length is a multiple of 2 N
        assert ledger.components_after(before_step)["grad"] == (2 * P + pad) * 2


def test_the_bucket_is_there_from_the_first_gradient_to_the_end_of_backward(chain):
    ledger = run(chain(), Zero2(2, 0, DeepSpeedSettings(reduce_bucket_size=3 * P)))
    assert peak_of(ledger, Component.COMM_BUFFER, Phase.FORWARD) == 0
    assert peak_of(ledger, Component.COMM_BUFFER, Phase.STEP) == 0
    # three layers are reduced at once, two of them this rank's neighbour's: two slices, so a flat copy beside the bucket
    assert peak_of(ledger, Component.COMM_BUFFER, Phase.BACKWARD) == 3 * P * 2 + 3 * P * 2


def test_overlap_doubles_the_bucket(chain):
    one, two = (
        run(chain(), Zero2(4, 0, DeepSpeedSettings(reduce_bucket_size=P, overlap_comm=overlap))) for overlap in (False, True)
    )
    grown = peak_of(two, Component.COMM_BUFFER, Phase.BACKWARD) - peak_of(one, Component.COMM_BUFFER, Phase.BACKWARD)
    assert grown == P * 2


def test_stage_1_keeps_whole_gradients_between_micro_steps_and_stage_2_does_not(chain):
    options = DeepSpeedSettings(reduce_bucket_size=P)
    first, second = (run(chain(), stage(4, 0, options), micro_steps=2) for stage in (Zero1, Zero2))
    assert peak_of(first, Component.GRAD, Phase.FORWARD) == 4 * P * 2
    assert peak_of(second, Component.GRAD, Phase.FORWARD) == P * 2


def test_fp32_accumulation_keeps_exactly_the_partition(chain):
    ledger = run(chain(), Zero2(3, 1, DeepSpeedSettings(reduce_bucket_size=P, grad_accum_dtype="float32")))
    before_step = int(np.flatnonzero(ledger.phase == Phase.STEP)[0]) - 1
    assert ledger.components_after(before_step)["grad"] == -(-4 * P // 6) * 2 * 4


@pytest.mark.parametrize("reorders", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 5, 7])
def test_the_heaviest_rank_is_the_first_that_keeps_the_most_gradients(chain, ranks, reorders):
    settings = DeepSpeedSettings(reduce_bucket_size=P, round_robin_gradients=reorders)
    kept = []
    for rank in range(ranks):
        ledger = run(chain(), Zero2(ranks, rank, settings))
        kept.append(ledger.components_after(int(np.flatnonzero(ledger.phase == Phase.STEP)[0]) - 1)["grad"])
    assert heaviest_rank(chain(), ranks, reorders=reorders) == kept.index(max(kept))


@pytest.mark.parametrize("stage", [Zero1, Zero2])
def test_more_ranks_never_keep_more(chain, stage):
    trace = chain()
    kept = [int(run(trace, stage(n)).live_bytes()[-1]) for n in (1, 2, 4, 8, 64)]
    assert kept == sorted(kept, reverse=True)


def test_no_gradient_and_no_bucket_survives_the_step(chain):
    for micro_steps in (1, 3):
        for stage in (Zero1, Zero2):
            rest = run(chain(), stage(3, 2, DeepSpeedSettings(reduce_bucket_size=P - 1)), micro_steps=micro_steps)
            assert rest.components_after(10**9).keys().isdisjoint({"grad", "comm_buffer", "workspace"})


def test_a_rank_outside_of_the_world_is_refused():
    with pytest.raises(UserError, match="expected 0 to 1"):
        Zero2(2, 2)


def test_transformers_two_groups_put_norms_and_biases_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 11, "n_positions": 8,
              "architectures": ["GPT2LMHeadModel"]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    trace = trace_step(load(str(tmp_path)), TraceOptions(batch_size=1, seq_len=4, target="cpu"), with_graph=False)

    decayed, kept = optimizer_groups(trace, "decay")

    assert all(len(p.shape) == 2 for p in decayed)
    assert all(".ln_" in p.fqn or p.fqn.endswith("bias") for p in kept)
    assert len(decayed) + len(kept) == len(trace.params)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 9))
def test_the_partitions_of_all_ranks_cover_every_parameter_once(sizes, world_size):
    params = [TensorSlot(f"p{i}", (n,), "bfloat16", True, 0, i) for i, n in enumerate(sizes)]
    groups = [flat_group(params, world_size, rank) for rank in range(world_size)]
    inside = dict.fromkeys((p.fqn for p in params), 0)
    for group in groups:
        assert group.length == group.partition * world_size
        assert group.length % (2 * world_size) == 0
        for param, numel in group.kept():
            inside[param.fqn] += numel
    assert inside == {p.fqn: p.numel for p in params}
    assert sum(g.padding for g in groups) == groups[0].length - sum(sizes)


def test_bf16_masters_and_states_halve_what_a_partition_keeps(chain):
    halves = DeepSpeedSettings(reduce_bucket_size=P, bf16_master_weights_and_grads=True, bf16_optimizer_states=True)
    states = run(chain(), Zero2(4, 0, halves, own_adam=True)).components_after(10**9)
    assert (states["master_weight"], states["optimizer_state"]) == (P * 2, P * 4)


def test_a_model_that_does_not_fit_twice_is_flattened_on_the_host(chain):
    params = 4 * P * 2
    roomy, tight = (
        run(chain(), Zero2(4, 0, DeepSpeedSettings(reduce_bucket_size=1), total_bytes=total))
        for total in (2 * params, 2 * params - 1)
    )
    assert peak_of(roomy, Component.PARAM, Phase.INIT, 0) == 2 * params
    on_gpu = tight.tier == Tier.GPU
    live = np.cumsum(np.where(on_gpu & (tight.component == Component.PARAM), tight.delta_bytes, 0))
    assert int(live[tight.phase == Phase.INIT].max()) == params
    assert tight.peak_bytes(Tier.HOST_PAGEABLE) == 2 * params
    assert int(tight.live_bytes(Tier.HOST_PAGEABLE)[-1]) == 0
