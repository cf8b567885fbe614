"""The errors that memplan raises on purpose.

    MemplanError            everything that memplan raises itself
     +- UserError           the input cannot be used: what, where, and the next step (exit code 2)
     +- CannotTell          the input is fine, but memplan has no model for it (verdict `unknown`, exit code 2)

A `UserError` is printed as one line without a traceback; any other exception is a bug of memplan and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MemplanError(Exception):
    """Base of every exception that memplan raises itself."""


class UserError(MemplanError):
    """The input cannot be used.  The message says what was wrong, where, and what to do next, on one line."""

    def __init__(self, problem: str, next_step: str = "") -> None:
        self.problem = " ".join(problem.split())
        self.next_step = " ".join(next_step.split())
        super().__init__(f"{self.problem}. {self.next_step}" if self.next_step else self.problem)


class CannotTell(MemplanError):
    """The question is understood, but not modelled: the honest answer is `unknown`, with this reason."""


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The `count` entries of `known` that look most like `word`, best first; case does not matter."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=0.4)
    return [by_lower[name] for name in close]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence that offers the nearest known names, or "" when nothing is near."""
    names = nearest(word, known)
    return f"Did you mean {', '.join(names)}?" if names else ""
