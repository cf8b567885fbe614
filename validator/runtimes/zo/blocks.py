"""The units of a decoder: what ZO2 perturbs, runs and updates at a time, in the order in which a forward pass calls them.

A unit is a block of the model's longest list of equal blocks, or a module outside that list with parameters of its own (an
embedding, the final norm, the head).  Their order is taken from a real forward pass of a few tokens, because the order of
registration is another one in many models (transformers registers OPT's final norm before its blocks).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ....errors import UserError
from ....planner.trace.prepare import block_list
from .perturb import Named

_NEXT = "Use --method full, or a decoder such as OPT, Llama, Qwen or GPT-2"


@dataclass(frozen=True, eq=False)
class Unit:
    """One unit, and the parameters that it owns; a parameter that several units share belongs to the first of them."""

    name: str
    module: nn.Module
    block: int | None
    """Its number in the list of blocks; None outside of it."""
    params: tuple[Named, ...]
    """Trainable and its own, in order of registration: the order in which z is drawn."""
    tied: tuple[Named, ...]
    """Trainable and owned by an earlier unit (a head that is tied to the embedding)."""
    forward: Callable[..., Any]
    """The module's own forward, whatever stands in its place later."""

    def tensors(self) -> list[nn.Parameter]:
        """All parameters of the module, frozen ones included: what moves when it moves."""
        return list(self.module.parameters())


def find_units(module: nn.Module, probe: Callable[[], Any]) -> tuple[Unit, ...]:
    """The units in calling order.  `probe` runs one small forward pass on `module`.

    Raises UserError for a model that does not consist of units, each called once.
    """
    kind = type(module).__name__
    try:
        path, blocks = block_list(module)
    except UserError as error:
        raise UserError(f"{kind} has no list of equal blocks to move one by one", _NEXT) from error
    inside = {id(part) for block in blocks for part in block.modules()}
    names = {id(part): name for name, part in module.named_modules()}
    found = list(blocks) + [
        m for m in module.modules() if id(m) not in inside and any(True for _ in m.parameters(recurse=False))
    ]
    for part in found[len(blocks) :]:
        if any(id(child) in names and child is not part and any(True for _ in child.parameters()) for child in part.modules()):
            where = names[id(part)] or kind
            raise UserError(f"{where} of {kind} holds parameters beside those of the modules in it", _NEXT)
    order = _calling_order(found, probe)
    wrong = [m for m in found if order[id(m)][1] != 1]
    if wrong:
        counts = ", ".join(f"{names[id(m)]} {order[id(m)][1]} times" for m in wrong[:3])
        raise UserError(f"{kind}: a forward pass must call every module with parameters once, but calls {counts}", _NEXT)
    ordered = sorted(found, key=lambda m: order[id(m)][0])
    if [m for m in ordered if id(m) in {id(b) for b in blocks}] != blocks:
        raise UserError(f"{kind} does not go through {path} from the first block to the last", _NEXT)
    return _units(ordered, blocks, names, {id(p): name for name, p in module.named_parameters()}, kind)


def _calling_order(found: list[nn.Module], probe: Callable[[], Any]) -> dict[int, tuple[int, int]]:
    """id -> (place of the first call, number of calls)."""
    calls: list[int] = []
    hooks = [m.register_forward_pre_hook(lambda part, args: calls.append(id(part))) for m in found]
    try:
        with torch.no_grad():
            probe()
    finally:
        for hook in hooks:
            hook.remove()
    counts = Counter(calls)
    return {id(m): (calls.index(id(m)) if id(m) in counts else -1, counts[id(m)]) for m in found}


def _units(
    ordered: list[nn.Module], blocks: list[nn.Module], names: dict[int, str], full: dict[int, str], kind: str
) -> tuple[Unit, ...]:
    numbers = {id(b): i for i, b in enumerate(blocks)}
    owned: set[int] = set()
    units = []
    for part in ordered:
        everything = list(part.parameters())
        shared = [p for p in everything if id(p) in owned]
        if shared and id(part) in numbers:
            raise UserError(f"{kind}: block {names[id(part)]} shares {full[id(shared[0])]} with another module", _NEXT)
        trainable = [p for p in everything if p.requires_grad]
        own = tuple(Named(full[id(p)], p) for p in trainable if id(p) not in owned)
        tied = tuple(Named(full[id(p)], p) for p in trainable if id(p) in owned)
        owned |= {id(p) for p in everything}
        units.append(Unit(names[id(part)], part, numbers.get(id(part)), own, tied, part.forward))
    return tuple(units)
