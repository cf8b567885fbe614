"""What a run holds in each of its steps, by place: the table of a study."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ledger import Ledger, Tier
from ..trace.steptrace import Phase

STEPS = (Phase.INIT, Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
PLACES = (Tier.GPU, Tier.HOST_PINNED, Tier.HOST_PAGEABLE, Tier.NVME)


@dataclass(frozen=True)
class StepPeak:
    """The most that one step holds in one place, in bytes as asked for; `components` sum to it."""

    total_bytes: int
    components: dict[str, int]


def step_peaks(ledger: Ledger) -> dict[str, dict[str, StepPeak]]:
    """{step: {place: peak}} over all iterations; what is live when a step begins counts.  An empty place is left out."""
    found: dict[str, dict[str, StepPeak]] = {step.name.lower(): {} for step in STEPS}
    for tier in PLACES:
        rows = ledger.rows(tier)
        if not len(rows):
            continue
        live = np.concatenate(([0], ledger.live_bytes(tier)))  # live[i]: before the i-th row of this tier
        for step in STEPS:
            highest, at = -1, 0
            for start, stop in _stretches(ledger.phase == step):
                first, last = np.searchsorted(rows, [start, stop])
                best = int(first + live[first : last + 1].argmax())
                if live[best] > highest:
                    highest, at = int(live[best]), best
            if highest > 0:
                row = int(rows[at - 1]) if at else -1
                found[step.name.lower()][tier.name.lower()] = StepPeak(highest, ledger.components_after(row, tier))
    return found


def _stretches(inside: np.ndarray) -> list[tuple[int, int]]:
    """[start, stop) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], inside, [False]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
