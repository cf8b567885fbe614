"""A ds_config.json of DeepSpeed 0.19, read as DeepSpeed and transformers' Trainer read it.

Values are checked as `DeepSpeedConfig` and the engine check them (deepspeed/runtime/config.py, engine.py).  "auto" means what
transformers 5.24 and accelerate 1.15 put there (transformers/integrations/deepspeed.py, `trainer_config_process` and
`trainer_config_finalize`; accelerate/utils/dataclasses.py, `DeepSpeedPlugin`); where neither does, DeepSpeed's default holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import UserError, did_you_mean
from . import deepspeed_schema as schema
from .deepspeed_file import DeepSpeedFile, uses_auto
from .deepspeed_zero import FIELDS, read_zero
from .imported import AUTO, Batches, Imported, Said

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_MODES = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}
_TRAINER_CLIPS_AT = 1.0  # TrainingArguments.max_grad_norm


def read(data: Mapping[str, Any], source: str, *, plain: bool = True) -> Imported:
    """What a ds_config.json says.  `plain`: it was JSON without comments, as transformers and accelerate demand.

    Raises UserError, on one line with key, value and what is allowed, for what DeepSpeed 0.19 refuses or would fail on.
    """
    file = DeepSpeedFile(data, source)
    _top_level(file)
    stage = read_zero(file)
    file.said["strategy"] = Said(f"zero{stage}", "zero_optimization.stage")
    _precision(file, stage)
    _dtypes(file, stage)
    batches = _batches(file)
    _optimizer(file, stage, "offload_optimizer" in file.settings)
    _the_rest(file)
    if uses_auto(data):
        _as_the_trainer(file, stage, plain)
    return Imported(
        source=source,
        kind="deepspeed",
        said=file.said,
        taken=file.taken,
        denied=file.denied,
        notes=tuple(file.notes),
        unmodelled=tuple(file.unmodelled),
        deepspeed=file.settings,
        hidden_size_keys=file.hidden,
        batches=batches,
    )


def _as_the_trainer(file: DeepSpeedFile, stage: int, plain: bool) -> None:
    """A file with "auto" is for the Trainer: two groups of its own optimizer; the model is made in shards at stage 3."""
    if not plain:
        file.notes.append("transformers and accelerate read plain JSON: comments and trailing commas are errors there")
    if stage == 3:
        file.settings["zero_init"] = True
        file.notes.append("the model is made under deepspeed.zero.Init, as the Trainer makes it at stage 3")
    if not schema.block(file.data, "optimizer").get("type"):
        file.settings["optimizer_groups"] = "decay"
        if "offload_optimizer" not in file.settings:  # else accelerate puts DeepSpeedCPUAdam in its place
            file.taken["optimizer_impl"] = Said("fused", "the Trainer's default optimizer (adamw_torch_fused)")
        file.notes.append("no optimizer block: the Trainer's own optimizer, with and without weight decay in two groups")


def _top_level(file: DeepSpeedFile) -> None:
    for key, value in file.data.items():
        if key in schema.REMOVED:
            raise UserError(f"{file.source}: {key} is refused by DeepSpeed 0.19: {schema.REMOVED[key]}")
        if key in schema.UNMODELLED_BLOCKS:
            switch, off = schema.UNMODELLED_BLOCKS[key]
            if schema.block(file.data, key).get(switch) not in (None, AUTO, *off):
                file.not_modelled(f"{key}.{switch}", value[switch])
        elif key in schema.UNMODELLED_KEYS:
            if value not in schema.UNMODELLED_KEYS[key]:
                file.not_modelled(key, value)
        elif key not in schema.TOP_LEVEL:
            hint = did_you_mean(key, schema.TOP_LEVEL)
            file.notes.append(f"DeepSpeed knows no {key!r} and ignores it. {hint}".strip())
    idle = [key for key in file.data if key in schema.NO_EFFECT and key not in _BATCH_KEYS]
    if idle:
        file.notes.append(f"without effect on memory: {', '.join(idle)}")


def _precision(file: DeepSpeedFile, stage: int) -> None:
    bf16_key = "bf16" if "bf16" in file.data or "bfloat16" not in file.data else "bfloat16"
    bf16: schema.Bf16Section = file.section(schema.Bf16Section, bf16_key, file.data.get(bf16_key, {}))
    fp16: schema.Fp16Section = file.section(schema.Fp16Section, "fp16", file.data.get("fp16", {}))
    autocast = schema.block(file.data, "torch_autocast")
    if bf16.enabled and fp16.enabled:
        raise UserError(f"{file.source}: {bf16_key}.enabled and fp16.enabled are both true", "Switch one of them off")
    for name, section, mixed in ((bf16_key, bf16, "bf16-mixed"), ("fp16", fp16, "fp16-mixed")):
        if section.enabled:
            file.said["precision"] = Said(mixed, f"{name}.enabled")
        elif schema.block(file.data, name).get("enabled") is False:
            file.denied["precision", mixed] = f"{name}.enabled"
    autos = [name for name in (bf16_key, "fp16") if schema.block(file.data, name).get("enabled") == AUTO]
    if autos:
        names = " and ".join(f"{name}.enabled" for name in autos)
        file.notes.append(f'{names} "auto": --precision says which, as bf16 and fp16 of TrainingArguments do')
    if autocast.get("enabled") is True:
        _autocast(file, autocast, bf16.enabled or fp16.enabled)
    elif "precision" not in file.said and not uses_auto([file.data.get("bf16"), file.data.get("fp16")]):
        file.notes.append("neither bf16 nor fp16 is switched on here: without --precision, weights train as they are loaded")
    file.settings["fp16_master_weights_and_grads"] = fp16.fp16_master_weights_and_grads
    if fp16.fp16_master_weights_and_grads and stage == 0:
        raise file.wrong("fp16.fp16_master_weights_and_grads", True, "allowed at stages 1 to 3, and the stage is 0")
    file.settings["bf16_master_weights_and_grads"] = bf16.bf16_master_weights_and_grads
    file.settings["bf16_optimizer_states"] = bf16.bf16_optimizer_states
    if bf16.bf16_master_weights_and_grads and stage == 0:
        raise file.wrong("bf16.bf16_master_weights_and_grads", True, "allowed at stages 1 to 3, and the stage is 0")
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        raise file.wrong("bf16.bf16_optimizer_states", True, "needs bf16_master_weights_and_grads")
    if bf16.immediate_grad_update and stage == 1:
        file.not_modelled("bf16.immediate_grad_update", True)


def _autocast(file: DeepSpeedFile, autocast: Mapping[str, Any], mixed: bool) -> None:
    """Parameters stay fp32 and ops are cast: engine.py, `autocast_if_enabled`."""
    kind = schema.dtype(autocast.get("dtype", "float16"))  # torch's default on CUDA where the key is not there
    if kind not in ("bfloat16", "float16"):
        raise file.wrong("torch_autocast.dtype", autocast["dtype"], "expected bfloat16 or float16")
    if mixed:
        raise UserError(
            f"{file.source}: torch_autocast.enabled and bf16 or fp16 are both true",
            "DeepSpeed takes one: switch the other off",
        )
    file.said["precision"] = Said("bf16-autocast" if kind == "bfloat16" else "fp16-autocast", "torch_autocast.enabled")
    if autocast.get("lower_precision_safe_modules"):
        file.not_modelled("torch_autocast.lower_precision_safe_modules", autocast["lower_precision_safe_modules"])


def _dtypes(file: DeepSpeedFile, stage: int) -> None:
    types = schema.block(file.data, "data_types")
    for key in types:
        if key not in ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"):
            file.notes.append(f"DeepSpeed knows no data_types.{key} and ignores it")
    if (value := types.get("grad_accum_dtype")) not in (None, AUTO):
        file.settings["grad_accum_dtype"] = found = _dtype(file, "data_types.grad_accum_dtype", value)
        mode = _MODES.get(file.said["precision"].value) if "precision" in file.said else None
        if stage == 0 and mode not in (None, found):
            raise file.wrong("data_types.grad_accum_dtype", value, f"at stage 0 it must be the model's own type, {mode}")
    if (value := types.get("param_dtype")) not in (None, AUTO):
        _param_dtype(file, value)
    if types.get("buffer_dtype") not in (None, AUTO):
        file.not_modelled("data_types.buffer_dtype", types["buffer_dtype"])
    if types.get("keep_in_fp32_modules", AUTO) not in (AUTO, []):
        file.not_modelled("data_types.keep_in_fp32_modules", types["keep_in_fp32_modules"])
    if (value := file.data.get("communication_data_type")) not in (None, AUTO):
        if not isinstance(value, str) or value.lower() not in ("fp32", "fp16", "bf16"):
            raise file.wrong("communication_data_type", value, "expected fp32, fp16 or bf16")
        file.settings["communication_data_type"] = schema.dtype(value)


def _dtype(file: DeepSpeedFile, key: str, value: Any) -> str:
    found = schema.dtype(value)
    if found is None:
        raise file.wrong(key, value, "expected fp32, fp16 or bf16")
    return found


def _param_dtype(file: DeepSpeedFile, value: Any) -> None:
    """It must repeat what bf16 and fp16 say: engine.py, `_assert_valid_mixed_precision_config`."""
    found = _dtype(file, "data_types.param_dtype", value)
    said = file.said.get("precision")
    mode = _MODES.get(said.value if said else "", "float32")
    autos = [k for k in ("bf16", "fp16") if schema.block(file.data, k).get("enabled") == AUTO]
    if found != mode and not autos:
        raise file.wrong("data_types.param_dtype", value, f"the bf16 and fp16 blocks make it {mode}")


def _optimizer(file: DeepSpeedFile, stage: int, offloaded: bool) -> None:
    optimizer = file.data.get("optimizer", {})
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer.get("type", ""), str):
        raise file.wrong("optimizer", optimizer, 'expected an object with a "type"')
    if not optimizer.get("type"):
        if not uses_auto(file.data):
            file.notes.append("no optimizer here: the program passes one, and --optimizer and --optimizer-impl say which")
        return
    kind, params = optimizer["type"], schema.block(optimizer, "params")
    if "max_grad_norm" in params:
        raise UserError(
            f"{file.source}: optimizer.params.max_grad_norm is refused by DeepSpeed", "Write gradient_clipping instead"
        )
    name = schema.OPTIMIZERS.get(kind.lower()) or schema.TORCH_OPTIMIZERS.get(kind)
    if name is None:
        known = [*(k.capitalize() for k in schema.OPTIMIZERS), *schema.TORCH_OPTIMIZERS]
        raise file.wrong("optimizer.type", kind, "neither DeepSpeed nor torch.optim has it", did_you_mean(kind, known))
    if stage and kind.lower() not in schema.TESTED_WITH_ZERO and file.data.get("zero_allow_untested_optimizer") is not True:
        raise file.wrong("optimizer.type", kind, 'ZeRO refuses it without "zero_allow_untested_optimizer": true')
    if offloaded and params.get("fp32_optimizer_states") is False:
        file.not_modelled("optimizer.params.fp32_optimizer_states", False)
    if kind.lower() == "muon" and "muon" in FIELDS:
        method = params.get("ns_method", "gram")
        if method not in ("gram", "standard"):
            raise file.wrong("optimizer.params.ns_method", method, "expected gram or standard")
        file.settings["muon"] = method
        if params.get("torch_adam") is True:
            file.not_modelled("optimizer.params.torch_adam of Muon", True)
    key = "optimizer.type"
    if name in ("sgd", "rmsprop") and params.get("momentum") not in (None, 0, 0.0, AUTO):
        name += "-momentum"
    if kind.lower() == "adam" and params.get("adam_w_mode") is not False:
        name = "adamw"
    if name == "adamw" and params.get("amsgrad") is True:
        name = "adamw-amsgrad"
    file.said["optimizer"] = Said(name, key)
    from ..optimizers.traced import names

    if name not in names() and "muon" not in file.settings:
        file.unmodelled.append(f"{file.source}: optimizer.type {kind} is not modelled yet")
    torch_adam = params.get("torch_adam") is True
    if offloaded and torch_adam and "zero_force_ds_cpu_optimizer" in FIELDS:
        file.settings["zero_force_ds_cpu_optimizer"] = False  # it is made as it is asked for, not DeepSpeedCPUAdam
    if not offloaded or torch_adam:
        impl = _impl(kind, params)
        if impl is not None:
            file.said["optimizer_impl"] = Said(impl, "optimizer.params")


def _impl(kind: str, params: Mapping[str, Any]) -> str | None:
    """Which kernels step; default: DeepSpeed's own FusedAdam.  torch's optimizers take their own arguments."""
    adam = kind.lower() in ("adam", "adamw")
    if adam and params.get("torch_adam") is not True:
        return "default"
    if params.get("fused") is True:
        return "fused"
    if isinstance(params.get("foreach"), bool):
        return "foreach" if params["foreach"] else "for-loop"
    return "foreach" if adam else None


def _the_rest(file: DeepSpeedFile) -> None:
    if not isinstance(file.data.get("scheduler", {}), Mapping):
        raise file.wrong("scheduler", file.data["scheduler"], "expected an object in braces")
    clip = file.data.get("gradient_clipping")
    if clip == AUTO:
        file.taken["clip_grad_norm"] = Said(True, f'gradient_clipping "auto" (max_grad_norm {_TRAINER_CLIPS_AT})')
    elif clip is not None:
        if isinstance(clip, bool) or not isinstance(clip, int | float) or clip < 0:
            raise file.wrong("gradient_clipping", clip, "expected a norm, or 0 for none")
        file.said["clip_grad_norm"] = Said(clip > 0, "gradient_clipping")
    if file.settings.get("compute_grad_norm") is False and clip != 0:
        why = "DeepSpeed clips at 1 by default" if clip is None else "DeepSpeed clips by the norm"
        raise file.wrong("zero_optimization.compute_grad_norm", False, f"it needs gradient_clipping 0: {why}")
    checkpointing = schema.block(file.data, "activation_checkpointing")
    if checkpointing:
        file.notes.append(
            "activation_checkpointing has effect only where the model calls deepspeed.checkpointing.checkpoint, "
            "which transformers' models do not; say what is recomputed with --recompute"
        )
    force = file.data.get("zero_force_ds_cpu_optimizer")
    if force is False and "zero_force_ds_cpu_optimizer" in FIELDS:
        file.settings["zero_force_ds_cpu_optimizer"] = False
    for key, value in schema.block(file.data, "aio").items():
        if f"aio_{key}" in FIELDS and value != AUTO:
            file.settings[f"aio_{key}"] = value
    if file.data.get(schema.PIPELINE):
        file.notes.append("pipeline has effect only on a deepspeed.pipe.PipelineModule, which is not modelled")


def _batches(file: DeepSpeedFile) -> Batches:
    train, micro, steps = (file.positive(key) for key in _BATCH_KEYS)
    if isinstance(micro, int):
        file.said["micro_batch_size"] = Said(micro, "train_micro_batch_size_per_gpu")
    if isinstance(steps, int):
        file.said["grad_accum_steps"] = Said(steps, "gradient_accumulation_steps")
    return Batches(train=train, micro=micro, steps=steps)
