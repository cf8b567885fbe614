"""DeepSpeed's offload as on a GPU: what lies on the host, pinned or not, and on NVMe; by hand, on a chain of square layers."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest
from memplan.errors import UserError
from memplan.models import load
from memplan.planner.ledger import Component, Ledger, Tier
from memplan.planner.loop import LoopFacts
from memplan.planner.optimizers.traced import traced_rule
from memplan.planner.simulate import simulate
from memplan.planner.strategies.base import Strategy
from memplan.planner.strategies.deepspeed_settings import DeepSpeedSettings, OffloadOptimizer, OffloadParam
from memplan.planner.strategies.zero3 import Zero3
from memplan.planner.strategies.zero12 import Zero1, Zero2
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.steptrace import Phase, StepTrace
from memplan.planner.trace.tracer import trace_step

WIDTH, LAYERS, RANKS = 64, 4, 4
P = WIDTH * WIDTH  # elements of one layer
ALL = LAYERS * P
PART = ALL // RANKS  # elements of one rank's share
BIG = 1024  # width of the chain whose partitions go to NVMe
MIB = 1 << 20
NETS = """
    import torch

    def chain(width=64):
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(4)])
        return model, lambda batch, seq: {"input": torch.ones(batch, width)}, lambda m, b: m(**b).sum()

    def big():
        return chain(1024)
"""
TIGHT = {
    "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}  # fmt: skip


@pytest.fixture
def net(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "nets.py"
    file.write_text(textwrap.dedent(NETS))
    return lambda name="chain", precision="bf16": trace_step(
        load(f"{file}:{name}"), TraceOptions(batch_size=8, seq_len=1, precision=precision, target="cuda"), with_graph=False
    )


def run(trace: StepTrace, strategy: Strategy, *, micro_steps: int = 1) -> Ledger:
    rule = traced_rule("adamw", "fused")
    ledger, _ = simulate(trace, strategy, optimizer=rule, loop=LoopFacts(grad_accum_steps=micro_steps))
    ledger.check()
    return ledger


def zero(stage: int, **settings) -> Strategy:
    kind = {1: Zero1, 2: Zero2, 3: Zero3}[stage]
    return kind(RANKS, 0, DeepSpeedSettings(**({"reduce_bucket_size": P} | settings)), own_adam=True)


def kept(ledger: Ledger, tier: Tier) -> dict[str, int]:
    """What is left after the last step, but for the batch and the loss."""
    return {what: nbytes for what, nbytes in ledger.components_after(len(ledger), tier).items() if what != "activation"}


def peak_of(ledger: Ledger, tier: Tier, phase: Phase) -> int:
    rows = ledger.rows(tier)
    return int(ledger.live_bytes(tier)[ledger.phase[rows] == phase].max())


@pytest.mark.parametrize("stage", [1, 2])
def test_below_stage_3_masters_their_gradients_and_buffers_are_pinned_and_states_are_not(net, stage):
    ledger = run(net(), zero(stage, offload_optimizer=OffloadOptimizer()))
    assert kept(ledger, Tier.HOST_PINNED) == {
        "master_weight": 4 * PART,
        "grad": 4 * PART,
        "offload_buffer": 2 * PART + 2 * P,  # staging, and one gradient
    }
    assert kept(ledger, Tier.HOST_PAGEABLE) == {"optimizer_state": 8 * PART}
    assert kept(ledger, Tier.GPU) == {"param": 2 * ALL, "offload_buffer": 2 * P}


def test_without_pin_memory_nothing_is_pinned(net):
    ledger = run(net(), zero(2, offload_optimizer=OffloadOptimizer(pin_memory=False)))
    assert ledger.peak_bytes(Tier.HOST_PINNED) == 0
    assert sum(kept(ledger, Tier.HOST_PAGEABLE).values()) == 18 * PART + 2 * P


def test_accumulation_at_stage_2_keeps_whole_gradients_on_the_host_and_stage_1_keeps_them_on_the_gpu(net):
    second, first = (run(net(), zero(s, offload_optimizer=OffloadOptimizer()), micro_steps=2) for s in (2, 1))
    assert kept(second, Tier.HOST_PINNED)["grad"] == 4 * PART + 2 * P  # one layer touches this rank's partition
    assert kept(first, Tier.HOST_PINNED)["grad"] == 4 * PART
    assert peak_of(first, Tier.GPU, Phase.FORWARD) - peak_of(second, Tier.GPU, Phase.FORWARD) >= 2 * ALL


def test_pinning_copies_so_that_both_live_for_a_moment(net):
    ledger = run(net(), zero(2, offload_optimizer=OffloadOptimizer()))
    assert peak_of(ledger, Tier.HOST_PAGEABLE, Phase.INIT) >= 4 * PART


def test_the_optimizer_takes_no_gpu_memory_in_its_step(net):
    host, gpu = (run(net(), zero(2, offload_optimizer=offload)) for offload in (OffloadOptimizer(), None))
    small = 4_096  # batch, loss and norms
    assert peak_of(host, Tier.GPU, Phase.STEP) < sum(kept(host, Tier.GPU).values()) + small
    assert peak_of(gpu, Tier.GPU, Phase.STEP) > sum(kept(gpu, Tier.GPU).values()) + 4 * PART


def test_stage_3_pins_gradients_only(net):
    ledger = run(net(), zero(3, offload_optimizer=OffloadOptimizer(), **TIGHT))
    assert kept(ledger, Tier.HOST_PINNED) == {"grad": (4 + 2) * PART}
    assert kept(ledger, Tier.HOST_PAGEABLE) == {"master_weight": 4 * PART, "optimizer_state": 8 * PART}
    assert kept(ledger, Tier.GPU) == {"param": 2 * PART, "comm_buffer": 2 * P}


def test_offloaded_parameters_are_one_pinned_buffer_whatever_pin_memory_says(net):
    for pins in (True, False):
        ledger = run(net(), zero(3, offload_param=OffloadParam(pin_memory=pins), **TIGHT))
        assert kept(ledger, Tier.HOST_PINNED) == {"param": 2 * PART}
        assert "param" not in kept(ledger, Tier.GPU)


def test_gathering_from_the_host_copies_the_partitions_to_the_gpu_first(net):
    ledger = run(net(), zero(3, offload_param=OffloadParam(), **TIGHT))
    rows = (ledger.component == Component.OFFLOAD_BUFFER) & (ledger.tier == Tier.GPU) & (ledger.delta_bytes > 0)
    assert set(ledger.delta_bytes[rows].tolist()) == {2 * P // RANKS}


def test_both_offloaded_leave_the_bucket_alone_on_the_gpu(net):
    ledger = run(net(), zero(3, offload_param=OffloadParam(), offload_optimizer=OffloadOptimizer(), **TIGHT))
    assert kept(ledger, Tier.GPU) == {"comm_buffer": 2 * P}
    assert sum(sum(kept(ledger, tier).values()) for tier in (Tier.HOST_PINNED, Tier.HOST_PAGEABLE)) == 20 * PART


def test_a_ratio_of_a_half_leaves_half_of_the_sub_groups_on_the_gpu(net):
    knobs = {"sub_group_size": PART // LAYERS, **TIGHT}  # one layer each
    ledger = run(net(), zero(3, offload_optimizer=OffloadOptimizer(ratio=0.5), **knobs))
    half = PART // 2
    gpu = kept(ledger, Tier.GPU)
    assert (gpu["master_weight"], gpu["grad"]) == (4 * half, 4 * half)
    assert gpu["optimizer_state"] == 8 * half
    assert kept(ledger, Tier.HOST_PAGEABLE) == {"master_weight": 4 * half, "optimizer_state": 8 * half}


def test_a_sub_group_on_nvme_leaves_swap_buffers_and_pinned_gradients_on_the_host(net):
    size = BIG * BIG  # elements of a rank's share of four such layers
    knobs = {"reduce_bucket_size": BIG * BIG, **TIGHT}
    ledger = run(net("big"), zero(3, offload_optimizer=OffloadOptimizer(device="nvme"), **knobs))
    assert kept(ledger, Tier.NVME) == {"master_weight": 4 * size, "optimizer_state": 8 * size, "grad": 4 * size}
    assert kept(ledger, Tier.HOST_PINNED) == {"offload_buffer": 4 * 4 * size, "grad": 2 * size}
    assert kept(ledger, Tier.HOST_PAGEABLE) == {}
    assert peak_of(ledger, Tier.HOST_PAGEABLE, Phase.STEP) == 8 * size + 2 * size  # states of the first step; write-back


def test_masters_of_16_bits_on_the_host_have_half_the_size(net):
    knobs = {"offload_optimizer": OffloadOptimizer(), "fp16_master_weights_and_grads": True}
    ledger = run(net("chain", "fp16"), zero(2, **knobs))
    pinned = kept(ledger, Tier.HOST_PINNED)
    assert (pinned["master_weight"], pinned["grad"]) == (2 * PART, 2 * PART)


def test_fast_init_reads_no_sub_group_into_pageable_memory_and_needs_buffers_of_its_size(net):
    size = BIG * BIG

    def init(elements, *, fast):
        optimizer = OffloadOptimizer(device="nvme", fast_init=fast)
        param = OffloadParam(device="nvme", max_in_cpu=0, buffer_size=elements)
        ledger = run(net("big", "fp32"), zero(3, offload_optimizer=optimizer, offload_param=param, **TIGHT))
        first_forward = int(np.flatnonzero(ledger.phase == Phase.FORWARD)[0])
        rows = (ledger.tier == Tier.HOST_PAGEABLE) & (ledger.component == Component.TEMP) & (ledger.delta_bytes > 0)
        return int(ledger.delta_bytes[:first_forward][rows[:first_forward]].sum())

    assert init(size, fast=False) - init(size, fast=True) == 4 * size
    with pytest.raises(UserError, match=r"buffer_size 262,144 with offload_optimizer\.fast_init: the largest sub-group"):
        init(size // 4, fast=True)


def test_a_sub_group_of_less_than_a_mib_stays_on_the_host(net):
    ledger = run(net(), zero(3, offload_optimizer=OffloadOptimizer(device="nvme"), **TIGHT))
    assert 4 * PART < MIB
    assert kept(ledger, Tier.NVME) == {}
    assert kept(ledger, Tier.HOST_PAGEABLE) == {"master_weight": 4 * PART, "optimizer_state": 8 * PART}


def test_parameters_on_nvme_come_back_into_memory_unless_max_in_cpu_is_small(net):
    size = BIG * BIG
    few = {"buffer_size": size, "buffer_count": 5}
    back, away = (
        run(net("big", "fp32"), zero(3, offload_param=OffloadParam(device="nvme", max_in_cpu=limit, **few), **TIGHT))
        for limit in (10**9, 0)
    )
    for ledger in (back, away):
        assert kept(ledger, Tier.NVME) == {"param": 4 * size}
    assert kept(back, Tier.HOST_PINNED) == {"offload_buffer": 5 * 4 * size, "param": 4 * size}
    assert kept(away, Tier.HOST_PINNED) == {"offload_buffer": 5 * 4 * size + 4 * 4 * size}  # swap space for whole parameters


def test_a_partition_above_the_swap_buffer_is_refused_with_the_key(net):
    with pytest.raises(UserError, match=r"offload_param\.buffer_size 1,000: the partition of 0\.weight has 262,144 elements"):
        run(net("big", "fp32"), zero(3, offload_param=OffloadParam(device="nvme", buffer_size=1_000), **TIGHT))


def test_too_few_swap_buffers_for_the_states_are_refused_with_the_key(net):
    with pytest.raises(UserError, match=r"offload_optimizer\.buffer_count 3: expected at least 4"):
        run(net("big"), zero(3, offload_optimizer=OffloadOptimizer(device="nvme", buffer_count=3), **TIGHT))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nothing_that_is_offloaded_stays_on_the_gpu_after_the_step(net, stage):
    knobs = TIGHT if stage == 3 else {}
    ledger = run(net(), zero(stage, offload_optimizer=OffloadOptimizer(), **knobs), micro_steps=3)
    assert kept(ledger, Tier.GPU).keys().isdisjoint({"grad", "optimizer_state", "master_weight", "temp"})


def test_what_moves_is_enqueued_for_the_timeline(net):
    _, work = simulate(
        net(), zero(3, offload_param=OffloadParam(), offload_optimizer=OffloadOptimizer(), **TIGHT),
        optimizer=traced_rule("adamw", "fused"), loop=LoopFacts(),
    )  # fmt: skip
    kinds = {w.kind for w in work}
    assert kinds >= {"h2d", "d2h", "host_step", "all_gather", "reduce_scatter"}
    stepped = [w.nbytes for w in work if w.kind == "host_step"]
    assert stepped == [4 * PART] * 2
