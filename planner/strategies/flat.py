"""Flat partitions: how ZeRO-1 and ZeRO-2 lay the parameters of an optimizer group end to end and cut them among the ranks.

Source: deepspeed 0.19.8, deepspeed/runtime/zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__` (alignment, padding)
and `get_partition_info`.  For P elements on N ranks the flat length is L = ceil(P / 2N) * 2N and a partition has L / N
elements; all padding lies at the end, and with `parameter_alignment` also before parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UserError
from ..trace.steptrace import ITEMSIZE, StepTrace, TensorSlot
from .zero_muon import halves, is_muon_group

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
REDUCED_AT_ONCE = 500_000_000  # elements; deepspeed/runtime/engine.py, MEMORY_OPT_ALLREDUCE_SIZE
_ALIGNMENT = 2  # elements; `nccl_start_alignment_factor`: 4 bytes of a 16-bit dtype
_PARAMETER_ALIGNMENT = 16  # bytes
_MUON_COPIES = 4  # of a matrix on each rank that it touches: gradient, update, momentum and the next one


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """One optimizer group on one rank."""

    params: tuple[TensorSlot, ...]
    starts: tuple[int, ...]  # of each parameter in the flat tensor, elements
    length: int  # elements of the flat tensor, padded
    partition: int  # elements of one rank's part
    rank: int

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)

    def partitions_of(self, index: int) -> list[tuple[int, int]]:
        """The (rank, elements) that parameter `index` is cut into, in order."""
        start, stop = self.starts[index], self.starts[index] + self.params[index].numel
        cuts = []
        while start < stop:
            owner = start // self.partition
            end = min(stop, (owner + 1) * self.partition)
            cuts.append((owner, end - start))
            start = end
        return cuts

    def kept(self) -> list[tuple[TensorSlot, int]]:
        """The parameters that touch this rank's partition, each with its number of elements inside."""
        found = []
        for index, param in enumerate(self.params):
            inside = sum(numel for owner, numel in self.partitions_of(index) if owner == self.rank)
            if inside:
                found.append((param, inside))
        return found

    @property
    def padding(self) -> int:
        """Elements of this rank's partition that belong to no parameter."""
        return self.partition - sum(inside for _, inside in self.kept())


def round_robin(params: Sequence[TensorSlot], world_size: int) -> list[TensorSlot]:
    """`_round_robin_reorder`: every N-th parameter becomes a neighbour, so that neighbours belong to different ranks."""
    return [param for start in range(world_size) for param in params[start::world_size]]


def flat_group(params: Sequence[TensorSlot], world_size: int, rank: int, *, aligned: bool = False) -> FlatGroup:
    """`params` in the optimizer's order, cut among `world_size` ranks.  `aligned`: `parameter_alignment`."""
    starts, position = [], 0
    for param in params:
        if aligned:
            multiple = _PARAMETER_ALIGNMENT // math.gcd(_PARAMETER_ALIGNMENT, ITEMSIZE[param.dtype])
            position = -(-position // multiple) * multiple
        starts.append(position)
        position += param.numel
    alignment = _ALIGNMENT * world_size
    length = -(-position // alignment) * alignment
    return FlatGroup(tuple(params), tuple(starts), length, length // world_size, rank)


def optimizer_groups(trace: StepTrace, groups: str) -> list[list[TensorSlot]]:
    """The trainable parameters by optimizer group, in the order of the model.

    `groups`: one; or decay, the two that transformers' Trainer makes: without weight decay go biases, and what its name or its
    class calls a norm (transformers 5, trainer.py, `get_decay_parameter_names`; a subclass of LayerNorm is not told apart).
    Trainable parameters without gradient are part of it: ZeRO flattens them like the others.
    """
    trainable = [p for p in trace.params if p.requires_grad]
    if groups == "one":
        return [trainable]
    kept = [p for p in trainable if trace.modules[p.module].class_name == "LayerNorm" or _NO_DECAY.search(p.fqn.lower())]
    names = {p.fqn for p in kept}
    return [group for group in ([p for p in trainable if p.fqn not in names], kept) if group]


def heaviest_rank(
    trace: StepTrace,
    world_size: int,
    groups: str = "one",
    *,
    reorders: bool = False,
    aligned: bool = False,
    muon: bool = False,
) -> int:
    """The first rank that keeps the most gradient elements in ZeRO-1 and ZeRO-2; nothing else differs between ranks.

    `reorders`: `round_robin_gradients`; `aligned`: `parameter_alignment`.  A parameter counts whole for every rank whose
    partition it touches, so a border inside a large embedding decides.  `muon`: it does so for each of Muon's copies.
    """
    kept = [0] * world_size
    grouped = optimizer_groups(trace, groups)
    for given in halves(grouped) if muon else grouped:
        copies = _MUON_COPIES if muon and is_muon_group(given) else 1
        params = round_robin(given, world_size) if reorders else given
        group = flat_group(params, world_size, 0, aligned=aligned)
        filled = [0] * world_size
        for index, param in enumerate(params):
            for owner, inside in group.partitions_of(index):
                kept[owner] += copies * param.numel
                filled[owner] += inside
        kept = [total + group.partition - inside for total, inside in zip(kept, filled, strict=True)]
    return kept.index(max(kept))


def check_rank(rank: int, world_size: int) -> None:
    """Raises UserError for a rank that the group does not have."""
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank}: expected 0 to {world_size - 1}", "Ranks count from 0")
