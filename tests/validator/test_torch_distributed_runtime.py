"""torch's own DDP and fully_shard judge the strategies that model them: a real rank's allocator events against the ledger."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from memplan.planner.optimizers.traced import traced_rule
from memplan.planner.simulate import simulate
from memplan.planner.strategies.ddp import DdpSettings, DistributedDataParallel
from memplan.planner.strategies.fsdp2 import Fsdp2Settings, FullyShard
from memplan.planner.trace.source import TraceSource
from memplan.validator.api import request_for
from memplan.validator.compare import rows_of
from memplan.validator.cpu import leaf_outputs
from memplan.validator.predicted import usage_of
from memplan.validator.runtimes import torch_distributed
from memplan.validator.zoo import find

USER = Path(__file__).with_name("user_models.py")

GPT2 = find("gpt2").spec(n_layer=3)
LLAMA = find("llama").spec(num_hidden_layers=3)
T5 = find("t5").spec()
MIXTRAL = find("mixtral").spec()
CNN, SHARED, UNUSED, SEVERAL = (f"{USER}:{name}" for name in ("cnn", "shared", "unused_layer", "several_forwards"))


@functools.cache
def _source() -> TraceSource:
    return TraceSource(exact=True)


def _trace(request):
    return _source().step(request, target="cpu")


def asked(model, **options):
    return request_for(model, "cpu", **{"micro_batch_size": 2, "seq_len": 32, "steps": 3, **options})


def compared(make, request, *, rank=0, traced_as=None):
    """Rows of the prediction against the real run; both get a strategy of their own."""
    trace = _trace(request.but(precision=traced_as) if traced_as else request)
    rule = traced_rule(request.optimizer, request.optimizer_impl, target="cpu")
    ledger, _ = simulate(trace, make(), optimizer=rule, loop=request.loop, rank=rank)
    ledger.check()
    return rows_of(usage_of(ledger), torch_distributed.measure(request, make(), leaf_outputs(trace), rank=rank))


def assert_equal(rows):
    """Every peak, what every phase leaves, and every component."""
    wrong = [r for r in rows if r.difference_bytes]
    assert not wrong, "\n".join(map(str, wrong))
    assert {r.what for r in rows} == {"peak", "after", "param", "buffer", "grad", "optimizer_state"}
    assert rows[0].measured_bytes > 0


VIEW = DdpSettings(gradient_as_bucket_view=True)
DDP = {
    "copies": (GPT2, DdpSettings(), {}),
    "accumulation without averaging": (LLAMA, DdpSettings(), {"grad_accum_steps": 3}),
    "views, accumulated and zeroed": (LLAMA, VIEW, {"grad_accum_steps": 2, "set_to_none": False}),
    "views in many buckets, averaged every time": (
        LLAMA,
        DdpSettings(bucket_cap_mb=0.1, gradient_as_bucket_view=True, no_sync=False),
        {"grad_accum_steps": 2, "zero_grad": "before-backward"},
    ),
    "autocast, clipped": (LLAMA, DdpSettings(), {"precision": "bf16-autocast", "clip_grad_norm": True}),
    "recompute": (T5, DdpSettings(), {"recompute": "full"}),
    "buffers that are broadcast": (CNN, DdpSettings(), {"micro_batch_size": 1}),
    "frozen and shared parameters": (SHARED, VIEW, {}),
    "three forwards in a step": (SEVERAL, DdpSettings(), {}),
}


@pytest.mark.parametrize("name", DDP)
def test_ddp_has_the_peaks_and_the_states_of_a_real_rank(name):
    model, settings, options = DDP[name]
    rows = compared(lambda: DistributedDataParallel(4, settings), asked(model, **options))
    assert_equal(rows)


MIXED = Fsdp2Settings(param_dtype="bfloat16", reduce_dtype="float32")
# name -> model, ranks, rank, settings, options, precision of the trace where it is not the run's
FSDP2 = {
    "blocks and root": (GPT2, 4, 0, Fsdp2Settings(), {}, None),
    "uneven rows, last rank": (LLAMA, 3, 2, Fsdp2Settings(), {}, None),
    "more ranks than rows": (LLAMA, 100, 99, Fsdp2Settings(), {}, None),
    "one rank": (LLAMA, 1, 0, MIXED, {}, "bf16"),
    "kept after forward": (LLAMA, 4, 0, Fsdp2Settings(reshard_after_forward=False), {}, None),
    "root dropped too": (LLAMA, 4, 0, Fsdp2Settings(reshard_after_forward=True), {}, None),
    "root dropped, blocks kept": (
        LLAMA, 4, 0, Fsdp2Settings(reshard_after_forward=False, root_reshard_after_forward=True), {}, None,
    ),
    "root kept, blocks dropped": (
        LLAMA, 4, 0, Fsdp2Settings(reshard_after_forward=True, root_reshard_after_forward=False), {}, None,
    ),
    "autocast and recompute": (T5, 4, 0, Fsdp2Settings(), {"precision": "bf16-autocast", "recompute": "full"}, None),
    "mixed precision": (LLAMA, 4, 0, MIXED, {}, "bf16"),
    "mixed precision, reduced narrow": (LLAMA, 4, 0, Fsdp2Settings(param_dtype="bfloat16"), {}, "bf16"),
    "mixed precision, accumulated": (LLAMA, 4, 1, MIXED, {"grad_accum_steps": 3}, "bf16"),
    "accumulated whole": (LLAMA, 4, 0, Fsdp2Settings(), {"grad_accum_steps": 2}, None),
    "accumulated in shards, zeroed": (
        LLAMA, 4, 0, Fsdp2Settings(no_sync=False), {"grad_accum_steps": 2, "set_to_none": False}, None,
    ),
    "accelerate's units": (
        LLAMA, 4, 0, Fsdp2Settings(embedding="model.embed_tokens", head=("model.norm", "lm_head")), {}, None,
    ),
    "accelerate's units, tied": (GPT2, 4, 0, Fsdp2Settings(head=("transformer.wte", "transformer.ln_f", "lm_head")), {}, None),
    "recompute": (LLAMA, 4, 0, Fsdp2Settings(), {"recompute": "full"}, None),
    "autocast": (LLAMA, 4, 1, Fsdp2Settings(), {"precision": "bf16-autocast"}, None),
    "experts": (MIXTRAL, 4, 0, Fsdp2Settings(), {}, None),
    "encoder and decoder": (T5, 4, 0, Fsdp2Settings(), {}, None),
    "wrapped inside wrapped": (
        LLAMA, 4, 0, Fsdp2Settings(blocks=("model.layers.0.mlp", "model.layers.1", "model.layers.1.mlp", "lm_head")), {}, None,
    ),
    "frozen first blocks": (LLAMA, 4, 0, Fsdp2Settings(), {"frozen": ("model.embed_tokens", "model.layers.0")}, None),
    "shared and frozen parameters, no blocks": (SHARED, 4, 3, Fsdp2Settings(), {}, None),
    "a layer that is never reached": (UNUSED, 4, 0, Fsdp2Settings(), {}, None),
    "momentum": (LLAMA, 4, 0, Fsdp2Settings(), {"optimizer": "sgd-momentum"}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", FSDP2)
def test_fsdp2_has_the_peaks_and_the_states_of_a_real_rank(name):
    model, world_size, rank, settings, options, traced_as = FSDP2[name]
    request = asked(model, steps=2, **options)
    assert_equal(compared(lambda: FullyShard(world_size, settings), request, rank=rank, traced_as=traced_as))


@pytest.mark.parametrize("model", ["vit", "dinov2"])
def test_images_are_cast_by_the_root_of_a_mixed_run(model):
    """Equal but for eight bytes of a scalar."""
    rows = compared(lambda: FullyShard(4, MIXED), asked(find(model).spec(), steps=2), traced_as="bf16")

    assert max(abs(r.difference_bytes) for r in rows) <= 8


def test_clipping_of_sharded_gradients_is_within_a_thousandth():
    """DTensors make a few scalars more than plain tensors do."""
    rows = compared(lambda: FullyShard(4), asked(LLAMA, clip_grad_norm=True))
    assert all(r.within(0.002) for r in rows if r.what == "peak")
    assert rows[0].difference_bytes == 0


def test_a_wrong_prediction_is_seen():
    """The comparison can fail: buckets of their own are predicted for a run that has views."""
    request = asked(GPT2)
    trace = _trace(request)
    ledger, _ = simulate(trace, DistributedDataParallel(4), optimizer=traced_rule("adamw", target="cpu"), loop=request.loop)
    real = torch_distributed.measure(request, DistributedDataParallel(4, VIEW), leaf_outputs(trace))
    with pytest.raises(AssertionError):
        assert_equal(rows_of(usage_of(ledger), real))


def test_the_process_group_is_gone_after_a_run():
    import torch.distributed as dist

    request = asked(SHARED)
    torch_distributed.measure(request, DistributedDataParallel(2), leaf_outputs(_trace(request)))
    assert not dist.is_initialized()
