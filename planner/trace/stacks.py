"""Stacks: lists of equal blocks in a model, and how few of their blocks stand for all of them.

A stack is a ModuleList or Sequential whose blocks' kinds (structure hashes) become periodic after some first ones.  Its shallow
form keeps the first blocks, two periods and the last period.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MIN_BLOCKS = 6  # fewer blocks are traced as they are


class NotPeriodic(Exception):
    """The trace cannot be deepened; the model is traced at its full depth instead."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A list of blocks: its path, full length, and which of its blocks the shallow model keeps."""

    path: str
    blocks: int  # of the full model
    head: int  # first blocks that are kept as they are
    period: int
    shallow: int  # blocks of the shallow model: head, two periods (and a remainder), and one period of last blocks

    def source(self, block: int) -> int:
        """The block of the shallow model that `block` of the full model equals."""
        if block < self.head:
            return block
        if block >= self.blocks - self.period:
            return self.shallow - (self.blocks - block)
        # the last period before those, counted from the end: in step with the last blocks
        return self.shallow - self.period - 1 - (self.blocks - self.period - 1 - block) % self.period

    def is_middle(self, source: int) -> bool:
        return self.head <= source < self.shallow - self.period


def find_stacks(module: Any) -> list[Stack]:
    """The stacks of `module` (a torch module) that are worth cutting."""
    import torch

    stacks: list[Stack] = []
    for path, child in module.named_modules():
        if not isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) or len(child) < _MIN_BLOCKS:
            continue
        if any(path.startswith(s.path + ".") for s in stacks):
            continue
        kinds = _kinds(list(child))
        found = _period(kinds)
        if found is None:
            continue
        head, period = found
        shallow = head + 3 * period + (len(kinds) - head) % period
        if shallow < len(kinds):
            stacks.append(Stack(path, len(kinds), head, period, shallow))
    return stacks


def _period(kinds: Sequence[int]) -> tuple[int, int] | None:
    """(blocks kept at the start, period) such that the kinds repeat from there on; None when they do not.

    The first period is kept too: the first block of each kind has other neighbours than later ones, and in backward it is the
    last to need what all blocks of its kind share (a mask, rotary tables).
    """
    n = len(kinds)
    for period in range(1, n // 2):
        for first in range(min(8, n - 2 * period)):
            if all(kinds[i] == kinds[i - period] for i in range(first + period, n)):
                return first + period, period
    return None


def _kinds(blocks: Sequence[Any]) -> list[int]:
    """A number per block; equal numbers, equal structure (classes, parameters, plain attributes but the block's own index)."""
    described = [_describe(b) for b in blocks]
    indexed = {key for key in described[0] if all(d.get(key) == ("attr", i) for i, d in enumerate(described))}
    numbers: dict[Any, int] = {}
    return [
        numbers.setdefault(tuple((k, v) for k, v in sorted(d.items()) if k not in indexed), len(numbers)) for d in described
    ]


def _describe(block: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in block.named_modules():
        found[f"{name}:class"] = ("class", type(module).__name__)
        for key, value in vars(module).items():
            if value is None or isinstance(value, (bool, int, float, str)):
                found[f"{name}:{key}"] = ("attr", value)
    for name, parameter in (*block.named_parameters(), *block.named_buffers()):
        found[f"{name}:tensor"] = ("tensor", f"{tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}")
    return found
