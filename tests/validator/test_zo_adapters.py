"""Zeroth-order training of an adapter: predicted, run for real, and only the adapter moves."""

from __future__ import annotations

import pytest
import torch
from memplan.errors import CannotTell
from memplan.models import load
from memplan.models.adapters import AdapterSettings
from memplan.planner.strategies.zo_settings import ZoSettings, adapter_of
from memplan.planner.trace.source import TraceSource
from memplan.validator.api import request_for
from memplan.validator.engines import run_engine
from memplan.validator.runtimes.zo.run import ZoRun, run_zo

TINY = {"num_hidden_layers": "3", "hidden_size": "64", "ffn_dim": "128", "num_attention_heads": "4"}
TINY |= {"word_embed_proj_dim": "64", "vocab_size": "512", "tie_word_embeddings": "false"}
QWEN = {"num_hidden_layers": "3", "hidden_size": "64", "intermediate_size": "128", "num_attention_heads": "4"}
QWEN |= {"num_key_value_heads": "2", "head_dim": "16", "vocab_size": "512"}


@pytest.fixture(scope="module")
def traces():
    return TraceSource(exact=True)


def asked(method, trained, model="facebook/opt-125m", overrides=TINY, **options):
    given = {"precision": "fp16", "micro_batch_size": 2, "seq_len": 32, **options}
    return request_for(model, "cpu", method=method, adapter=adapter_of(trained, {}), overrides=overrides, **given)


@pytest.mark.parametrize(
    ("method", "trained", "options"),
    [
        ("mezo", "lora", {}),
        ("mezo", "prefix-tuning", {}),
        ("mezo", "lora", {"model": "Qwen/Qwen3-0.6B", "overrides": QWEN, "precision": "bf16"}),
        ("zo2", "lora", {}),
        ("zo2", "lora", {"zo": ZoSettings(bucket=True)}),
    ],
)
def test_the_peak_of_an_adapter_is_predicted_within_half_a_percent(traces, method, trained, options):
    found = run_engine(asked(method, trained, **options), traces)

    assert found.reason == ""
    assert found.predicted.peak_bytes == pytest.approx(found.measured.peak_bytes, rel=0.005)
    assert found.predicted.detail.get("host_pinned_bytes", 0) == found.measured.detail["host_pinned_bytes"]


def test_a_perturbation_of_an_adapter_needs_next_to_nothing(traces):
    """The update of the whole model takes four times the embedding."""
    whole = run_engine(
        request_for("facebook/opt-125m", "cpu", method="mezo", precision="fp16", overrides=TINY, seq_len=8), traces
    )
    part = run_engine(asked("mezo", "lora", micro_batch_size=1, seq_len=8), traces)

    embedding = 512 * 64 * 2
    assert whole.predicted.peak_bytes - part.predicted.peak_bytes > 3 * embedding


def trained(method, steps=3, **options):
    spec = load("facebook/opt-125m", overrides=TINY)
    return run_zo(
        ZoRun.asked(
            spec,
            method,
            ZoSettings(use_cache=False),
            precision="fp32",
            micro_batch_size=2,
            seq_len=16,
            steps=steps,
            lr=1e-2,
            adapter=adapter_of("lora", {}),
            keep_parameters=True,
            **options,
        )
    )


def test_zo2_trains_an_adapter_step_by_step_as_mezo_does():
    mezo, zo2 = trained("mezo"), trained("zo2")

    assert zo2.losses == mezo.losses
    assert zo2.projected_grads == mezo.projected_grads
    assert any(mezo.projected_grads)
    assert zo2.ranks[0].digest == mezo.ranks[0].digest


def test_only_the_adapter_is_trained():
    names = trained("mezo", steps=1).ranks[0].parameters

    assert names
    assert all("lora_" in name for name in names)
    assert all(isinstance(value, torch.Tensor) for value in names.values())


@pytest.mark.parametrize(
    ("method", "adapter", "said"),
    [
        ("mezo", AdapterSettings(kind="dora"), "--method mezo with dora is not modelled"),
        ("mezo", AdapterSettings(kind="lora", base_quant="nf4"), "lora on a nf4 base"),
        ("zo2", AdapterSettings(kind="prefix-tuning"), "its cache goes through all blocks"),
    ],
)
def test_what_is_not_modelled_says_so(method, adapter, said):
    with pytest.raises(CannotTell, match=said):
        request_for("facebook/opt-125m", "cpu", method=method, adapter=adapter, precision="fp16")
