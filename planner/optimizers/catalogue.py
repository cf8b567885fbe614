"""Every optimizer that memplan knows: what it keeps, what it makes, where that is written, and what it cannot be combined with.

`optimizer_rule` is the one door to a rule: torch.optim's own are traced, the others are written down from their source.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from ...errors import UserError, did_you_mean
from . import (
    adam_mini,
    apex,
    apollo,
    badam,
    bitsandbytes,
    deepspeed_cpu_adam,
    flashoptim,
    galore,
    grokadamw,
    hf_adafactor,
    hift,
    lion,
    lomo,
    lpmm,
    muon,
    optimi,
    prodigy,
    schedulefree,
    torchao,
)
from .entry import Entry
from .rule import OptimizerRule
from .traced import names as torch_names
from .traced import traced_rule

_FAMILIES = (
    flashoptim,
    bitsandbytes,
    torchao,
    hf_adafactor,
    lion,
    muon,
    adam_mini,
    galore,
    apollo,
    badam,
    hift,
    lomo,
    schedulefree,
    prodigy,
    optimi,
    grokadamw,
    deepspeed_cpu_adam,
    lpmm,
    apex,
)
# What torch's own keep, in copies of the parameter; Adafactor's is no multiple.  A test compares them with the traces.
TORCH_COPIES = {
    "adamw": 2,
    "adam": 2,
    "adamw-amsgrad": 3,
    "sgd": 0,
    "sgd-momentum": 1,
    "adagrad": 1,
    "adadelta": 2,
    "adamax": 2,
    "nadam": 2,
    "radam": 2,
    "rmsprop": 1,
    "rmsprop-momentum": 2,
    "rprop": 2,
    "asgd": 1,
}
_TORCH_ALIASES = {"adamw": ("adamw_torch", "adamw_torch_fused")}
_FUSED_ALIASES = ("adamw_torch_fused",)  # transformers' Trainer: its default


def _torch_entry(name: str) -> Entry:
    copies = TORCH_COPIES.get(name)
    return Entry(
        name,
        "torch",
        "2.13.0",
        "torch.optim's own, in the parameter's dtype",
        "s*(rows + columns) of a matrix, s of a vector" if copies is None else f"{copies}*s" if copies else "0",
        "by implementation: foreach copies of whole lists, for-loop of one parameter, fused none",
        "torch/optim, recorded from the optimizer itself",
        aliases=_TORCH_ALIASES.get(name, ()),
        checked="state and transient",
    )


@functools.cache
def entries() -> dict[str, Entry]:
    """All of them by name: torch's own first."""
    found = {name: _torch_entry(name) for name in torch_names()}
    for family in _FAMILIES:
        for entry in family.ENTRIES:
            assert entry.name not in found, f"two optimizers are called {entry.name}"
            found[entry.name] = entry
    return found


@functools.cache
def _aliases() -> dict[str, str]:
    return {alias: entry.name for entry in entries().values() for alias in entry.aliases}


@functools.cache
def _by_letters() -> dict[str, str]:
    """Names without hyphens and capitals: libraries write adamw8bit, adamw_8bit and AdamW-8bit."""
    found: dict[str, set[str]] = {}
    for spelling, name in (*_aliases().items(), *zip(entries(), entries(), strict=True)):
        found.setdefault(_letters(spelling), set()).add(name)
    return {spelling: names.pop() for spelling, names in found.items() if len(names) == 1}


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def entry_of(name: str) -> Entry:
    """The entry called `name`, or by one of its other spellings.  Raises UserError."""
    known = entries()
    found = name if name in known else _aliases().get(name) or _by_letters().get(_letters(name))
    if found is not None:
        return known[found]
    hint = did_you_mean(name, (*known, *_aliases()))
    raise UserError(f"--optimizer {name}: not known", f"{hint} `memplan optimizers list` shows all".strip())


def split_options(text: str) -> tuple[str, dict[str, str]]:
    """ "NAME:OPTION=VALUE,..." as name and options, as texts.  Raises UserError."""
    name, _, rest = text.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--optimizer {text}: {part!r} is no OPTION=VALUE", "Write it as in galore-adamw:rank=64")
        options[key.strip()] = value.strip()
    return name.strip(), options


def optimizer_rule(
    name: str, impl: str = "default", *, target: str = "cuda", options: Mapping[str, Any] | None = None
) -> OptimizerRule:
    """The rule of the optimizer `name`, which may carry options: "flash-adamw:master_weight_bits=32".

    `impl`: of torch's own (default, foreach, fused, for-loop); the others have one each.  `options`: more of them, as texts
    or values. Raises UserError for an unknown name, option or implementation, and for a value that the library refuses.
    """
    name, written = split_options(name)
    entry = entry_of(name)
    if name in _FUSED_ALIASES and impl == "default":
        impl = "fused"
    given = {**written, **(options or {})}
    if entry.rule is None:
        if given:
            raise UserError(f"--optimizer {entry.name}: torch's own has no options here", "Leave them out")
        return traced_rule(entry.name, impl, target=target)
    fields = {item.name for item in dataclasses.fields(entry.rule)}  # type: ignore[arg-type]  # every rule here is a dataclass
    if "target" in fields:  # an AdamW of torch steps inside
        return dataclasses.replace(entry.make(given), impl=impl, target=target)  # type: ignore[type-var]
    if impl != "default":
        raise UserError(f"--optimizer-impl {impl}: {entry.name} has one implementation", "Leave --optimizer-impl out")
    return entry.make(given)
