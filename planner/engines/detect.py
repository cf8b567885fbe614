"""Which kind of configuration a file is, by what it holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...errors import UserError
from . import accelerate_yaml, deepspeed_json, deepspeed_schema, fsdp_config, training_args
from .imported import Imported
from .text import Text, read_file

_ACCELERATE_MARKS = ("distributed_type", "compute_environment")
_DEEPSPEED_MARKS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")


def read_config(path: str | os.PathLike[str]) -> Imported:
    """What the configuration file at `path` says, whichever of the four kinds it is.

    DeepSpeed's JSON, an accelerate YAML (or JSON), transformers' TrainingArguments or their `fsdp_config` alone.
    Raises UserError for a file that is none of them, or that its own reader would refuse.
    """
    text = read_file(path)
    kind = kind_of(text.data)
    if kind == "accelerate":
        return accelerate_yaml.read(text.data, text.source)
    if kind == "training-arguments":
        return training_args.read(text.data, text.source)
    if kind == "fsdp":
        return _fsdp(text)
    if kind == "deepspeed":
        return deepspeed_json.read(text.data, text.source, plain=text.plain)
    raise UserError(
        f"{text.source}: is no configuration that memplan knows",
        "Expected a ds_config.json, an accelerate YAML, TrainingArguments or an fsdp_config as JSON or YAML",
    )


def kind_of(data: Mapping[str, Any]) -> str | None:
    """accelerate | training-arguments | fsdp | deepspeed; None where nothing is recognised."""
    if any(mark in data for mark in _ACCELERATE_MARKS):
        return "accelerate"
    if any(mark in data for mark in _DEEPSPEED_MARKS):
        return "deepspeed"
    scores = {
        "training-arguments": sum(key in training_args.KNOWN for key in data),
        "fsdp": sum(key.removeprefix("fsdp_") in fsdp_config.KEYS for key in data if isinstance(key, str)),
        "deepspeed": sum(key in deepspeed_schema.TOP_LEVEL | deepspeed_schema.REMOVED.keys() for key in data),
    }
    for name in ("bf16", "fp16"):  # a switch in TrainingArguments, a block in DeepSpeed's file
        if name in data:
            scores["deepspeed" if not isinstance(data[name], Mapping) else "training-arguments"] -= 1
    best = max(scores, key=lambda kind: scores[kind])
    return best if scores[best] > 0 else None


def _fsdp(text: Text) -> Imported:
    settings, notes = fsdp_config.from_trainer(True, text.data, text.source)
    notes.append("fsdp_config alone says nothing of mixed precision: --precision does")
    return accelerate_yaml.fsdp_question(settings, "", text.source, "", "fsdp", notes, [])
