"""Best-first search: what the bounds cannot rule out is simulated in full, until no other configuration can be better.

Every configuration waits in a queue with the best score that it could have.  The first of the queue is looked at more closely:
first its bound is brought up to date, then its micro step is traced, at last it is simulated and timed.  When as many rows as
are asked for have scores that no waiting configuration can beat, the search is over; the result is that of an exhaustive one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell, UserError
from ...units import gib
from ..predict import answer, simulated
from ..prediction import Prediction, Verdict
from ..recompute.policy import is_selective
from ..recompute.selective import resolve
from ..timeline.step_time import StepTime, step_time
from .bounds import Bounds
from .plan import Candidate, Refused
from .space import given_up, harm

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.source import TraceSource

STEADY = 3  # micro steps that are simulated: the third is like all later ones (a test compares)
_TWO = 2  # micro steps have the memory of many
_HOPELESS = 3  # shapes that failed before anything fitted: from then on the smallest micro batch of each is tried first
EXPANDABLE = "expandable_segments:True"
Score = tuple[float, ...]


@dataclass(frozen=True)
class Judged:
    """A configuration that was simulated."""

    request: Request
    prediction: Prediction

    @property
    def time(self) -> StepTime | None:
        return self.prediction.time


@dataclass
class Found:
    """What a search knows when it is over."""

    best: dict[Any, tuple[Score, Judged]] = field(default_factory=dict)
    """By row: its best precision, recompute and micro batch."""
    refused: list[tuple[Score, Request, Refused]] = field(default_factory=list)
    num_considered: int = 0
    num_simulated: int = 0

    def ranked(self) -> list[tuple[Score, Judged]]:
        return sorted(self.best.values(), key=lambda pair: pair[0])


def judge(request: Request, traces: TraceSource) -> Judged:
    """Simulates the request.  Raises CannotTell.

    Where it fails only because free memory lies in pieces, it is tried again with segments that grow, which costs nothing.
    """
    if is_selective(request.recompute):
        few = request.but(
            grad_accum_steps=min(request.loop.grad_accum_steps, _TWO), alloc_conf=request.alloc_conf or EXPANDABLE
        )
        request = request.but(recompute=resolve(few, traces).request.recompute)
    judged = _steady(request, traces)
    prediction = judged.prediction
    if prediction.fits or request.alloc_conf or prediction.allocated_peak_bytes > prediction.usable_bytes:
        return judged
    again = _steady(request.but(alloc_conf=EXPANDABLE), traces)
    return again if again.prediction.fits else judged


def _steady(request: Request, traces: TraceSource) -> Judged:
    """Many micro steps are answered from `STEADY` of them: the others are like the last."""
    steps = request.loop.grad_accum_steps
    some = request.but(grad_accum_steps=min(steps, STEADY))
    trace = traces.step(some)
    run = simulated(some, trace)
    prediction = answer(some, trace, run)
    if steps <= STEADY:
        return Judged(request, prediction)
    time = prediction.time
    if prediction.fits and time is not None:  # else nobody asks for the time
        one_less = some.but(grad_accum_steps=STEADY - 1)
        time = _extrapolated(time, step_time(one_less, trace, run.ledger, run.work.without(micro_step=1)), steps)
    flops = prediction.flops_per_step // STEADY * steps
    return Judged(request, replace(prediction, question=request.as_data(), flops_per_step=flops, time=time))


def _extrapolated(time: StepTime, one_less: StepTime, steps: int) -> StepTime:
    """`time` is that of STEADY micro steps."""
    more = steps - STEADY
    seconds = time.seconds + more * (time.seconds - one_less.seconds)
    critical = {lane: s + more * (s - one_less.critical_s.get(lane, 0.0)) for lane, s in time.critical_s.items()}
    return replace(
        time,
        seconds=seconds,
        tokens_per_s=time.tokens_per_s * time.seconds / STEADY * steps / seconds,
        bound_by=max(critical, key=lambda lane: critical[lane]),
        busy_s={},
        critical_s=critical,
        compute_s={},
    )


def search(
    requests: Iterable[Request],
    traces: TraceSource,
    *,
    objective: str = "throughput",
    top: int = 1,
    bounds: Bounds | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Found:
    """The `top` best rows of `requests` (`row_of`), by `objective` (`space.OBJECTIVES`)."""
    bounds = bounds or Bounds(traces)
    found = Found()
    queue: list[tuple[Score, int, Request]] = []
    shapes: dict[Any, list[Request]] = {}
    probed: set[Any] = set()
    for order, request in enumerate(requests):
        shapes.setdefault(shape_of(request), []).append(request)
        heapq.heappush(queue, (_bound(objective, request, bounds), order, request))
    found.num_considered = len(queue)
    too_large: dict[Any, int] = {}  # by shape: the smallest micro batch that was simulated and does not fit
    while queue:
        score, order, request = heapq.heappop(queue)
        if len(found.best) >= top and score >= found.ranked()[top - 1][0]:
            break
        shape, row = shape_of(request), row_of(request)
        if row in found.best and score >= found.best[row][0]:
            continue
        if request.micro_batch_size >= too_large.get(shape, 1 << 62):
            continue
        floor = bounds.floor_bytes(request)
        if floor > request.device.usable_bytes:
            what = "needs at least" if bounds.known(request) else "weights, gradients and optimizer state alone need at least"
            _refuse(found, score, request, floor, False, f"{what} {gib(floor)} of {gib(request.device.usable_bytes)}")
            continue  # a smaller micro batch is judged by its own bound: too_large is for what was simulated
        now = _bound(objective, request, bounds)
        if now > score:
            heapq.heappush(queue, (now, order, request))
            continue
        if not bounds.known(request):
            why = bounds.look(request)
            if why:
                _refuse(found, score, request, 0, False, why)
            else:
                heapq.heappush(queue, (_bound(objective, request, bounds), order, request))
            continue
        say(f"{request.strategy}, micro batch {request.micro_batch_size}")
        found.num_simulated += 1
        try:
            judged = judge(request, traces)
        except (CannotTell, UserError) as error:
            _refuse(found, score, request, 0, False, str(error))
            continue
        if not judged.prediction.fits:
            too_large[shape] = request.micro_batch_size
            if not found.best and len(too_large) >= _HOPELESS and shape not in probed:  # does the shape fit at all?
                probed.add(shape)
                smallest = min(shapes[shape], key=lambda r: r.micro_batch_size)
                if smallest is not request and not _fits_at_all(smallest, traces, found):
                    too_large[shape] = smallest.micro_batch_size
            needs = judged.prediction.allocated_peak_bytes
            _refuse(found, score, request, needs, True, _why(judged.prediction))
            continue
        real = score_of(objective, judged)
        if row not in found.best or real < found.best[row][0]:
            found.best[row] = real, judged
    return found


def _fits_at_all(request: Request, traces: TraceSource, found: Found) -> bool:
    """Whether the smallest micro batch of a shape fits: memory alone, and two micro steps do."""
    found.num_simulated += 1
    try:
        few = request.but(grad_accum_steps=min(2, request.loop.grad_accum_steps))
        run = simulated(few, traces.step(few))
        if run.ledger.peak_bytes() > request.device.usable_bytes:
            floor = run.ledger.peak_bytes()
            reason = f"needs {gib(floor)} of {gib(request.device.usable_bytes)}"
            _refuse(found, (float("inf"),), request, floor, True, reason)
            return False
    except (CannotTell, UserError) as error:
        _refuse(found, (float("inf"),), request, 0, False, str(error))
        return False
    return True


def _why(prediction: Prediction) -> str:
    needs, usable = prediction.allocated_peak_bytes, prediction.usable_bytes
    if needs > usable:
        return f"needs {gib(needs)} of {gib(usable)}"
    if prediction.failure is not None:
        return f"needs {gib(needs)} of {gib(usable)}, and what is free lies in pieces that are too small"
    return prediction.reason


def _refuse(found: Found, score: Score, request: Request, needs: int, simulated: bool, reason: str) -> None:
    name = candidate_of(request).name
    found.refused.append((score, request, Refused(name=name, micro_batch_size=request.micro_batch_size, needs_bytes=needs,
                                                  simulated=simulated, reason=reason)))  # fmt: skip


def shape_of(request: Request) -> Any:
    """What is left of a configuration without its micro batch."""
    q = request
    return q.method, q.strategy, q.offload, q.precision, q.optimizer, q.recompute, q.gpus, q.nodes


def row_of(request: Request) -> Any:
    """Configurations with one of these share a row of the plan, which the best of them has."""
    q = request
    return q.method, q.strategy, q.offload, q.optimizer, q.gpus


def score_of(objective: str, judged: Judged) -> Score:
    """Smaller is better.  What fits only just comes after what fits, what has no time after what has one."""
    request, prediction = judged.request, judged.prediction
    tight = float(prediction.verdict is Verdict.TIGHT)
    seconds = judged.time.seconds if judged.time is not None else float("inf")
    if objective == "memory":
        return float(prediction.reserved_peak_bytes), seconds
    if objective == "quality-first":
        return float(harm(request)), tight, seconds
    return tight, seconds * (request.gpus if objective == "cost" else 1), float(harm(request))


def _bound(objective: str, request: Request, bounds: Bounds) -> Score:
    """At most the score that the request will have."""
    if objective == "memory":
        return float(bounds.floor_bytes(request)), 0.0
    seconds = bounds.floor_s(request)
    if objective == "quality-first":
        return float(harm(request)), 0.0, seconds
    return 0.0, seconds * (request.gpus if objective == "cost" else 1), 0.0


def candidate_of(request: Request, judged: Judged | None = None, why_not_more: str = "") -> Candidate:
    """A row of the plan."""
    prediction, time = (judged.prediction, judged.time) if judged else (None, None)
    return Candidate(
        method=request.method,
        strategy=request.strategy,
        precision=request.precision,
        optimizer=request.optimizer,
        optimizer_impl=request.optimizer_impl,
        recompute=request.recompute,
        offload=request.offload,
        gpus=request.gpus,
        nodes=request.nodes,
        micro_batch_size=request.micro_batch_size,
        grad_accum_steps=request.loop.grad_accum_steps,
        alloc_conf=judged.request.alloc_conf if judged else request.alloc_conf,
        verdict=prediction.verdict if prediction else Verdict.UNKNOWN,
        reserved_peak_bytes=prediction.reserved_peak_bytes if prediction else 0,
        headroom_bytes=prediction.headroom_bytes if prediction else 0,
        host_bytes=prediction.host.node_bytes if prediction else 0,
        nvme_bytes=prediction.host.node_nvme_bytes if prediction else 0,
        step_s=time.seconds if time else None,
        tokens_per_s=time.tokens_per_s if time else None,
        bound_by=time.bound_by if time else "",
        gives_up=given_up(request),
        why_not_more=why_not_more,
    )
