"""Adapters trained for real on this machine's CPU, by peft and bitsandbytes themselves, against what was predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from memplan.models import load
from memplan.models.adapters import AdapterSettings
from memplan.planner.strategies.deepspeed_settings import DeepSpeedSettings
from memplan.planner.strategies.fsdp_settings import FsdpSettings
from memplan.validator.api import request_for, run

pytest.importorskip("peft")

SMALL = {
    "num_hidden_layers": "2",
    "hidden_size": "256",
    "intermediate_size": "512",
    "num_attention_heads": "4",
    "num_key_value_heads": "2",
    "head_dim": "64",
    "vocab_size": "1024",
}
EVERYWHERE = ("all-linear",)


def compare(**options: Any):
    spec = load("meta-llama/Llama-3.1-8B", overrides=SMALL)
    return run(request_for(spec, "cpu", micro_batch_size=2, seq_len=96, **options), "cpu", isolated=False)


def assert_equal_within(comparison, share: float) -> None:
    assert comparison.measured is not None, comparison.reason
    predicted, measured = comparison.predicted.peak_bytes, comparison.measured.peak_bytes
    assert abs(predicted - measured) <= share * measured, (predicted, measured)
    for row in comparison.rows:  # and what every phase leaves
        assert abs(row.predicted_bytes - row.measured_bytes) <= max(share * row.measured_bytes, 2048), row


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("fp32", AdapterSettings(rank=4)),
        ("bf16", AdapterSettings(rank=16, dropout=0.1, targets=EVERYWHERE)),
        ("bf16", AdapterSettings(targets=EVERYWHERE, autocast=False)),
        ("bf16", AdapterSettings(adapter_dtype="base", autocast=False, modules_to_save=("lm_head",))),
    ],
    ids=["fp32", "autocast-dropout", "fp32-adapters-without-autocast", "16-bit-adapters"],
)
def test_a_real_lora_step_takes_what_was_predicted(precision, settings):
    assert_equal_within(compare(method="lora", precision=precision, adapter=settings), 0.001)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_real_lora_step_with_activation_checkpointing_takes_what_was_predicted(reentrant):
    options = {"method": "lora", "precision": "bf16", "recompute": "full", "reentrant": reentrant}
    assert_equal_within(compare(**options), 0.001)


@pytest.mark.parametrize("method", ["dora", "oft", "ia3", "loha", "prefix-tuning"])
def test_a_real_step_of_other_adapters_takes_what_was_predicted(method):
    assert_equal_within(compare(method=method, precision="bf16"), 0.001)


@pytest.mark.parametrize(
    "settings",
    [
        AdapterSettings.of("qlora"),
        AdapterSettings(base_quant="fp4", upcast=False, targets=EVERYWHERE),
        AdapterSettings(kind="dora", base_quant="nf4"),
    ],
    ids=["nf4-dq", "fp4", "dora-nf4"],
)
def test_a_real_step_on_a_4_bit_base_takes_what_was_predicted(settings):
    pytest.importorskip("bitsandbytes")
    assert_equal_within(compare(method=settings.kind, precision="bf16", adapter=settings), 0.005)


RANK_4 = AdapterSettings(rank=4)
ORIGINAL = FsdpSettings(version=1, use_orig_params=True)
SMALL_BUCKETS = {"deepspeed": DeepSpeedSettings(reduce_bucket_size=20_000, allgather_bucket_size=20_000)}
REENTRANT = {"recompute": "full", "reentrant": True}
# name -> strategy, precision, adapter, further options, share of the peak that may differ
ON_TWO_GPUS: dict[str, tuple[str, str, AdapterSettings, dict[str, Any], float]] = {
    "ddp": ("ddp", "bf16", RANK_4, {}, 0.0),
    "fsdp1": ("fsdp1", "fp32", RANK_4, {}, 0.0),
    "fsdp1, original parameters, reentrant": ("fsdp1", "bf16", RANK_4, {"fsdp": ORIGINAL, **REENTRANT}, 0.0),
    "fsdp2": ("fsdp2", "bf16", RANK_4, {"recompute": "full"}, 0.0),
    "fsdp2, mixed": ("fsdp2", "bf16-mixed", RANK_4, {}, 0.0),
}
SLOW_ON_TWO_GPUS: dict[str, tuple[str, str, AdapterSettings, dict[str, Any], float]] = {
    "fsdp1, mixed": ("fsdp1", "bf16-mixed", RANK_4, {"fsdp": ORIGINAL, "recompute": "full"}, 0.0),
    "ddp, qlora": ("ddp", "bf16", AdapterSettings.of("qlora"), {}, 0.001),
    "fsdp1, qlora": ("fsdp1", "bf16", AdapterSettings.of("qlora", rank=4), {"fsdp": ORIGINAL}, 0.001),
    "fsdp2, qlora": ("fsdp2", "bf16-mixed", AdapterSettings.of("qlora", rank=4), {}, 0.001),
    "zero1": ("zero1", "fp32", RANK_4, SMALL_BUCKETS, 0.001),
    "zero2, qlora": ("zero2", "bf16-mixed", AdapterSettings.of("qlora", rank=4), SMALL_BUCKETS, 0.001),
    "zero3": ("zero3", "bf16-mixed", RANK_4, SMALL_BUCKETS, 0.001),
    "zero3, recompute": ("zero3", "bf16-mixed", RANK_4, {"recompute": "full", **SMALL_BUCKETS}, 0.001),
    "fsdp1, units inside checkpoints": (
        "fsdp1",
        "bf16",
        AdapterSettings(rank=4, dropout=0.1),
        {"fsdp": replace(ORIGINAL, units_inside_checkpoints=True), **REENTRANT},
        0.001,
    ),
}


def assert_a_rank_takes_what_was_predicted(case):
    strategy, precision, settings, options, share = case
    found = compare(method=settings.kind, precision=precision, strategy=strategy, gpus=2, adapter=settings, **options)
    assert found.measured is not None, found.reason
    if not strategy.startswith("zero"):
        assert_equal_within(found, share)
        return
    pytest.importorskip("deepspeed")
    peaks = found.predicted.peak_bytes, found.measured.peak_bytes
    assert abs(peaks[0] - peaks[1]) <= share * peaks[1]
    states = [row for row in found.rows if row.what in ("param", "grad", "optimizer_state")]
    assert all(row.predicted_bytes == row.measured_bytes for row in states)


@pytest.mark.parametrize("name", ON_TWO_GPUS)
def test_a_real_rank_of_two_that_trains_an_adapter_takes_what_was_predicted(name):
    assert_a_rank_takes_what_was_predicted(ON_TWO_GPUS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_ON_TWO_GPUS)
def test_a_real_rank_of_two_with_a_quantised_base_or_another_wrapping_takes_what_was_predicted(name):
    pytest.importorskip("bitsandbytes")
    assert_a_rank_takes_what_was_predicted(SLOW_ON_TWO_GPUS[name])
