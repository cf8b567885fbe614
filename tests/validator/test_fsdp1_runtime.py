"""torch's own FullyShardedDataParallel judges the strategy that models it: a real rank's events against the ledger."""

from __future__ import annotations

import functools

import pytest
from memplan.planner.optimizers.traced import traced_rule
from memplan.planner.simulate import simulate
from memplan.planner.strategies.fsdp1 import FullySharded
from memplan.planner.strategies.fsdp_settings import FsdpSettings
from memplan.planner.trace.source import TraceSource
from memplan.validator.api import request_for
from memplan.validator.compare import rows_of
from memplan.validator.cpu import leaf_outputs
from memplan.validator.predicted import usage_of
from memplan.validator.runtimes import torch_distributed
from memplan.validator.zoo import find

GPT2 = find("gpt2").spec(n_layer=3)
LLAMA = find("llama").spec(num_hidden_layers=3)
BERT = find("bert").spec()
T5 = find("t5").spec()
VIT = find("vit").spec()


def knobs(**changes) -> FsdpSettings:
    return FsdpSettings(version=1, **changes)


NARROW = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", "stored_dtype": "float32"}
WIDE_REDUCTION = {**NARROW, "reduce_dtype": "float32"}
# name -> model, ranks, rank, settings, options, precision of the trace where it is not the run's
CASES = {
    "units and root": (LLAMA, 4, 0, knobs(), {}, None),
    "padded, last rank": (GPT2, 3, 2, knobs(), {}, None),
    "original parameters": (LLAMA, 4, 1, knobs(use_orig_params=True), {}, None),
    "original parameters, padded": (BERT, 3, 2, knobs(use_orig_params=True), {}, None),
    "kept after forward": (LLAMA, 4, 0, knobs(sharding_strategy="SHARD_GRAD_OP"), {}, None),
    "one unit": (GPT2, 4, 0, knobs(auto_wrap_policy="NO_WRAP"), {}, None),
    "gathered after the gradients": (LLAMA, 4, 0, knobs(backward_prefetch="BACKWARD_POST"), {}, None),
    "nothing gathered ahead": (LLAMA, 4, 0, knobs(backward_prefetch=None), {}, None),
    "mixed precision": (LLAMA, 4, 0, knobs(**NARROW), {}, "bf16"),
    "mixed precision, reduced wide": (LLAMA, 8, 7, knobs(**WIDE_REDUCTION, use_orig_params=True), {}, "bf16"),
    "mixed precision, accumulated": (LLAMA, 4, 0, knobs(**NARROW), {"grad_accum_steps": 3}, "bf16"),
    "mixed precision, buffers too": (LLAMA, 4, 0, knobs(**NARROW, buffer_dtype="bfloat16"), {}, "bf16"),
    "mixed precision, images": (VIT, 4, 0, knobs(**NARROW), {}, "bf16"),
    "mixed precision, images, accumulated": (VIT, 4, 0, knobs(**NARROW), {"grad_accum_steps": 2}, "bf16"),
    "accumulated whole": (LLAMA, 4, 0, knobs(), {"grad_accum_steps": 2}, None),
    "accumulated in shards": (LLAMA, 4, 0, knobs(no_sync=False), {"grad_accum_steps": 2}, None),
    "accumulated, kept after forward": (LLAMA, 4, 0, knobs(sharding_strategy="SHARD_GRAD_OP"), {"grad_accum_steps": 2}, None),
    "recompute": (LLAMA, 4, 0, knobs(), {"recompute": "full"}, None),
    "encoder and decoder": (T5, 4, 0, knobs(), {}, None),
    "frozen first units": (LLAMA, 4, 0, knobs(), {"frozen": ("model.layers.0",)}, None),
    "autocast, norms in fp32": (LLAMA, 4, 1, knobs(), {"precision": "bf16-autocast"}, None),
    "autocast": (GPT2, 4, 1, knobs(use_orig_params=True), {"precision": "bf16-autocast"}, None),
    "autocast, recompute": (T5, 4, 1, knobs(), {"precision": "bf16-autocast", "recompute": "full"}, None),
    "momentum": (LLAMA, 2, 0, knobs(use_orig_params=True), {"optimizer": "sgd-momentum"}, None),
}  # fmt: skip


@functools.cache
def _source() -> TraceSource:
    return TraceSource(exact=True)


def compared(name: str):
    model, world_size, rank, settings, options, traced_as = CASES[name]
    request = request_for(model, "cpu", **{"micro_batch_size": 2, "seq_len": 32, "steps": 2, **options})
    asked = request.but(strategy="fsdp1", gpus=world_size, precision=traced_as or request.precision)
    trace = _source().step(asked, target="cpu")
    rule = traced_rule(request.optimizer, request.optimizer_impl, target="cpu")
    ledger, _ = simulate(trace, FullySharded(world_size, settings, rank=rank), optimizer=rule, loop=request.loop, rank=rank)
    ledger.check()
    real = torch_distributed.measure(request, FullySharded(world_size, settings, rank=rank), leaf_outputs(trace), rank=rank)
    return rows_of(usage_of(ledger), real)


@pytest.mark.parametrize("name", CASES)
def test_a_real_rank_holds_the_predicted_bytes(name):
    rows = compared(name)

    wrong = [r for r in rows if r.difference_bytes]
    assert not wrong, "\n".join(map(str, wrong))
