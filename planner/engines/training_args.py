"""TrainingArguments of transformers, as JSON or YAML: what they say about memory, and the engine files that they name.

Sources: transformers 5.24, transformers/training_args.py (fields, their defaults, `OptimizerNames`), trainer_optimizer.py,
integrations/deepspeed.py (`trainer_config_process`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import UserError, did_you_mean
from . import accelerate_yaml, deepspeed_json, fsdp_config
from .deepspeed_schema import block
from .imported import AUTO, Imported, Said
from .keys import Keys
from .text import Text, beside, read_file, shown

#: `optim` where memplan's catalogue has another word for it, or another optimizer of that name: (optimizer, implementation).
_OPTIM: dict[str, tuple[str, str | None]] = {
    "adamw_torch": ("adamw", "foreach"),
    "adamw_torch_fused": ("adamw", "fused"),
    "adafactor": ("hf-adafactor", None),  # transformers' own, not torch's
}
#: The others of `OptimizerNames` that the catalogue knows under the same name.
OPTIM_NAMES = (
    "sgd", "adagrad", "rmsprop", "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "adamw_bnb_8bit", "adamw_8bit",
    "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit",
    "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit",
    "lomo", "adalomo", "grokadamw", "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "stable_adamw",
)  # fmt: skip
#: And those that no model of memplan stands for.
_OTHER_OPTIMS = (
    "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision", "galore_adamw", "galore_adamw_8bit", "galore_adafactor",
    "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "apollo_adamw",
    "apollo_adamw_layerwise",
)  # fmt: skip
_DEFAULT_OPTIM = "adamw_torch_fused"  # with torch 2.8 or newer
_DEFAULTS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0}
#: Fields that are read, and others by which such a file is known.
READ = frozenset({
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "bf16", "fp16", "optim", "deepspeed", "fsdp",
    "fsdp_config", "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
    "activation_checkpointing_kwargs", "torch_compile", "torch_compile_backend", "use_cache", "use_liger_kernel",
    "auto_find_batch_size", "use_cpu",
})  # fmt: skip
KNOWN = READ | frozenset({
    "output_dir", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "num_train_epochs", "max_steps",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "logging_steps", "logging_strategy",
    "logging_dir", "save_steps", "save_strategy", "save_total_limit", "eval_steps", "eval_strategy", "evaluation_strategy",
    "per_device_eval_batch_size", "seed", "data_seed", "report_to", "run_name", "do_train", "do_eval", "do_predict",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_drop_last", "remove_unused_columns", "label_names",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "push_to_hub", "hub_model_id", "tf32",
    "ddp_timeout", "ddp_find_unused_parameters", "ddp_backend", "group_by_length", "optim_args", "optim_target_modules",
    "label_smoothing_factor", "overwrite_output_dir", "resume_from_checkpoint", "local_rank", "log_level", "disable_tqdm",
    "bf16_full_eval", "fp16_full_eval", "neftune_noise_alpha", "average_tokens_across_devices", "accelerator_config",
    "torch_compile_mode", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "prediction_loss_only",
    "include_num_input_tokens_seen", "save_only_model", "save_on_each_node", "hub_strategy", "hub_token", "hub_private_repo",
    "batch_eval_metrics", "dataloader_in_order", "dataloader_multiprocessing_context", "dataloader_persistent_workers",
    "dataloader_prefetch_factor", "ddp_static_graph", "debug", "enable_jit_checkpoint", "eval_do_concat_batches",
    "eval_on_start",
    "eval_use_gather_object", "hub_always_push", "hub_revision", "ignore_data_skip", "include_for_metrics", "log_level_replica",
    "log_on_each_node", "logging_first_step", "logging_nan_inf_filter", "restore_callback_states_from_checkpoint",
    "trackio_bucket_id", "trackio_static_space_id", "train_sampling_strategy", "length_column_name", "full_determinism",
    "skip_memory_metrics", "eval_accumulation_steps",
    "eval_delay", "torch_empty_cache_steps", "liger_kernel_config", "parallelism_config", "project", "trackio_space_id",
})  # fmt: skip
#: Keys of the example scripts of transformers (`run_clm.py` and its like), which take TrainingArguments beside their own.
SCRIPT_MARKS = (
    "block_size", "task_name", "train_file", "validation_file", "dataset_config_name", "config_name", "max_train_samples",
    "validation_split_percentage", "pad_to_max_length",
)  # fmt: skip
_LENGTHS = ("block_size", "max_seq_length")
_MODEL = "model_name_or_path"
_SCRIPT_SILENT = frozenset({
    *SCRIPT_MARKS, *_LENGTHS, _MODEL, "dataset_name", "tokenizer_name", "preprocessing_num_workers", "use_fast_tokenizer",
    "model_revision", "cache_dir", "max_eval_samples", "overwrite_cache", "streaming", "keep_linebreaks", "token",
    "trust_remote_code", "low_cpu_mem_usage", "max_predict_samples", "test_file",
})  # fmt: skip
#: They change what a step keeps: fused kernels, low-rank optimizers, a loss beside the model's, a mesh.
_NOT_MODELLED = ("use_liger_kernel", "optim_target_modules", "label_smoothing_factor", "parallelism_config")


def read(data: Mapping[str, Any], source: str, text: Text | None = None) -> Imported:
    """What the arguments say; `text`: the file, for the lines of its keys.

    Raises UserError for what transformers refuses, and for files named here that cannot be used.
    """
    said, taken = _batch(data, source), _left_to_defaults(data)
    notes: list[str] = []
    mixed = _mixed(data, source)
    key = "bf16" if mixed == "no" else mixed
    engines = [key for key in ("deepspeed", "fsdp") if _on(data.get(key))]
    if len(engines) > 1:
        raise UserError(f"{source}: deepspeed and fsdp are both there", "transformers takes one: remove the other")
    if "deepspeed" in engines:
        found = _with_deepspeed(data, mixed, source)
    elif "fsdp" in engines:
        settings, notes = fsdp_config.from_trainer(data["fsdp"], _fsdp_block(data, source), source)
        found = accelerate_yaml.fsdp_question(settings, mixed, source, key, "training-arguments", notes, [])
    else:
        found = accelerate_yaml.plain_question(None, mixed, source, key, "training-arguments")
        if _on(data.get("fsdp_config")):
            notes.append("fsdp_config has no effect without fsdp")
    keys = Keys(text or Text(source, data))
    script = any(mark in data for mark in SCRIPT_MARKS)
    for key in _LENGTHS:
        if script and (length := keys.number(key)) is not None:
            said["seq_len"] = Said(length, key)
    model = keys.text_of(_MODEL) if script else None
    notes += keys.not_understood(KNOWN | _SCRIPT_SILENT if script else KNOWN, "TrainingArguments")
    if data.get("neftune_noise_alpha"):
        notes.append("neftune_noise_alpha makes one more tensor of the size of the embedded tokens, which is not counted")
    if data.get("auto_find_batch_size"):
        notes.append("auto_find_batch_size lowers the batch size until it fits; the one that is written is answered for")
    unmodelled = [
        f"{source}: {key} {shown(data[key])} changes memory, and is not modelled yet" for key in _NOT_MODELLED if data.get(key)
    ]
    _optimizer(data, found, source, said, taken, unmodelled)
    _recompute(data, said, unmodelled, source)
    _loop(data, said, source)
    return replace(
        found,
        kind="training-arguments",
        said={**found.said, **said},
        taken={**{k: v for k, v in taken.items() if k not in found.said}, **found.taken},
        notes=(*dict.fromkeys((*found.notes, *notes)),),
        unmodelled=(*found.unmodelled, *unmodelled),
        model=Said(model, _MODEL) if model else None,
    )


def _on(value: Any) -> bool:
    return value not in (None, False, "", [], {}, "false", "False")


def _mixed(data: Mapping[str, Any], source: str) -> str:
    both = [key for key in ("bf16", "fp16") if data.get(key) is True]
    if len(both) > 1:
        raise UserError(f"{source}: bf16 and fp16 are both true", "Switch one of them off")
    return both[0] if both else "no"


def _batch(data: Mapping[str, Any], source: str) -> dict[str, Said]:
    said = {}
    for key, option in (
        ("per_device_train_batch_size", "micro_batch_size"),
        ("gradient_accumulation_steps", "grad_accum_steps"),
    ):
        value = data.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{source}: {key} is {shown(value)}: expected a whole number of 1 or more", "Correct the file")
        said[option] = Said(value, key)
    clip = data.get("max_grad_norm")
    if clip is not None:
        if isinstance(clip, bool) or not isinstance(clip, int | float) or clip < 0:
            raise UserError(f"{source}: max_grad_norm is {shown(clip)}: expected a norm, or 0 for none", "Correct the file")
        said["clip_grad_norm"] = Said(clip > 0, "max_grad_norm")
    return said


def _left_to_defaults(data: Mapping[str, Any]) -> dict[str, Said]:
    """What transformers takes where the file says nothing."""
    options = {"per_device_train_batch_size": "micro_batch_size", "gradient_accumulation_steps": "grad_accum_steps"}
    taken = {options[k]: Said(_DEFAULTS[k], f"the default of {k}") for k in options if data.get(k) is None}
    if data.get("max_grad_norm") is None:
        taken["clip_grad_norm"] = Said(True, f"the default of max_grad_norm ({_DEFAULTS['max_grad_norm']})")
    return taken


def _with_deepspeed(data: Mapping[str, Any], mixed: str, source: str) -> Imported:
    """The file or block that `deepspeed` names, with every "auto" that the Trainer fills; raises where the two differ."""
    where = data["deepspeed"]
    if isinstance(where, Mapping):
        text = Text(f"{source}: deepspeed", where)
    elif isinstance(where, str):
        text = read_file(beside(where, source), source)
    else:
        raise UserError(f"{source}: deepspeed is {shown(where)}: expected a file or a block", "Correct the file")
    steps = data.get("gradient_accumulation_steps") or _DEFAULTS["gradient_accumulation_steps"]
    clip = data.get("max_grad_norm")
    values: dict[str, tuple[Any, str]] = {
        "train_micro_batch_size_per_gpu": (
            data.get("per_device_train_batch_size") or _DEFAULTS["per_device_train_batch_size"], "per_device_train_batch_size"
        ),
        "gradient_accumulation_steps": (steps, "gradient_accumulation_steps"),
        "gradient_clipping": (_DEFAULTS["max_grad_norm"] if clip is None else clip, "max_grad_norm"),
    }  # fmt: skip
    config = dict(text.data)
    for key, (value, name) in values.items():
        _fill(config, key, value, f"{name} of {source}", text.source)
    for name in ("bf16", "fp16"):
        if name in config:
            config[name] = dict(block(config, name))
            _fill(config[name], "enabled", mixed == name, f"{name} of {source}", text.source, f"{name}.")
        elif mixed == name:
            config[name] = {"enabled": True}  # accelerate, `DeepSpeedPlugin.set_mixed_precision`
    found = deepspeed_json.read(config, text.source, plain=text.plain)
    settings = dict(found.deepspeed or {})
    if found.said["strategy"].value == "zero3":
        settings["zero_init"] = True
    if "optimizer" not in found.said:
        settings["optimizer_groups"] = "decay"
    return replace(found, deepspeed=settings)


def _fill(config: dict[str, Any], key: str, value: Any, other: str, source: str, prefix: str = "") -> None:
    """`HfTrainerDeepSpeedConfig.fill_match`: "auto" becomes the argument, and any other value must be equal to it."""
    there = config.get(key)
    if there == AUTO:
        config[key] = value
    elif there is not None and there != value:
        raise UserError(
            f"{prefix}{key} {shown(there)} of {source} and {other} ({shown(value)}) do not agree",
            'Write "auto" in DeepSpeed\'s file',
        )


def _fsdp_block(data: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    where = data.get("fsdp_config")
    if where is None:
        return {}
    if isinstance(where, Mapping):
        return where
    if isinstance(where, str):
        return read_file(beside(where, source), source).data
    raise UserError(f"{source}: fsdp_config is {shown(where)}: expected a file or a block", "Correct the file")


def _optimizer(
    data: Mapping[str, Any], found: Imported, source: str, said: dict[str, Said], taken: dict[str, Said], unmodelled: list[str]
) -> None:
    if "optimizer" in found.said:  # DeepSpeed's file has the optimizer
        return
    optim = data.get("optim")
    name = str(_DEFAULT_OPTIM if optim is None else optim).removeprefix("OptimizerNames.").lower()
    known = optimizer_of(name)
    if known is None:
        if not is_optim(name):
            names = (*_OPTIM, *OPTIM_NAMES, *_OTHER_OPTIMS)
            hint = did_you_mean(name, names) or f"Choose one of {', '.join(names)}"
            raise UserError(f"{source}: optim is {shown(optim)}: transformers knows no such optimizer", hint)
        unmodelled.append(f"{source}: optim {name} is not modelled yet")
        return
    if found.deepspeed is not None and "offload_optimizer" in found.deepspeed:
        known = (known[0], None)  # accelerate puts DeepSpeedCPUAdam in its place
    where = said if optim is not None else taken
    key = "optim" if optim is not None else f"the default of optim ({_DEFAULT_OPTIM})"
    where["optimizer"] = Said(known[0], key)
    if known[1] is not None:
        where["optimizer_impl"] = Said(known[1], key)


def is_optim(name: str) -> bool:
    """Whether transformers has an optimizer of that name, modelled or not."""
    return name in _OPTIM or name in OPTIM_NAMES or name in _OTHER_OPTIMS


def optimizer_of(optim: str) -> tuple[str, str | None] | None:
    """(memplan's optimizer, implementation) of a word of `OptimizerNames`; None where memplan has no model of it."""
    from ..optimizers.catalogue import entry_of

    if optim in _OPTIM:
        return _OPTIM[optim]
    return (entry_of(optim).name, None) if optim in OPTIM_NAMES else None


def optim_of(optimizer: str, impl: str) -> str | None:
    """The word of `OptimizerNames` for memplan's optimizer; None where there is none."""
    for optim in (*_OPTIM, *OPTIM_NAMES):
        if optimizer_of(optim) in ((optimizer, impl), (optimizer, None)):
            return optim
    return None


def _recompute(data: Mapping[str, Any], said: dict[str, Said], unmodelled: list[str], source: str) -> None:
    """transformers leaves every n-th block to be recomputed from the first on, memplan from the n-th on: as many of them."""
    key = "activation_checkpointing" if data.get("activation_checkpointing") is not None else "gradient_checkpointing"
    if data.get(key) is not True:
        return
    arguments = block(data, f"{key}_kwargs")
    every = arguments.get("every_n_layers", 1)
    said["recompute"] = Said("full" if every in (None, 1) else f"selective-layer:{every}", key)
    if arguments.get("offload"):
        unmodelled.append(f"{source}: {key}_kwargs.offload true changes memory, and is not modelled yet")
    if arguments.get("use_reentrant") is True:
        said["reentrant"] = Said(True, f"{key}_kwargs.use_reentrant")


def _loop(data: Mapping[str, Any], said: dict[str, Said], source: str) -> None:
    if data.get("torch_compile") is True or _on(data.get("torch_compile_backend")):
        said["compiled"] = Said(True, "torch_compile")
    if data.get("use_cache") is True:
        said["use_cache"] = Said(True, "use_cache")
    if data.get("use_cpu") is True:
        raise UserError(f"{source}: use_cpu is true: nothing runs on a GPU then", "Set it to false")
