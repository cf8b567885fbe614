"""Facts of the training loop, in words and as defaults."""

from __future__ import annotations

import inspect

import pytest
import torch
from memplan.planner.loop import LoopFacts


def test_the_defaults_are_those_of_torch_and_of_the_trainer():
    facts = LoopFacts()
    signature = inspect.signature(torch.optim.Optimizer.zero_grad)
    assert facts.set_to_none is signature.parameters["set_to_none"].default
    assert (facts.grad_accum_steps, facts.zero_grad, facts.clip_grad_norm, facts.keep_outputs) == (
        1,
        "after-step",
        False,
        False,
    )


def test_at_least_two_steps_are_simulated_since_the_first_makes_the_states():
    assert LoopFacts().iterations >= 2


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (LoopFacts(), "gradients are cleared after step, set to None"),
        (LoopFacts(set_to_none=False), "kept and zeroed (set_to_none=False)"),
        (LoopFacts(zero_grad="before-backward"), "before backward"),
        (LoopFacts(grad_accum_steps=4), "4 micro steps are accumulated before each optimizer step"),
        (LoopFacts(clip_grad_norm=True), "clipped by norm"),
        (LoopFacts(keep_outputs=True), "holds the model's output"),
        (LoopFacts(), "keeps only the loss"),
    ],
)
def test_every_fact_is_said(facts, said):
    assert said in "; ".join(facts.assumptions())


def test_what_is_not_used_is_not_said():
    words = "; ".join(LoopFacts().assumptions())
    assert "accumulated" not in words
    assert "clipped" not in words
