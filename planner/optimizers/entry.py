"""What the catalogue says about one optimizer, and how its options are read."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import UserError, did_you_mean
from .rule import OptimizerRule


@dataclass(frozen=True)
class Option:
    """One setting of a rule, with its default."""

    name: str
    default: Any
    kinds: tuple[type, ...]  # NoneType among them: "none" is a value

    def read(self, optimizer: str, text: str) -> Any:
        """`text` as this option's type.  Raises UserError."""
        word = text.strip().lower()
        if word == "none" and type(None) in self.kinds:
            return None
        if bool in self.kinds:
            if word in ("true", "false"):
                return word == "true"
            raise UserError(f"--optimizer {optimizer}: {self.name}={text}: expected true or false")
        if int in self.kinds:
            try:
                return int(word)
            except ValueError:
                raise UserError(f"--optimizer {optimizer}: {self.name}={text}: expected a whole number") from None
        return tuple(text.split("+")) if tuple in self.kinds else text


@dataclass(frozen=True)
class Entry:
    """One optimizer that memplan knows."""

    name: str  # as --optimizer spells it
    library: str  # the distribution that ships it
    version: str  # that the rule was read from and checked with
    summary: str
    state: str  # what is kept, in bytes per parameter; s and g: bytes of one element of the parameter and its gradient
    transient: str  # what one step makes beside it
    source: str  # file and function of the library
    rule: type[OptimizerRule] | None = None  # None: torch's own, traced
    fixed: Mapping[str, Any] = field(default_factory=dict)  # arguments of `rule` that make it this optimizer
    not_with: tuple[str, ...] = ()  # what it cannot be combined with, and other traps
    aliases: tuple[str, ...] = ()  # names of transformers' Trainer (`TrainingArguments.optim`) and other spellings
    per_parameter: float | None = None  # state of a matrix, where the rule needs torch to tell it ...
    copies: int | None = None  # ... or the same in copies of the parameter
    checked: str = "state"  # what a test compares with the real library: state and transient, state, or nothing

    @property
    def options(self) -> dict[str, Option]:
        """Settings by name, with their defaults."""
        if self.rule is None:
            return {}
        hints = typing.get_type_hints(self.rule)
        found = {}
        for item in dataclasses.fields(self.rule):  # type: ignore[arg-type]  # every rule here is a dataclass
            if item.name in ("name", "impl", "target") or item.name in self.fixed:
                continue
            kinds = tuple(typing.get_origin(k) or k for k in (typing.get_args(hints[item.name]) or (hints[item.name],)))
            if typing.get_origin(hints[item.name]) is tuple:
                kinds = (tuple,)
            found[item.name] = Option(item.name, item.default, kinds)
        return found

    def make(self, options: Mapping[str, Any]) -> OptimizerRule:
        """The rule with `options`; texts are read as the option's type.  Raises UserError for an unknown one."""
        assert self.rule is not None
        known = self.options
        given = {}
        for name, value in options.items():
            if name not in known:
                hint = did_you_mean(name, known) or (f"Known: {', '.join(known)}" if known else "It has none")
                raise UserError(f"--optimizer {self.name}: no option {name!r}", hint)
            given[name] = known[name].read(self.name, value) if isinstance(value, str) else value
        return self.rule(name=self.name, **self.fixed, **given)  # type: ignore[call-arg]
