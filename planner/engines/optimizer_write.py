"""An optimizer as a class and its arguments, for a program that makes it by name."""

from __future__ import annotations

from typing import Any

from ...errors import CannotTell
from ..optimizers.catalogue import entry_of, optimizer_rule, split_options
from ..optimizers.lowrank import ALL_LINEAR

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
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lion": ("lion_pytorch.Lion", {}),
    "hf-adafactor": ("transformers.optimization.Adafactor", {"relative_step": False, "scale_parameter": False}),
    "schedule-free-adamw": ("schedulefree.AdamWScheduleFree", {}),
    "schedule-free-radam": ("schedulefree.RAdamScheduleFree", {}),
    "schedule-free-sgd": ("schedulefree.SGDScheduleFree", {}),
    "prodigy": ("prodigyopt.Prodigy", {"lr": 1.0}),  # it is a factor there
    "stable-adamw": ("optimi.StableAdamW", {}),
    "grokadamw": ("grokadamw.GrokAdamW", {}),
    **{f"torchao-{kind.lower()}-{form.lower()}": (f"torchao.optim.{kind}{form}", {})
       for kind in ("AdamW", "Adam") for form in ("8bit", "4bit", "Fp8")},
}  # fmt: skip
#: Optimizers that are given more than a list of weights: what of the model they take, and their class.
_OF_THE_MODEL = {
    "adam-mini": ("names", "adam_mini.Adam_mini"),
    "galore-adamw": ("low-rank", "galore_torch.GaLoreAdamW"),
    "galore-adamw-8bit": ("low-rank", "galore_torch.GaLoreAdamW8bit"),
    "galore-adafactor": ("low-rank", "galore_torch.GaLoreAdafactor"),
    "apollo-adamw": ("low-rank", "apollo_torch.APOLLOAdamW"),
    "apollo-mini": ("low-rank", "apollo_torch.APOLLOAdamW"),
    "muon": ("muon", "torch.optim.Muon"),
    "badam": ("blocks", "badam.BlockOptimizer"),
}
_LOW_RANK = {"update_proj_gap": 200, "proj_type": "std"}  # the defaults of both libraries
_LEARNING_RATE = 5e-5  # as TrainingArguments has it; no memory depends on it


def optimizer_class(optimizer: str, impl: str = "default") -> dict[str, Any]:
    """{"class": its dotted name, "arguments": beside the parameters} of an optimizer, and what it takes of the model:

    "takes": names (pairs with the weights), low-rank (two groups of weights; "group" is what the second has), muon (an AdamW
    beside it) or blocks (an AdamW inside it); "matrices": {"with": words} or {"without": words} of the names that are chosen.

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
    elif entry.name in _OTHERS:
        kind, fixed = _OTHERS[entry.name]
        if entry.name == "hf-adafactor":
            given = {"beta1": 0.9} if given.get("momentum") else {}
        found = kind, {**fixed, **given}
    elif entry.name in _OF_THE_MODEL:
        return _of_the_model(entry.name, optimizer)
    else:
        raise CannotTell(f"train.py: how {entry.name} of {entry.library} is made is for its own documentation to say")
    return {"class": found[0], "arguments": {"lr": _LEARNING_RATE, **found[1]}}


def takes_the_model(optimizer: str) -> bool:
    """Whether the optimizer is given more of the model than a list of weights."""
    return entry_of(split_options(optimizer)[0]).name in _OF_THE_MODEL


def _of_the_model(name: str, optimizer: str) -> dict[str, Any]:
    takes, kind = _OF_THE_MODEL[name]
    rule: Any = optimizer_rule(optimizer)
    made: dict[str, Any] = {"class": kind, "arguments": {"lr": _LEARNING_RATE}, "takes": takes}
    if takes == "names":
        made["arguments"] |= {"dim": rule.dim, "n_heads": rule.n_heads, "verbose": False}
    elif takes == "muon":
        made["matrices"] = {"without": list(rule.others)}
    elif takes == "low-rank":
        words = [""] if rule.targets == (ALL_LINEAR,) else list(rule.targets)
        made["matrices"] = {"with": words}
        made["group"] = {"rank": rule.rank, **_LOW_RANK}
        if name.startswith("apollo"):
            scale = 128 if name == "apollo-mini" else 1
            made["group"] |= {"proj": "random", "scale_type": rule.scale_type, "scale": scale}
        else:
            made["group"]["scale"] = 0.25
            made["arguments"] |= {
                "galore-adamw": {"no_deprecation_warning": True},
                "galore-adafactor": {"relative_step": False, "scale_parameter": False},
            }.get(name, {})
    return made


def _of_bitsandbytes(name: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    paged = "Paged" if name.startswith("paged-") else ""
    kind, _, bits = name.removeprefix("paged-").rpartition("-")
    if "embeddings" in given:
        raise CannotTell("train.py: embeddings at 32 bits are for transformers' Trainer")
    arguments = {"momentum": 0.9} if kind in ("sgd", "lars") else {}
    if kind == "ademamix" and bits == "32bit":  # its class of that name has no room for the second average
        return f"bitsandbytes.optim.{paged}AdEMAMix", given
    return f"bitsandbytes.optim.{paged}{_BITSANDBYTES[kind]}{bits}", {**arguments, **given}
