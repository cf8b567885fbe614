"""Which results each block keeps: the cheapest recompute that stays below a limit at every moment, by integer programming.

Of every block b, `whole[b]` says that it is not recomputed, and `kept[b, c]` that the results of its call c are kept while the
rest of it is.  At a moment when the blocks before `above` hold what they keep for backward, the memory is

    fixed + sum over b < above of (whole[b] saved[b] + sum over c of kept[b, c] bytes[c]) + extra (1 - whole[own])

with `fixed` what is there when every block is recomputed, and `extra` what recomputing the moment's own block adds.  The cost
of a block that is recomputed is the time of its calls that are not kept.  Blocks of one kind are interchangeable but for their
place: earlier ones hold for longer, so an earlier one never keeps more than a later one, which orders the solutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .blocks import Block, Call
from .policy import Op, Policy

_WORTH = 0.01  # of a block's recompute time: calls below it are not worth a word of the policy
_GAP = 1e-3  # of the recompute time, to the proved optimum
_MOST_SECONDS = 10.0  # of the solver; what it has by then is good, only not proved


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes in use at the worst point of a stretch of the step, with every block recomputed.  `own`: its block, or -1."""

    above: int
    own: int
    fixed_bytes: int
    extra_bytes: int


@dataclass(frozen=True, slots=True)
class Solution:
    """A policy, what it recomputes in one micro step, and the least that any policy could (the solver's proof)."""

    policy: Policy
    seconds: float
    bound_s: float


def choices(block: Block) -> tuple[Call, ...]:
    """The calls whose results may be worth keeping."""
    return tuple(c for c in block.calls if c.can_be_kept and c.seconds > _WORTH * block.seconds)


def solve(blocks: Sequence[Block], moments: Sequence[Moment], limit_bytes: int) -> Solution | None:
    """The cheapest policy below `limit_bytes`; None where even recomputing every block is too much."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    offered = [choices(b) for b in blocks]
    start = np.cumsum([0, *(1 + len(c) for c in offered)])
    num = int(start[-1])
    cost = np.zeros(num)
    held = np.zeros(num)  # bytes of each variable, over those of a block that is recomputed
    for b, block in enumerate(blocks):
        cost[start[b]] = -block.seconds
        held[start[b]] = block.saved_bytes
        for i, call in enumerate(offered[b], int(start[b]) + 1):
            cost[i] = -call.seconds
            held[i] = call.nbytes
    rows: list[tuple[dict[int, float], float]] = []
    for moment in moments:
        row = {i: held[i] for i in range(int(start[moment.above]))}
        if moment.own >= 0:
            i = int(start[moment.own])
            row[i] = row.get(i, 0.0) - moment.extra_bytes
        room = limit_bytes - moment.fixed_bytes - (moment.extra_bytes if moment.own >= 0 else 0)
        if sum(max(v, 0.0) for v in row.values()) > room:
            rows.append((row, room))
    for b in range(len(blocks)):
        rows += [({int(start[b]): 1.0, i: 1.0}, 1.0) for i in range(int(start[b]) + 1, int(start[b + 1]))]
    rows += _in_order(blocks, start)
    unit = float(held.max()) or 1.0  # bytes of one row become numbers near 1
    data: list[float] = []
    indices: list[int] = []
    pointers = [0]
    upper: list[float] = []
    for row, most in rows:
        scale = unit if max(map(abs, row.values()), default=0.0) > 1.0 else 1.0
        data += [value / scale for value in row.values()]
        indices += list(row)
        pointers.append(len(indices))
        upper.append(most / scale)
    matrix = csr_array((data, indices, pointers), shape=(len(rows), num))
    total = sum(b.seconds for b in blocks)
    found = milp(
        cost / (total or 1.0),
        integrality=np.ones(num),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, ub=np.array(upper)) if rows else (),
        options={"mip_rel_gap": _GAP, "time_limit": _MOST_SECONDS},
    )
    if found.x is None:
        return None
    x = np.round(found.x).astype(bool)
    kept: list[frozenset[Op] | None] = []
    for b in range(len(blocks)):
        mine = x[start[b] : start[b + 1]]
        kept.append(None if mine[0] else frozenset(c.op for c, yes in zip(offered[b], mine[1:], strict=True) if yes))
    proved = total * (1.0 + float(found.mip_dual_bound)) if found.mip_dual_bound is not None else 0.0
    return Solution(Policy(tuple(kept)), recompute_s(blocks, Policy(tuple(kept))), max(proved, 0.0))


def recompute_s(blocks: Sequence[Block], policy: Policy) -> float:
    """Seconds of what a policy runs again in one micro step."""
    return sum(
        call.seconds
        for block, kept in zip(blocks, policy.blocks, strict=True)
        if kept is not None
        for call in block.calls
        if call.op not in kept
    )


def _in_order(blocks: Sequence[Block], start: np.ndarray) -> list[tuple[dict[int, float], float]]:
    """What a block does not recompute, the next of its kind does not either."""
    rows: list[tuple[dict[int, float], float]] = []
    last: dict[object, int] = {}
    for b, block in enumerate(blocks):
        before = last.get(block.kind)
        last[block.kind] = b
        if before is None:
            continue
        one, two = int(start[before]), int(start[b])
        rows.append(({one: 1.0, two: -1.0}, 0.0))
        for i in range(1, int(start[b + 1]) - two):
            rows.append(({one: 1.0, one + i: 1.0, two: -1.0, two + i: -1.0}, 0.0))
    return rows
