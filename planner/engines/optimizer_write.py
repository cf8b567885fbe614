"""An optimizer as a class and its arguments, for a program that makes it by name."""

from __future__ import annotations

from typing import Any

from ...errors import CannotTell
from ..optimizers.catalogue import entry_of, split_options

_TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}), "adam": ("Adam", {}), "adamw-amsgrad": ("AdamW", {"amsgrad": True}), "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}), "adagrad": ("Adagrad", {}), "adadelta": ("Adadelta", {}),
    "adamax": ("Adamax", {}), "nadam": ("NAdam", {}), "radam": ("RAdam", {}), "rmsprop": ("RMSprop", {}),
    "rmsprop-momentum": ("RMSprop", {"momentum": 0.9}), "rprop": ("Rprop", {}), "asgd": ("ASGD", {}),
    "adafactor": ("Adafactor", {}),
}  # fmt: skip
_IMPLS: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
_FLASH: dict[str, tuple[str, dict[str, Any]]] = {
    "flash-adamw": ("FlashAdamW", {}), "flash-adam": ("FlashAdam", {}), "flash-lion": ("FlashLion", {}),
    "flash-sgd": ("FlashSGD", {}), "flash-sgd-momentum": ("FlashSGD", {"momentum": 0.9}),
}  # fmt: skip
_BITSANDBYTES = {
    "adam": "Adam", "adamw": "AdamW", "ademamix": "AdEMAMix", "lion": "Lion", "rmsprop": "RMSprop", "sgd": "SGD",
    "adagrad": "Adagrad", "lamb": "LAMB", "lars": "LARS",
}  # fmt: skip
_LEARNING_RATE = 5e-5  # as TrainingArguments has it; no memory depends on it


def optimizer_class(optimizer: str, impl: str = "default") -> dict[str, Any]:
    """{"class": its dotted name, "arguments": beside the parameters} of an optimizer of torch, bitsandbytes or FlashOptim.

    Raises CannotTell for the others, which their own documentation says how to make.
    """
    name, options = split_options(optimizer)
    entry = entry_of(name)
    given = {key: entry.options[key].read(entry.name, text) for key, text in options.items()}
    if entry.name in _TORCH:
        kind, fixed = _TORCH[entry.name]
        found = f"torch.optim.{kind}", {**fixed, **_IMPLS.get(impl, {})}
    elif entry.name in _FLASH:
        kind, fixed = _FLASH[entry.name]
        found = f"flashoptim.{kind}", {**fixed, **given}
    elif entry.library == "bitsandbytes":
        found = _of_bitsandbytes(entry.name, given)
    else:
        raise CannotTell(f"train.py: how {entry.name} of {entry.library} is made is for its own documentation to say")
    return {"class": found[0], "arguments": {"lr": _LEARNING_RATE, **found[1]}}


def _of_bitsandbytes(name: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    paged = "Paged" if name.startswith("paged-") else ""
    kind, _, bits = name.removeprefix("paged-").rpartition("-")
    if "embeddings" in given:
        raise CannotTell("train.py: embeddings at 32 bits are for transformers' Trainer")
    arguments = {"momentum": 0.9} if kind in ("sgd", "lars") else {}
    if kind == "ademamix" and bits == "32bit":  # its class of that name has no room for the second average
        return f"bitsandbytes.optim.{paged}AdEMAMix", given
    return f"bitsandbytes.optim.{paged}{_BITSANDBYTES[kind]}{bits}", {**arguments, **given}
