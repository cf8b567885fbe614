"""A trace made deep equals a trace of the deep model, column by column."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest
import torch
from memplan.models import load
from memplan.planner.api import make_request
from memplan.planner.trace.depth import NotPeriodic, Stack, deepen, find_stacks, same_structure
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.tracer import stacks_of, trace_step


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


DECODER = {
    "hidden_size": "32", "intermediate_size": "48", "num_attention_heads": "4", "num_key_value_heads": "2", "head_dim": "8",
    "vocab_size": "64",
}  # fmt: skip
MODELS = {
    "llama": ("meta-llama/Llama-3.1-8B", {**DECODER, "num_hidden_layers": "9"}),
    "gpt2": ("openai-community/gpt2", {"n_embd": "32", "n_head": "4", "vocab_size": "64", "n_layer": "8"}),
}
