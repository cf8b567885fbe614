"""DistZO2: ZO2 on several GPUs that exchange nothing but losses, and slices of blocks (arXiv 2507.03211; no code of it is
public).

A rank holds a part of the batch and one sign or both:
* perturbation parallel (`pert_size` 2): one rank runs +eps, its partner -eps, on the same part of the batch;
* data parallel (`data_size` D): every part of the batch runs both signs, or is a pair's;
* both, on pert_size x data_size ranks.
All ranks draw the same z.  Two losses (8 bytes) are summed over the ranks once a step, so that all find the same gradient,
bit for bit.

The mapping pert = rank % pert_size, data = rank // pert_size is not published; it is this project's.

Restoring.  A rank of a pair adds +1 -1 or -1 +1 times z where MeZO adds +1 -2 +1: in any dtype the results differ by
rounding, so the partners' parameters drift apart by units in the last place.  The copies of pert 0 are the canonical ones:
`flush` hands them to the partners.  With replayed restoring all ranks add what MeZO adds and stay bitwise equal to it, for
one more perturbation a block.  Sliced blocks cannot drift apart: there is one copy of each, made of all ranks' slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .blocks import Unit
from .perturb import BOTH, MINUS, MINUS_REPLAYED, PLUS, PLUS_REPLAYED, Schedule, Step
from .zo2 import Combine, Zo2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks share the work, and how."""

    pert_size: int = 1
    """1: every rank runs both signs.  2: one sign a rank."""
    data_size: int = 1
    """Parts of the global batch."""
    sliced: bool = False
    """Every rank keeps 1/N of every block on its host, uploads that, and gathers the rest from the others."""
    replayed: bool = False
    """Ranks of a pair restore their parameters by MeZO's own additions."""

    @property
    def world_size(self) -> int:
        return self.pert_size * self.data_size

    def pert(self, rank: int) -> int:
        return rank % self.pert_size

    def data(self, rank: int) -> int:
        return rank // self.pert_size

    def schedule(self, rank: int) -> Schedule:
        """What the rank does at a unit."""
        if self.pert_size == 1:
            return BOTH
        own = (PLUS_REPLAYED, MINUS_REPLAYED) if self.replayed else (PLUS, MINUS)
        return own[self.pert(rank)]


def combine(layout: Layout, rank: int) -> Combine:
    """Sums this rank's losses with the others' and averages over the parts of the batch."""

    def combined(losses: list[Tensor]) -> Tensor:
        both = torch.zeros(2, dtype=torch.float32, device=losses[0].device)
        first = layout.pert(rank)
        for place, loss in enumerate(losses, first):
            both[place] = loss
        dist.all_reduce(both)
        return both / layout.data_size if layout.data_size > 1 else both

    return combined


class DistZo2:
    """One rank; all ranks call the same methods in the same order.  The process group exists."""

    def __init__(self, engine: Zo2, layout: Layout, rank: int) -> None:
        self._engine, self._layout, self._rank = engine, layout, rank
        starts = range(0, layout.world_size, 2) if layout.pert_size == 2 else ()
        pairs = [dist.new_group([start, start + 1]) for start in starts]  # every rank has to make every group
        self._pair = pairs[layout.data(rank)] if pairs else None

    def step(self, loss: Callable[[], Tensor], step: Step) -> tuple[tuple[float, float], float]:
        return self._engine.step(loss, step)

    def evaluate(self, loss: Callable[[], Tensor]) -> float:
        """Of the whole batch."""
        self.flush()
        mine = torch.tensor(self._engine.evaluate(loss), dtype=torch.float64, device=self._engine.device)
        dist.all_reduce(mine)
        return float(mine) / self._layout.world_size

    def flush(self) -> None:
        """Applies the last gradient; then every pair has the parameters of its +eps rank."""
        self._engine.flush()
        if self._pair is None or self._layout.replayed:
            return
        canonical = self._layout.data(self._rank) * self._layout.pert_size
        for unit in self._engine.visit():
            for named in unit.params:
                dist.broadcast(named.parameter.data, canonical, group=self._pair)

    def visit(self) -> Iterator[Unit]:
        return self._engine.visit()

    def close(self) -> None:
        self._engine.close()
