"""`memplan plan --from FILE`: what the file says is held fast, and the rest is searched."""

from __future__ import annotations

import pytest
from memplan.__main__ import build_parser
from memplan.errors import UserError
from memplan.planner.search.cli import asked

FILE = """\
base_model: meta-llama/Llama-3.2-1B
sequence_len: 512
micro_batch_size: 4
gradient_accumulation_steps: 2
optimizer: paged_adamw_8bit
bf16: true
flash_attention: true
max_grad_norm: 1.0
gradient_checkpointing: true
liger_glue: true
"""
LORA = FILE + "adapter: lora\nlora_r: 8\nlora_target_linear: true\n"


@pytest.fixture
def ask(tmp_path):
    def run(text, *words):
        (tmp_path / "axolotl.yml").write_text(text)
        command = ["plan", "--gpu", "a100-80gb", "--from", str(tmp_path / "axolotl.yml"), *words]
        wanted, bases = asked(build_parser().parse_args(command))
        return wanted, bases[max(bases)]

    return run


def test_model_lengths_samples_method_and_optimizer_are_the_files(ask):
    wanted, base = ask(FILE, "--gpus", "2")

    assert (base.model.name, base.seq_len, base.attention) == ("meta-llama/Llama-3.2-1B", 512, "flash_attention_2")
    assert wanted.global_batch_size == 16
    assert wanted.optimizers == ("paged-adamw-8bit",)
    assert base.loop.clip_grad_norm


def test_how_it_is_placed_on_the_gpus_is_searched(ask):
    wanted, base = ask(FILE)

    assert (wanted.strategies, wanted.precisions, wanted.recomputes, wanted.micro_batch_size) == (None, None, None, None)
    assert any("gradient_checkpointing" in note and "searched anew" in note for note in base.defaults)


def test_an_adapter_is_the_one_of_the_file(ask):
    wanted, base = ask(LORA)

    assert wanted.methods == ("lora",)
    assert (base.adapter.rank, base.adapter.targets) == (8, ("all-linear",))


def test_options_go_before_the_file(ask):
    wanted, base = ask(LORA, "--method", "full,lora", "--global-batch", "32", "--seq", "256", "--optimizer", "adamw")

    assert (wanted.methods, wanted.global_batch_size, wanted.optimizers) == (("full", "lora"), 32, ("adamw",))
    assert base.seq_len == 256
    assert base.adapter is None


def test_keys_that_are_not_understood_are_said(ask):
    _, base = ask(FILE)

    assert any("NOT UNDERSTOOD" in note and "liger_glue" in note for note in base.defaults)


def test_a_plan_without_a_model_is_a_mistake():
    with pytest.raises(UserError, match="MODEL is missing"):
        asked(build_parser().parse_args(["plan", "--gpu", "a100-80gb"]))
