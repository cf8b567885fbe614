"""ZeRO-3 checked by hand on a chain of square layers, and against invariants."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import numpy as np
import pytest
from memplan.errors import UserError
from memplan.models import load
from memplan.planner.ledger import Component, Ledger, Tier
from memplan.planner.loop import LoopFacts
from memplan.planner.optimizers.traced import traced_rule
from memplan.planner.simulate import simulate
from memplan.planner.strategies.deepspeed_settings import DeepSpeedSettings, LeafModules
from memplan.planner.strategies.zero3 import Zero3
from memplan.planner.strategies.zero3_hooks import kept_inputs, leaf_modules, module_use
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.steptrace import Phase, StepTrace
from memplan.planner.trace.tracer import trace_step

WIDTH, LAYERS, RANKS = 64, 6, 4
P = WIDTH * WIDTH  # elements of one layer
C = P // RANKS  # elements of its partition
W = P * 2  # bytes of one layer in bf16
NETS = """
    import torch

    def chain():
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(6)])
        return model, lambda batch, seq: {"input": torch.ones(batch, 64)}, lambda m, b: m(**b).sum()

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(64, 64)
            self.body = torch.nn.Linear(64, 64)
            self.head = torch.nn.Linear(64, 64, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.body(self.embed(x)))

    class Straight(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64, 64))

        def forward(self, x):
            return x @ self.weight

    def straight():
        model = torch.nn.Sequential(*[Straight() for _ in range(6)])
        return model, lambda batch, seq: {"input": torch.ones(batch, 64)}, lambda m, b: m(**b).sum()

    class Sliced(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1, 64, 64))

        def forward(self, x):
            return x @ self.weight[0].t()

    def sliced():
        model = torch.nn.Sequential(*[Sliced() for _ in range(6)])
        return model, lambda batch, seq: {"input": torch.ones(batch, 64)}, lambda m, b: m(**b).sum()

    def tied():
        return Tied(), lambda batch, seq: {"x": torch.ones(batch, seq, dtype=torch.long)}, lambda m, b: m(**b).sum()
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "nets.py"
    file.write_text(textwrap.dedent(NETS))
    return lambda name="chain", target="cpu", frozen=(): trace_step(
        load(f"{file}:{name}"),
        TraceOptions(batch_size=8, seq_len=1, precision="bf16", target=target, frozen=frozen),
        with_graph=False,
    )


def options(*, persistence=0, live=10**9, reuse=0, prefetch=0, bucket=P, **others) -> DeepSpeedSettings:
    return DeepSpeedSettings(
        reduce_bucket_size=bucket, stage3_param_persistence_threshold=persistence, stage3_max_live_parameters=live,
        stage3_max_reuse_distance=reuse, stage3_prefetch_bucket_size=prefetch, **others,
    )  # fmt: skip


def run(trace: StepTrace, knobs: DeepSpeedSettings, *, ranks: int = RANKS, rank: int = 0, iterations: int = 3) -> Ledger:
    rule = traced_rule("adamw", "for-loop", target="cpu")
    ledger, _ = simulate(trace, Zero3(ranks, rank, knobs), optimizer=rule, loop=LoopFacts(iterations=iterations))
    ledger.check()
    return ledger


def peak_of(ledger: Ledger, component: Component, phase: Phase, iteration: int = 2) -> int:
    """Of the GPU, of one phase of an iteration."""
    on = (ledger.component == component) & (ledger.tier == Tier.GPU)
    live = np.cumsum(np.where(on, ledger.delta_bytes, 0))
    return int(live[(ledger.phase == phase) & (ledger.iteration == iteration)].max())


def gathered(ledger: Ledger, phase: Phase, iteration: int = 2, bucket: int = P) -> int:
    return peak_of(ledger, Component.COMM_BUFFER, phase, iteration) - bucket * 2


def test_everything_that_is_kept_is_sharded(net):
    states = run(net(), options()).components_after(10**9)
    assert states["param"] == LAYERS * C * 2
    assert states["master_weight"] == LAYERS * C * 4
    assert states["grad"] == LAYERS * C * 2
    assert states["optimizer_state"] == 2 * LAYERS * C * 4 + 4
    assert states["comm_buffer"] == P * 2  # the bucket


def test_muon_has_one_momentum_in_parts_from_the_start(net):
    ledger = run(net(), options(muon="gram", reduce_scatter=False))
    first_forward = int(np.flatnonzero(ledger.phase == Phase.FORWARD)[0])
    assert ledger.components_after(first_forward)["optimizer_state"] == LAYERS * C * 2  # of the communication's dtype
    assert ledger.components_after(10**9)["optimizer_state"] == LAYERS * C * 2


def test_muon_s_gather_buffers_stay_for_the_next_step(net):
    kept = run(net(), options(muon="gram", reduce_scatter=False)).components_after(10**9)["comm_buffer"]
    plain = run(net(), options(reduce_scatter=False)).components_after(10**9)["comm_buffer"]
    assert kept - plain == (RANKS + 1) * C * 2  # the bucket holds one layer: so many are gathered at a time


def test_without_prefetch_and_reuse_one_layer_is_gathered_at_a_time(net):
    ledger = run(net(), options())
    assert gathered(ledger, Phase.FORWARD) == W
    assert gathered(ledger, Phase.FORWARD, iteration=0) == W


def test_the_first_iteration_gathers_nothing_ahead(net):
    ledger = run(net(), options(prefetch=3 * P))
    assert gathered(ledger, Phase.FORWARD, iteration=0) == W
    assert gathered(ledger, Phase.FORWARD, iteration=1) > 2 * W


def test_layers_gathered_ahead_together_are_there_twice_until_the_last_is_used(net):
    # the root and the first layer each gather ahead; three layers in one flat buffer, and a copy of each
    ledger = run(net(), options(prefetch=3 * P, live=3 * P))
    assert gathered(ledger, Phase.FORWARD) == 2 * 3 * W


def test_a_long_reuse_distance_keeps_all_layers_through_forward(net):
    ledger = run(net(), options(reuse=10**9))
    assert gathered(ledger, Phase.FORWARD) == LAYERS * W


def test_persistent_parameters_stay_but_for_the_step(net):
    ledger = run(net(), options(persistence=P))
    assert gathered(ledger, Phase.FORWARD) == LAYERS * W
    rows = np.flatnonzero((ledger.phase == Phase.STEP) & (ledger.iteration == 2))
    states = [ledger.components_after(int(row))["comm_buffer"] for row in rows]
    assert min(states) == P * 2  # all were partitioned again
    assert states[-1] == P * 2 + LAYERS * W


def test_the_model_threshold_limits_what_persists(net):
    ledger = run(net(), options(persistence=P, stage3_model_persistence_threshold=2 * P))
    assert ledger.components_after(10**9)["comm_buffer"] == P * 2 + 2 * W


def test_a_gradient_above_the_bucket_is_reduced_without_it(net):
    small, exact = (run(net(), options(bucket=bucket)) for bucket in (P - 1, P))
    grown = peak_of(small, Component.GRAD, Phase.BACKWARD) - peak_of(exact, Component.GRAD, Phase.BACKWARD)
    assert grown == W  # one waits while the next is made


def test_sub_groups_divide_what_a_step_takes(net):
    whole, parts = (run(net(), options(sub_group_size=size)) for size in (10**9, C))
    for ledger, size in ((whole, LAYERS * C), (parts, C)):
        step = peak_of(ledger, Component.GRAD, Phase.STEP) - LAYERS * C * 2
        assert step == size * (4 if size == C else 4 + 2)  # a single gradient needs no flat copy


def test_the_flat_copy_of_a_reduction_is_padded_for_every_rank(net):
    ledger = run(net(), options(bucket=LAYERS * P), ranks=3)
    part = -(-P // 3)
    flat = peak_of(ledger, Component.COMM_BUFFER, Phase.BACKWARD) - LAYERS * P * 2
    # all layers at once; the first is gathered still, since no gradient leaves it by which its hook would be called
    assert flat == (LAYERS + 1) * part * 3 * 2


def test_on_a_gpu_the_partitions_move_through_the_host(net):
    ledger = run(net(target="cuda"), options())
    assert ledger.peak_bytes(Tier.HOST_PAGEABLE) == LAYERS * C * 2
    assert ledger.live_bytes(Tier.HOST_PAGEABLE)[-1] == 0


def test_one_rank_gathers_nothing(net):
    ledger = run(net(), options(persistence=P, prefetch=P), ranks=1)
    assert gathered(ledger, Phase.FORWARD) == 0


def test_a_tied_parameter_belongs_to_both_modules(net):
    trace = net("tied")
    use = module_use(trace)
    index = {m.fqn: i for i, m in enumerate(trace.modules)}
    (shared,) = [i for i, p in enumerate(trace.params) if p.fqn == "embed.weight"]
    assert use.params[index["embed"]] == [shared]
    assert use.params[index["head"]] == [shared]
    assert len(use.params[index["body"]]) == 2


def test_no_gradient_enters_a_module_that_reads_only_ids(net):
    trace = net("tied")
    use = module_use(trace)
    enters = {m.fqn: use.has_input_grad[i] for i, m in enumerate(trace.modules)}
    assert enters == {"": False, "embed": False, "body": True, "head": True}
    assert all(use.has_output_grad)


def test_an_embedding_stays_gathered_to_the_end_of_backward(net):
    ledger = run(net("tied"), options())
    rows = np.flatnonzero((ledger.phase == Phase.BACKWARD) & (ledger.iteration == 2))
    bytes_gathered = [ledger.components_after(int(row)).get("comm_buffer", 0) - P * 2 for row in rows]
    assert bytes_gathered[-1] == 0
    assert bytes_gathered[-2] >= W


def test_a_view_that_autograd_saves_keeps_the_weight_whole_from_forward_to_backward(net):
    ledger = run(net("sliced"), options())
    # of the first layer nothing is saved: its input needs no gradient
    assert gathered(ledger, Phase.FORWARD) == (LAYERS - 1) * W
    assert gathered(ledger, Phase.BACKWARD) == LAYERS * W  # the last is gathered once more, for its backward
    assert ledger.components_after(10**9)["comm_buffer"] == P * 2


def test_torch_s_own_linear_saves_a_view_which_deepspeed_s_does_not(net):
    own, torch_s = (run(net(), options(memory_efficient_linear=efficient)) for efficient in (True, False))
    assert gathered(own, Phase.FORWARD) == W
    assert gathered(torch_s, Phase.FORWARD) == (LAYERS - 1) * W


def test_a_leaf_module_is_gathered_at_once_with_all_that_is_inside(net):
    ledger = run(net(), options(leaf_module=LeafModules(classes=("torch.nn.modules.container.Sequential",))))
    assert gathered(ledger, Phase.FORWARD) == 2 * LAYERS * W  # in one flat buffer, and a copy of each


def test_gradients_of_a_leaf_module_wait_for_the_end_of_its_backward(net):
    ledger = run(net(), options(leaf_module=LeafModules(classes=("Sequential",))))
    assert peak_of(ledger, Component.GRAD, Phase.BACKWARD) == LAYERS * C * 2 + LAYERS * W


def test_a_leaf_module_is_found_by_class_name_or_suffix(net):
    trace = net("tied")
    index = {m.fqn: i for i, m in enumerate(trace.modules)}
    assert leaf_modules(trace, LeafModules()) == frozenset()
    assert leaf_modules(trace, LeafModules(classes=("Embedding",))) == {index["embed"]}
    assert leaf_modules(trace, LeafModules(names=("body",), name_suffixes=("ead",))) == {index["body"], index["head"]}


def test_a_rank_outside_of_the_world_is_refused():
    with pytest.raises(UserError, match="expected 0 to 1"):
        Zero3(2, -1)


def test_views_that_keep_a_large_model_whole_are_said(net):
    trace = net("sliced")
    big = replace(trace, params=tuple(replace(p, shape=(1000, *p.shape[1:])) for p in trace.params))
    strategy = Zero3(RANKS, 0, options())
    simulate(big, strategy, optimizer=traced_rule("adamw", "for-loop", target="cpu"), loop=LoopFacts(iterations=2))
    (hint,) = strategy.hints()
    assert "20 of 25 million parameters after forward" in hint
    assert "--recompute full" in hint


def test_gathered_one_by_one_no_layer_is_there_twice(net):
    ledger = run(net(), options(prefetch=3 * P, live=3 * P, stage3_allgather_sequential=True))
    assert gathered(ledger, Phase.FORWARD) == 2 * W  # what is used, and one ahead


def test_gathered_by_all_reduce_layers_are_views_of_one_buffer(net):
    ledger = run(net(), options(prefetch=3 * P, live=3 * P, stage3_use_all_reduce_for_fetch_params=True))
    # the buffer of the first three stays until the third is released; meanwhile two more are gathered ahead, one by one
    assert gathered(ledger, Phase.FORWARD) == (3 + 2) * W


def test_the_input_of_a_frozen_linear_is_saved_by_deepspeed_s_own_and_not_by_torch_s(net):
    trace = net(frozen=("2", "3"))
    own, torch_s = (run(trace, options(memory_efficient_linear=efficient)) for efficient in (True, False))
    saved = [peak_of(ledger, Component.ACTIVATION, Phase.BACKWARD) for ledger in (own, torch_s)]
    assert saved[0] - saved[1] == 2 * 8 * WIDTH * 2  # the inputs of both, eight rows in bf16
    assert own.components_after(10**9) == torch_s.components_after(10**9)  # they go with the backward


def test_a_frozen_weight_that_is_no_linear_s_saves_no_input(net):
    # as GPT-2's Conv1D: its matmul is torch's own, also where the weight is square
    trace = net("straight", frozen=("2", "3"))
    assert kept_inputs(trace).at == {}
    assert len(kept_inputs(net(frozen=("2", "3"))).at) == 2
