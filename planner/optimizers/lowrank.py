"""What GaLore and APOLLO share: which weights are projected, and the sizes of a projection.

A matrix of R rows and C columns is projected on its smaller side mn: the projector has rank*mn elements, the low-rank
gradient rank*mx.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...errors import UserError
from .bitsandbytes import is_embedding
from .rule import OptimizerTensor

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Projection:
    """Sizes, in elements, of one projected matrix."""

    rows: int
    columns: int
    rank: int

    @property
    def small(self) -> int:
        return min(self.rows, self.columns)

    @property
    def large(self) -> int:
        return max(self.rows, self.columns)

    @property
    def projector(self) -> int:
        return self.rank * self.small

    @property
    def gradient(self) -> int:
        return self.rank * self.large

    @property
    def shape(self) -> tuple[int, int]:
        """Of the low-rank gradient."""
        return (self.rows, self.rank) if self.rows >= self.columns else (self.rank, self.columns)


def is_target(p: OptimizerTensor, targets: tuple[str, ...]) -> bool:
    """Whether the weight is projected: a matrix that is no embedding, and whose name has one of `targets` (all-linear: any)."""
    if len(p.shape) != 2 or is_embedding(p):
        return False
    return targets == (ALL_LINEAR,) or any(word in p.name for word in targets)


def others_first(tensors: Sequence[OptimizerTensor], targets: tuple[str, ...]) -> Iterator[tuple[int, OptimizerTensor, bool]]:
    """(index, tensor, projected?) in the order of the two groups that every script makes: the plain parameters come first
    (transformers/trainer_optimizer.py, `_setup_low_rank_optimizer`)."""
    chosen = [is_target(p, targets) for p in tensors]
    for wanted in (False, True):
        for i, p in enumerate(tensors):
            if chosen[i] is wanted:
                yield i, p, wanted


def check_rank(name: str, rank: int) -> None:
    if rank < 1:
        raise UserError(f"--optimizer {name}: rank={rank}: must be at least 1")
