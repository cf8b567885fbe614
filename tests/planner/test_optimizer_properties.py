"""What holds for every optimizer and every model: more bits cost no less, frozen parameters nothing, release no more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memplan.planner.api import make_request
from memplan.planner.ledger import Component, Ledger
from memplan.planner.optimizers.catalogue import optimizer_rule
from memplan.planner.optimizers.rule import OptimizerTensor, StepEvents
from memplan.planner.simulate import simulate
from memplan.planner.strategies.release import GradientRelease
from memplan.planner.strategies.single import SingleDevice
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import StepTrace

# From the fewest bits of a state to the most; every one of these families is one optimizer.
BITS = [
    ("torchao-adamw-4bit", "adamw-8bit", "adamw-32bit"),
    ("lion-8bit", "lion-32bit"),
    ("paged-adamw-8bit", "paged-adamw-32bit"),
    ("ademamix-8bit", "ademamix-32bit"),
    ("flash-adamw:master_weight_bits=none", "flash-adamw", "flash-adamw:master_weight_bits=32"),
    ("flash-lion:master_weight_bits=none", "flash-lion", "flash-lion:master_weight_bits=32"),
]
# Steps that take one parameter without the others, and make no more for it than for all of them together.
RELEASED = (
    "sgd",
    "adamw",
    "adamw-8bit",
    "flash-adamw",
    "lion",
    "hf-adafactor",
    "galore-adamw",
    "apollo-mini",
    "torchao-adamw-4bit",
)
matrices = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6)


def state(name: str, shapes: list[tuple[int, int]], dtype: str) -> int:
    return optimizer_rule(name).step([OptimizerTensor((64 * a, 64 * b), dtype) for a, b in shapes]).state_bytes


@settings(max_examples=25, deadline=None)
@given(matrices, st.sampled_from(BITS))
def test_more_bits_never_cost_fewer_bytes(shapes, family):
    found = [state(name, shapes, "bfloat16") for name in family]
    assert found == sorted(found)


@settings(max_examples=25, deadline=None)
@given(matrices, st.sampled_from(["adamw", "sgd-momentum", "lion", "adam-mini:dim=64,n_heads=1", "galore-adamw", "muon"]))
def test_a_wider_parameter_never_has_a_smaller_state(shapes, name):
    assert state(name, shapes, "bfloat16") <= state(name, shapes, "float32")


@settings(max_examples=25, deadline=None)
@given(matrices, st.sampled_from(RELEASED))
def test_a_step_of_one_parameter_makes_no_more_than_the_step_of_all(shapes, name):
    rule = optimizer_rule(name)
    tensors = [
        OptimizerTensor((64 * a, 64 * b), "bfloat16", name=f"layers.0.mlp.{i}.weight") for i, (a, b) in enumerate(shapes)
    ]
    whole = rule.step(tensors)
    for part in ("first", "later"):
        alone = max(StepEvents.transient_bytes(getattr(rule.step([t]), part)) for t in tensors)
        assert alone <= StepEvents.transient_bytes(getattr(whole, part))


# -- whole steps -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces():
    return TraceSource()


def traced(traces: TraceSource, frozen: tuple[str, ...] = (), tied: bool = False) -> StepTrace:
    sizes = {"num_hidden_layers": "3", "hidden_size": "64", "intermediate_size": "128", "num_attention_heads": "4"}
    sizes |= {"num_key_value_heads": "2", "head_dim": "16", "vocab_size": "500", "tie_word_embeddings": str(tied).lower()}
    known = {"precision": "bf16", "micro_batch_size": 1, "seq_len": 32, "overrides": sizes}
    return traces.step(make_request("meta-llama/Llama-3.2-1B", "h200-sxm-141gb", frozen=frozen, **known))


def simulated(trace: StepTrace, name: str, released: bool = False) -> Ledger:
    strategy = GradientRelease() if released else SingleDevice()
    ledger, _ = simulate(trace, strategy, optimizer=optimizer_rule(name))
    return ledger


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(RELEASED))
def test_release_never_raises_a_peak_without_tied_weights(traces, name):
    trace = traced(traces)
    plain, released = (simulated(trace, name, way) for way in (False, True))
    rows = [np.flatnonzero(ledger.iteration[ledger.rows()] == 1) for ledger in (plain, released)]
    before, after = (int(ledger.live_bytes()[r].max()) for ledger, r in zip((plain, released), rows, strict=True))
    tables = 2 * 1024 * len(trace.params_with_grad) if name == "adamw-8bit" else 0  # each of the optimizers has its own two
    assert after <= before + tables


PARTS = ("model.embed_tokens.", "model.layers.0.", "model.layers.1.", "model.layers.2.mlp.", "model.norm.", "lm_head.")


@settings(max_examples=12, deadline=None)
@given(st.sets(st.sampled_from(PARTS), max_size=4), st.sampled_from(["adamw", "flash-adamw", "adamw-8bit"]), st.booleans())
def test_a_frozen_parameter_has_no_gradient_and_no_state(traces, parts, name, released):
    trace = traced(traces, tuple(sorted(parts)))
    ledger = simulated(trace, name, released)
    frozen = {p.fqn for p in trace.params if not p.requires_grad}
    assert frozen == {p.fqn for p in trace.params if p.fqn.startswith(tuple(parts))} or not parts
    held = np.isin(ledger.component, (Component.GRAD, Component.OPTIMIZER_STATE))
    assert not frozen & {ledger.labels[i][0] for i in np.unique(ledger.label[held])}
    end = ledger.components_after(len(ledger) - 1)
    own = [OptimizerTensor.of(trace, p) for p in trace.params if p.requires_grad]
    if not released:  # else tables that an optimizer makes once are made for each parameter
        assert end.get("optimizer_state", 0) == optimizer_rule(name).step(own).state_bytes


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(["adamw", "sgd", "flash-adamw", "paged-adamw-8bit", "galore-adamw"]), st.booleans(), st.booleans())
def test_the_components_sum_to_the_live_bytes_at_every_moment(traces, name, released, tied):
    ledger = simulated(traced(traces, tied=tied), name, released)
    live = ledger.live_bytes()
    rows = ledger.rows()
    for position in (0, len(rows) // 3, len(rows) // 2, int(live.argmax()), len(rows) - 1):
        assert sum(ledger.components_after(int(rows[position])).values()) == live[position]
