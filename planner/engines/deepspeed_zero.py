"""`zero_optimization` of a ds_config.json: stage, knobs and offload.

Sources: deepspeed 0.19.8, zero/config.py and zero/offload_config.py; what the engine makes of them, runtime/engine.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...errors import UserError
from ..strategies.deepspeed_settings import DeepSpeedSettings, LeafModules, OffloadOptimizer, OffloadParam, ZenFlow
from . import deepspeed_schema as schema
from .deepspeed_file import DeepSpeedFile
from .imported import AUTO, Said
from .text import shown

FIELDS = frozenset(f.name for f in dataclasses.fields(DeepSpeedSettings))
_HIDDEN_SIZE_KEYS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
_STAGE_OF_ACCELERATE = 2  # DeepSpeedPlugin.zero_stage


def read_zero(file: DeepSpeedFile) -> int:
    """Takes the settings into `file`, and returns the stage."""
    raw = file.data.get("zero_optimization", {})
    if isinstance(raw, bool):  # the oldest form: zero/config.py, read_zero_config_deprecated
        file.notes.append(f"zero_optimization {shown(raw)} is deprecated: it means stage {int(raw)}")
        raw = {"stage": int(raw), **({"allgather_bucket_size": file.data.get("allgather_size", 5e8)} if raw else {})}
    if not isinstance(raw, Mapping):
        raise file.wrong("zero_optimization", raw, "expected an object in braces")
    raw = dict(raw)
    for key, why in schema.REMOVED_ZERO.items():
        if key in raw:
            raise UserError(f"{file.source}: zero_optimization.{key} is refused by DeepSpeed 0.19: {why}")
    _replace_deprecated(file, raw)
    _fill_accelerate(file, raw)
    zero: schema.ZeroSection = file.section(schema.ZeroSection, "zero_optimization", _without_auto(raw))
    stage = zero.stage
    _settings_of(file, zero)
    _offload(file, zero, stage)
    _autos(file, raw, stage)
    if not zero.compute_grad_norm and stage not in (1, 2):
        raise file.wrong("zero_optimization.compute_grad_norm", False, "allowed at stages 1 and 2 only")
    if zero.legacy_stage1:
        raise file.wrong("zero_optimization.legacy_stage1", True, "DeepSpeed 0.19 has no old stage 1 any more")
    return stage


def _replace_deprecated(file: DeepSpeedFile, raw: dict[str, Any]) -> None:
    for old, new in schema.ZERO_DEPRECATED.items():
        if old not in raw:
            continue
        value = raw.pop(old)
        if new is None:
            file.notes.append(f"zero_optimization.{old} is deprecated, and DeepSpeed 0.19 ignores it (pin_memory is the key)")
            continue
        name, made = new
        if name in raw or name.removeprefix("stage3_") in raw:
            raise UserError(
                f"{file.source}: zero_optimization.{old} and {name} are both there", f"DeepSpeed refuses that: remove {old}"
            )
        file.notes.append(f"zero_optimization.{old} is deprecated: it is read as {name}")
        if value not in (True, False):
            raise file.wrong(f"zero_optimization.{old}", value, "expected true or false")
        if value:
            raw[name] = made


def _fill_accelerate(file: DeepSpeedFile, raw: dict[str, Any]) -> None:
    """The "auto" values that accelerate fills whatever the Trainer says (`plugin_to_config_mapping`)."""
    if raw.get("stage") == AUTO:
        raw["stage"] = _STAGE_OF_ACCELERATE
        file.notes.append(f'zero_optimization.stage "auto": accelerate makes it {_STAGE_OF_ACCELERATE}; DeepSpeed alone, 0')
    for part in ("offload_optimizer", "offload_param"):
        if schema.block(raw, part).get("device") == AUTO:
            raw[part] = {**raw[part], "device": "none"}
            file.notes.append(f'zero_optimization.{part}.device "auto": accelerate makes it "none"')


def _settings_of(file: DeepSpeedFile, zero: schema.ZeroSection) -> None:
    """What is there and differs from the default goes to the field of its name, or is said to be not modelled."""
    for field in zero.model_fields_set - {"stage", "offload_optimizer", "offload_param", "leaf_module", "zenflow"}:
        key = schema.json_name(schema.ZeroSection, field)
        value, default = getattr(zero, field), schema.ZeroSection.model_fields[field].default
        if key in FIELDS:
            file.settings[key] = value
        elif value != default and field not in schema.ZERO_NO_EFFECT:
            file.not_modelled(f"zero_optimization.{key}", value)
    if zero.leaf_module is not None:
        file.settings["leaf_module"] = LeafModules(**zero.leaf_module.model_dump())

    if zero.zenflow is not None:
        _zenflow(file, zero.zenflow)


def _zenflow(file: DeepSpeedFile, section: schema.ZenFlowSection) -> None:
    """runtime/zenflow/engine.py, `configure_zenflow`."""
    key, strategy, every = "zero_optimization.zenflow", section.select_strategy, section.select_interval
    if strategy == "auto" and every != "auto":
        raise file.wrong(f"{key}.select_interval", every, 'leave it out, as select_strategy is "auto"')
    if strategy != "auto" and every == "auto":
        raise file.wrong(f"{key}.select_interval", every, f'expected a number, as select_strategy is "{strategy}"')
    if section.update_interval != "auto" and section.update_interval < 1:
        raise file.wrong(f"{key}.update_interval", section.update_interval, "expected at least 1")
    for name in ("overlap_step", "offload"):
        if getattr(section, name):
            file.not_modelled(f"{key}.{name}", True)
    if section.update_interval == "auto":  # decided by the gradients, step by step
        file.not_modelled(f"{key}.update_interval", section.update_interval)
        return
    file.settings["zenflow"] = ZenFlow(
        topk_ratio=section.topk_ratio,
        select_strategy="step" if strategy == "step" else "epoch",
        select_interval=1 if every == "auto" else every,
        update_interval=section.update_interval,
        full_warm_up_rounds=section.full_warm_up_rounds,
    )


def _offload(file: DeepSpeedFile, zero: schema.ZeroSection, stage: int) -> None:
    parts: list[str] = []
    stated = False
    sections = (("optimizer", zero.offload_optimizer, OffloadOptimizer), ("param", zero.offload_param, OffloadParam))
    for part, section, made in sections:
        key = f"zero_optimization.offload_{part}"
        stated |= section is not None
        if section is None or section.device == "none":
            continue
        if part == "param" and stage != 3:
            raise file.wrong(f"{key}.device", section.device, f"allowed at stage 3 only, and the stage is {stage}")
        if part == "optimizer" and stage == 0:
            raise file.wrong(f"{key}.device", section.device, "allowed at stages 1 to 3, and the stage is 0")
        if section.device == "nvme" and stage != 3:  # stage_1_and_2.py: whatever is not "none" is the host
            section = section.model_copy(update={"device": "cpu", "nvme_path": None})
            file.notes.append(f'{key}.device "nvme" means host memory below stage 3')
        if section.device == "nvme" and section.nvme_path in (None, "none"):
            raise file.wrong(f"{key}.nvme_path", section.nvme_path, 'expected a folder, as the device is "nvme"')
        known = {f.name for f in dataclasses.fields(made)}
        values = {k: v for k, v in section.model_dump().items() if k in known}
        _offload_extras(file, key, section, stage)
        file.settings[f"offload_{part}"] = made(**values)
        parts.append(part if section.device == "cpu" else f"{part}:nvme")
    if stated or parts:
        file.said["offload"] = Said(tuple(parts), "zero_optimization.offload_*.device")


def _offload_extras(file: DeepSpeedFile, key: str, section: Any, stage: int) -> None:
    if not isinstance(section, schema.OffloadOptimizerSection):
        return
    if section.ratio < 1 and stage != 3:
        raise file.wrong(f"{key}.ratio", section.ratio, f"below 1 at stage 3 only, and the stage is {stage}")
    if section.super_offload:
        if stage != 3:
            raise file.wrong(f"{key}.super_offload", True, f"allowed at stage 3 only, and the stage is {stage}")
        file.not_modelled(f"{key}.super_offload", True)


def _autos(file: DeepSpeedFile, raw: Mapping[str, Any], stage: int) -> None:
    """What is left of "auto": the Trainer fills three keys from the model's width, DeepSpeed drops the others."""
    for key in _dotted_autos(raw):
        name = schema.json_name(schema.ZeroSection, key) if key in schema.ZeroSection.model_fields else key
        if name == "reduce_bucket_size" or (name in _HIDDEN_SIZE_KEYS and key == name and stage == 3):
            file.hidden += (name,)
        else:
            file.notes.append(f'zero_optimization.{key} "auto": nobody fills it, so DeepSpeed takes its default')


def _without_auto(raw: Mapping[str, Any]) -> dict[str, Any]:
    """As DeepSpeedConfigModel drops "auto" in every section; zenflow has its own "auto"."""
    return {k: _without_auto(v) if isinstance(v, Mapping) and k != "zenflow" else v for k, v in raw.items() if v != AUTO}


def _dotted_autos(raw: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in raw.items():
        if isinstance(value, Mapping) and key != "zenflow":
            found += _dotted_autos(value, f"{prefix}{key}.")
        elif value == AUTO:
            found.append(prefix + key)
    return found
