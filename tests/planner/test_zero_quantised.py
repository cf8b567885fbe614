"""Quantised bases under DeepSpeed and DDP: what is answered, what is refused and why, and what stays whole at stage 3."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from memplan.errors import CannotTell, UserError
from memplan.models import load
from memplan.models.adapters import AdapterSettings
from memplan.planner.api import make_request
from memplan.planner.loading import loading_peak, steps
from memplan.planner.predict import ledger_of, predict
from memplan.planner.request import Request
from memplan.planner.strategies import deepspeed_engine, zero3
from memplan.planner.strategies.deepspeed_settings import DeepSpeedSettings, OffloadParam
from memplan.planner.strategies.zero3_hooks import kept_by_products
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import Phase, StepTrace

needs_bitsandbytes = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("bitsandbytes", "peft")),
    reason="bitsandbytes or peft is not installed",
)
TINY = {
    "num_hidden_layers": "2", "hidden_size": "64", "intermediate_size": "128", "num_attention_heads": "4",
    "num_key_value_heads": "2", "head_dim": "16", "vocab_size": "256",
}  # fmt: skip
PACKED = 64 * 64 * 2 // 2 + 32 * 64 * 2 // 2 + 3 * 64 * 128 // 2  # bytes of a layer: q and o, k and v, and the MLP
FIRST = 64 * 64 // 2 + 32 * 64 * 2 // 2  # of q, k and v, of whose input the first layer asks no gradient


def ask(quant: str, strategy: str = "zero2", precision: str = "bf16-mixed", **rest: Any) -> Request:
    settings = {k: v for k, v in rest.items() if k in DeepSpeedSettings.__dataclass_fields__}
    adapted = {k: rest[k] for k in ("quant_storage", "packed_as_parameters", "upcast", "rank") if k in rest}
    own = {k: v for k, v in rest.items() if k not in settings and k not in adapted}
    return make_request(
        load("meta-llama/Llama-3.1-8B", overrides=TINY), "a100-80gb", method="lora", strategy=strategy, precision=precision,
        gpus=4, micro_batch_size=1, seq_len=16, adapter=AdapterSettings(base_quant=quant, **adapted),
        deepspeed=DeepSpeedSettings(**settings) if settings else None, **own,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


def traced(request: Request) -> StepTrace:
    return TraceSource().step(request)


@pytest.mark.parametrize(
    ("request_", "error", "said"),
    [
        (ask("gptq"), UserError, r"--precision bf16-mixed: GPTQ's products are of fp16"),
        (ask("gptq", "zero0", "fp32"), UserError, r"--precision fp32: GPTQ's products"),
        (ask("gptq", precision="fp16-mixed", packed_as_parameters=True), CannotTell, r"for FSDP only"),
        (ask("nf4", quant_storage="float32"), UserError, r"bnb_4bit_quant_storage float32: DeepSpeed casts .* to bfloat16"),
        (ask("fp4-dq", precision="fp16-mixed", quant_storage="bfloat16"), UserError, r"in bfloat16 to float16"),
        (ask("nf4", "zero3", recompute="full", reentrant=True), CannotTell, r"and --reentrant: how long"),
        (ask("int8", "zero3"), UserError, r"keeps the whole 8-bit weights on every GPU"),
        (ask("nf4", "zero3", stage3_use_all_reduce_for_fetch_params=True), CannotTell, r"one dtype into its buffer"),
        (ask("nf4", "zero3", offload_param=OffloadParam(device="nvme")), CannotTell, r"offload_param\.device nvme"),
    ],
)
def test_what_deepspeed_cannot_do_with_a_quantised_base_is_said_exactly(request_, error, said):
    with pytest.raises(error, match=said):
        deepspeed_engine.check(request_)


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(
    ("quant", "precision"), [("nf4-dq", "bf16-mixed"), ("fp4", "fp32"), ("int8", "fp16-mixed"), ("gptq", "fp16-mixed")]
)
@needs_bitsandbytes
def test_a_quantised_base_under_deepspeed_is_answered(strategy, quant, precision):
    if (quant, strategy) == ("int8", "zero3"):
        pytest.skip("refused")
    answer = predict(ask(quant, strategy, precision), TraceSource())
    assert answer.peak is not None, answer.reason


def test_a_quantised_model_is_not_made_under_zero_init():
    assert not deepspeed_engine.settings_of(ask("nf4", "zero3")).zero_init
    assert not deepspeed_engine.settings_of(ask("nf4", "zero3", zero_init=True)).zero_init
    assert deepspeed_engine.settings_of(ask("none", "zero3")).zero_init
    (said,) = [line for line in deepspeed_engine.said(ask("nf4", "zero3")) if "zero.Init" in line]
    assert "loaded whole on every GPU" in said


@pytest.mark.parametrize("quant", ["int8", "gptq"])
@needs_bitsandbytes
def test_the_engine_casts_adapters_that_peft_leaves_in_fp32(quant):
    dtypes = {p.dtype for p in traced(ask(quant, precision="fp16-mixed")).params if p.requires_grad}
    assert dtypes == {"float16"}


@needs_bitsandbytes
def test_the_graph_of_the_loss_holds_each_packed_weight_that_backward_reads_again():
    trace = traced(ask("nf4", "zero3"))
    assert sum(trace.params[index].nbytes for _, index in kept_by_products(trace)) == 2 * PACKED - FIRST


@needs_bitsandbytes
def test_what_zero3_cannot_release_is_hinted_at(monkeypatch):
    monkeypatch.setattr(zero3, "_WORTH_A_HINT", 1)
    (hint,) = [h for h in predict(ask("nf4", "zero3"), TraceSource()).hints if "4-bit" in h]
    assert "--strategy zero2" in hint


@needs_bitsandbytes
def test_loading_under_deepspeed_ends_with_the_cast_back_to_16_bits():
    request = ask("nf4-dq", rank=4)
    trace = traced(request)
    kept = sum(sum(step.kept) - sum(step.gone) for step in steps(request, trace))
    assert kept == sum(t.nbytes for t in (*trace.params, *trace.buffers))
    peak = loading_peak(request, trace)
    assert peak is not None
    assert peak == loading_peak(request.but(strategy="zero3"), trace)


@needs_bitsandbytes
def test_ddp_broadcasts_no_statistics_of_packed_weights():
    """bitsandbytes' scales are no buffers of the module: a forward sends what a model without them would."""
    sent = []
    for quant in ("nf4-dq", "none"):
        request = ask(quant, "ddp", "bf16")
        ledger = ledger_of(request, traced(request))
        broadcasts = {number for number, (_, what) in enumerate(ledger.labels) if what == "broadcast"}
        made = (ledger.delta_bytes > 0) & (ledger.phase == Phase.FORWARD) & np.isin(ledger.label, list(broadcasts))
        sent.append(int(ledger.delta_bytes[made].sum()))
    assert sent[0] == sent[1]
