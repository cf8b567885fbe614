"""LLaMA-Factory's files: what they say about memory, and what is said about the rest."""

from __future__ import annotations

import pytest
from memplan.errors import CannotTell, UserError

LORA = """\
### model
model_name_or_path: Qwen/Qwen3-4B
trust_remote_code: true

### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all

### dataset
dataset: identity,alpaca_en_demo
template: qwen3_nothink
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16

### output
output_dir: saves/qwen3-4b/lora/sft
logging_steps: 10
save_only_model: false
report_to: none  # choices: [none, wandb]

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
"""
FULL_DS3 = """\
model_name_or_path: meta-llama/Meta-Llama-3-8B
stage: sft
finetuning_type: full
deepspeed: ds.json
dataset: mine
template: llama3
cutoff_len: 4096
per_device_train_batch_size: 2
bf16: true
flash_attn: fa2
optim: adamw_torch
"""
QLORA = """\
model_name_or_path: mistralai/Mistral-7B-v0.1
quantization_bit: 4
quantization_method: bnb
double_quantization: false
stage: sft
lora_target: q_proj,v_proj
lora_rank: 64
lora_alpha: 128
lora_dropout: 0.1
additional_target: lm_head
template: mistral
per_device_train_batch_size: 4
fp16: true
use_reentrant_gc: false
flash_attn: disabled
optim: paged_adamw_32bit
"""
FULL = """\
model_name_or_path: HuggingFaceTB/SmolLM2-135M
stage: pt
finetuning_type: full
dataset: wiki
cutoff_len: 512
packing: true
bf16: true
disable_gradient_checkpointing: true
max_grad_norm: 0
"""
PURE = FULL.replace("bf16: true", "pure_bf16: true\nuse_galore: true\ngalore_rank: 64\ngalore_target: mlp,self_attn")
FILES = {
    "lora": (
        LORA, {},
        {"method": "lora", "precision": "bf16", "micro_batch_size": 1, "grad_accum_steps": 8, "seq_len": 2048,
        "recompute": "full",
         "reentrant": True, "optimizer": "adamw", "optimizer_impl": "fused", "strategy": "single", "clip_grad_norm": True,
         "adapter": {"rank": 8, "dropout": 0.0, "targets": ("all-linear",), "base_quant": "none"}},
    ),
    "full with ZeRO-3": (
        FULL_DS3, {"gpus": 4},
        {"strategy": "zero3", "precision": "bf16-mixed", "micro_batch_size": 2, "seq_len": 4096,
        "attention": "flash_attention_2",
         "method": None, "recompute": "full"},
    ),
    "qlora": (
        QLORA, {},
        {"method": "qlora", "precision": "fp16", "reentrant": None, "attention": "eager", "optimizer": "paged-adamw-32bit",
         "seq_len": 2048, "adapter": {"rank": 64, "alpha": 128.0, "dropout": 0.1, "targets": ("q_proj", "v_proj"),
                                      "modules_to_save": ("lm_head",), "base_quant": "nf4", "quant_storage": "float16",
                                      "upcasts": False}},
    ),
    "full on one card": (
        FULL, {"gpus": 2},
        {"precision": "bf16-autocast", "recompute": None, "strategy": "ddp", "micro_batch_size": 8, "clip_grad_norm": False},
    ),
    "pure bf16 with GaLore": (PURE, {}, {"precision": "bf16", "optimizer": "galore-adamw:rank=64"}),
}  # fmt: skip


@pytest.mark.parametrize(("text", "options", "expected"), FILES.values(), ids=FILES)
def test_a_file_says_what_it_says_and_every_key_is_understood(training_file, text, options, expected):
    made = training_file.asked(text, **options)

    assert training_file.otherwise(made, expected) == {}
    assert training_file.not_understood(made) == []


def test_the_model_is_the_one_of_the_file(training_file):
    assert training_file.imported(LORA).model.value == "Qwen/Qwen3-4B"


def test_a_key_that_is_not_understood_is_listed_with_its_line(training_file):
    (note,) = training_file.not_understood(training_file.asked("lora_ranks: 4\n" + LORA))

    assert "line 1: lora_ranks 4" in note
    assert "LLaMA-Factory" in note


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ("finetuning_type: full\nquantization_bit: 4", ("quantization_bit 4 (line 4)", 'finetuning_type "full" (line 3)')),
        ("bf16: true\nfp16: true", ("bf16 true (line 3)", "fp16 true (line 4)")),
        ("deepspeed: ds.json\nfsdp: full_shard", ("deepspeed", "fsdp", "line 3", "line 4")),
        ("use_badam: true\nuse_adam_mini: true", ("use_badam true (line 3)", "use_adam_mini true (line 4)")),
        ("pure_bf16: true\ndeepspeed: ds.json", ("line 3", "pure_bf16")),
        ("stage: sfft", ("line 3", "sft")),
        ("finetuning_type: lorra", ("line 3", "lora")),
        ("quantization_bit: four", ("line 3", "whole number")),
        ("per_device_train_batch_size: 0", ("line 3", "1 or more")),
        ("optim: adamw_troch", ("adamw_troch", "adamw_torch")),
        ("dist_config: {name: fsdp2}", ("line 3", "v1")),
    ],
)
def test_what_contradicts_itself_is_a_mistake_with_the_lines(training_file, lines, parts):
    with pytest.raises(UserError) as error:
        training_file.asked(f"model_name_or_path: gpt2\ntemplate: default\n{lines}\n")

    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize(
    "line",
    [
        "stage: dpo",
        "quantization_bit: 4\nquantization_method: hqq",
        "use_unsloth: true",
        "finetuning_type: freeze",
        "mixture_of_depths: convert",
    ],
)
def test_what_is_not_modelled_gives_no_answer_and_says_the_line(training_file, line):
    with pytest.raises(CannotTell, match=r"line 3: .*not modelled yet"):
        training_file.asked(f"model_name_or_path: gpt2\ntemplate: default\n{line}\n")


def test_a_file_that_is_named_from_the_root_of_its_repository_is_found(training_file):
    assert training_file.asked(FULL_DS3, within="examples/train_full", gpus=4)["strategy"] == "zero3"


def test_ligers_kernels_fuse_head_and_loss(training_file):
    assert training_file.asked(FULL + "enable_liger_kernel: true\n")["loss"] == "liger"
