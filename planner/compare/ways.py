"""What is compared: every optimizer under every method, with and without gradient release; and what cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import UserError
from ..optimizers.catalogue import entries, entry_of, optimizer_rule, split_options
from ..optimizers.methods import METHODS, default_optimizer, optimizer_under

if TYPE_CHECKING:
    from ..optimizers.entry import Entry
    from ..optimizers.rule import OptimizerRule
    from ..request import Request

NO_OPTIMIZER = "-"  # zeroth-order training updates the weights in place
RELEASES = {"both": (False, True), "yes": (True,), "no": (False,)}  # the values of --grad-release


@dataclass(frozen=True)
class Way:
    """One combination.  `base` is the question without an optimizer; ways of one base share its trace."""

    base: Request
    optimizer: str
    released: bool

    @property
    def request(self) -> Request:
        if self.optimizer == NO_OPTIMIZER:
            return self.base
        strategy = "release" if self.released else self.base.strategy
        return self.base.but(optimizer=self.optimizer, optimizer_impl=self._impl, strategy=strategy)

    @property
    def entry(self) -> Entry | None:
        return None if self.optimizer == NO_OPTIMIZER else entry_of(split_options(self.optimizer)[0])

    @property
    def rule(self) -> OptimizerRule:
        """Raises UserError."""
        return optimizer_rule(self.optimizer, self._impl)

    @property
    def _impl(self) -> str:
        """--optimizer-impl is a choice of torch's own; the other libraries have one implementation each."""
        return self.base.optimizer_impl if self.entry is None or self.entry.library == "torch" else "default"

    @property
    def name(self) -> str:
        parts = [self.optimizer, self.base.method, self.base.precision, "released" if self.released else ""]
        return ", ".join(part for part in parts if part not in ("", NO_OPTIMIZER))


def ways(bases: Sequence[Request], optimizers: Sequence[str], releases: Sequence[bool]) -> Iterator[Way]:
    """Every combination, base by base.  Zeroth-order training has no optimizer and no gradients: one way.

    A method that an optimizer is (GaLore, BAdam) meets the ones that it has: asked for as `adamw` or by their own names.
    """
    for base in bases:
        if base.method in METHODS:
            base = base.but(strategy="single") if base.strategy == "release" else base  # each way says which
            names = [_under(base.method, name) for name in optimizers]
            own = dict.fromkeys(name for name in names if name) or [default_optimizer(base.method)]
            yield from (Way(base, name, released) for name in own for released in releases)
        elif base.has_backward:
            yield from (Way(base, name, released) for name in optimizers for released in releases)
        else:
            yield Way(base, NO_OPTIMIZER, False)


def check(way: Way) -> None:
    """Raises UserError for what the library refuses, CannotTell for what is not modelled as a run of the whole model."""
    if way.base.gpus != 1 or way.base.strategy != "single":
        raise UserError("a comparison is of one GPU", "Use `memplan study` for strategies of several")
    way.request.check()


def _under(method: str, optimizer: str) -> str | None:
    try:
        return optimizer_under(method, optimizer)
    except UserError:
        return None


def optimizers_of(text: str) -> list[str]:
    """ "all", or "a,b:option=1,option=2,c" as names with their options.  Raises UserError for one that is not known."""
    if text.strip() == "all":
        return list(entries())
    found: list[str] = []
    for part in text.split(","):
        part = part.strip()
        if found and ":" in found[-1] and "=" in part and ":" not in part:
            found[-1] += f",{part}"  # one more option of the name before
        else:
            found.append(part)
    if not all(found):
        raise UserError(f"--optimizers {text!r}: there is nothing between two commas", "Write names with a comma between them")
    for name in found:
        entry_of(split_options(name)[0])
    return list(dict.fromkeys(found))
