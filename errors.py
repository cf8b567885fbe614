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
    """The entries of `known` that `word` may have been meant to be, best first, `count` at most; case does not matter.

    A name that begins with the word, ends with it, or has it as a part of its path is near; else letters must agree.  What is
    clearly further off than the best one is left out.
    """
    wanted = word.lower()
    scored = sorted(((_likeness(wanted, name.lower()), name) for name in known), key=lambda pair: (-pair[0], pair[1]))
    if not scored or scored[0][0] < _NEAR:
        return []
    least = max(_NEAR, scored[0][0] - _AS_NEAR)
    return [name for score, name in scored[:count] if score >= least]


_NEAR = 0.6  # difflib's ratio: twice the letters that agree, of all letters
_AS_NEAR = 0.15
_PART = 0.85  # of a word of three letters or more that is the beginning or the end of a name


def _likeness(word: str, name: str) -> float:
    ratio = difflib.SequenceMatcher(None, name, word).ratio()
    last = name.rpartition("/")[2]
    if last != name:
        ratio = max(ratio, difflib.SequenceMatcher(None, last, word).ratio())
    parts = name.startswith(word) or name.endswith(word) or last.startswith(word)
    return max(ratio, _PART) if len(word) > 2 and parts else ratio


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence that offers the nearest known names, or "" when nothing is near."""
    names = nearest(word, known)
    return f"Did you mean {', '.join(names)}?" if names else ""
