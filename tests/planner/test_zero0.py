"""Stage 0 and BF16_Optimizer checked by hand on a chain of square layers."""

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
from memplan.planner.strategies.base import Strategy
from memplan.planner.strategies.deepspeed_engine import strategy_of
from memplan.planner.strategies.deepspeed_settings import DeepSpeedSettings
from memplan.planner.strategies.zero0 import Zero0
from memplan.planner.strategies.zero12 import Zero1
from memplan.planner.strategies.zero_bf16 import Bf16Optimizer
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.steptrace import Phase, StepTrace
from memplan.planner.trace.tracer import trace_step

P = 64 * 64  # elements of one layer
ALL = 4 * P
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


def run(trace: StepTrace, strategy: Strategy, *, micro_steps: int = 1) -> Ledger:
    rule = traced_rule("adamw", "fused", target="cpu")
    ledger, _ = simulate(trace, strategy, optimizer=rule, loop=LoopFacts(grad_accum_steps=micro_steps))
    ledger.check()
    return ledger


def states(ledger: Ledger, phase: Phase, iteration: int = 1) -> dict[str, int]:
    """What is live when a phase has ended."""
    last = int(np.flatnonzero((ledger.phase == phase) & (ledger.iteration == iteration))[-1])
    return ledger.components_after(last)


def peak_of(ledger: Ledger, component: Component, phase: Phase, iteration: int = 1) -> int:
    live = np.cumsum(np.where(ledger.component == component, ledger.delta_bytes, 0))
    return int(live[(ledger.phase == phase) & (ledger.iteration == iteration)].max())


@pytest.mark.parametrize("own_adam", [True, False])
def test_a_16_bit_model_has_masters_and_states_from_the_start(chain, own_adam):
    found = states(run(chain(), Zero0(4, own_adam=own_adam)), Phase.INIT, 0)
    assert (found["param"], found["master_weight"]) == (2 * ALL, 4 * ALL)
    assert 0 <= found["optimizer_state"] - 8 * ALL <= 4 * 4  # torch's counts of steps
    assert "grad" not in found


def test_an_fp32_model_has_no_masters_and_states_from_the_first_step(chain):
    ledger = run(chain("fp32"), Zero0(4, own_adam=True))
    assert "optimizer_state" not in states(ledger, Phase.INIT, 0)
    found = states(ledger, Phase.STEP, 0)
    assert (found["param"], found["optimizer_state"]) == (4 * ALL, 8 * ALL)
    assert "master_weight" not in found


def test_all_gradients_are_reduced_in_one_flat_copy(chain):
    assert peak_of(run(chain(), Zero0(4)), Component.COMM_BUFFER, Phase.BACKWARD) == 2 * ALL


def test_another_communication_dtype_costs_a_second_copy(chain):
    ledger = run(chain(), Zero0(4, settings=DeepSpeedSettings(communication_data_type="float32")))
    assert peak_of(ledger, Component.COMM_BUFFER, Phase.BACKWARD) == (2 + 4) * ALL


def test_between_micro_steps_nothing_is_reduced(chain):
    one, three = (run(chain(), Zero0(4), micro_steps=n) for n in (1, 3))
    reduced = [int(((led.component == Component.COMM_BUFFER) & (led.delta_bytes > 0)).sum()) for led in (one, three)]
    assert reduced[0] == reduced[1] == 2  # once a step


def test_fused_adam_drops_the_gradients_of_the_model_before_it_steps(chain):
    fused, other = (run(chain(), Zero0(4, own_adam=own)) for own in (True, False))
    assert peak_of(fused, Component.GRAD, Phase.STEP) == (2 + 4) * ALL  # while they are flattened
    assert peak_of(other, Component.GRAD, Phase.STEP) == (2 + 4) * ALL
    assert peak_of(fused, Component.TEMP, Phase.STEP) == 4 * ALL  # one by one in fp32, before they are flat


def test_more_ranks_change_nothing_without_zero(chain):
    trace = chain()
    assert run(trace, Zero0(2)).live_bytes().tolist() == run(trace, Zero0(64, 63)).live_bytes().tolist()


def test_stage_0_with_fp32_accumulation_is_refused_as_deepspeed_does(chain):
    with pytest.raises(CannotTell, match=r"data_types\.grad_accum_dtype float32 with a bfloat16 model"):
        run(chain(), Zero0(2, settings=DeepSpeedSettings(grad_accum_dtype="float32")))


def test_bf16_with_fp32_accumulation_at_stage_1_is_another_optimizer(chain):
    trace, fp32 = chain(), DeepSpeedSettings(grad_accum_dtype="float32")
    assert isinstance(strategy_of(1, fp32, trace, 4, None, own_adam=True), Bf16Optimizer)
    assert isinstance(strategy_of(1, DeepSpeedSettings(), trace, 4, None, own_adam=True), Zero1)


def test_bf16_optimizer_keeps_all_gradients_in_fp32_on_every_rank(chain):
    ledger = run(chain(), Bf16Optimizer(4, 3))
    found = states(ledger, Phase.INIT, 0)
    assert found == {"param": 2 * ALL, "master_weight": ALL, "grad": 4 * ALL}
    assert states(ledger, Phase.BACKWARD)["grad"] == (4 + 2) * ALL
    assert states(ledger, Phase.STEP)["grad"] == 4 * ALL


def test_bf16_optimizer_reduces_a_bf16_copy_of_all_gradients(chain):
    assert peak_of(run(chain(), Bf16Optimizer(4, 0)), Component.COMM_BUFFER, Phase.BACKWARD) == 2 * ALL
