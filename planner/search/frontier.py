"""The frontier of speed and memory: for every amount of memory, the fastest configuration that needs no more.

The fastest plan comes first.  Then the search runs again under a limit just below what that plan holds, and so on (the
epsilon-constraint method), until nothing fits without giving up more than the first plan does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..prediction import Verdict
from .api import make_plan
from .plan import Candidate, Plan
from .space import Wanted

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.source import TraceSource

PARETO = "pareto"
_MOST_POINTS = 6
_STEP = 0.05  # of what the fastest holds: points that are nearer to each other are one
_TIGHT = 0.02  # as `predict.ERROR_BAND`


def frontier(
    bases: Mapping[int, Request], wanted: Wanted, traces: TraceSource, *, say: Callable[[str], None] = lambda text: None
) -> Plan:
    """A plan whose rows are the frontier, the fastest first; without step times it has one row.  Raises as `make_plan`."""
    wanted = replace(wanted, objective="throughput")
    first = make_plan(bases, wanted, traces, top=1, say=say)
    if first.best is None or first.best.step_s is None:
        return replace(first, objective=PARETO)
    rows, usable = [first.best], first.usable_bytes
    considered, simulated = first.num_considered, first.num_simulated
    limit = usable
    for _ in range(_MOST_POINTS - 1):
        limit = min(limit, rows[-1].reserved_peak_bytes) - int(_STEP * first.best.reserved_peak_bytes)
        if limit <= 0:
            break
        say(f"what needs less than {limit / 2**30:.1f} GiB")
        found = make_plan({n: _limited(base, limit) for n, base in bases.items()}, wanted, traces, top=1, say=say)
        considered, simulated = considered + found.num_considered, simulated + found.num_simulated
        best = found.best
        if best is None or best.step_s is None or set(best.gives_up) - set(first.best.gives_up):
            break
        if best.reserved_peak_bytes < rows[-1].reserved_peak_bytes:
            rows = [row for row in rows if (row.step_s or 0.0) < best.step_s]  # a policy of recompute may beat an earlier row
            rows.append(_on_the_card(best, usable))
    return replace(
        first, objective=PARETO, candidates=tuple(rows), refused=(), num_considered=considered, num_simulated=simulated
    )


def _limited(base: Request, usable_bytes: int) -> Request:
    return replace(base, device=base.device.with_memory(base.device.context_bytes + usable_bytes))


def _on_the_card(row: Candidate, usable_bytes: int) -> Candidate:
    """`row`, found under a lower limit, as it is on the whole card."""
    headroom = usable_bytes - row.reserved_peak_bytes
    verdict = Verdict.FITS if headroom >= _TIGHT * usable_bytes else Verdict.TIGHT
    return replace(row, headroom_bytes=headroom, verdict=verdict, why_not_more="")
