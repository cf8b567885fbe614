"""LLaMA-Factory's YAML (`llamafactory-cli train config.yaml`), read as LLaMA-Factory 0.9 reads it.

Sources: llamafactory/hparams/ (keys and defaults), hparams/parser.py, model/adapter.py (`init_adapter`: what is cast to fp32),
model/model_utils/checkpointing.py and quantization.py.

It runs transformers' Trainer: the keys of TrainingArguments are there under their own names, and `training_args` reads them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import UserError
from . import training_args
from .imported import Imported, Said
from .keys import Keys
from .text import Text

MARKS = ("finetuning_type", "stage", "template", "cutoff_len", "lora_target", "dataset_dir", "quantization_bit")
MARKS_OF_V1 = ("model_class", "dist_config")
SILENT = frozenset({
    "cache_dir", "use_fast_tokenizer", "split_special_tokens", "new_special_tokens_config", "init_special_tokens",
    "model_revision", "low_cpu_mem_usage", "rope_scaling", "moe_aux_loss_coef", "infer_backend", "offload_folder",
    "use_kv_cache", "use_v1_kernels", "infer_dtype", "hf_hub_token", "ms_hub_token", "om_hub_token", "print_param_status",
    "trust_remote_code", "quantization_device_map", "adapter_folder", "template", "dataset", "eval_dataset", "dataset_dir",
    "media_dir", "train_on_prompt", "mask_history", "streaming", "buffer_size", "mix_strategy", "interleave_probs",
    "overwrite_cache", "preprocessing_batch_size", "preprocessing_num_workers", "max_samples", "eval_num_beams",
    "ignore_pad_token_for_loss", "val_size", "eval_on_each_dataset", "packing", "neat_packing", "tool_format",
    "default_system", "enable_thinking", "preserve_thinking", "tokenized_path", "data_shared_file_system", "loraplus_lr_ratio",
    "loraplus_lr_embedding", "pissa_init", "pissa_iter", "pissa_convert", "create_new_adapter", "pref_beta", "pref_ftx",
    "pref_bco_weight", "pref_loss", "dpo_label_smoothing", "kto_chosen_weight", "kto_rejected_weight", "simpo_gamma",
    "ppo_buffer_size", "ppo_epochs", "ppo_score_norm", "ppo_target", "ppo_whiten_rewards", "ld_alpha", "galore_update_interval",
    "galore_scale", "galore_proj_type", "apollo_update_interval", "apollo_scale", "apollo_proj", "apollo_proj_type",
    "apollo_scale_type", "apollo_scale_front", "badam_start_block", "badam_switch_mode", "badam_switch_interval",
    "badam_update_ratio", "badam_mask_mode", "badam_verbose", "compute_accuracy", "disable_shuffling", "early_stopping_steps",
    "plot_loss", "include_effective_tokens_per_second", "asft_alpha", "eaft_alpha", "image_min_pixels", "video_min_pixels",
    "video_fps", "video_maxlen", "use_audio_in_video", "audio_sampling_rate", "image_do_pan_and_scan", "crop_to_patches",
    "do_sample", "temperature", "top_p", "top_k", "num_beams", "max_length", "max_new_tokens", "repetition_penalty",
    "length_penalty", "skip_special_tokens", "predict_with_generate", "generation_max_length", "generation_num_beams",
    "ray_num_workers", "ray_init_kwargs", "master_addr", "master_port", "ray_run_name", "ray_storage_path",
    "resources_per_worker", "placement_strategy", "enable_torch_profiler", "profiler_output_dir", "profiler_wait_steps",
    "profiler_warmup_steps", "profiler_active_steps", "profiler_repeat", "profiler_record_shapes", "profiler_profile_memory",
    "profiler_with_stack", "profile_modules", "fp8_backend", "fp8_enable_fsdp_float8_all_gather", "overwrite_output_dir",
    "freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model", "oft_rank", "freeze_trainable_modules",
    "freeze_extra_modules", "freeze_trainable_layers", "swanlab_project", "badam_mode", "galore_target", "apollo_target",
    "export_dir", "export_size", "export_device", "export_legacy_format", "export_hub_model_id", "do_train", "block_diag_attn",
    "model_max_length", "compute_dtype", "kt_config", "ref_model", "ref_model_adapters", "ref_model_quantization_bit",
    "reward_model", "reward_model_adapters", "reward_model_quantization_bit", "reward_model_type", "train_from_scratch",
    "device_map", "hyper_parallel_args", "hyper_parallel_cp_size",
})  # fmt: skip
_SILENT_PREFIXES = ("swanlab_", "use_swanlab", "vllm_", "sglang_", "export_", "ray_", "profiler_", "hub_", "trackio_", "kt_")
_NOT_MODELLED = {
    "shift_attn": "shifted attention",
    "mixture_of_depths": "mixture of depths",
    "use_unsloth": "unsloth's own kernels and checkpoints",
    "use_llama_pro": "blocks are added",
    "use_mca": "Megatron",
    "use_megatron_bridge": "Megatron",
    "use_hyper_parallel": "parallelism inside a layer",
    "use_kt": "experts on the host",
    "fp8": "fp8 keeps other tensors",
    "use_asft_loss": "another loss",
    "use_eaft_loss": "another loss",
    "use_dft_loss": "another loss",
    "galore_layerwise": "an optimizer for each layer",
    "apollo_layerwise": "an optimizer for each layer",
}
_STAGES = {
    "rm": "a reward model has another head",
    "ppo": "PPO keeps several models",
    "dpo": "DPO keeps two forwards, of two models",
    "kto": "KTO keeps several forwards, of two models",
}
_ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_2"}
_CHOSEN = ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon")


def read(text: Text) -> Imported:
    """What the file says.  Raises UserError for what LLaMA-Factory refuses, with the line."""
    keys = Keys(text)
    for mark in MARKS_OF_V1:
        if mark in keys:
            raise UserError(f"{keys.at(mark)}: {mark} is of LLaMA-Factory's v1, whose files are not read", "Use the options")
    notes: list[str] = []
    reasons = keys.unmodelled(_NOT_MODELLED)
    arguments = _arguments(keys)
    found = training_args.read(arguments, text.source)
    said, taken = dict(found.said), dict(found.taken)
    stage = keys.choice("stage", ("pt", "sft", *_STAGES)) or "sft"
    if stage in _STAGES:
        reasons.append(f"{keys.at('stage')}: stage {stage}: {_STAGES[stage]}, which is not modelled yet")
    said["seq_len"] = Said(
        keys.number("cutoff_len") or 2048, "cutoff_len" if "cutoff_len" in keys else "the default of cutoff_len"
    )
    _optimizer(keys, said, taken, reasons)
    adapter = _adapter(keys, said, reasons, notes)
    _precision(keys, found, bool(adapter), said, taken)
    _recompute(keys, said)
    if keys.flag("enable_liger_kernel"):  # the head and the loss in one, for pt and sft (`apply_liger_kernel`)
        said["loss"] = Said("liger", "enable_liger_kernel")
    attention = keys.choice("flash_attn", _ATTENTION)
    if attention is not None and _ATTENTION[attention]:
        said["attention"] = Said(_ATTENTION[attention], "flash_attn")
    notes += keys.less({
        "enable_liger_kernel": "its kernels of norms and activations keep less",
        "use_unsloth_gc": "what checkpoints keep waits on the host",
    })  # fmt: skip
    for key, words in (
        ("upcast_layernorm", "norms in fp32 are not counted"),
        ("upcast_lmhead_output", "the copy of the logits in fp32 is not counted"),
        ("resize_vocab", "rows that are added to the vocabulary are not counted"),
        ("add_tokens", "rows that are added to the vocabulary are not counted"),
        ("add_special_tokens", "rows that are added to the vocabulary are not counted"),
        ("image_max_pixels", "pictures and videos of the samples are not counted"),
        ("video_max_pixels", "pictures and videos of the samples are not counted"),
    ):
        if keys.is_on(key):
            notes.append(f"{key}: {words}")
    if not keys.is_on("packing") and not keys.is_on("neat_packing"):
        notes.append("cutoff_len: a batch of samples of that length is answered for; shorter ones need less")
    base = keys.text_of("model_name_or_path")
    silent = SILENT | training_args.KNOWN | {key for key in keys.data if key.startswith(_SILENT_PREFIXES)}
    notes += keys.not_understood(silent, "LLaMA-Factory")
    return replace(
        found,
        kind="llamafactory",
        said=said,
        taken={option: value for option, value in taken.items() if option not in said},
        notes=(*found.notes, *notes),
        unmodelled=(*found.unmodelled, *reasons),
        model=Said(base, "model_name_or_path") if base else None,
        adapter=adapter,
    )


def _arguments(keys: Keys) -> dict[str, Any]:
    """The keys of TrainingArguments; recompute is LLaMA-Factory's own matter."""
    own = ("gradient_checkpointing", "gradient_checkpointing_kwargs", "use_cache")
    arguments = {key: keys.get(key) for key in keys.data if key in training_args.KNOWN and key not in own}
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if (number := keys.number(key)) is not None:
            arguments[key] = number
    if (clip := keys.real("max_grad_norm")) is not None:
        arguments["max_grad_norm"] = clip
    if keys.flag("bf16") and keys.flag("fp16"):
        raise keys.both("bf16", "fp16", "a run has one of them")
    if keys.is_on("deepspeed") and keys.is_on("fsdp"):
        raise keys.both("deepspeed", "fsdp", "a run has one of them")
    if keys.flag("pure_bf16"):
        arguments["bf16"] = False  # nothing is cast: all of the model is in bf16
    return {key: value for key, value in arguments.items() if value is not None}


def _optimizer(keys: Keys, said: dict[str, Said], taken: dict[str, Said], reasons: list[str]) -> None:
    """Optimizers that have a switch of their own instead of a word of `optim`."""
    chosen = [key for key in _CHOSEN if keys.flag(key)]
    if len(chosen) > 1:
        raise keys.both(chosen[0], chosen[1], "a run has one optimizer")
    rank = {key: keys.number(key) or 16 for key in ("galore_rank", "apollo_rank")}
    if not chosen:
        return
    name = {
        "use_galore": f"galore-adamw:rank={rank['galore_rank']}",
        "use_apollo": f"apollo-adamw:rank={rank['apollo_rank']}",
        "use_badam": "badam",
        "use_adam_mini": "adam-mini",
        "use_muon": "muon",
    }[chosen[0]]
    if chosen[0] == "use_badam" and keys.get("badam_mode") == "ratio":
        reasons.append(f"{keys.at('badam_mode')}: badam_mode ratio is not modelled yet")
    for option in ("optimizer", "optimizer_impl"):
        said.pop(option, None)
        taken.pop(option, None)
    said["optimizer"] = Said(name, chosen[0])


def _adapter(keys: Keys, said: dict[str, Said], reasons: list[str], notes: list[str]) -> dict[str, Said]:
    kind = keys.choice("finetuning_type", ("lora", "oft", "freeze", "full")) or "lora"
    bits = keys.number("quantization_bit")
    method = str(keys.get("quantization_method", "bnb")).lower().rpartition(".")[2]
    quant_type = keys.choice("quantization_type", ("nf4", "fp4")) or "nf4"
    double = keys.flag("double_quantization", True)
    fields: dict[str, Said] = {}
    if kind == "freeze":
        reasons.append(f"{keys.at('finetuning_type')}: finetuning_type freeze: some layers train, which is not modelled yet")
    if kind in ("full", "freeze"):
        if bits is not None:
            raise keys.both("quantization_bit", "finetuning_type", "quantised weights do not train")
        return {}
    key = "finetuning_type" if "finetuning_type" in keys else "the default of finetuning_type"
    name = kind
    if kind == "lora":
        dora, rslora = keys.flag("use_dora"), keys.flag("use_rslora")
        name = "dora" if dora else "rslora" if rslora else "qlora" if bits == 4 else "lora"
        key = "use_dora" if dora else "use_rslora" if rslora else "quantization_bit" if bits == 4 else key
        fields["rank"] = Said(keys.number("lora_rank") or 8, "lora_rank")
        if (alpha := keys.real("lora_alpha")) is not None:
            fields["alpha"] = Said(alpha, "lora_alpha")
        fields["dropout"] = Said(keys.real("lora_dropout") or 0.0, "lora_dropout")
        targets = keys.words("lora_target") or ("all",)
    else:
        fields["rank"] = Said(keys.number("oft_block_size") or 32, "oft_block_size")
        fields["dropout"] = Said(keys.real("module_dropout") or 0.0, "module_dropout")
        targets = keys.words("oft_target") or ("all",)
    fields["targets"] = Said(("all-linear",) if targets == ("all",) else targets, f"{kind}_target")
    if extra := keys.words("additional_target"):
        fields["modules_to_save"] = Said(extra, "additional_target")
    if keys.is_on("adapter_name_or_path"):
        notes.append("adapter_name_or_path: an adapter of the rank of this file is answered for")
    said["method"] = Said(name, key)
    if bits is not None:
        if method not in ("bnb", "bitsandbytes") or bits not in (4, 8):
            reasons.append(f"{keys.at('quantization_bit')}: quantization_bit {bits} by {method} is not modelled yet")
        fields["base_quant"] = Said("int8" if bits == 8 else quant_type + ("-dq" if double else ""), "quantization_bit")
        fields["upcast"] = Said(False, "quantization_bit")  # prepare_model_for_kbit_training is not called
        half = "bfloat16" if keys.flag("bf16") or keys.flag("pure_bf16") else "float16" if keys.flag("fp16") else None
        if bits == 4 and half:
            fields["quant_storage"] = Said(half, "quantization_bit")  # the type that is computed in
    if keys.flag("pure_bf16"):
        fields["adapter_dtype"] = Said("base", "pure_bf16")
    return fields


def _precision(keys: Keys, found: Imported, adapter: bool, said: dict[str, Said], taken: dict[str, Said]) -> None:
    """The weights that train are cast to fp32 (`init_adapter`); a frozen base is loaded in the type that is computed in."""
    if "precision" in said or found.deepspeed is not None or found.fsdp is not None:
        if keys.flag("pure_bf16"):
            raise UserError(
                f"{keys.at('pure_bf16')}: pure_bf16 beside deepspeed or fsdp has its precision there", "Remove pure_bf16"
            )
        return
    taken.pop("precision", None)
    mixed = next((key for key in ("bf16", "fp16") if keys.flag(key)), None)
    if keys.flag("pure_bf16"):
        said["precision"] = Said("bf16", "pure_bf16")
    elif mixed is not None:
        said["precision"] = Said(mixed if adapter else f"{mixed}-autocast", mixed)
    elif not adapter:
        said["precision"] = Said("fp32", "the default of bf16")


def _recompute(keys: Keys, said: dict[str, Said]) -> None:
    """On unless `disable_gradient_checkpointing`, and reentrant unless told otherwise."""
    said.pop("recompute", None)
    said.pop("reentrant", None)
    reentrant = keys.flag("use_reentrant_gc", True)
    for key in ("gradient_checkpointing", "gradient_checkpointing_kwargs", "use_cache"):
        keys.get(key)
    if keys.flag("disable_gradient_checkpointing"):
        return
    said["recompute"] = Said("full", "the default of disable_gradient_checkpointing")
    if reentrant:
        said["reentrant"] = Said(True, "use_reentrant_gc" if "use_reentrant_gc" in keys else "the default of use_reentrant_gc")
