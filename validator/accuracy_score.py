"""Predictions against published measurements: like with like, row by row, in as many processes as there are cores."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import CannotTell, UserError
from .accuracy_rows import Row

if TYPE_CHECKING:
    from ..planner.prediction import Prediction
    from ..planner.request import Request
    from ..planner.trace.source import TraceSource
    from .accuracy_question import Question


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One row beside its prediction.  Sizes in bytes; `predicted_bytes` is None where the row cannot be expressed."""

    id: str
    source: str
    metric: str
    completeness: str
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    verdict: str | None = None
    """Of fits and oom rows: fits, tight or does_not_fit, under the row's memory."""
    reason: str = ""
    """Why the row cannot be expressed, or how the verdict came about."""
    phases: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Further figures of the row: name -> (predicted, measured)."""

    @property
    def ratio(self) -> float | None:
        """Predicted by measured."""
        if self.predicted_bytes is None or self.measured_bytes is None:
            return None
        return self.predicted_bytes / self.measured_bytes

    @property
    def expressed(self) -> bool:
        return self.predicted_bytes is not None

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return {
            "id": self.id,
            "source": self.source,
            "metric": self.metric,
            "completeness": self.completeness,
            "predicted_bytes": self.predicted_bytes,
            "measured_bytes": self.measured_bytes,
            "ratio": self.ratio,
            "verdict": self.verdict,
            "reason": self.reason,
            "phases": {name: {"predicted_bytes": p, "measured_bytes": m} for name, (p, m) in self.phases.items()},
        }


UNSPECIFIED = "unspecified"  # the metric of a figure of which its source says "GPU memory" and no more
# What such a figure may be, in words for the page.
READINGS = ("read as allocated", "read as reserved", "read as nvidia-smi")
# The end of a step or of a run: (point of the row, loop that leaves the ledger there).
_POINTS: dict[str, dict[str, Any]] = {
    "after_forward": {},
    "end_of_train_allocated": {},
    "after_optimizer_step": {"zero_grad": "before-forward"},
    "after_optimizer_step_mean_minus_init": {"zero_grad": "before-forward", "keep_outputs": True},
}


def score(
    rows: Iterable[Row], *, processes: int | None = None, done: Callable[[int], None] = lambda count: None
) -> list[Scored]:
    """Every row beside its prediction, in order.

    Rows of one model go to one process, which traces it once.  `processes`: None takes every core.  `done(n)` is called as n
    more rows are finished.
    """
    rows = list(rows)
    groups = _groups(rows)
    count = min(processes or _cores(), len(groups))
    found: dict[str, Scored] = {}
    if count <= 1:
        for group in groups:
            found |= {s.id: s for s in _score_group(group)}
            done(len(group))
        return [found[row.id] for row in rows]
    from multiprocessing import get_context

    with ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        work = {pool.submit(_score_group, group): group for group in groups}
        try:
            for future in as_completed(work):
                found |= {s.id: s for s in future.result()}
                done(len(work[future]))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [found[row.id] for row in rows]


def score_row(row: Row, traces: TraceSource) -> Scored:
    """One row beside its prediction; what cannot be expressed says why."""
    from .accuracy_question import question_of

    blank = _blank(row)
    try:
        return replace(blank, **_predicted(row, question_of(row), traces))
    except (CannotTell, UserError) as error:
        return replace(blank, reason=str(error))


def _blank(row: Row) -> Scored:
    from .accuracy_models import measured_bytes

    return Scored(
        id=row.id,
        source=row.source.name,
        metric=row.measured.metric,
        completeness=row.completeness,
        measured_bytes=measured_bytes(row),
    )


def _predicted(row: Row, question: Question, traces: TraceSource) -> dict[str, Any]:
    from ..planner.predict import predict
    from ..planner.prediction import Verdict

    metric = row.measured.metric
    if metric == "allocated_after":
        point = next(iter(row.measured.phases), "")
        return {"predicted_bytes": _allocated_at(point, question.request, traces)}
    prediction = predict(question.request, traces)
    if prediction.verdict is Verdict.UNKNOWN:
        raise CannotTell(prediction.reason)
    if metric == UNSPECIFIED:
        figures = [_figure(known, prediction, question, traces) for known in ("allocated_peak", "reserved_peak", "nvml_peak")]
        measured = row.measured.bytes
        read = {name: (predicted, measured) for name, predicted in zip(READINGS, figures, strict=True)} if measured else {}
        return {"reason": "the source does not say which figure it measured", "phases": read}
    found: dict[str, Any] = {"predicted_bytes": _figure(metric, prediction, question, traces)}
    if metric in ("fits", "oom"):
        found |= {"verdict": prediction.verdict.value, "reason": prediction.reason}
    found["phases"] = {
        name: (predicted, measured)
        for name, measured in row.measured.phases.items()
        if (predicted := _phase_figure(name, prediction, question, traces)) is not None
    }
    return found


def _figure(metric: str, prediction: Prediction, question: Question, traces: TraceSource) -> int:
    """The figure of a prediction that a metric measures."""
    if metric == "allocated_peak" and question.later_tokens is not None:
        return _peak_of_micro_steps(question.request, question.later_tokens, traces)
    if metric in ("allocated_peak", "active_peak"):  # they differ by blocks that other streams hold: one GPU has none
        return prediction.allocated_peak_bytes
    reserved = _reserved(prediction, question.request, traces)
    if metric in ("reserved_peak", "reserved_minus_init"):  # what a process holds before it has made anything is nothing
        return reserved
    return reserved + (prediction.context_bytes if question.context_bytes is None else question.context_bytes)


def _reserved(prediction: Prediction, request: Request, traces: TraceSource) -> int:
    """What is reserved on that card: a run that reserves all of it flushes its cache and goes on with less."""
    if prediction.reserved_peak_bytes <= prediction.usable_bytes or not prediction.fits:
        return prediction.reserved_peak_bytes
    from ..planner.predict import ledger_of, replay_ledger

    return replay_ledger(ledger_of(request, traces.step(request)), limit_bytes=prediction.usable_bytes).peak_reserved_bytes


def _phase_figure(name: str, prediction: Prediction, question: Question, traces: TraceSource) -> int | None:
    if name in _POINTS:
        return _allocated_at(name, question.request, traces)
    if name == "nvidia_smi_minus_idle":
        return _reserved(prediction, question.request, traces) + prediction.context_bytes
    phases = {"peak_fwd_bwd": ("forward", "backward"), "peak_optimizer_step": ("step",)}.get(name)
    if phases is None:
        return None  # an average, an input, or a point that no phase of a prediction is
    peaks = [prediction.phases[p].allocated_bytes for p in phases if p in prediction.phases]
    return max(peaks, default=None)


def _peak_of_micro_steps(request: Request, later_tokens: int, traces: TraceSource) -> int:
    """Of the first micro step, which has the longest sample, and of a later one that finds its gradients."""
    from ..planner.predict import ledger_of, replay_ledger

    peaks = []
    for number, seq_len in enumerate((request.seq_len, later_tokens)[: request.loop.grad_accum_steps]):
        asked = request.but(seq_len=seq_len)
        ledger = ledger_of(asked, traces.step(asked))
        start, stop = micro_step(ledger.phase[ledger.rows()].tolist(), number)
        peaks.append(max(replay_ledger(ledger).allocated_series[start:stop]))
    return max(peaks)


def micro_step(phases: Sequence[int], number: int) -> tuple[int, int]:
    """Of a ledger's phases: the first row of a micro step, and the row after its last."""
    from ..planner.trace.steptrace import Phase

    def begins(row: int) -> bool:
        return phases[row] == Phase.FORWARD and (row == 0 or phases[row - 1] != Phase.FORWARD)

    start = [row for row in range(len(phases)) if begins(row)][number]
    inside = (Phase.FORWARD, Phase.BACKWARD)
    later = range(start + 1, len(phases))
    return start, next((row for row in later if begins(row) or phases[row] not in inside), len(phases))


def _allocated_at(point: str, request: Request, traces: TraceSource) -> int:
    from ..planner.predict import ledger_of, replay_ledger

    if point not in _POINTS:
        raise CannotTell(f"the point {point!r} of the run is not one that a prediction has")
    asked = request.but(**_POINTS[point])
    return replay_ledger(ledger_of(asked, traces.step(asked))).allocated_series[-1]


# -- processes ---------------------------------------------------------------------------------------------------------

_traces: TraceSource | None = None  # of this process: what one group traced, the next may need


def _score_group(rows: list[Row]) -> list[Scored]:
    from ..planner.trace.source import TraceSource

    global _traces
    _traces = _traces or TraceSource()
    return [_guarded(row, _traces) for row in rows]


def _guarded(row: Row, traces: TraceSource) -> Scored:
    try:
        return score_row(row, traces)
    except Exception as error:  # one row must not cost the others; the reason says that this is no fault of the row
        line = " ".join(str(error).split())[:200]
        return replace(_blank(row), reason=f"memplan failed, which is a bug: {type(error).__name__}: {line}")


def _groups(rows: list[Row]) -> list[list[Row]]:
    """Rows that share traces, the largest group first: the last one to finish should be a small one."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        strategy = row.strategy
        shared = [
            row.model.family, row.model.config, row.workload.task, row.workload.phase, row.workload.loss_fn, strategy.method,
            strategy.precision.param_dtype, strategy.precision.autocast, strategy.recompute, strategy.attention, strategy.loss,
        ]  # fmt: skip
        groups.setdefault(json.dumps(shared, sort_keys=True), []).append(row)
    return sorted(groups.values(), key=len, reverse=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # the processes are the parallelism
