"""Adapters trained for real on this machine's CPU, by peft and bitsandbytes themselves, against what was predicted."""

from __future__ import annotations

from typing import Any

import pytest
from memplan.models import load
from memplan.models.adapters import AdapterSettings
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
