"""`--recompute selective`: the policy that a question's own memory leaves room for, simulated in full before it is believed.

The program of `milp` is built from two simulations of the question, with nothing recomputed and with every block recomputed.
Its policy is traced and simulated like any other value of --recompute; where that needs more than the limit, the limit of the
program is lowered by the difference and solved again, and where room is left over it is raised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import CannotTell, UserError
from ...units import gib
from ..ledger import Component, Ledger
from ..predict import ERROR_BAND, answer, simulated
from ..prediction import Prediction
from ..trace.steptrace import Phase
from .blocks import Block, block_of, blocks_of, list_path
from .milp import Moment, solve
from .policy import PREFIX, Policy, stated_limit

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.source import TraceSource

_MOST_TRIES = 5
_STEP, _LONGER_STEP = 0.002, 3  # of the limit: the least that it is lowered by; times more after each failure
_LONGER = (2, 4)  # blocks of a segment
_OF_THE_MODEL = (Component.ACTIVATION, Component.TEMP)
_OUTSIDE, _ELSE = -1, -2  # in the place of a block's number: of the model but in no block, and not of the model
_GAINED = 0.97  # of a full recompute's time: above it the choice has gained nothing
_WORTH_IT = 0.01  # of the limit: room that is left over and worth another solution


@dataclass(frozen=True)
class Selected:
    """The question with its policy, the answer to it, and what the choice was made between."""

    request: Request
    prediction: Prediction
    limit_bytes: int
    """Of what PyTorch holds on a GPU."""
    recompute_s: float
    """Of one micro step, by the roofline."""
    full_s: float
    """Of one micro step, with every block recomputed."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen, in words; and as an option, where it is no other value's name."""
        share = self.recompute_s / self.full_s if self.full_s else 0.0
        text, within = self.request.recompute, f"solved for at most {gib(self.limit_bytes)} held by PyTorch"
        if not text.startswith(PREFIX):
            return (f"selective recompute comes to --recompute {text}, {within}",)
        words = Policy.parse(text).words
        return (
            f"selective recompute: {words}; {share:.0%} of the time of a full one, {within}",
            f"the same again: --recompute {text}",
        )


def resolve(request: Request, traces: TraceSource) -> Selected:
    """The question with its best policy in the place of `selective`; none or full where that is the best.

    Raises CannotTell where the policy cannot be chosen, UserError where even full recompute needs more than the stated size.
    """
    request.check()
    if not request.has_backward:
        raise CannotTell(f"--recompute {request.recompute} is for training with a backward. Use --recompute none")
    stated = stated_limit(request.recompute)
    limit = stated or int(request.device.usable_bytes * (1 - ERROR_BAND))
    plain, full = request.but(recompute="none"), request.but(recompute="full")
    plain_trace, full_trace = traces.step(plain), traces.step(full)
    plain_run, full_run = simulated(plain, plain_trace), simulated(full, full_trace)
    blocks = blocks_of(plain_trace, full_trace, request.device)
    full_s = sum(b.seconds for b in blocks)
    most = answer(plain, plain_trace, plain_run)
    if most.reserved_peak_bytes <= limit:
        return Selected(plain, most, limit, 0.0, full_s)
    least = answer(full, full_trace, full_run)
    best = Selected(full, least, limit, full_s, full_s)
    if least.reserved_peak_bytes > limit:
        longer = _segments(request, traces, limit, full_s)
        if longer is not None:
            return longer
        if stated is not None:
            raise UserError(
                f"--recompute {request.recompute}: with every block recomputed it needs {gib(least.reserved_peak_bytes)}",
                "State more, or change the micro batch, the strategy or the optimizer",
            )
        return best
    path = list_path(plain_trace)
    moments = moments_of(plain_run.ledger, full_run.ledger, path, blocks)
    room = limit - (least.reserved_peak_bytes - least.allocated_peak_bytes)
    low, high = 0, 2 * limit  # rooms that are known to be too small, and too large
    tried: set[str] = set()
    step = _STEP
    for _ in range(_MOST_TRIES):
        solution = solve(blocks, moments, room)
        if solution is None:  # the allocator's holes are not that large at every moment
            low, room = room, (room + min(high, limit)) // 2
            continue
        if solution.policy.text in tried:
            break
        tried.add(solution.policy.text)
        asked = request.but(recompute=solution.policy.text)
        trace = traces.step(asked)
        found = answer(asked, trace, simulated(asked, trace))
        left = limit - found.reserved_peak_bytes
        if left >= 0 and solution.seconds < best.recompute_s:
            best = Selected(asked, found, limit, solution.seconds, full_s)
        gained = best.recompute_s < _GAINED * full_s
        if 0 <= left <= _WORTH_IT * limit and gained:
            break
        if left < 0:
            high = room
        elif not gained:  # what PyTorch holds is not what its tensors take: there may be room between them
            low, room = room, (room + min(high, limit)) // 2
            continue
        room += left if left >= 0 else min(left, -int(step * limit))
        step *= _LONGER_STEP if left < 0 else 1
        if not low < room < high:
            room = (low + high) // 2
    return best


def _segments(request: Request, traces: TraceSource, limit: int, full_s: float) -> Selected | None:
    """Where a full recompute needs too much: several blocks recomputed as one, which keeps less between them."""
    for blocks in _LONGER:
        asked = request.but(recompute=f"every-k:{blocks}")
        trace = traces.step(asked)
        found = answer(asked, trace, simulated(asked, trace))
        if found.reserved_peak_bytes <= limit:
            return Selected(asked, found, limit, full_s, full_s)
    return None


def moments_of(plain: Ledger, full: Ledger, path: str, blocks: tuple[Block, ...]) -> list[Moment]:
    """The stretches of a step in which what the blocks hold changes, and the most that is in use in each.

    In forward a stretch is a block and what follows it, in backward a block; before the first block of backward comes the loss.
    """
    saved = np.concatenate([[0], np.cumsum([b.saved_bytes for b in blocks])])
    without, with_all = _peaks(plain, path, len(blocks)), _peaks(full, path, len(blocks))
    moments = []
    for place in sorted(with_all):
        above, own = place
        fixed, extra = with_all[place], 0
        if own >= 0 and place in without:
            extra = with_all[place] - (without[place] - int(saved[above]))
            fixed -= extra
        moments.append(Moment(above, own, fixed, extra))
    return moments


def _peaks(ledger: Ledger, path: str, num_blocks: int) -> dict[tuple[int, int], int]:
    """By (blocks that hold what they keep, block at work or -1): the most bytes in use."""
    pattern = block_of(path)
    numbers = [int(m[1]) if (m := pattern.match(fqn)) else _OUTSIDE for fqn, _ in ledger.labels]
    of_label = np.array(numbers or [_OUTSIDE])
    rows = ledger.rows()
    live, phases = ledger.live_bytes(), ledger.phase[rows]
    # only what the model itself makes says where it is: a block's parameters are gathered before its turn
    block = np.where(np.isin(ledger.component[rows], _OF_THE_MODEL), of_label[ledger.label[rows]], _ELSE)
    passes = ledger.iteration[rows].astype(np.int64)
    peaks: dict[tuple[int, int], int] = {}
    now, last_phase, last_pass = (0, -1), -1, -1
    for phase, number, iteration, size in zip(phases.tolist(), block.tolist(), passes.tolist(), live.tolist(), strict=True):
        if phase != last_phase or iteration != last_pass:
            now = (num_blocks, -1) if phase == Phase.BACKWARD else (0, -1)
            last_phase, last_pass = phase, iteration
        if number >= 0 and phase in (Phase.FORWARD, Phase.BACKWARD):
            now = (number, number)
        elif number == _OUTSIDE and phase == Phase.FORWARD and now[1] == num_blocks - 1:
            now = (num_blocks, -1)
        if size > peaks.get(now, -1):
            peaks[now] = size
    return peaks
