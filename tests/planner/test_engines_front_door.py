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


AXOLOTL = """\
base_model: {folder}
sequence_len: 64
micro_batch_size: 2
gradient_accumulation_steps: 2
optimizer: adamw_torch_fused
bf16: true
adapter: lora
lora_r: 4
lora_target_linear: true
flash_attention: true
gradient_chekpointing: true
"""


@pytest.fixture
def axolotl_file(tmp_path):
    from transformers import LlamaConfig

    numbers = {name: int(value) for name, value in TINY.items()}
    LlamaConfig(**numbers, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(tmp_path / "model")
    path = tmp_path / "axolotl.yml"
    path.write_text(AXOLOTL.format(folder=tmp_path / "model"))
    return path


def _fit(capsys, *words):
    from memplan.__main__ import main

    code = main(["fit", "--gpu", "a100-80gb", "--no-advice", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_training_file_alone_is_a_question(axolotl_file, capsys):
    code, said = _fit(capsys, "--from", axolotl_file, "--json")

    answer = json.loads(said)
    question = answer["question"]
    assert code == 0
    assert (question["method"], question["micro_batch_size"], question["seq_len"]) == ("lora", 2, 64)
    assert question["adapter"]["rank"] == 4
    assert any("NOT UNDERSTOOD" in words and "line 11" in words for words in answer["assumptions"])


def test_an_option_of_the_command_line_goes_before_the_training_file(axolotl_file, capsys):
    code, said = _fit(capsys, "--from", axolotl_file, "--json", "--lora-rank", 8, "--seq", 32)

    question = json.loads(said)["question"]
    assert code == 0
    assert (question["adapter"]["rank"], question["seq_len"]) == (8, 32)


def test_a_question_without_a_model_is_a_mistake_on_one_line(tmp_path, capsys):
    code, said = _fit(capsys)
    assert (code, said.count("\n")) == (2, 1)
    assert "MODEL is missing" in said

    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    code, said = _fit(capsys, "--from", tmp_path / "ds.json")
    assert (code, said.count("\n")) == (2, 1)
    assert "names no model" in said


def test_a_file_of_no_known_kind_names_the_known_ones(tmp_path, capsys):
    (tmp_path / "a.yml").write_text("some: thing\n")

    code, said = _fit(capsys, "gpt2", "--from", tmp_path / "a.yml")

    assert code == 2
    assert all(kind in said for kind in ("axolotl", "LLaMA-Factory", "TRL", "torchtune", "accelerate", "ds_config.json"))
