"""axolotl's YAML (`axolotl train config.yml`), read as axolotl 0.13 reads it.

Sources: axolotl/utils/schemas/ (keys and defaults), utils/config (`normalize_config`, `resolve_dtype`), core/builders/base.py
(which TrainingArguments it makes), loaders/model.py and loaders/adapter.py (dtypes, quantisation, peft).

axolotl runs transformers' Trainer: the file becomes TrainingArguments, which `training_args` reads, and what is around them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import UserError, did_you_mean
from ...models.adapters import targets_of
from . import training_args
from .imported import Imported, Said
from .keys import Keys
from .text import Text, shown

MARKS = ("base_model",)
#: Keys that change neither memory nor the work of a step.
SILENT = frozenset({
    "strict", "resume_from_checkpoint", "auto_resume_from_checkpoints", "mean_resizing_embeddings", "shrink_embeddings",
    "reinit_weights", "trainer_cls", "datasets", "test_datasets", "shuffle_merged_datasets", "shuffle_before_merging_datasets",
    "dataset_prepared_path", "dataset_shard_num", "dataset_shard_idx", "skip_prepare_dataset", "num_dataset_shards_to_save",
    "pretraining_dataset", "dataset_processes", "dataset_num_proc", "dataset_exact_deduplication", "dataset_keep_in_memory",
    "dataloader_pin_memory", "dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_drop_last",
    "accelerator_config", "remove_unused_columns", "push_dataset_to_hub", "hf_use_auth_token", "device", "device_map",
    "world_size", "local_rank", "ddp", "seed", "ddp_timeout", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
    "ddp_find_unused_parameters", "do_causal_lm_eval", "eval_causal_lm_metrics", "do_bench_eval", "bench_dataset",
    "bench_split", "metric_for_best_model", "greater_is_better", "loss_watchdog_threshold", "loss_watchdog_patience",
    "gc_steps", "torch_empty_cache_steps", "gc_collect_steps", "tf32", "excess_length_strategy", "eval_sequence_len",
    "min_sample_len", "max_prompt_len", "sample_packing", "sample_packing_group_size", "sample_packing_bin_size",
    "sample_packing_sequentially", "sample_packing_mp_start_method", "sample_packing_eff_est",
    "sample_packing_seq_len_multiplier", "eval_sample_packing", "pad_to_sequence_len", "pad_to_multiple_of",
    "curriculum_sampling", "multipack_real_batches", "batch_flattening", "pose_split_on_token_ids", "pose_max_context_len",
    "pose_num_chunks", "pretrain_multipack_buffer_size", "pretrain_multipack_attn", "pretraining_sample_concatenation",
    "streaming", "streaming_multipack_buffer_size", "flex_attn_compile_kwargs", "flash_optimum", "experts_implementation",
    "chunked_cross_entropy_num_chunks", "tiled_mlp_num_shards", "tiled_mlp_use_original_mlp", "eaft_alpha", "eaft_k",
    "fsdp_final_state_dict_type", "val_set_size", "heads_k_stride", "ring_attn_func", "special_tokens",
    "added_tokens_overrides", "torch_compile_backend", "torch_compile_mode", "torch_compile_options", "max_steps",
    "warmup_steps", "warmup_ratio", "eval_steps", "evals_per_epoch", "eval_strategy", "evaluation_strategy", "save_steps",
    "saves_per_epoch", "save_strategy", "save_total_limit", "save_first_step", "logging_steps", "early_stopping_patience",
    "load_best_model_at_end", "save_only_model", "use_tensorboard", "profiler_steps", "profiler_steps_start",
    "include_tokens_per_second", "include_tkps", "max_memory", "gpu_memory_limit", "low_cpu_mem_usage", "chat_template",
    "chat_template_jinja", "chat_template_kwargs", "eot_tokens", "default_system_message", "fix_untrained_tokens",
    "is_preprocess", "preprocess_iterable", "total_num_tokens", "total_supervised_tokens", "axolotl_config_path",
    "is_falcon_derived_model", "is_llama_derived_model", "is_mistral_derived_model", "is_qwen_derived_model", "debug",
    "generate_samples", "num_generation_samples", "generation_max_new_tokens", "generation_temperature", "generation_top_p",
    "generation_top_k", "generation_prompt_ratio", "generation_do_sample", "base_model_config", "cls_model_config",
    "tokenizer_config", "tokenizer_use_fast", "tokenizer_legacy", "tokenizer_use_mistral_common", "tokenizer_type",
    "processor_type", "processor_kwargs", "tokenizer_save_jinja_files", "trust_remote_code", "model_type", "type_of_model",
    "revision_of_model", "base_model_ignore_patterns", "experimental_skip_move_to_device", "output_dir", "hub_model_id",
    "hub_strategy", "hub_revision", "save_safetensors", "lora_model_dir", "lora_fan_in_fan_out", "peft_init_lora_weights",
    "peft_ensure_weight_tying", "qlora_sharded_model_loading", "loraplus_lr_ratio", "loraplus_lr_embedding", "merge_lora",
    "merge_method", "gptq_groupsize", "gptq_model_v1", "gptq_disable_exllama", "embeddings_skip_upcast", "eval_batch_size",
    "train_on_inputs", "group_by_length", "learning_rate", "embedding_lr", "embedding_lr_scale", "weight_decay", "optim_args",
    "torchdistx_path", "lr_scheduler", "lr_scheduler_kwargs", "lr_quadratic_warmup", "cosine_min_lr_ratio",
    "cosine_constant_lr_ratio", "lr_div_factor", "lr_groups", "eta_min", "adam_epsilon", "adam_epsilon2", "adam_eps",
    "adam_beta1", "adam_beta2", "adam_beta3", "dion_lr", "dion_momentum", "num_epochs", "jagged_restart_steps",
    "jagged_restart_warmup_steps", "jagged_restart_anneal_steps", "relora_prune_ratio", "relora_prune_method",
    "relora_cpu_offload", "lisa_step_interval", "lisa_layers_attribute", "image_size", "image_resize_algorithm",
    "role_boundaries", "resources_per_worker", "full_finetune", "num_labels", "eval_table_size", "eval_max_new_tokens",
    "dynamic_checkpoint", "fp32_norm_classes", "swanlab_project", "use_otel_metrics", "hf_mlflow_log_artifacts", "secrets",
    "sample_packing_seq_len", "shuffle", "model_quantization_config_kwargs", "trl", "vllm",
    "lora_alpha_pattern", "peft_layers_pattern", "precompute_ref_log_probs", "center_rewards_coefficient",
    "fp8_enable_fsdp_float8_all_gather", "tokens", "resize_token_embeddings_to_32x", "plugins", "liger_use_token_scaling",
})  # fmt: skip
_SILENT_PREFIXES = ("wandb_", "mlflow_", "comet_", "trackio_", "otel_", "gradio_", "ray_", "swanlab_", "use_wandb",
"use_mlflow",
                    "use_comet", "use_trackio", "use_ray", "use_swanlab", "dataset_", "hub_", "lm_eval_", "dpo_", "kto_",
                    "cpo_",
                    "orpo_", "simpo_", "rl_", "rpo_", "qgalore_", "loftq_", "nemo_gym_", "dion_")  # fmt: skip
_NOT_MODELLED = {
    "rl": "preference and reinforcement learning keep more than one forward",
    "reward_model": "a reward model has another head",
    "process_reward_model": "a reward model has another head",
    "ebft": "it keeps generated samples",
    "qat": "fake quantisation keeps more",
    "fp8": "fp8 keeps other tensors",
    "layer_offloading": "layers that wait on the host",
    "unfrozen_parameters": "which parameters train is a pattern",
    "freeze_mm_modules": "which parameters train depends on the model",
    "use_pose": "positions are drawn",
    "max_packed_sequence_len": "axolotl refuses it",
    "s2_attention": "shifted attention",
    "flash_attn_rms_norm": "axolotl refuses it",
    "quantize_moe_experts": "quantised experts",
    "tiled_mlp": "the MLP runs in tiles",
    "lora_on_cpu": "adapters on the host",
    "lora_target_parameters": "adapters on parameters, not modules",
    "lora_rank_pattern": "a rank for each module",
    "peft_layers_to_transform": "adapters in some layers only",
    "peft_layer_replication": "layers are copied",
    "peft_trainable_token_indices": "some rows of the embedding train",
    "relora": "adapters are merged and made again",
    "lisa_n_layers": "which layers train changes",
    "use_onebitllms": "1.58-bit weights",
    "model_quantization_config": "the model is quantised when it is loaded",
    "fp32_norms": "norms under a policy of their own",
    "diffusion": "another loss",
    "use_eaft": "another loss",
    "llama4_linearized_experts": "the experts are made again",
    "use_scattermoe": "another kernel for the experts",
    "use_sonicmoe": "another kernel for the experts",
    "llmcompressor": "a sparse model",
    "mora": "MoRA",
    "use_mora": "MoRA",
    "kd_trainer": "distillation keeps two models",
    "grokfast_alpha": "a moving average of the gradients",
    "dense_mixer": "every expert runs",
    "quantization": "the model is quantised when it is loaded",
}
_PARALLEL = ("sequence_parallel_degree", "context_parallel_size", "tensor_parallel_size", "expert_parallel_size")
_LESS = {
    "liger_rope": "a fused kernel",
    "liger_rms_norm": "a fused kernel",
    "liger_rms_norm_gated": "a fused kernel",
    "liger_layer_norm": "a fused kernel",
    "liger_swiglu": "a fused kernel",
    "liger_glu_activation": "a fused kernel",
    "lora_mlp_kernel": "a fused kernel",
    "lora_qkv_kernel": "a fused kernel",
    "lora_o_kernel": "a fused kernel",
    "lora_embedding_kernel": "a fused kernel",
    "flash_attn_cross_entropy": "a fused kernel",
    "liger_cross_entropy": "the loss needs no copy of the logits",
    "flash_attn_fuse_mlp": "a fused kernel",
    "fused_attn_kernel": "a fused kernel",
    "use_kernels": "kernels of the hub",
}
_LOSSES = ("liger_fused_linear_cross_entropy", "cut_cross_entropy", "chunked_cross_entropy")
_LOSS_PLUGIN = "CutCrossEntropyPlugin"
_ATTENTION = {
    "eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash_attention_2", "flash_attention_3": "flash_attention_2",
    "kernels-community/flash-attn2": "flash_attention_2", "kernels-community/flash-attn3": "flash_attention_2",
    "kernels-community/vllm-flash-attn3": "flash_attention_2",
}  # fmt: skip
_OLD_ATTENTION = {
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
    "xformers_attention": "xformers",
    "sage_attention": "sage", "flex_attention": "flex_attention",
}  # fmt: skip
#: axolotl's own optimizers (CustomSupportedOptimizers) that memplan has a model of; the others are the Trainer's names.
_OPTIMIZERS = {
    "ao_adamw_4bit": "torchao-adamw-4bit", "ao_adamw_8bit": "torchao-adamw-8bit", "ao_adamw_fp8": "torchao-adamw-fp8",
    "flash_adamw": "flash-adamw", "flash_adam": "flash-adam", "flash_lion": "flash-lion", "flash_sgd": "flash-sgd",
    "muon": "muon",
}  # fmt: skip
_CUSTOM = ("optimi_adamw", "adopt_adamw", "came_pytorch", "dion", "sinkgd", "flash_sgdw", "q_galore_adamw8bit")
_TRAINER_NAMES = {"per_device_train_batch_size": "micro_batch_size", "optim": "optimizer"}
_NOT_FSDP = ("final_state_dict_type", "mixed_precision_policy", "cpu_offload_pin_memory", "version")


def read(text: Text) -> Imported:
    """What the file says.  Raises UserError for what axolotl refuses, with the line."""
    keys = Keys(text)
    notes: list[str] = []
    reasons = keys.unmodelled(_NOT_MODELLED)
    for key in _PARALLEL:
        if (keys.number(key) or 1) > 1:
            reasons.append(f"{keys.at(key)}: {key} {keys.get(key)}: parallelism inside a layer is not modelled yet")
    arguments = _arguments(keys, notes)
    optimizer = str(keys.get("optimizer", "adamw_torch_fused")).lower()
    own = _OPTIMIZERS.get(optimizer)
    if optimizer in _CUSTOM:
        reasons.append(f"{keys.at('optimizer')}: optimizer {optimizer} is not modelled yet")
    elif own is None and not training_args.is_optim(optimizer):
        hint = did_you_mean(optimizer, (*training_args.OPTIM_NAMES, "adamw_torch", "adamw_torch_fused", *_OPTIMIZERS))
        raise keys.wrong("optimizer", "axolotl knows no such optimizer", hint or "Correct the file")
    elif own is None:
        arguments["optim"] = optimizer
    found = training_args.read(arguments, text.source)
    said, taken = dict(found.said), dict(found.taken)
    if own is not None or optimizer in _CUSTOM:
        for name in ("optimizer", "optimizer_impl"):
            said.pop(name, None)
            taken.pop(name, None)
        said["optimizer"] = Said(own, "optimizer")
    said["seq_len"] = Said(keys.number("sequence_len") or 512, "sequence_len")
    adapter = _adapter(keys, said, reasons)
    _precision(keys, found, bool(adapter), said, taken, notes)
    _attention(keys, said, reasons, notes, full=not adapter)
    _loss(keys, said, notes)
    notes += keys.less(_LESS)
    if keys.is_on("activation_offloading"):
        notes += keys.less({"activation_offloading": "activations wait on the host"})
        said.setdefault("recompute", Said("full", "activation_offloading"))
    if keys.get("tokens") or keys.is_on("resize_token_embeddings_to_32x"):
        notes.append("tokens: rows that are added to the vocabulary are not counted")
    if keys.is_on("model_config") or keys.is_on("overrides_of_model_config"):
        notes.append("model_config: changes of the model's config are not read; say them with --set KEY=VALUE")
    _lengths(keys, notes)
    sizes = ("micro_batch_size", "gradient_accumulation_steps", "batch_size")
    if sum(size in keys for size in sizes) < 2:
        raise UserError(f"{text.source}: axolotl needs two of {', '.join(sizes)}", "Write micro_batch_size and the second")
    base = keys.text_of("base_model")
    silent = SILENT | {key for key in keys.data if key.startswith(_SILENT_PREFIXES)}
    notes += keys.not_understood(silent, "axolotl")
    renamed = {option: replace(value, key=_TRAINER_NAMES.get(value.key, value.key)) for option, value in said.items()}
    return replace(
        found,
        kind="axolotl",
        said=renamed,
        taken={option: value for option, value in taken.items() if option not in renamed},
        notes=(*found.notes, *notes),
        unmodelled=(*found.unmodelled, *reasons),
        model=Said(base, "base_model") if base else None,
        adapter=adapter,
    )


def _arguments(keys: Keys, notes: list[str]) -> dict[str, Any]:
    """The TrainingArguments that axolotl makes (core/builders/base.py), without the optimizer."""
    micro, steps = keys.number("micro_batch_size") or 1, keys.number("gradient_accumulation_steps")
    batch = keys.number("batch_size")
    if batch is not None and steps is not None:
        raise keys.both("batch_size", "gradient_accumulation_steps", "axolotl takes one of them")
    if batch is not None:
        if batch % micro:
            raise keys.both("batch_size", "micro_batch_size", "the first does not divide by the second")
        steps = batch // micro
        notes.append(f"batch_size {batch} of one GPU: {steps} accumulated")
    arguments: dict[str, Any] = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": steps or 1}
    if (clip := keys.real("max_grad_norm")) is not None:
        arguments["max_grad_norm"] = clip
    bf16 = _bf16(keys)
    arguments |= {"bf16": bf16 in ("auto", "true"), "fp16": bf16 == "false" and keys.flag("fp16")}
    if keys.is_on("torch_compile") and keys.get("torch_compile") != "auto":
        arguments["torch_compile"] = True
    checkpointing = keys.get("gradient_checkpointing")
    if checkpointing in ("offload", "offload_disk", "unsloth"):
        notes += keys.less({"gradient_checkpointing": "what checkpoints keep waits on the host"})
        checkpointing = True
    if checkpointing not in (None, True, False, "true", "false", "auto"):
        raise keys.wrong("gradient_checkpointing", "expected true, false, offload or offload_disk")
    if checkpointing in (True, "true", "auto"):
        arguments["gradient_checkpointing"] = True
        arguments["gradient_checkpointing_kwargs"] = dict(keys.block("gradient_checkpointing_kwargs").data)
    if keys.is_on("selective_checkpointing"):
        notes.append("selective_checkpointing: blocks are recomputed in full here, so the run keeps more than is said")
    keys.get("gradient_checkpointing_kwargs")
    for key in ("neftune_noise_alpha", "auto_find_batch_size", "optim_target_modules"):
        if keys.is_on(key):
            arguments[key] = keys.get(key)
    if keys.is_on("noisy_embedding_alpha"):
        arguments["neftune_noise_alpha"] = keys.get("noisy_embedding_alpha")
    if keys.is_on("deepspeed"):
        arguments["deepspeed"] = keys.get("deepspeed")
    if keys.is_on("fsdp") or keys.is_on("fsdp_config"):
        if keys.is_on("deepspeed"):
            raise keys.both("deepspeed", "fsdp" if keys.is_on("fsdp") else "fsdp_config", "a run has one of them")
        block = dict(keys.block("fsdp_config").data)
        plain = {name.removeprefix("fsdp_"): value for name, value in block.items()}
        version = keys.number("fsdp_version") or plain.get("version") or 1
        left = {name: value for name, value in plain.items() if name not in _NOT_FSDP and value is not None}
        arguments["fsdp"] = keys.get("fsdp") or True
        arguments["fsdp_config"] = {"version": version, **left}
    for key in ("dp_shard_size", "dp_replicate_size"):
        if (keys.number(key) or 1) > 1:
            notes.append(f"{key} {keys.get(key)}: the GPUs are those of --gpus; say --strategy hsdp for copies of the shards")
    keys.get("deepcompile")
    return arguments


def _bf16(keys: Keys) -> str:
    """auto | true | full | false; what is switched off is false."""
    text = str(keys.get("bf16", "auto")).lower()
    if text not in ("auto", "true", "false", "full"):
        raise keys.wrong("bf16", "expected true, false, auto or full")
    if keys.is_on("fp16") and text in ("true", "full"):
        raise keys.both("bf16", "fp16", "a run has one of them")
    return "false" if text == "auto" and keys.is_on("fp16") else text


def _precision(
    keys: Keys, found: Imported, adapter: bool, said: dict[str, Said], taken: dict[str, Said], notes: list[str]
) -> None:
    """axolotl loads the weights in the type that it computes in (`resolve_dtype`); an engine's own precision stays."""
    bf16 = _bf16(keys)
    half = "bf16" if bf16 != "false" or keys.flag("bfloat16") else "fp16" if keys.flag("fp16") or keys.flag("float16") else ""
    on = [name for name in ("bf16", "bfloat16", "fp16", "float16") if keys.is_on(name)]
    key = on[0] if on else "the default of bf16"
    keys.get("float32")
    if "precision" in said or found.deepspeed is not None or found.fsdp is not None:
        return
    taken.pop("precision", None)
    said["precision"] = Said(half or "fp32", key)
    if half and not adapter and found.said.get("optimizer") is not None:
        notes.append(f"{key}: axolotl loads the weights in 16 bits, so gradients and optimizer state are too")


def _adapter(keys: Keys, said: dict[str, Said], reasons: list[str]) -> dict[str, Said]:
    kind = keys.get("adapter")
    in4, in8, gptq = keys.flag("load_in_4bit"), keys.flag("load_in_8bit"), keys.flag("gptq")
    fields = {
        "rank": keys.number("lora_r"),
        "alpha": keys.real("lora_alpha"),
        "dropout": keys.real("lora_dropout"),
        "targets": _targets(keys),
        "modules_to_save": keys.words("lora_modules_to_save"),
    }
    dora, rslora = keys.flag("peft_use_dora"), keys.flag("peft_use_rslora")
    base16 = keys.get("peft_autocast_adapter_dtype") is not None and not keys.flag("peft_autocast_adapter_dtype")
    peft, bnb = keys.block("peft").data, dict(keys.block("bnb_config_kwargs").data)
    double = bnb.pop("bnb_4bit_use_double_quant", True)
    if bnb or not isinstance(double, bool):
        reasons.append(f"{keys.at('bnb_config_kwargs')}: bnb_config_kwargs {shown(bnb)}: not modelled yet")
    if in4 and in8:
        raise keys.both("load_in_4bit", "load_in_8bit", "weights have one size")
    if kind is None or str(kind).lower() in ("none", "false"):
        for key in ("load_in_4bit", "load_in_8bit"):
            if keys.flag(key):
                raise UserError(
                    f"{keys.at(key)}: {key} is true without an adapter: axolotl refuses to train quantised weights",
                    "Write adapter: qlora, or switch it off",
                )
        return {}
    kind = keys.choice("adapter", ("lora", "qlora", "llama-adapter", "mora"))
    if kind not in ("lora", "qlora"):
        reasons.append(f"{keys.at('adapter')}: adapter {kind} is not modelled yet")
        return {}
    if kind == "qlora" and in8:
        raise keys.both("adapter", "load_in_8bit", "QLoRA loads the base in 4 bits")
    if kind == "qlora" and not in4:
        raise UserError(f"{keys.at('adapter')}: adapter qlora needs load_in_4bit: true", "Write it, or use adapter: lora")
    if peft.get("loftq_config"):
        reasons.append(f"{keys.at('peft')}: peft.loftq_config is not modelled yet")
    method = "dora" if dora else "rslora" if rslora else str(kind)
    key = "peft_use_dora" if dora else "peft_use_rslora" if rslora else "adapter"
    said["method"] = Said(method, key)
    adapter = {name: Said(value, f"lora_{name}") for name, value in fields.items() if value not in (None, ())}
    renames = {"rank": "lora_r", "targets": "lora_target_modules"}
    adapter = {name: replace(value, key=renames.get(name, value.key)) for name, value in adapter.items()}
    if "targets" in adapter and keys.is_on("lora_target_linear"):
        adapter["targets"] = Said(adapter["targets"].value, "lora_target_linear")
    if in4 or in8 or gptq:  # norms, embeddings and head go back to 16 bits behind prepare_model_for_kbit_training
        quant_key = "load_in_4bit" if in4 else "load_in_8bit" if in8 else "gptq"
        adapter["base_quant"] = Said(("nf4-dq" if double else "nf4") if in4 else "int8" if in8 else "gptq", quant_key)
        adapter["upcast"] = Said(False, quant_key)
    if in4:
        adapter["quant_storage"] = Said("bfloat16", "load_in_4bit")
    if base16:
        adapter["adapter_dtype"] = Said("base", "peft_autocast_adapter_dtype")
    return adapter


def _targets(keys: Keys) -> tuple[str, ...]:
    linear = keys.flag("lora_target_linear")
    value = keys.get("lora_target_modules")
    if linear:
        return ("all-linear",)
    pattern = targets_of(value) if isinstance(value, str) else ()
    return pattern if pattern and pattern[0] != value else keys.words("lora_target_modules")


def _attention(keys: Keys, said: dict[str, Said], reasons: list[str], notes: list[str], *, full: bool) -> None:
    named = [(key, name) for key, name in _OLD_ATTENTION.items() if keys.flag(key)]
    chosen = keys.get("attn_implementation")
    if chosen is not None:
        named.insert(0, ("attn_implementation", str(chosen).lower()))
    kinds = {name: key for key, name in named}
    if len(kinds) > 1:
        first, second = list(kinds.values())[:2]
        raise keys.both(first, second, "attention has one implementation")
    if not named:
        return
    key, name = named[0]
    if name not in _ATTENTION:
        reasons.append(f"{keys.at(key)}: {key}: attention by {name} is not modelled yet")
        return
    said["attention"] = Said(_ATTENTION[name], key)
    if name.endswith("3"):
        notes.append(f"{key} {name}: answered as flash_attention_2, which keeps the same tensors")
    if full and name in ("sdpa", "eager") and "precision" in said and said["precision"].value in ("bf16", "fp16"):
        notes.append(f"{key} {name}: axolotl then keeps embeddings, head and norms in fp32, which is not counted")


def _loss(keys: Keys, said: dict[str, Said], notes: list[str]) -> None:
    plugins = " ".join(map(str, keys.words("plugins")))
    key = next((key for key in _LOSSES if keys.is_on(key)), None)
    if key is None and _LOSS_PLUGIN in plugins and keys.get("cut_cross_entropy") is not False:
        key = "plugins"
    if key == "liger_fused_linear_cross_entropy":
        said["loss"] = Said("liger", key)
    elif key is not None:
        said["loss"] = Said("chunked", key)
        notes.append(f"{key}: answered as --loss chunked, which keeps more than that kernel: the peak is an upper bound")


def _lengths(keys: Keys, notes: list[str]) -> None:
    if keys.is_on("sample_packing"):
        notes.append("sample_packing: every sample is full; a micro batch is one row of as many tokens")
    elif not keys.is_on("pad_to_sequence_len"):
        notes.append("sequence_len: a batch of samples of that length is answered for; shorter ones need less")
