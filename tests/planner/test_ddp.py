"""DDP by hand, on a chain of square linear layers: a weight is W bytes, a hidden state H."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest
from memplan.errors import CannotTell
from memplan.models import load
from memplan.planner.ledger import Component, Ledger
from memplan.planner.loop import LoopFacts
from memplan.planner.optimizers.traced import traced_rule
from memplan.planner.simulate import simulate
from memplan.planner.strategies.ddp import DdpSettings, DistributedDataParallel
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.steptrace import Phase, StepTrace
from memplan.planner.trace.tracer import trace_step

W = 64 * 64 * 4
H = 8 * 64 * 4
SCALAR = 4  # the loss
G = 3 * W  # bytes of all gradients

MODELS = """
    import torch

    def chain(spare=False):
        model = torch.nn.Sequential()
        model.blocks = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
        if spare:
            model.blocks.spare = torch.nn.Module()
            model.blocks.spare.weight = torch.nn.Parameter(torch.ones(8))
            model.blocks.spare.forward = lambda x: x
        return model, lambda batch, seq: {"input": torch.ones(batch, 64)}, lambda m, b: m(**b).sum()

    def inside():
        model, batch, _ = chain()
        return model, batch, lambda m, b: m.blocks(**b).sum()
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


def traced(tmp_path, factory="chain", **overrides) -> StepTrace:
    file = tmp_path / "net.py"
    file.write_text(textwrap.dedent(MODELS))
    return trace_step(load(f"{file}:{factory}", overrides=overrides), TraceOptions(batch_size=8, seq_len=1, target="cpu"))


def run(trace: StepTrace, *, loop: LoopFacts | None = None, **settings):
    strategy = DistributedDataParallel(4, DdpSettings(**settings))
    ledger, work = simulate(trace, strategy, optimizer=traced_rule("adamw", "foreach"), loop=loop)
    ledger.check()
    return ledger, work


def after(ledger: Ledger, phase: Phase, iteration: int = 0) -> int:
    rows = ledger.rows()
    return int(ledger.live_bytes()[np.flatnonzero((ledger.phase[rows] == phase) & (ledger.iteration[rows] == iteration))[-1]])


def made(ledger: Ledger, what: str, iteration: int) -> list[int]:
    """Sizes of the blocks that are called `what`, in the order in which an iteration made them."""
    chosen = (ledger.iteration == iteration) & (ledger.delta_bytes > 0)
    return [int(ledger.delta_bytes[i]) for i in np.flatnonzero(chosen) if ledger.labels[ledger.label[i]][1] == what]


def peak_of(ledger: Ledger, component: Component) -> int:
    rows = ledger.rows()
    return int(np.cumsum(np.where(ledger.component[rows] == component, ledger.delta_bytes[rows], 0)).max())


def test_every_rank_holds_the_model_and_a_bucket_of_all_gradients_before_the_first_step(tmp_path):
    ledger, _ = run(traced(tmp_path))
    assert after(ledger, Phase.INIT) == 3 * W + G


def test_gradients_are_there_twice_unless_they_are_views_of_the_buckets(tmp_path):
    trace = traced(tmp_path)
    copied, _ = run(trace)
    viewed, _ = run(trace, gradient_as_bucket_view=True)
    kept = H + SCALAR  # the batch and the loss
    assert after(copied, Phase.BACKWARD) == 3 * W + 2 * G + kept
    assert after(viewed, Phase.BACKWARD) == 3 * W + G + kept
    # a view's own gradient lives until it is copied: one at a time
    assert peak_of(viewed, Component.GRAD) == G + W


def test_clearing_gradients_gives_nothing_back_where_they_are_views(tmp_path):
    trace = traced(tmp_path)
    states = 2 * G
    for view, buckets in ((False, G), (True, G)):
        ledger, _ = run(trace, gradient_as_bucket_view=view)
        assert after(ledger, Phase.STEP) == 3 * W + buckets + states + H + SCALAR


def test_the_first_step_has_one_bucket_and_later_ones_are_full_at_the_limit(tmp_path):
    ledger, _ = run(traced(tmp_path), bucket_cap_mb=1.5 * W / 2**20)
    assert made(ledger, "gradient bucket", 0) == [3 * W]
    assert made(ledger, "gradient bucket", 1) == [2 * W, W]


def test_buckets_are_made_again_only_once(tmp_path):
    ledger, _ = run(traced(tmp_path), loop=LoopFacts(iterations=4))
    assert [len(made(ledger, "gradient bucket", i)) for i in range(4)] == [1, 1, 0, 0]


def test_the_first_bucket_is_small_unless_a_size_is_asked_for():
    assert DdpSettings().bucket_limits == (2**20, 25 * 2**20)
    assert DdpSettings(bucket_cap_mb=50).bucket_limits == (50 * 2**20, 50 * 2**20)


def test_views_that_are_still_alive_keep_the_old_buckets_beside_the_new_ones(tmp_path):
    trace = traced(tmp_path)
    late, _ = run(trace, gradient_as_bucket_view=True, loop=LoopFacts(set_to_none=False))
    assert peak_of(late, Component.GRAD) == 2 * G
    assert late.components_after(len(late) - 1)["grad"] == G


def test_views_move_bucket_by_bucket(tmp_path):
    ledger, _ = run(traced(tmp_path), gradient_as_bucket_view=True, bucket_cap_mb=W / 2**20, loop=LoopFacts(set_to_none=False))
    assert made(ledger, "gradient bucket", 1) == [W, W, W]
    assert ledger.components_after(len(ledger) - 1)["grad"] == G


@pytest.mark.parametrize(("no_sync", "per_step"), [(True, 1), (False, 3)])
def test_accumulation_averages_in_the_last_micro_step_or_in_each(tmp_path, no_sync, per_step):
    _, work = run(traced(tmp_path), no_sync=no_sync, loop=LoopFacts(grad_accum_steps=3, iterations=2))
    assert sum(w.nbytes for w in work if w.kind == "all_reduce") == 2 * per_step * G


def test_a_parameter_that_the_loss_does_not_reach_cannot_be_told(tmp_path):
    with pytest.raises(CannotTell, match=r"blocks\.spare\.weight trains but the loss does not reach it"):
        run(traced(tmp_path, spare="true"))


def test_a_step_that_goes_around_the_wrapper_cannot_be_told(tmp_path):
    with pytest.raises(CannotTell, match="never calls the whole model"):
        run(traced(tmp_path, "inside"))
