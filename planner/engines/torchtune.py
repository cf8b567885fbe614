"""torchtune's recipe configs (`tune run RECIPE --config config.yaml`), read as torchtune 0.7 reads them.

Sources: recipes/*.py (`full_finetune_single_device`, `full_finetune_distributed`, `lora_finetune_*`), recipes/configs,
torchtune/models/*/_model_builders.py, torchtune/modules/peft/lora.py, torchtune/modules/loss/cross_entropy_loss.py.

torchtune trains modules of its own; the answer is for transformers' model of the same sizes.  There is no autocast: all of the
model has the type `dtype`.  `${key}` stands for another key's value, as OmegaConf has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...errors import UserError
from ..strategies.fsdp_settings import FsdpSettings
from .deepspeed_schema import TORCH_OPTIMIZERS
from .imported import Imported, Said
from .keys import Keys
from .text import Text, shown

COMPONENT = "_component_"
SILENT = frozenset({
    "output_dir", "tokenizer", "checkpointer", "resume_from_checkpoint", "dataset", "dataset_val", "seed", "shuffle",
    "batch_size_val", "run_val_every_n_steps", "lr_scheduler", "epochs", "max_steps_per_epoch", "metric_logger",
    "log_every_n_steps", "log_peak_memory_stats", "log_level", "device", "profiler", "save_adapter_weights_only", "collate_fn",
    "enable_kv_cache", "low_cpu_ram", "save_every_n_steps", "keep_last_n_checkpoints", "dataloader", "num_workers",
    "enable_async_checkpointing", "use_distributed_state_dict", "cudnn_deterministic_mode", "debug_num_samples_per_step",
    "debug_logging_enabled", "dataset_val_batch", "max_seq_len", "quantization", "tensor_parallel_plan", "name",
    "context_parallel_rotate_method", "load_dataset_from_cache",
})  # fmt: skip
_NOT_MODELLED = {
    "teacher_model": "distillation keeps two models",
    "ref_checkpointer": "preference training keeps two forwards, of two models",
    "reward_and_value_model": "training by a reward model",
    "policy_model": "training by a reward model",
    "quantizer": "fake quantisation keeps more",
    "resize_token_embeddings": "rows are added to the vocabulary",
    "use_fp8": "fp8 keeps other tensors",
    "fp8_recipe_name": "fp8 keeps other tensors",
    "enable_fp8_training": "fp8 keeps other tensors",
    "orchestration": "training by generated samples",
}
_PARALLEL = ("tensor_parallel_dim", "context_parallel_dim", "expert_parallel_dim")
#: Keys that the distributed recipes alone read.
_DISTRIBUTED = ("fsdp_cpu_offload", "fsdp_reshard_after_forward", "custom_sharded_layers", "data_parallel_shard_dim",
                "data_parallel_replicate_dim", "tensor_parallel_dim", "memory_efficient_fsdp_wrap", "fsdp")  # fmt: skip
#: Builder of torchtune.models, without lora_ or qlora_ -> the model of the same sizes.
MODELS = {
    "llama2_7b": "meta-llama/Llama-2-7b-hf", "llama2_13b": "meta-llama/Llama-2-13b-hf",
    "llama2_70b": "meta-llama/Llama-2-70b-hf",
    "code_llama2_7b": "codellama/CodeLlama-7b-hf", "code_llama2_13b": "codellama/CodeLlama-13b-hf",
    "llama3_8b": "meta-llama/Meta-Llama-3-8B", "llama3_70b": "meta-llama/Meta-Llama-3-70B",
    "llama3_1_8b": "meta-llama/Llama-3.1-8B", "llama3_1_70b": "meta-llama/Llama-3.1-70B",
    "llama3_1_405b": "meta-llama/Llama-3.1-405B", "llama3_2_1b": "meta-llama/Llama-3.2-1B",
    "llama3_2_3b": "meta-llama/Llama-3.2-3B", "llama3_3_70b": "meta-llama/Llama-3.3-70B-Instruct",
    "mistral_7b": "mistralai/Mistral-7B-v0.1", "gemma_2b": "google/gemma-2b", "gemma_7b": "google/gemma-7b",
    "gemma2_2b": "google/gemma-2-2b", "gemma2_9b": "google/gemma-2-9b", "gemma2_27b": "google/gemma-2-27b",
    "phi3_mini": "microsoft/Phi-3-mini-4k-instruct", "phi4_14b": "microsoft/phi-4",
    **{f"qwen2_{size}": f"Qwen/Qwen2-{name}" for size, name in (("0_5b", "0.5B"), ("1_5b", "1.5B"), ("7b", "7B"))},
    **{
        f"qwen2_5_{size}": f"Qwen/Qwen2.5-{name}"
        for size, name in (
            ("0_5b", "0.5B"), ("1_5b", "1.5B"), ("3b", "3B"), ("7b", "7B"), ("14b", "14B"), ("32b", "32B"), ("72b", "72B"),
        )
    },
    **{
        f"qwen3_{size}": f"Qwen/Qwen3-{name}"
        for size, name in (("0_6b", "0.6B"), ("1_7b", "1.7B"), ("4b", "4B"), ("8b", "8B"), ("14b", "14B"), ("32b", "32B"))
    },
}  # fmt: skip
_FUSED = ("phi3", "phi4")  # transformers' Phi has one projection where torchtune has several
_TARGETS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_FUSED_TARGETS = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "output_proj": "o_proj"}
_MLP, _FUSED_MLP = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
#: Classes of other libraries -> memplan's optimizer.  torch's own are by name.
_OPTIMIZERS = {
    "bitsandbytes.optim.PagedAdamW": "paged-adamw-32bit", "bitsandbytes.optim.PagedAdamW32bit": "paged-adamw-32bit",
    "bitsandbytes.optim.PagedAdamW8bit": "paged-adamw-8bit", "bitsandbytes.optim.AdamW": "adamw-32bit",
    "bitsandbytes.optim.AdamW8bit": "adamw-8bit", "bitsandbytes.optim.Adam8bit": "adam-8bit",
    "bitsandbytes.optim.PagedAdam8bit": "paged-adam-8bit", "bitsandbytes.optim.Lion8bit": "lion-8bit",
    "torchao.optim.AdamW8bit": "torchao-adamw-8bit", "torchao.optim.AdamW4bit": "torchao-adamw-4bit",
    "torchao.optim.AdamWFp8": "torchao-adamw-fp8", "torchao.prototype.low_bit_optim.AdamW8bit": "torchao-adamw-8bit",
    "torchao.prototype.low_bit_optim.AdamW4bit": "torchao-adamw-4bit",
    "torchao.prototype.low_bit_optim.CPUOffloadOptimizer": "torchao-cpu-offload",
    "torchao.optim.CPUOffloadOptimizer": "torchao-cpu-offload",
}  # fmt: skip
_LOSSES = {
    "LinearCrossEntropyLoss": "chunked", "CEWithChunkedOutputLoss": "chunked", "CrossEntropyLoss": "plain",
}  # fmt: skip
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def is_torchtune(data: Mapping[str, Any]) -> bool:
    """Whether the blocks of a file name their classes as torchtune's do."""
    parts = [data.get(key) for key in ("model", "tokenizer", "optimizer", "checkpointer", "policy_model")]
    return any(isinstance(part, Mapping) and COMPONENT in part for part in parts)


def read(text: Text) -> Imported:
    """What the file says.  Raises UserError for what the recipes refuse, with the line."""
    keys = Keys(text, _resolved(text.data, text.data, text.source))
    notes: list[str] = []
    reasons = keys.unmodelled(_NOT_MODELLED)
    for key in _PARALLEL:
        if (keys.number(key) or 1) > 1:
            reasons.append(f"{keys.at(key)}: {key} {keys.get(key)}: parallelism inside a layer is not modelled yet")
    dtype = keys.choice("dtype", ("bf16", "fp32", "fp16")) or "bf16"
    if dtype == "fp16":
        raise keys.wrong("dtype", "torchtune's recipes refuse to train in fp16", "Write bf16 or fp32")
    said = {
        "micro_batch_size": Said(keys.number("batch_size") or 1, "batch_size"),
        "grad_accum_steps": Said(keys.number("gradient_accumulation_steps") or 1, "gradient_accumulation_steps"),
        "precision": Said(dtype, "dtype"),
        "clip_grad_norm": Said(keys.is_on("clip_grad_norm"), "clip_grad_norm"),
    }
    model, adapter = _model(keys, said, reasons, notes)
    length = keys.block("tokenizer").number("max_seq_len")
    if length is not None:
        said["seq_len"] = Said(length, "tokenizer.max_seq_len")
    else:
        notes.append("tokenizer.max_seq_len is null: no sample is cut; say the longest with --seq")
    _optimizer(keys, said, reasons)
    _recompute(keys, said, notes)
    _loss(keys, said, reasons)
    if keys.is_on("compile"):
        said["compiled"] = Said(True, "compile")
    fsdp = _fsdp(keys, said, reasons, notes)
    if keys.is_on("optimizer_in_bwd"):
        _in_backward(keys, said, reasons, fsdp)
    notes.append("torchtune's modules are answered for by transformers' of the same sizes")
    notes += keys.not_understood(SILENT, "torchtune")
    return Imported(
        source=text.source,
        kind="torchtune",
        said=said,
        notes=tuple(notes),
        unmodelled=tuple(reasons),
        fsdp=fsdp,
        model=model,
        adapter=adapter,
    )


def _resolved(value: Any, root: Mapping[str, Any], source: str, depth: int = 0) -> Any:
    """`value` with every ${key} replaced.  Raises UserError where it names nothing, or itself."""
    if depth > 20:
        raise UserError(f"{source}: a ${{...}} stands for itself", "Write the value there")
    if isinstance(value, Mapping):
        return {key: _resolved(inner, root, source, depth) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(inner, root, source, depth) for inner in value]
    if not isinstance(value, str):
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole:
        return _resolved(_named(whole[1], root, source), root, source, depth + 1)
    return _REFERENCE.sub(lambda m: str(_resolved(_named(m[1], root, source), root, source, depth + 1)), value)


def _named(path: str, root: Mapping[str, Any], source: str) -> Any:
    found: Any = root
    for part in path.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise UserError(f"{source}: ${{{path}}} names a key that is not there", "Correct the file")
        found = found[part]
    return found


def _model(keys: Keys, said: dict[str, Said], reasons: list[str], notes: list[str]) -> tuple[Said | None, dict[str, Said]]:
    block = keys.block("model")
    name = str(block.get(COMPONENT, "")).rpartition(".")[2]
    if not name:
        return None, {}
    quantised = name.startswith("qlora_")
    plain = name.removeprefix("qlora_").removeprefix("lora_")
    reference = MODELS.get(plain) or MODELS.get(plain.removesuffix("_base").removesuffix("_instruct"))
    if reference is None:
        notes.append(f"model._component_ {name}: memplan knows no model of these sizes by that name")
    model = Said(reference, f"model._component_ {name}") if reference else None
    if plain == name:
        return model, {}
    attention = block.words("lora_attn_modules")
    fused = plain.startswith(_FUSED)
    table = _FUSED_TARGETS if fused else _TARGETS
    for word in attention:
        if word not in table:
            raise block.wrong("lora_attn_modules", f"expected some of {', '.join(table)}")
    targets = [table[word] for word in attention]
    if block.flag("apply_lora_to_mlp"):
        targets += _FUSED_MLP if fused else _MLP
    if block.flag("apply_lora_to_output"):
        targets.append("lm_head")
    if fused:
        notes.append(f"model._component_ {name}: transformers' model has fused projections, so its adapters are smaller")
    dora, quantised = block.flag("use_dora"), quantised or block.flag("quantize_base")
    said["method"] = Said("dora" if dora else "qlora" if quantised else "lora", f"model._component_ {name}")
    adapter = {
        "rank": Said(block.number("lora_rank") or 8, "model.lora_rank"),
        "alpha": Said(block.real("lora_alpha") or 16.0, "model.lora_alpha"),
        "dropout": Said(block.real("lora_dropout") or 0.0, "model.lora_dropout"),
        "targets": Said(tuple(dict.fromkeys(targets)), "model.lora_attn_modules"),
        "adapter_dtype": Said("base", "dtype"),
        "autocast": Said(False, "dtype"),
    }
    if quantised:
        adapter["base_quant"] = Said("nf4-dq", f"model._component_ {name}")
        adapter["upcast"] = Said(False, f"model._component_ {name}")
        notes.append(
            "torchao's NF4 is answered for by bitsandbytes' with double quantisation, which has blocks of the same sizes"
        )
    notes += block.not_understood((), "torchtune's model builders")
    return model, adapter


def _optimizer(keys: Keys, said: dict[str, Said], reasons: list[str]) -> None:
    block = keys.block("optimizer")
    name = str(block.get(COMPONENT, ""))
    if not name:
        return
    if name in _OPTIMIZERS:
        said["optimizer"] = Said(_OPTIMIZERS[name], "optimizer._component_")
        return
    known = TORCH_OPTIMIZERS.get(name.rpartition(".")[2]) if name.startswith("torch.optim.") else None
    if known is None:
        reasons.append(f"{block.at(COMPONENT)}: optimizer {name} is not modelled yet")
        return
    if known in ("sgd", "rmsprop") and block.real("momentum"):
        known += "-momentum"
    if block.flag("amsgrad"):
        known += "-amsgrad"
    said["optimizer"] = Said(known, "optimizer._component_")
    if block.flag("fused"):
        said["optimizer_impl"] = Said("fused", "optimizer.fused")
    elif block.get("foreach") is not None:
        said["optimizer_impl"] = Said("foreach" if block.flag("foreach") else "for-loop", "optimizer.foreach")


def _recompute(keys: Keys, said: dict[str, Said], notes: list[str]) -> None:
    mode, option = keys.choice("ac_mode", ("full", "selective")), keys.get("ac_option")
    if mode == "selective":
        if option == "op":
            said["recompute"] = Said("selective-op", "ac_option")
        else:
            said["recompute"] = Said(f"selective-layer:{keys.number('ac_option') or 1}", "ac_option")
    elif keys.flag("enable_activation_checkpointing") or mode == "full":
        said["recompute"] = Said("full", "enable_activation_checkpointing")
    notes += keys.less({"enable_activation_offloading": "activations wait on the host"})


def _loss(keys: Keys, said: dict[str, Said], reasons: list[str]) -> None:
    block = keys.block("loss")
    name = str(block.get(COMPONENT, "")).rpartition(".")[2]
    if not name:
        return
    if name not in _LOSSES:
        reasons.append(f"{block.at(COMPONENT)}: loss {shown(name)} is not modelled yet")
        return
    said["loss"] = Said(_LOSSES[name], "loss._component_")


def _fsdp(keys: Keys, said: dict[str, Said], reasons: list[str], notes: list[str]) -> FsdpSettings | None:
    """`shard_model` (torchtune/training/_distributed.py): every block, then the root, in the type they are stored in."""
    if not any(key in keys for key in _DISTRIBUTED):
        return None
    block = keys.block("fsdp")
    offload = keys.flag("fsdp_cpu_offload") or block.flag("cpu_offload")
    copies = keys.number("data_parallel_replicate_dim") or 1
    keys.get("data_parallel_shard_dim")
    apart = keys.words("custom_sharded_layers")
    if apart:
        notes.append(f"custom_sharded_layers {', '.join(apart)}: answered as embedding and head wrapped apart from the root")
    keys.get("memory_efficient_fsdp_wrap")
    key = next(key for key in _DISTRIBUTED if key in keys)
    said["strategy"] = Said("hsdp" if copies > 1 else "fsdp2", key)
    if offload:
        said["offload"] = Said(("optimizer", "param"), "fsdp_cpu_offload")
    return FsdpSettings(
        version=2,
        reshard_after_forward=keys.flag("fsdp_reshard_after_forward", True),
        cpu_offload=offload,
        wrap_embeddings=bool(apart),
        dp_replicate_size=copies if copies > 1 else None,
    )


def _in_backward(keys: Keys, said: dict[str, Said], reasons: list[str], fsdp: FsdpSettings | None) -> None:
    if said["grad_accum_steps"].value > 1:
        raise keys.both("optimizer_in_bwd", "gradient_accumulation_steps", "a gradient that is gone cannot be accumulated")
    if said["clip_grad_norm"].value:
        raise keys.both("optimizer_in_bwd", "clip_grad_norm", "the norm of all gradients is known when the first are gone")
    if fsdp is not None:
        reasons.append(f"{keys.at('optimizer_in_bwd')}: optimizer_in_bwd true under fully_shard is not modelled yet")
        return
    said["strategy"] = Said("release", "optimizer_in_bwd")
