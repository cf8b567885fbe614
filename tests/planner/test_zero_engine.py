"""The door to DeepSpeed: which engine answers a question, and what is refused, with the key of the JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from memplan.errors import CannotTell, UserError
from memplan.hardware.catalogue import device as find_device
from memplan.models import load
from memplan.planner.loop import LoopFacts
from memplan.planner.request import Request
from memplan.planner.strategies import deepspeed_engine
from memplan.planner.strategies.deepspeed_settings import DeepSpeedSettings, OffloadOptimizer, OffloadParam
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.tracer import trace_step

BF16_MASTERS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def ask(strategy: str = "zero3", *, precision: str = "bf16-mixed", gpus: int = 4, **rest: Any) -> Request:
    settings = {k: v for k, v in rest.items() if k in DeepSpeedSettings.__dataclass_fields__}
    own = {k: v for k, v in rest.items() if k not in settings}
    return Request(
        model=load("gpt2"), device=find_device("a100-80gb"), precision=precision, strategy=strategy, gpus=gpus,
        deepspeed=DeepSpeedSettings(**settings) if settings else None, seq_len=128, **own,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "error", "said"),
    [
        (ask("zero2", offload=("param",)), UserError, r"zero_optimization\.offload_param at stage 2"),
        (ask("zero0", offload=("optimizer",)), UserError, r"zero_optimization\.offload_optimizer at stage 0"),
        (ask("zero2", offload_optimizer=OffloadOptimizer(ratio=0.5)), UserError, r"offload_optimizer\.ratio 0\.5 at stage 2"),
        (ask("zero3", zero_hpz_partition_size=3), UserError, r"zero_hpz_partition_size 3: 4 GPUs do not divide"),
        (ask("zero0", grad_accum_dtype="float32"), UserError, r"data_types\.grad_accum_dtype float32 at stage 0"),
        (
            ask("zero2", precision="fp16-mixed", fp16_master_weights_and_grads=True),
            UserError,
            r"fp16_master_weights_and_grads without DeepSpeedCPUAdam",
        ),
        (
            ask("zero0", precision="fp16-mixed", fp16_master_weights_and_grads=True),
            UserError,
            r"fp16_master_weights_and_grads at stage 0",
        ),
        (
            ask("zero2", bf16_master_weights_and_grads=True),
            UserError,
            r"with fp32 states on the GPU",
        ),
        (ask("zero0", optimizer="muon"), CannotTell, r"optimizer\.type Muon at stage 0 is not modelled"),
        (ask("zero3", optimizer="muon"), UserError, r"Muon with zero_optimization\.reduce_scatter: DeepSpeed refuses"),
        (
            ask("zero3", optimizer="muon", reduce_scatter=False, offload_optimizer=OffloadOptimizer(device="nvme")),
            CannotTell,
            r"Muon with zero_optimization\.offload_optimizer\.device nvme",
        ),
        (
            ask("zero2", optimizer="muon", bf16_master_weights_and_grads=True, offload_optimizer=OffloadOptimizer()),
            UserError,
            r"with fp32 states and optimizer\.type Muon",
        ),
        (ask("zero2", optimizer="muon", grad_accum_dtype="float32"), CannotTell, r"Muon with data_types\.grad_accum_dtype"),
        (ask("zero3", compute_grad_norm=False), UserError, r"compute_grad_norm: false at stage 3: allowed at stages 1 and 2"),
        (ask("zero2", compute_grad_norm=False, loop=LoopFacts(clip_grad_norm=True)), UserError, r"false with gradient clip"),
        (ask("zero2", compute_grad_norm=False, offload=("optimizer",)), UserError, r"compute_grad_norm: false with an offl"),
        (ask("zero2", bf16_optimizer_states=True), UserError, r"bf16\.bf16_optimizer_states without"),
        (
            ask("zero2", precision="fp32", **BF16_MASTERS),
            CannotTell,
            r"weights_and_grads at stage 2 with a float32",
        ),
        (ask("zero3", offload_optimizer=OffloadOptimizer(device="nvme"), **BF16_MASTERS), UserError, r"16-bit masters .* nvme"),
        (ask("zero2", precision="fp32", grad_accum_dtype="bfloat16"), CannotTell, r"data_types\.grad_accum_dtype bfloat16"),
        (ask("zero2", precision="bf16"), CannotTell, r"--precision bf16: DeepSpeed keeps fp32 masters"),
    ],
)
def test_what_is_not_planned_is_said_by_its_key(request_, error, said):
    with pytest.raises(error, match=said):
        deepspeed_engine.check(request_)


@pytest.mark.parametrize(
    "request_",
    [
        ask("zero0"), ask("zero1"), ask("zero2", gpus=1), ask("zero3", offload=("optimizer", "param")),
        ask("zero3", offload=("optimizer:nvme", "param:nvme")), ask("zero3", memory_efficient_linear=False),
        ask("zero3", optimizer="muon", reduce_scatter=False, offload=("optimizer",)),
        ask("zero3", offload_optimizer=OffloadOptimizer(device="nvme", fast_init=True)),
        ask("zero2", precision="fp16-mixed", fp16_master_weights_and_grads=True, offload=("optimizer",)),
        ask("zero2", optimizer="muon"), ask("zero1", optimizer="muon", offload=("optimizer",)),
        ask("zero2", **BF16_MASTERS), ask("zero2", zero_hpz_partition_size=3),
        ask("zero3", precision="fp32", offload=("param",)), ask("zero2", contiguous_gradients=False, overlap_comm=True),
    ],
)  # fmt: skip
def test_what_is_planned_passes(request_):
    deepspeed_engine.check(request_)


def test_offload_on_the_command_line_takes_deepspeed_s_defaults():
    settings = deepspeed_engine.settings_of(ask(offload=("optimizer", "param:nvme")))
    assert settings.offload_optimizer == OffloadOptimizer()
    assert settings.offload_param == OffloadParam(device="nvme")


def test_offload_of_the_configuration_is_left_as_it_is():
    own = OffloadOptimizer(pin_memory=False)
    asked = replace(ask(offload_optimizer=own), offload=("optimizer",))
    assert deepspeed_engine.settings_of(asked).offload_optimizer is own


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (ask("zero0"), "ZeRO-0 with its default knobs, no offload, FusedAdam"),
        (ask("zero3", offload=("optimizer", "param:nvme")), "optimizer on the host and parameters on NVMe, DeepSpeedCPUAdam"),
        (ask("zero2", round_robin_gradients=True), "the knobs of your configuration"),
        (ask("zero2", optimizer="muon"), "at most that) and FusedAdam"),
        (ask("zero2", optimizer="sgd"), "no offload, sgd of torch"),
        (ask("zero2", optimizer_impl="fused"), "no offload, adamw of torch"),
        (ask("zero2", optimizer_impl="fused", offload=("optimizer",)), "DeepSpeedCPUAdam"),
    ],
)
def test_the_answer_says_which_engine_and_which_adam_it_takes(request_, said):
    assert said in deepspeed_engine.said(request_)[0]


def test_nvme_below_stage_3_is_said_to_be_host_memory():
    assert "host memory" in deepspeed_engine.said(ask("zero2", offload=("optimizer:nvme",)))[1]


def test_masters_in_fp32_make_every_parameter_16_bit_also_what_transformers_keeps(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(
        '{"model_type": "t5", "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 32,'
        ' "architectures": ["T5ForConditionalGeneration"]}'
    )
    spec = load(str(tmp_path))

    def dtypes(precision: str) -> set[str]:
        options = TraceOptions(batch_size=1, seq_len=4, precision=precision, target="cpu")
        return {p.dtype for p in trace_step(spec, options, with_graph=False).params}

    assert dtypes("fp16") == {"float16", "float32"}
    assert dtypes("fp16-mixed") == {"float16"}
