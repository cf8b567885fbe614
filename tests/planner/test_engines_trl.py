"""TRL's files: what they say about memory, and what is said about the rest."""

from __future__ import annotations

import pytest
from memplan.errors import CannotTell, UserError

SMALL = """\
# trl sft --config config.yaml
env:
  CUDA_VISIBLE_DEVICES: 0
model_name_or_path:
  Qwen/Qwen2.5-0.5B
dataset_name:
  stanfordnlp/imdb
report_to:
  none
learning_rate:
  0.0001
lr_scheduler_type:
  cosine
"""
FULL = """\
model_name_or_path: meta-llama/Llama-3.2-3B
dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: trl-lib/Capybara
max_length: 4096
packing: true
loss_type: nll
bf16: true
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
gradient_checkpointing_kwargs: {use_reentrant: true}
optim: adamw_torch
max_grad_norm: 0.3
"""
QLORA = """\
model_name_or_path: mistralai/Mistral-7B-v0.1
torch_dtype: bfloat16
use_peft: true
load_in_4bit: true
use_bnb_nested_quant: true
lora_r: 64
lora_alpha: 16
lora_dropout: 0.1
lora_target_modules: all-linear
max_seq_length: 2048
gradient_checkpointing: false
optim: paged_adamw_8bit
dataset_mixer: {some/dataset: 1.0}
"""
LORA_ZERO = """\
model_name_or_path: Qwen/Qwen2.5-7B
use_peft: true
lora_target_modules: [q_proj, k_proj]
lora_modules_to_save: [lm_head]
deepspeed: ds.json
max_length: 512
padding_free: false
per_device_train_batch_size: 2
"""
FILES = {
    "the defaults": (
        SMALL, {},
        {"precision": "bf16-autocast", "micro_batch_size": 8, "seq_len": 1024, "recompute": "full", "loss": "chunked",
         "optimizer": "adamw", "optimizer_impl": "fused", "strategy": "single", "method": None},
    ),
    "full": (
        FULL, {"gpus": 2},
        {"precision": "bf16", "attention": "flash_attention_2", "seq_len": 4096, "loss": None, "reentrant": True,
         "optimizer_impl": "foreach", "micro_batch_size": 4, "grad_accum_steps": 2, "strategy": "ddp"},
    ),
    "qlora": (
        QLORA, {},
        {"method": "qlora", "precision": "bf16", "recompute": None, "seq_len": 2048, "optimizer": "paged-adamw-8bit",
         "adapter": {"rank": 64, "alpha": 16.0, "targets": ("all-linear",), "base_quant": "nf4-dq", "upcasts": False,
                     "adapter_dtype": "base"}},
    ),
    "lora with ZeRO-3": (
        LORA_ZERO, {"gpus": 8},
        {"strategy": "zero3", "precision": "bf16-mixed", "method": "lora",
         "adapter": {"rank": 16, "alpha": 32.0, "dropout": 0.05, "targets": ("q_proj", "k_proj"),
         "modules_to_save": ("lm_head",)}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "options", "expected"), FILES.values(), ids=FILES)
def test_a_file_says_what_it_says_and_every_key_is_understood(training_file, text, options, expected):
    made = training_file.asked(text, **options)

    assert training_file.otherwise(made, expected) == {}
    assert training_file.not_understood(made) == []


def test_the_model_is_the_one_of_the_file(training_file):
    assert training_file.imported(SMALL).model.value == "Qwen/Qwen2.5-0.5B"


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (
            "load_in_4bit: true\nload_in_8bit: true\nuse_peft: true",
            ("load_in_4bit true (line 2)", "load_in_8bit true (line 3)"),
        ),
        ("load_in_4bit: true", ("line 2", "use_peft")),
        ("bf16: true\nfp16: true", ("bf16", "fp16", "line 3")),
        ("dtype: float32\ntorch_dtype: bfloat16", ("dtype", "torch_dtype", "line 2", "line 3")),
        ("max_length: 512\nmax_seq_length: 1024", ("max_length 512 (line 2)", "max_seq_length 1024 (line 3)")),
        ("loss_type: chunked_nll\nuse_liger_kernel: true", ("loss_type", "use_liger_kernel")),
        ("dtype: int4", ("line 2", "int4")),
    ],
)
def test_what_contradicts_itself_is_a_mistake_with_the_lines(training_file, lines, parts):
    with pytest.raises(UserError) as error:
        training_file.asked(f"model_name_or_path: gpt2\n{lines}\n")

    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize("line", ["beta: 0.1", "num_generations: 8", "loss_type: dft", "activation_offloading: true"])
def test_other_trainers_and_what_is_not_modelled_give_no_answer(training_file, line):
    with pytest.raises(CannotTell, match=r"line 2: .*not modelled yet"):
        training_file.asked(f"model_name_or_path: gpt2\n{line}\n")


def test_a_length_that_cuts_nothing_is_said_to_be_left_open(training_file):
    made = training_file.asked("model_name_or_path: gpt2\nmax_length: null\n")

    assert "seq_len" not in made
    assert any("max_length null" in note for note in made["notes"])


def test_ligers_kernels_fuse_head_and_loss(training_file):
    assert training_file.asked(SMALL + "use_liger_kernel: true\n")["loss"] == "liger"


@pytest.mark.parametrize(
    ("said", "targets"),
    [("['.*_proj']", ("re:.*_proj",)), ("[q_proj, k_proj]", ("q_proj", "k_proj")), ("[all-linear]", ("all-linear",))],
)
def test_a_list_of_one_target_may_be_a_pattern(training_file, said, targets):
    made = training_file.asked(f"model_name_or_path: gpt2\nuse_peft: true\nmax_length: 64\nlora_target_modules: {said}\n")
    assert made["adapter"].targets == targets
