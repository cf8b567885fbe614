"""What each block of a model keeps for backward, as text: the `keep:` values of --recompute.

    keep:0-11=nothing/12-23=aten.mm@0+attention@0/24-31=all

Blocks 0 to 11 are recomputed whole; of blocks 12 to 23 the results of the first `aten.mm` and the first attention that a block
runs are kept, and the rest is recomputed; blocks 24 to 31 are not recomputed.  Calls of an op are counted from 0 in the order
in which the block runs them; `attention` counts the fused attention kernels together, whichever the GPU takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import UserError
from ...units import parse_bytes

PREFIX = "keep:"
SELECTIVE = "selective"  # the word that stands for the best such text, within what the GPU has, or within selective:GiB
ALL, NOTHING = "all", "nothing"
ATTENTION = "attention"  # one name for every fused attention kernel
_RANGE = re.compile(r"(\d+)(?:-(\d+))?=(.+)")
_OP = re.compile(r"([A-Za-z_][\w.]*)@(\d+)")
_EXAMPLE = f"Write for example {PREFIX}0-11={NOTHING}/12-23=aten.mm@0+attention@0/24-31={ALL}"
Op = tuple[str, int]
"""(name, number): the number-th call of an op in its block."""


@dataclass(frozen=True)
class Policy:
    """`blocks[i]`: the calls whose results block i keeps; None where it is not recomputed."""

    blocks: tuple[frozenset[Op] | None, ...]

    @property
    def text(self) -> str:
        parts: list[tuple[int, int, str]] = []
        for number, kept in enumerate(self.blocks):
            words = _words(kept)
            if parts and parts[-1][2] == words:
                parts[-1] = (parts[-1][0], number, words)
            else:
                parts.append((number, number, words))
        return PREFIX + "/".join(f"{a}={what}" if a == b else f"{a}-{b}={what}" for a, b, what in parts)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """The inverse of `text`.  Raises UserError."""
        blocks: list[frozenset[Op] | None] = []
        for part in text.removeprefix(PREFIX).split("/"):
            match = _RANGE.fullmatch(part)
            if match is None:
                raise UserError(f"--recompute {text}: {part!r} does not say what some blocks keep", _EXAMPLE)
            first, last = int(match[1]), int(match[2] or match[1])
            if first != len(blocks) or last < first:
                raise UserError(f"--recompute {text}: {part!r} should begin with block {len(blocks)}", _EXAMPLE)
            blocks += [_kept(text, match[3])] * (last - first + 1)
        return cls(tuple(blocks))

    @property
    def words(self) -> str:
        """Short, for people."""
        whole = sum(kept is None for kept in self.blocks)
        nothing = sum(kept is not None and not kept for kept in self.blocks)
        some = len(self.blocks) - whole - nothing
        said = [(nothing, "recomputed"), (some, "recomputed in part"), (whole, "kept")]
        return f"of {len(self.blocks)} blocks " + ", ".join(f"{count} {what}" for count, what in said if count)


def is_selective(recompute: str) -> bool:
    """Whether it is `selective` or `selective:SIZE`."""
    return recompute.partition(":")[0] == SELECTIVE


def stated_limit(recompute: str) -> int | None:
    """The bytes of `selective:SIZE`, a number of GiB or a size with a unit; None for `selective`.  Raises UserError."""
    size = recompute.partition(":")[2]
    if not size:
        return None
    return parse_bytes(f"{size}GiB" if size.replace(".", "", 1).isdecimal() else size, f"--recompute {recompute}")


def _words(kept: frozenset[Op] | None) -> str:
    if kept is None:
        return ALL
    return "+".join(f"{name}@{number}" for name, number in sorted(kept)) or NOTHING


def _kept(text: str, words: str) -> frozenset[Op] | None:
    if words in (ALL, NOTHING):
        return None if words == ALL else frozenset()
    return frozenset(_ops(text, words.split("+")))


def _ops(text: str, parts: Iterable[str]) -> Iterable[Op]:
    for part in parts:
        match = _OP.fullmatch(part)
        if match is None:
            raise UserError(f"--recompute {text}: {part!r} is no call of an op", "Write for example aten.mm@0: the first")
        yield match[1], int(match[2])
