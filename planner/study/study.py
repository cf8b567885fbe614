"""One model under several strategies: each a full prediction, and what each of its steps holds where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell, UserError
from ..prediction import Prediction, Verdict
from .phases import StepPeak, step_peaks

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.source import TraceSource


@dataclass(frozen=True, kw_only=True)
class Column:
    """One strategy of a study."""

    name: str
    prediction: Prediction
    steps: dict[str, dict[str, StepPeak]]

    def peak_bytes(self, place: str = "gpu") -> int:
        """The most that any step holds in `place`, in bytes as asked for."""
        return max((peaks[place].total_bytes for peaks in self.steps.values() if place in peaks), default=0)


@dataclass(frozen=True)
class Study:
    """Columns in the order asked for; what could not be one is in `left_out`, as (name, reason)."""

    columns: tuple[Column, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def scale(self) -> tuple[int, int]:
        """(GPUs, machines) of the columns that use them all: `single` is one GPU whatever was asked."""
        asked = [c.prediction.question for c in self.columns]
        return max(q["gpus"] for q in asked), max(q["nodes"] for q in asked)

    def saving(self, column: Column) -> float:
        """Share of the first column's GPU peak that `column` does not need; negative where it needs more."""
        first = self.columns[0].prediction.reserved_peak_bytes
        return 1 - column.prediction.reserved_peak_bytes / first if first else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys; sizes in bytes."""
        return {
            "columns": [
                {
                    "name": c.name,
                    "saving": self.saving(c),
                    "steps": {s: {p: asdict(peak) for p, peak in places.items()} for s, places in c.steps.items()},
                    "prediction": c.prediction.to_json(),
                }
                for c in self.columns
            ],
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
        }


def study(
    questions: Iterable[tuple[str, Callable[[], Request]]], traces: TraceSource, say: Callable[[str], None] = lambda text: None
) -> Study:
    """Answers each (name, question).  One that cannot be, or whose answer is `unknown`, is left out with its reason."""
    from ..predict import predict_with_ledger

    columns, left_out = [], []
    for name, ask in questions:
        say(name)
        try:
            prediction, ledger = predict_with_ledger(ask(), traces)
        except (CannotTell, UserError) as error:  # of every pair that is asked for, some do not go together
            left_out.append((name, str(error)))
            continue
        if prediction.verdict is Verdict.UNKNOWN or ledger is None:
            left_out.append((name, prediction.reason))
            continue
        columns.append(Column(name=name, prediction=prediction, steps=step_peaks(ledger)))
    return Study(tuple(columns), tuple(left_out))


def combinations(strategies: Sequence[str], offloads: Sequence[str]) -> list[tuple[str, str, str]]:
    """(name, strategy, offload) of every pair, strategy by strategy."""
    return [
        (strategy if offload == "none" else f"{strategy}, {offload} offloaded", strategy, offload)
        for strategy in strategies
        for offload in offloads
    ]
