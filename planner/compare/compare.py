"""Every way to train, answered: one trace for each method and precision, one simulated run for each way that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell, UserError
from ..advice import max_micro_batch_size
from ..optimizers.rule import StepEvents
from ..predict import predict_with_ledger
from ..prediction import Prediction, Verdict
from ..trace.source import TraceSource, trace_options
from .at_once import at_once
from .sizes import Kept, error_bytes, kept, model_bytes, saved_bytes, stepped, transients
from .ways import NO_OPTIMIZER, Way, check

if TYPE_CHECKING:
    from ..optimizers.rule import OptimizerRule, OptimizerTensor
    from ..request import Request
    from ..trace.steptrace import StepTrace

SORTS: dict[str, Callable[[Row], int]] = {
    "peak": lambda row: row.prediction.reserved_peak_bytes,
    "kept": lambda row: row.kept.total_bytes,
    "checkpoint": lambda row: row.checkpoint_bytes,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way.  Sizes in bytes, of the GPU where nothing else is said."""

    way: Way
    prediction: Prediction
    kept: Kept
    first_step_bytes: int
    """Made and dropped by the first step, which creates the state."""
    later_step_bytes: int
    model_saved_bytes: int
    optimizer_saved_bytes: int
    max_micro_batch_size: int | None = None
    """None: not one sample fits, or it was not asked for (`tried_batches`)."""
    tried_batches: bool = False

    @property
    def checkpoint_bytes(self) -> int:
        return self.model_saved_bytes + self.optimizer_saved_bytes

    def per_parameter(self, num_bytes: int) -> float:
        return num_bytes / max(self.prediction.num_params, 1)

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        found, entry = self.prediction, self.way.entry
        return {
            "optimizer": self.way.optimizer,
            "library": entry and entry.library,
            "method": self.way.base.method,
            "precision": self.way.base.precision,
            "grad_release": self.way.released,
            "num_params": found.num_params,
            "num_trainable_params": found.num_trainable_params,
            "kept": asdict(self.kept) | {"total_bytes": self.kept.total_bytes},
            "kept_per_parameter": self.per_parameter(self.kept.total_bytes),
            "first_step_bytes": self.first_step_bytes,
            "later_step_bytes": self.later_step_bytes,
            "checkpoint": {"model_bytes": self.model_saved_bytes, "optimizer_bytes": self.optimizer_saved_bytes},
            "checkpoint_per_parameter": self.per_parameter(self.checkpoint_bytes),
            "allocated_peak_bytes": found.allocated_peak_bytes,
            "reserved_peak_bytes": found.reserved_peak_bytes,
            "device_peak_bytes": found.device_peak_bytes,
            "usable_bytes": found.usable_bytes,
            "verdict": found.verdict.value,
            "max_micro_batch_size": self.max_micro_batch_size,
            "tried_batches": self.tried_batches,
            "not_with": list(entry.not_with) if entry else [],
        }


@dataclass(frozen=True)
class Refusal:
    """A way that is no row."""

    way: Way
    reason: str
    impossible: bool
    """The library refuses it; else memplan has no model for it."""


@dataclass(frozen=True)
class Comparison:
    """Rows in order, best first, and what could not be one."""

    rows: tuple[Row, ...]
    refused: tuple[Refusal, ...]

    def to_json(self) -> dict[str, Any]:
        first = self.rows[0].prediction.question if self.rows else None
        question = first and {k: v for k, v in first.items() if k not in ("optimizer", "strategy", "method", "precision")}
        return {
            "question": question,
            "rows": [row.to_json() for row in self.rows],
            "refused": [{"way": r.way.name, "reason": r.reason, "impossible": r.impossible} for r in self.refused],
        }


def compare(
    asked: Iterable[Way],
    traces: TraceSource,
    *,
    top: int | None = 0,
    sort: str = "peak",
    say: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Answers each way, sorts by `SORTS[sort]`, and finds the largest micro batch of the first `top` rows (None: of all)."""
    traces = _Remembered(traces)
    refused, possible = [], []
    behaviours: dict[str, Any] = {}
    first: dict[Any, Way] = {}  # by behaviour: adam and adamw, say, allocate the same bytes in the same order
    for way in asked:
        say(way.name)
        try:
            check(way)
            behaviours[way.name] = _behaviour(way, traces)
            first.setdefault(behaviours[way.name], way)
            possible.append(way)
        except UserError as error:
            refused.append(Refusal(way, str(error), True))
        except CannotTell as error:
            refused.append(Refusal(way, str(error), False))
    say(f"{len(first)} runs that differ")
    known = dict(zip(first, at_once(_answered, [(way, traces) for way in first.values()]), strict=True))
    rows = []
    for way in possible:
        found = known[behaviours[way.name]]
        if isinstance(found, str):
            refused.append(Refusal(way, found, False))
        else:
            rows.append(Row(way=way, **found))
    rows.sort(key=SORTS[sort])  # stable: equal ones stay in the catalogue's order
    batches: dict[Any, int | None] = {}
    per_sample = 0.0
    for index, row in enumerate(rows[:top]):
        say(f"{row.way.name}: the largest batch")
        key = behaviours[row.way.name]
        if key not in batches:
            batches[key] = max_micro_batch_size(_near(row, per_sample), traces)
            per_sample = _bytes_per_sample(row, batches[key]) or per_sample
        rows[index] = replace(row, max_micro_batch_size=batches[key], tried_batches=True)
    return Comparison(tuple(rows), tuple(refused))


def _near(row: Row, per_sample: float) -> Request:
    """The question from which the search of the largest batch starts: at the batch that the way before makes likely."""
    request = row.way.request
    if not per_sample:
        return request
    found = row.prediction
    likely = request.micro_batch_size + int((found.usable_bytes - found.reserved_peak_bytes) / per_sample)
    return request.but(micro_batch_size=max(likely, 1))


def _bytes_per_sample(row: Row, largest: int | None) -> float:
    """What one more sample takes, told from the largest batch; 0 where there is no such batch."""
    more = (largest or 0) - row.way.request.micro_batch_size
    return (row.prediction.usable_bytes - row.prediction.reserved_peak_bytes) / more if more > 0 else 0.0


class _Remembered(TraceSource):
    """Hands out one trace for all optimizers: making it from its family takes half as long as a run."""

    def __init__(self, source: TraceSource) -> None:
        super().__init__()
        self._source = source
        self._steps: dict[Any, StepTrace] = {}

    def step(self, request: Request, target: str = "cuda") -> StepTrace:
        key = request.model.fingerprint, trace_options(request, target), request.strategy, request.method
        if key not in self._steps:
            self._steps[key] = self._source.step(request, target)
        return self._steps[key]


def _answered(way: Way, traces: TraceSource) -> dict[str, Any] | str:
    """The figures of a row, or why there are none."""
    try:
        return _figures(way, traces)
    except CannotTell as error:
        return str(error)


def _figures(way: Way, traces: TraceSource) -> dict[str, Any]:
    trace = traces.step(way.request)
    prediction, ledger = predict_with_ledger(way.request, traces)
    if prediction.verdict is Verdict.UNKNOWN or ledger is None:
        raise CannotTell(prediction.reason)
    error = saved = 0
    if way.optimizer != NO_OPTIMIZER:
        rule, tensors = way.rule, stepped(trace)
        error = error_bytes(rule, tensors)
        saved = sum(saved_bytes(rule, events, group) for events, group in _steps(way, rule, tensors))
    first, later = transients(ledger, way.released)
    return {
        "prediction": prediction,
        "kept": kept(ledger, error),
        "first_step_bytes": first,
        "later_step_bytes": later,
        "model_saved_bytes": model_bytes(trace, way.base.adapter_settings is not None),
        "optimizer_saved_bytes": saved,
    }


def _steps(way: Way, rule: OptimizerRule, tensors: list[OptimizerTensor]) -> list[tuple[StepEvents, list[OptimizerTensor]]]:
    """The steps that make one update of the model, each with its tensors: one, or one for each released gradient."""
    groups = [[tensor] for tensor in tensors] if way.released else [tensors]
    return [(rule.step(group), group) for group in groups]


def _behaviour(way: Way, traces: TraceSource) -> Any:
    """Equal for ways of one base whose runs are equal, event by event."""
    if way.optimizer == NO_OPTIMIZER:
        return id(way.base), NO_OPTIMIZER
    rule = way.rule
    steps = tuple(events for events, _ in _steps(way, rule, stepped(traces.step(way.request))))
    # the class: what a checkpoint holds is the library's own
    return id(way.base), way.released, rule.in_backward, type(rule).__name__, steps
