"""Which of all model types that transformers knows can be traced, and why the others cannot.  Nothing is run.

A type is tried from a tiny config of its own defaults (`tiny`): narrow, else shallow, else the defaults themselves.
"""

from __future__ import annotations

import re
from typing import Any

from ..errors import MemplanError
from .tiny import SIZES, default_config, tiny_config

BATCH_SIZE = 2
SEQ_LEN = 64
_WAVE_SAMPLES = 8000  # for models of raw sound, where `seq_len` counts samples: half a second
# What a model is tried as, best first, after the task that its config calls for.
_TASKS = (
    "causal-lm", "masked-lm", "seq2seq-lm", "image-classification", "image-text-to-text", "ctc", "speech-seq2seq",
    "seq-classification", "auto",
)  # fmt: skip
PART = "part of another model: transformers has no class to train it by itself"


def all_types() -> list[str]:
    """Every model type of the installed transformers, sorted."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def traced(model_type: str) -> dict[str, Any]:
    """{"task", "size", "events", "reason"} of one type; an empty reason says that it traces."""
    try:
        config = default_config(model_type)
    except Exception as error:
        return {"reason": f"no default config: {_line(error)}"}
    task, architecture = _task_of(model_type, config)
    if task is None:
        return {"reason": PART}
    own = {} if architecture is None else {"architectures": [architecture]}
    reason = ""
    for size in SIZES:
        try:
            events = _trace(model_type, task, {**tiny_config(model_type, size), **own})
        except MemplanError as error:
            reason = str(error)
        except Exception as error:
            reason = f"{type(error).__name__}: {_line(error)}"
        else:
            return {"task": task, "size": size, "events": events, "reason": ""}
    return {"task": task, "reason": reason}


def _trace(model_type: str, task: str, config: dict[str, Any]) -> int:
    from ..models import ModelSpec
    from ..planner.trace.options import TraceOptions
    from ..planner.trace.tracer import trace_step

    spec = ModelSpec(name=model_type, source="folder", task=task, config=config)
    options = TraceOptions(batch_size=BATCH_SIZE, seq_len=_WAVE_SAMPLES if task == "ctc" else SEQ_LEN)
    return len(trace_step(spec, options, with_graph=False).event_kind)


def _task_of(model_type: str, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """(task, class to name in `architectures`); (None, None) for a part of other models."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from ..models import tasks

    config_class = CONFIG_MAPPING[model_type]
    for task in (tasks.default_task(config), *_TASKS):
        if config_class in getattr(transformers, tasks.AUTO_CLASS[task])._model_mapping:
            return task, None
    own = _own_class(config_class)
    return ("auto", own) if own else (None, None)


def _own_class(config_class: Any) -> str | None:
    """A public model class that belongs to this config alone, for types without an auto class."""
    import importlib

    import transformers

    module_name = config_class.__module__.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return None
    names = [
        name
        for name in getattr(module, "__all__", ())
        if isinstance(cls := getattr(module, name, None), type)
        and issubclass(cls, transformers.PreTrainedModel)
        and cls.config_class is config_class
        and not name.endswith("PreTrainedModel")
        and hasattr(transformers, name)
    ]
    return next((n for n in names if not n.endswith("Model")), names[0] if names else None)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


RAISED = "its step raised an error on the example batch"
# Reasons of many types, in few words: the first pattern that is found counts.
_GROUPS = (
    (r"^part of another model", "is a part of another model and has no class to train it by itself"),
    (r"^no default config", "has no default config"),
    (r"requires the (\w+) library", r"needs the package \1"),
    (r"has no vocab_size, so no example batch", "takes inputs that its config does not describe"),
    (r"forward needs (.*), which the config does not describe", "takes inputs that its config does not describe"),
    (r"decides by the values of a tensor", "decides by the values of a tensor, which no trace knows"),
    (r"has no fake implementation", "uses an op without a fake implementation"),
    (r"the model cannot be built from its config", "cannot be built from transformers' own defaults"),
    (r"transformers refuses the config", "cannot be built from transformers' own defaults"),
    (r"took longer than", "took too long"),
    (r"depends on no trainable parameter", "has no loss that trains anything"),
    (r"holds no floating tensor", "has no loss that trains anything"),
)


def group_of(reason: str) -> str:
    """The short form of a reason, shared by many types."""
    for pattern, short in _GROUPS:
        found = re.search(pattern, reason)
        if found:
            return found.expand(short)
    return RAISED
