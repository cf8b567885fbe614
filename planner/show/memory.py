"""What lies on the GPU in the course of a run, thinned so that it can be drawn: no peak is lost by it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..ledger import Component, Ledger, Tier
from ..trace.steptrace import Phase

POINTS = 600  # of a curve: more than a page has columns


@dataclass(frozen=True)
class Stretch:
    """Events `start` to `stop` of one phase of one optimizer step; `iteration` counts from 0."""

    start: int
    stop: int
    phase: str
    iteration: int


@dataclass(frozen=True)
class Course:
    """Live bytes by component after chosen events.  Sizes as asked for, without the allocator's rounding.

    `events`: numbers of the events, ascending, [n].  `components`: {label: bytes [n]}, those that are ever live, in the order
    of `Component`.  The peak is one of the events.
    """

    events: np.ndarray
    components: dict[str, np.ndarray]
    stretches: tuple[Stretch, ...]
    peak: int
    peak_bytes: int
    num_events: int


def course(ledger: Ledger, points: int = POINTS) -> Course:
    """The course of `ledger` on the GPU.  Of every `points`-th part of the run the event with most live bytes is taken."""
    rows = ledger.rows(Tier.GPU)
    live = ledger.live_bytes(Tier.GPU)
    if not len(rows):
        raise ValueError("the ledger has no rows on the GPU")
    stretches = _stretches(ledger, rows)
    edges = np.unique(np.linspace(0, len(rows), points + 1).astype(int))
    highest = [a + int(live[a:b].argmax()) for a, b in pairwise(edges.tolist())]
    bounds = [event for s in stretches for event in (s.start, s.stop - 1)]
    events = np.unique(np.array([*highest, *bounds], np.int64))
    component, delta = ledger.component[rows], ledger.delta_bytes[rows]
    parts = {}
    for c in Component:
        own = component == c
        if own.any():
            parts[c.label] = np.cumsum(np.where(own, delta, 0))[events]
    peak = int(live.argmax())
    return Course(events, parts, stretches, peak, int(live[peak]), len(rows))


def _stretches(ledger: Ledger, rows: np.ndarray) -> tuple[Stretch, ...]:
    phase, iteration = ledger.phase[rows], ledger.iteration[rows]
    changes = np.flatnonzero((np.diff(phase) != 0) | (np.diff(iteration) != 0)) + 1
    starts, stops = [0, *changes.tolist()], [*changes.tolist(), len(rows)]
    return tuple(Stretch(a, b, Phase(phase[a]).name.lower(), int(iteration[a])) for a, b in zip(starts, stops, strict=True))
