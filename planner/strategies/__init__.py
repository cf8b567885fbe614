"""Training strategies, one file each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Strategy


def make_strategy(name: str) -> Strategy:
    """A fresh strategy object by the name that `--strategy` uses."""
    from .single import SingleDevice

    strategies = {SingleDevice.name: SingleDevice}
    return strategies[name]()
