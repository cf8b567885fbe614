"""From a configuration file to the answer: what the file says is what is simulated."""

from __future__ import annotations

import dataclasses
import json

import pytest
from memplan.errors import CannotTell
from memplan.models import load
from memplan.planner.api import make_request
from memplan.planner.engines.detect import read_config
from memplan.planner.engines.imported import apply
from memplan.planner.predict import ledger_of
from memplan.planner.strategies import make_strategy
from memplan.planner.trace.source import TraceSource

TINY = {"num_hidden_layers": "2", "hidden_size": "64", "intermediate_size": "128", "num_attention_heads": "4"}
TINY |= {"num_key_value_heads": "2", "head_dim": "16", "vocab_size": "512"}


@pytest.fixture(scope="module")
def traces():
    return TraceSource()


@pytest.fixture
def ask(tmp_path):
    spec = load("meta-llama/Llama-3.2-1B", overrides=TINY)

    def asked(data, **options):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(data))
        made = apply(read_config(path), {"seq_len": 64, **options}, spec.config)
        notes = made.pop("notes")
        request = make_request(spec, "a100-80gb", **made)
        return dataclasses.replace(request, defaults=(*request.defaults, *notes))

    return asked


def _comm_peak(request, traces):
    ledger = ledger_of(request, traces.step(request))
    return max(ledger.components_after(row).get("comm_buffer", 0) for row in range(0, len(ledger), 7))


def test_the_bucket_of_the_file_is_the_bucket_of_the_run(ask, traces):
    def file(size):
        zero = {"stage": 2, "reduce_bucket_size": size}
        return {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": zero}

    small, large = ask(file(10_000_000), gpus=4), ask(file(11_000_000), gpus=4)  # larger than the model
    small.check()

    grown = _comm_peak(large, traces) - _comm_peak(small, traces)
    assert grown == 2 * 1_000_000  # bf16 elements


def test_auto_of_the_trainer_is_the_hidden_size_of_this_model(ask, traces):
    data = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
        "optimizer": {"type": "AdamW"},
    }

    request = ask(data, gpus=4, precision="bf16-mixed", micro_batch_size=2)

    assert request.deepspeed.reduce_bucket_size == 64 * 64
    assert make_strategy(request, traces.step(request)).name == "zero3"
    assert any("is 4,096 for a hidden size of 64" in said for said in request.defaults)


def test_a_batch_of_all_gpus_is_divided_over_them(ask):
    data = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}

    request = ask(data, gpus=8, precision="fp32")

    assert (request.micro_batch_size, request.loop.grad_accum_steps) == (4, 2)


def test_fsdp_settings_reach_the_question(ask):
    request = ask({"output_dir": "x", "bf16": True, "fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, gpus=4)

    assert (request.strategy, request.precision) == ("fsdp2", "bf16-mixed")
    assert request.fsdp.reshard_after_forward is False


def test_a_run_with_torch_compile_has_no_answer(ask):
    with pytest.raises(CannotTell, match=r"torch\.compile"):
        ask({"output_dir": "x", "torch_compile": True}).check()


def test_a_question_that_a_file_asked_can_be_written_as_json(ask):
    data = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}

    shown = json.loads(json.dumps(ask(data, gpus=2, precision="bf16-mixed").as_data()))

    assert shown["deepspeed"]["offload_param"]["device"] == "cpu"
