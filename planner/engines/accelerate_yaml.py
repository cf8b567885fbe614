"""An accelerate configuration (`accelerate config`, `accelerate launch --config_file`), read as accelerate 1.15 reads it.

Sources: accelerate/commands/config/config_args.py (`BaseConfig`, `ClusterConfig`), accelerate/commands/launch.py,
accelerate/utils/dataclasses.py (`DeepSpeedPlugin.__post_init__`, `set_mixed_precision`), accelerate/accelerator.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import UserError, did_you_mean
from ..strategies.fsdp_settings import FsdpSettings
from . import deepspeed_json, fsdp_config
from .deepspeed_schema import block
from .imported import AUTO, Imported, Kind, Said
from .text import beside, read_file, shown

#: Fields of `ClusterConfig`; accelerate refuses others.
KEYS = frozenset({
    "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "machine_rank",
    "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network",
    "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config", "parallelism_config",
    "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo",
    "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config", "fp16", "dynamo_backend",
})  # fmt: skip
_PRECISIONS = ("no", "fp16", "bf16", "fp8")
_MODELLED_TYPES = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")
_OTHER_TYPES = ("MEGATRON_LM", "TP", "MULTI_CPU", "XLA", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU", "MULTI_SDAA",
                "MULTI_MUSA", "MULTI_NEURON")  # fmt: skip
_REPLICATE, _SHARD = "parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"
#: What the plugin is told -> the key of DeepSpeed's file that it writes.
_DEEPSPEED_KEYS = {
    "zero_optimization.stage": "deepspeed_config.zero_stage",
    "zero_optimization.offload_*.device": "deepspeed_config.offload_*_device",
    "gradient_accumulation_steps": "deepspeed_config.gradient_accumulation_steps",
    "gradient_clipping": "deepspeed_config.gradient_clipping",
    "bf16.enabled": "mixed_precision",
    "fp16.enabled": "mixed_precision",
}
_IGNORED_WITH_A_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device", "offload_param_device",
    "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip


def read(data: Mapping[str, Any], source: str) -> Imported:
    """What the file says.  Raises UserError for what accelerate refuses."""
    for key in data:
        if key not in KEYS:
            raise UserError(f"{source}: accelerate knows no {key!r} and refuses it", did_you_mean(key, KEYS))
    if data.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise UserError(f"{source}: compute_environment is {shown(data['compute_environment'])}", "Only LOCAL_MACHINE is read")
    kind, mixed = _kind(data, source), _mixed(data, source)
    if kind == "DEEPSPEED":
        found = _deepspeed(data, mixed, source)
    elif kind == "FSDP":
        found = _fsdp(data, mixed, source)
    else:
        strategy = "ddp" if kind == "MULTI_GPU" and data.get("num_processes") != 1 else "single"
        found = plain_question(strategy, mixed, source, "mixed_precision", "accelerate")
    said = dict(found.said)
    for key, option in (("num_processes", "gpus"), ("num_machines", "nodes")):
        value = 1 if kind == "NO" and option == "gpus" else data.get(key)
        if value in (None, -1):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{source}: {key} is {shown(value)}: expected a whole number of 1 or more", "Correct the file")
        said[option] = Said(value, "distributed_type" if kind == "NO" and option == "gpus" else key)
    unmodelled = list(found.unmodelled)
    if mixed == "fp8":
        unmodelled.append(f"{source}: mixed_precision fp8 is not modelled yet")
    if _compiles(data):
        said["compiled"] = Said(True, "dynamo_config.dynamo_backend")
    if kind not in _MODELLED_TYPES:
        unmodelled.append(f"{source}: distributed_type {kind} is not modelled yet")
    if data.get("use_cpu"):
        raise UserError(f"{source}: use_cpu is true: nothing runs on a GPU then", "Set it to false")
    return replace(found, said=said, unmodelled=tuple(unmodelled))


def _kind(data: Mapping[str, Any], source: str) -> str:
    kind = data.get("distributed_type")
    if kind is False or kind is None:  # YAML reads a bare NO as false, and accelerate then finds no distributed_type
        raise UserError(f"{source}: distributed_type is missing", "Write it in quotes: 'NO', MULTI_GPU, FSDP or DEEPSPEED")
    known = (*_MODELLED_TYPES, *_OTHER_TYPES)
    if kind not in known:
        hint = did_you_mean(str(kind), known) or "Write one of 'NO', MULTI_GPU, FSDP or DEEPSPEED"
        raise UserError(f"{source}: distributed_type is {shown(kind)}: accelerate knows no such type", hint)
    return str(kind)


def _mixed(data: Mapping[str, Any], source: str) -> str:
    mixed = data.get("mixed_precision")
    if mixed is None:
        return "fp16" if data.get("fp16") else "no"
    mixed = "no" if mixed is False else str(mixed).lower()
    if mixed not in _PRECISIONS:
        raise UserError(
            f"{source}: mixed_precision is {shown(mixed)}: expected one of {', '.join(_PRECISIONS)}",
            did_you_mean(mixed, _PRECISIONS),
        )
    return mixed


def _compiles(data: Mapping[str, Any]) -> bool:
    dynamo = block(data, "dynamo_config")
    backend = dynamo.get("dynamo_backend", dynamo.get("backend", data.get("dynamo_backend", "no")))
    return backend is not False and str(backend).upper() not in ("NO", "NONE")


def plain_question(strategy: str | None, mixed: str, source: str, key: str, kind: Kind) -> Imported:
    """One GPU or DDP as an Imported; `key` is what says `mixed`."""
    said = {"strategy": Said(strategy, "distributed_type")} if strategy else {}
    taken, denied = {}, {}
    if (
        mixed in fsdp_config.MIXED_DTYPES
    ):  # autocast; but weights that are loaded in 16 bits stay so: --precision bf16 may be right
        taken["precision"] = Said(f"{mixed}-autocast", key)
        other = "fp16" if mixed == "bf16" else "bf16"
        denied = {("precision", f"{other}-autocast"): key, ("precision", other): key}
    return Imported(source=source, kind=kind, said=said, taken=taken, denied=denied, notes=tuple(_output_note(mixed, key)))


def _output_note(mixed: str, key: str) -> list[str]:
    if mixed not in fsdp_config.MIXED_DTYPES:
        return []
    return [f"{key}: accelerate also casts what the model returns (logits) to fp32, which is not counted"]


def _fsdp(data: Mapping[str, Any], mixed: str, source: str) -> Imported:
    settings, notes = fsdp_config.from_accelerate(block(data, "fsdp_config"), source)
    parallel = block(data, "parallelism_config")
    unmodelled = [
        f"{source}: parallelism_config.{key} {shown(value)} is not modelled yet"
        for key, value in parallel.items()
        if key.endswith("_size") and key not in (_REPLICATE, _SHARD) and isinstance(value, int) and value > 1
    ]
    if parallel.get(_REPLICATE, 1) != 1 and settings.version == 2:
        copies, shards, world = parallel[_REPLICATE], parallel.get(_SHARD, 1), data.get("num_processes")
        if isinstance(world, int) and copies * shards != world:
            raise UserError(
                f"{source}: {_REPLICATE} {copies} x {_SHARD} {shards} is not num_processes {world}", "Make them multiply to it"
            )
        settings = replace(settings, dp_replicate_size=copies)
    return fsdp_question(settings, mixed, source, "mixed_precision", "accelerate", notes, unmodelled)


def fsdp_question(
    settings: FsdpSettings, mixed: str, source: str, key: str, kind: Kind, notes: list[str], unmodelled: list[str]
) -> Imported:
    """An FSDP configuration as an Imported; `key` is what says `mixed`."""
    settings = fsdp_config.with_mixed_precision(settings, mixed)
    said = {"strategy": Said(fsdp_config.strategy_of(settings), "fsdp_config.version")}
    denied = {}
    if mixed in fsdp_config.MIXED_DTYPES:
        said["precision"] = Said(f"{mixed}-mixed", key)
    elif mixed == "no":
        denied = {("precision", p): key for p in ("bf16-mixed", "fp16-mixed", "bf16-autocast", "fp16-autocast")}
    if settings.activation_checkpointing:
        said["recompute"] = Said("full", "fsdp_config.activation_checkpointing")
    if settings.cpu_offload:
        said["offload"] = Said(("optimizer", "param"), "fsdp_config.offload_params")
    return Imported(
        source=source,
        kind=kind,
        said=said,
        denied=denied,
        notes=(*notes, *_output_note(mixed, key)),
        unmodelled=tuple(unmodelled),
        fsdp=settings,
    )


def _deepspeed(data: Mapping[str, Any], mixed: str, source: str) -> Imported:
    plugin = block(data, "deepspeed_config")
    path = plugin.get("deepspeed_config_file")
    if path not in (None, "none"):
        if data.get("mixed_precision") is not None:
            raise UserError(
                f"{source}: mixed_precision beside deepspeed_config.deepspeed_config_file: accelerate refuses that",
                "Remove it here, and write bf16 or fp16 in DeepSpeed's file",
            )
        return _deepspeed_file(plugin, str(path), mixed, source)
    config = _plugin_config(plugin, source)
    config.update(_precision_blocks(mixed))
    found = deepspeed_json.read(config, source)
    said = {option: Said(s.value, _DEEPSPEED_KEYS.get(s.key, s.key)) for option, s in found.said.items()}
    return _as_accelerate(replace(found, said=said), plugin, source)


def _plugin_config(plugin: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The file that `DeepSpeedPlugin` makes; its defaults are those of the launcher."""
    offload: dict[str, Any] = {}
    for part in ("optimizer", "param"):
        device = plugin.get(f"offload_{part}_device") or "none"
        path = plugin.get(f"offload_{part}_nvme_path")
        offload[f"offload_{part}"] = {"device": str(device).lower(), "nvme_path": path if device == "nvme" else None}
    stage = plugin.get("zero_stage", 2)
    if stage != 3 and offload["offload_param"]["device"] != "none":
        raise UserError(
            f"{source}: deepspeed_config.offload_param_device is {shown(plugin['offload_param_device'])}: "
            f"allowed at zero_stage 3 only, and it is {shown(stage)}",
            "Correct the file",
        )
    return {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": plugin.get("gradient_accumulation_steps", 1),
        "gradient_clipping": plugin.get("gradient_clipping", 1.0),
        "zero_optimization": {"stage": stage, **offload},
    }


def _precision_blocks(mixed: str) -> dict[str, Any]:
    return {"bf16": {"enabled": mixed in ("bf16", "fp8")}, "fp16": {"enabled": mixed == "fp16"}}


def _deepspeed_file(plugin: Mapping[str, Any], path: str, mixed: str, source: str) -> Imported:
    """The JSON that the YAML names; the plugin's own keys must not be there beside it."""
    for key in _IGNORED_WITH_A_FILE:
        if key in plugin:
            raise UserError(
                f"{source}: deepspeed_config.{key} beside deepspeed_config_file: accelerate refuses that", "Remove it here"
            )
    text = read_file(beside(path, source))
    config = dict(text.data)
    for name, wanted in _precision_blocks(mixed).items():
        enabled = block(config, name).get("enabled")
        if name not in config or enabled == AUTO:
            config[name] = {**block(config, name), **wanted}
    return _as_accelerate(deepspeed_json.read(config, text.source, plain=text.plain), plugin, source)


def _as_accelerate(found: Imported, plugin: Mapping[str, Any], source: str) -> Imported:
    settings, unmodelled = dict(found.deepspeed or {}), list(found.unmodelled)
    stage3 = found.said["strategy"].value == "zero3"
    settings["zero_init"] = stage3 and str(plugin.get("zero3_init_flag", True)).lower() == "true"
    if stage3 and plugin.get("deepspeed_moe_layer_cls_names"):
        unmodelled.append(f"{source}: deepspeed_config.deepspeed_moe_layer_cls_names makes leaf modules, not modelled yet")
    notes = [note for note in found.notes if "deepspeed.zero.Init" not in note]
    if settings["zero_init"]:
        notes.append("zero3_init_flag: the model is made under deepspeed.zero.Init")
    return replace(found, kind="accelerate", deepspeed=settings, notes=tuple(notes), unmodelled=tuple(unmodelled))
