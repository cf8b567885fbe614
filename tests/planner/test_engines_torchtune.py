"""torchtune's recipe configs: what they say about memory, and what is said about the rest."""

from __future__ import annotations

import pytest
from memplan.errors import CannotTell, UserError
from memplan.models import catalogue
from memplan.planner.engines.torchtune import MODELS

_REST = """\
output_dir: /tmp/torchtune/run
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /tmp/model/original/tokenizer.model
  max_seq_len: {length}
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /tmp/model/
  output_dir: ${{output_dir}}
dataset: {{_component_: torchtune.datasets.alpaca_dataset, packed: False}}
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
batch_size: 2
batch_size_val: ${{batch_size}}
epochs: 1
max_steps_per_epoch: null
clip_grad_norm: null
device: cuda
log_level: INFO
metric_logger: {{_component_: torchtune.training.metric_logging.DiskLogger, log_dir: "${{output_dir}}/logs"}}
"""
LORA = (
    _REST.format(length="null")
    + """\
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 8  # higher increases accuracy and memory
  lora_alpha: 16
  lora_dropout: 0.0
optimizer: {_component_: torch.optim.AdamW, fused: True, weight_decay: 0.01, lr: 3e-4}
gradient_accumulation_steps: 8
dtype: bf16
compile: False
enable_activation_checkpointing: True
enable_activation_offloading: False
"""
)
SINGLE = (
    _REST.format(length="8192")
    + """\
model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit, lr: 2e-5}
optimizer_in_bwd: True
gradient_accumulation_steps: 1
dtype: bf16
enable_activation_checkpointing: False
"""
)
DISTRIBUTED = (
    _REST.format(length="4096").replace("clip_grad_norm: null", "clip_grad_norm: 1.0")
    + """\
model: {_component_: torchtune.models.qwen2_5.qwen2_5_7b_instruct}
optimizer: {_component_: torch.optim.SGD, momentum: 0.9}
fsdp_cpu_offload: True
custom_sharded_layers: ['tok_embeddings', 'output']
dtype: fp32
ac_mode: selective
ac_option: 2
"""
)
QLORA = (
    _REST.format(length="2048")
    + """\
model: {_component_: torchtune.models.phi3.qlora_phi3_mini, lora_attn_modules: [q_proj, v_proj], lora_rank: 16, use_dora: True}
optimizer: {_component_: torch.optim.AdamW, foreach: False}
"""
)
FILES = {
    "lora": (
        LORA, {},
        {"method": "lora", "precision": "bf16", "micro_batch_size": 2, "grad_accum_steps": 8, "recompute": "full",
         "optimizer": "adamw", "optimizer_impl": "fused", "loss": "chunked", "clip_grad_norm": False, "strategy": "single",
         "adapter": {"rank": 8, "alpha": 16.0, "autocast": False, "adapter_dtype": "base",
                     "targets": ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")}},
    ),
    "lora on two GPUs": (LORA, {"gpus": 2}, {"strategy": "fsdp2"}),
    "the optimizer in backward": (
        SINGLE, {}, {"strategy": "release", "optimizer": "paged-adamw-8bit", "seq_len": 8192, "recompute": None,
        "adapter": None},
    ),
    "distributed": (
        DISTRIBUTED, {"gpus": 8},
        {"strategy": "fsdp2", "offload": ("optimizer", "param"), "precision": "fp32", "optimizer": "sgd-momentum",
         "recompute": "selective-layer:2", "clip_grad_norm": True, "seq_len": 4096},
    ),
    "qdora with fused projections": (
        QLORA, {},
        {"method": "dora", "optimizer_impl": "for-loop",
         "adapter": {"rank": 16, "targets": ("qkv_proj",), "base_quant": "nf4-dq", "upcasts": False}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "options", "expected"), FILES.values(), ids=FILES)
def test_a_file_says_what_it_says_and_every_key_is_understood(training_file, text, options, expected):
    made = training_file.asked(text, **options)

    assert training_file.otherwise(made, expected) == {}
    assert training_file.not_understood(made) == []


@pytest.mark.parametrize("reference", sorted(set(MODELS.values())))
def test_every_model_that_a_builder_stands_for_is_in_the_catalogue(reference):
    assert catalogue.find(reference) is not None


def test_a_builder_says_the_model(training_file):
    assert training_file.imported(LORA).model.value == "meta-llama/Llama-3.1-8B"
    assert training_file.imported(DISTRIBUTED).model.value == "Qwen/Qwen2.5-7B"


def test_a_builder_that_is_not_known_is_said_and_names_no_model(training_file):
    found = training_file.imported(LORA.replace("lora_llama3_1_8b", "lora_llama9_3b"))

    assert found.model is None
    assert any("lora_llama9_3b" in note for note in found.notes)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (("optimizer_in_bwd: True", "optimizer_in_bwd: True\ngradient_accumulation_steps_: 1"), ()),
        (
            ("gradient_accumulation_steps: 1", "gradient_accumulation_steps: 4"),
            ("optimizer_in_bwd", "gradient_accumulation_steps 4"),
        ),
        (("clip_grad_norm: null", "clip_grad_norm: 1.0"), ("optimizer_in_bwd", "clip_grad_norm 1.0")),
        (("dtype: bf16", "dtype: fp16"), ("dtype", "fp16")),
        (("batch_size: 2", "batch_size: ${nowhere}"), ("${nowhere}", "not there")),
        (("batch_size: 2", "batch_size: ${batch_size}"), ("stands for itself",)),
        (("batch_size: 2", "batch_size: two"), ("line 13", "whole number")),
    ],
)
def test_what_the_recipes_refuse_is_a_mistake(training_file, change, parts):
    if not parts:
        assert training_file.not_understood(training_file.asked(SINGLE.replace(*change)))
        return
    with pytest.raises(UserError) as error:
        training_file.asked(SINGLE.replace(*change))

    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize(
    "line",
    ["tensor_parallel_dim: 8", "quantizer: {_component_: x}", "teacher_model: {_component_: x}",
     "fsdp_cpu_offload: False\noptimizer_in_bwd: True"],
)  # fmt: skip
def test_what_is_not_modelled_gives_no_answer(training_file, line):
    text = DISTRIBUTED.replace("fsdp_cpu_offload: True\n", "").replace("clip_grad_norm: 1.0", "clip_grad_norm: null")
    with pytest.raises(CannotTell, match="not modelled yet"):
        training_file.asked(f"{text}{line}\n")
