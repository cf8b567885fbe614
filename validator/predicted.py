"""The prediction of the very run that is measured, in the same form."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .measurement import COMPONENTS, DRIVER_USED, MOMENTS, STEPS, Counter, PhaseBytes, Usage

if TYPE_CHECKING:
    from ..planner.ledger import Ledger
    from ..planner.request import Request
    from ..planner.trace.source import TraceSource
    from ..planner.trace.steptrace import StepTrace


def on_cpu(request: Request, traces: TraceSource) -> tuple[StepTrace, Usage]:
    """The trace of `request` with the CPU's own choices, and its live bytes."""
    from ..planner.predict import ledger_of

    trace = traces.step(request, target="cpu")
    return trace, usage_of(ledger_of(request, trace))


def on_cuda(request: Request, traces: TraceSource) -> tuple[StepTrace, Usage]:
    """The trace for the request's GPU, and what torch.cuda's counters will say."""
    trace = traces.step(request)
    return trace, usage_on_cuda(request, trace)


def usage_on_cuda(request: Request, trace: StepTrace) -> Usage:
    """What torch.cuda's counters and the driver will say of the rank that `request` names."""
    from ..planner.allocator.config import AllocConf
    from ..planner.predict import ledger_of, replay_ledger

    ledger = ledger_of(request, trace)
    played = replay_ledger(ledger, AllocConf.parse(request.alloc_conf))
    usage = usage_of(ledger, np.array(played.allocated_series, np.int64), counter="allocated")
    detail = {DRIVER_USED: played.peak_reserved_bytes + request.device.context_bytes}
    return replace(usage, reserved_peak_bytes=played.peak_reserved_bytes, detail=detail)


def usage_of(ledger: Ledger, series: np.ndarray | None = None, *, counter: Counter = "live") -> Usage:
    """Peaks per phase of a ledger.  `series`: the counter after each GPU row; the live bytes where it is left out."""
    from ..planner.trace.steptrace import Phase

    rows = ledger.rows()
    value = ledger.live_bytes() if series is None else series
    before = np.concatenate(([0], value[:-1]))
    phase, step = ledger.phase[rows], np.minimum(ledger.iteration[rows], 1)
    found = []
    components: dict[str, dict[str, int]] = {}
    for number, label in enumerate(STEPS):
        for name in MOMENTS:
            at = np.flatnonzero((phase == Phase[name.upper()]) & (step == number))
            if not len(at):
                continue
            peak = int(max(value[at].max(), before[at].max()))
            found.append(PhaseBytes(phase=name, step=label, peak_bytes=peak, after_bytes=int(value[at[-1]])))
            kept = ledger.components_after(int(rows[at[-1]]))
            components[name] = {part: kept.get(part, 0) for part in COMPONENTS}
    return Usage(counter=counter, phases=tuple(found), components=components)
