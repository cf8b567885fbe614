"""axolotl's files: what they say about memory, and what is said about the rest."""

from __future__ import annotations

import pytest
from memplan.errors import CannotTell, UserError

LORA = """\
# LoRA of a small model on one card
base_model: meta-llama/Llama-3.2-1B
datasets:
  - path: some/dataset
    type: alpaca
val_set_size: 0.1
output_dir: ./outputs/lora-out
adapter: lora
lora_model_dir:
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules:
  - q_proj
  - v_proj
wandb_project:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
attn_implementation: flash_attention_2
loss_watchdog_threshold: 5.0
special_tokens: {pad_token: "<|end_of_text|>"}
"""
QLORA = """\
base_model: meta-llama/Llama-3.1-8B
load_in_4bit: yes
adapter: qlora
sequence_len: 4096
pad_to_sequence_len: true
lora_r: 32
lora_alpha: 16
lora_target_linear: true
lora_modules_to_save: [embed_tokens, lm_head]
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: paged_adamw_8bit
bf16: true
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: true}
flash_attention: true
"""
FULL_ZERO3 = """\
base_model: Qwen/Qwen2.5-7B
sequence_len: 8192
micro_batch_size: 1
gradient_accumulation_steps: 8
optimizer: adamw_torch_fused
max_grad_norm: 0.5
bf16: true
gradient_checkpointing: true
deepspeed: ds.json
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rope: true
liger_fused_linear_cross_entropy: true
"""
FSDP1 = """\
base_model: meta-llama/Meta-Llama-3-8B
sequence_len: 1024
micro_batch_size: 1
gradient_accumulation_steps: 1
optimizer: adamw_torch
bf16: auto
gradient_checkpointing: false
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_offload_params: true
  fsdp_limit_all_gathers: true
  fsdp_sync_module_states: true
  fsdp_use_orig_params: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
"""
FSDP2 = """\
base_model: Qwen/Qwen3-8B
sequence_len: 2048
micro_batch_size: 4
gradient_accumulation_steps: 1
optimizer: adamw_torch_fused
bf16: true
fsdp_version: 2
fsdp_config:
  offload_params: false
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: Qwen3DecoderLayer
  state_dict_type: SHARDED_STATE_DICT
  reshard_after_forward: true
  activation_checkpointing: true
"""
FULL = """\
base_model: mistralai/Mistral-7B-v0.1
defaults: &lengths
  sequence_len: 4096
<<: *lengths
batch_size: 8
micro_batch_size: 2
optimizer: muon
fp16: true
bf16: false
sdp_attention: true
"""
FILES = {
    "lora": (
        LORA,
        {},
        {"method": "lora", "micro_batch_size": 2, "grad_accum_steps": 2, "seq_len": 2048, "precision": "bf16",
         "optimizer": "adamw-8bit", "recompute": "full", "attention": "flash_attention_2", "strategy": "single",
         "clip_grad_norm": True, "adapter": {"rank": 16, "alpha": 32.0, "dropout": 0.05, "targets": ("q_proj", "v_proj"),
                                             "base_quant": "none"}},
    ),
    "lora on four GPUs": (LORA, {"gpus": 4}, {"strategy": "ddp", "method": "lora"}),
    "qlora": (
        QLORA,
        {},
        {"method": "qlora", "precision": "bf16", "optimizer": "paged-adamw-8bit", "reentrant": True, "seq_len": 4096,
         "adapter": {"rank": 32, "targets": ("all-linear",), "modules_to_save": ("embed_tokens", "lm_head"),
                     "base_quant": "nf4-dq", "quant_storage": "bfloat16", "upcasts": False}},
    ),
    "full with ZeRO-3": (
        FULL_ZERO3,
        {"gpus": 8},
        {"strategy": "zero3", "precision": "bf16-mixed", "micro_batch_size": 1, "grad_accum_steps": 8, "seq_len": 8192,
         "loss": "liger", "clip_grad_norm": True, "recompute": "full", "optimizer": "adamw", "adapter": None},
    ),
    "FSDP1": (
        FSDP1, {"gpus": 2}, {"strategy": "fsdp1", "precision": "bf16-mixed", "offload": ("optimizer", "param"),
        "optimizer_impl": "foreach"},
    ),
    "FSDP2": (FSDP2, {"gpus": 8}, {"strategy": "fsdp2", "recompute": "full", "micro_batch_size": 4}),
    "full in 16 bits": (
        FULL, {}, {"precision": "fp16", "optimizer": "muon", "grad_accum_steps": 4, "micro_batch_size": 2, "attention": "sdpa"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "options", "expected"), FILES.values(), ids=FILES)
def test_a_file_says_what_it_says(training_file, text, options, expected):
    made = training_file.asked(text, **options)

    assert training_file.otherwise(made, expected) == {}


@pytest.mark.parametrize("name", [name for name in FILES if name != "full in 16 bits"])
def test_every_key_of_an_ordinary_file_is_understood(training_file, name):
    text, options, _ = FILES[name]

    assert training_file.not_understood(training_file.asked(text, **options)) == []


def test_the_model_is_the_one_of_the_file(training_file):
    assert training_file.imported(LORA).model.value == "meta-llama/Llama-3.2-1B"


def test_a_key_that_is_not_understood_is_listed_with_its_line_and_the_nearest(training_file):
    made = training_file.asked(LORA + "gradient_chekpointing: true\n")

    (note,) = training_file.not_understood(made)
    assert "config.yml" in note
    assert "line 33: gradient_chekpointing true" in note
    assert "Did you mean gradient_checkpointing" in note


def test_options_go_before_the_file_and_that_is_said(training_file):
    made = training_file.asked(QLORA, micro_batch_size=1, method="lora", adapter={"rank": 8})

    assert (
        training_file.otherwise(made, {"micro_batch_size": 1, "method": "lora", "adapter": {"rank": 8, "base_quant": "none"}})
        == {}
    )
    said = " ".join(made["notes"])
    assert "--micro-batch 1 is taken, not micro_batch_size 2" in said
    assert "--lora-rank 8 is taken, not lora_r 32" in said
    assert '--method lora is taken, not adapter "qlora"' in said


def test_full_training_of_a_file_with_an_adapter_leaves_the_adapter_out(training_file):
    made = training_file.asked(LORA, method="full")

    assert made["adapter"] is None
    assert any("lora_r" in note and "without effect under --method full" in note for note in made["notes"])


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (
            "adapter: qlora\nload_in_4bit: true\nload_in_8bit: true",
            ("load_in_4bit true (line 3)", "load_in_8bit true (line 4)"),
        ),
        ("adapter: qlora\nload_in_8bit: true", ("adapter", "(line 2)", "load_in_8bit true (line 3)")),
        ("adapter: qlora", ("line 2", "load_in_4bit")),
        ("load_in_4bit: true", ("line 2", "without an adapter")),
        ("bf16: true\nfp16: true", ("bf16 true (line 2)", "fp16 true (line 3)")),
        ("batch_size: 8\ngradient_accumulation_steps: 2", ("batch_size 8 (line 2)", "gradient_accumulation_steps 2 (line 3)")),
        ("deepspeed: ds.json\nfsdp_config: {fsdp_offload_params: true}", ("deepspeed", "(line 2)", "fsdp_config", "(line 3)")),
        ("flash_attention: true\nsdp_attention: true", ("flash_attention true (line 2)", "sdp_attention true (line 3)")),
        ("micro_batch_size: 2\nmicro_batch_size: 4", ("'micro_batch_size'", "lines 2 and 3")),
        ("micro_batch_size: many", ("line 2", "whole number")),
        ("optimizer: adamw_troch", ("line 2", "adamw_torch")),
        ("deepspeed: nowhere.json", ("names nowhere.json", "no such file")),
        ("gradient_checkpointing: sometimes", ("line 2", "sometimes")),
        ("micro_batch_size: 2", ("two of micro_batch_size, gradient_accumulation_steps, batch_size",)),
    ],
)
def test_what_contradicts_itself_is_a_mistake_with_both_lines(training_file, lines, parts):
    with pytest.raises(UserError) as error:
        training_file.asked(f"base_model: gpt2\n{lines}\n")

    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize(
    "lines",
    ["rl: dpo", "unfrozen_parameters: ['^lm_head']", "context_parallel_size: 2",
     "attn_implementation: xformers", "optimizer: came_pytorch",
     "adapter: lora\npeft: {loftq_config: {loftq_bits: 4}}"],
)  # fmt: skip
def test_what_is_not_modelled_gives_no_answer_and_says_the_line(training_file, lines):
    with pytest.raises(CannotTell, match=r"line 4: .*not modelled yet|line 5: .*not modelled yet"):
        training_file.asked(f"base_model: gpt2\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\n{lines}\n")


def test_kernels_that_save_memory_are_said_to_make_an_upper_bound(training_file):
    made = training_file.asked(LORA + "liger_rms_norm: true\nlora_mlp_kernel: true\n")

    assert sum("the run needs less than is said here" in note for note in made["notes"]) == 2


def test_an_anchor_is_what_it_names(training_file):
    assert training_file.asked(FULL)["seq_len"] == 4096


def test_a_base_in_8_bits_is_that_of_the_adapter(training_file):
    made = training_file.asked(LORA + "load_in_8bit: true\n")

    assert training_file.otherwise(made, {"method": "lora", "adapter": {"base_quant": "int8", "quant_storage": None}}) == {}


def test_a_loss_in_chunks_is_counted_whole_where_the_strategy_runs_the_whole_model(training_file):
    text = FULL_ZERO3.replace("deepspeed: ds.json\n", "")

    alone, several = training_file.asked(text), training_file.asked(text, gpus=2)

    assert alone["loss"] == "liger"
    assert several["loss"] is None
    assert any("all logits are counted at once" in note for note in several["notes"])


def test_a_pattern_of_targets_is_read_by_the_rule_of_peft(training_file):
    batch = "base_model: gpt2\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\n"
    made = training_file.asked(f"{batch}adapter: lora\nlora_target_modules: 'h\\.(0|1)\\..*attn'\n")
    assert made["adapter"].targets == (r"re:h\.(0|1)\..*attn",)
