"""Which kind of configuration a file is, by what it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import UserError
from . import (
    accelerate_yaml,
    axolotl,
    deepspeed_json,
    deepspeed_schema,
    fsdp_config,
    llamafactory,
    plan_file,
    torchtune,
    training_args,
    trl,
    zo_file,
)
from .imported import Imported
from .text import Text, read_file

_ACCELERATE_MARKS = ("distributed_type", "compute_environment")
_DEEPSPEED_MARKS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
_NAMED_MODEL = "model_name_or_path"


def read_config(path: str | os.PathLike[str]) -> Imported:
    """What the configuration file at `path` says, whichever of the kinds it is.

    axolotl, LLaMA-Factory, TRL, torchtune; DeepSpeed's JSON, an accelerate YAML (or JSON), transformers' TrainingArguments or
    their `fsdp_config` alone; a plan.json, or the folder that `--write` made.  Raises UserError for a file that is none of
    them, or that its own reader would refuse.
    """
    place = Path(path)
    text = read_file(place / plan_file.PLAN if (place / plan_file.PLAN).is_file() else path)  # a folder of `--write`
    kind = kind_of(text.data)
    if kind is None:
        raise UserError(
            f"{text.source}: is no configuration that memplan knows",
            "Expected one of axolotl, LLaMA-Factory, TRL or torchtune, a ds_config.json, an accelerate YAML, TrainingArguments "
            "or an fsdp_config, as JSON or YAML",
        )
    return _READERS[kind](text)


def kind_of(data: Mapping[str, Any]) -> str | None:
    """axolotl | llamafactory | trl | torchtune | accelerate | training-arguments | fsdp | deepspeed; None: not recognised."""
    if any(mark in data for mark in _ACCELERATE_MARKS):
        return "accelerate"
    if plan_file.is_plan(data):
        return "plan"
    if zo_file.MARK in data or zo_file.ZO2_MARK in data:
        return "zeroth-order"
    if torchtune.is_torchtune(data):
        return "torchtune"
    if any(mark in data for mark in axolotl.MARKS):
        return "axolotl"
    if any(mark in data for mark in _DEEPSPEED_MARKS):
        return "deepspeed"
    if any(mark in data for mark in llamafactory.MARKS_OF_V1):
        return "llamafactory"
    scores = {
        "training-arguments": sum(key in training_args.KNOWN for key in data),
        "fsdp": sum(key.removeprefix("fsdp_") in fsdp_config.KEYS for key in data if isinstance(key, str)),
        "deepspeed": sum(key in deepspeed_schema.TOP_LEVEL | deepspeed_schema.REMOVED.keys() for key in data),
    }
    for name in ("bf16", "fp16"):  # a switch in TrainingArguments, a block in DeepSpeed's file
        if name in data:
            scores["deepspeed" if not isinstance(data[name], Mapping) else "training-arguments"] -= 1
    best = max(scores, key=lambda kind: scores[kind])
    marks = {
        name: sum(mark in data for mark in module.MARKS) for name, module in (("llamafactory", llamafactory), ("trl", trl))
    }
    if any(mark in data for mark in training_args.SCRIPT_MARKS) and not marks["llamafactory"]:
        return "training-arguments"
    if _NAMED_MODEL in data or (max(marks.values()) > 1 and best != "deepspeed"):
        return "llamafactory" if marks["llamafactory"] and marks["llamafactory"] >= marks["trl"] else "trl"
    return best if scores[best] > 0 else None


def _fsdp(text: Text) -> Imported:
    settings, notes = fsdp_config.from_trainer(True, text.data, text.source)
    notes.append("fsdp_config alone says nothing of mixed precision: --precision does")
    return accelerate_yaml.fsdp_question(settings, "", text.source, "", "fsdp", notes, [])


_READERS: dict[str, Callable[[Text], Imported]] = {
    "plan": lambda text: plan_file.imported(text.data, text.source),
    "zeroth-order": lambda text: zo_file.imported(text.data, text.source),
    "axolotl": axolotl.read,
    "llamafactory": llamafactory.read,
    "trl": trl.read,
    "torchtune": torchtune.read,
    "accelerate": lambda text: accelerate_yaml.read(text.data, text.source),
    "training-arguments": lambda text: training_args.read(text.data, text.source, text),
    "fsdp": _fsdp,
    "deepspeed": lambda text: deepspeed_json.read(text.data, text.source, plain=text.plain),
}
