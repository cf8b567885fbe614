"""What many scored rows say together: coverage, error, bias, and verdicts that would have misled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from .accuracy_score import Scored

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The rows of one source and metric (`all`: of every source).  Errors are shares: 0.02 is two percent."""

    source: str
    metric: str
    completeness: str
    rows: int
    expressed: int
    median_abs_error: float | None
    p90_abs_error: float | None
    """The smallest error that nine in ten rows do not exceed."""
    bias: float | None
    """Mean of predicted / measured - 1: negative where predictions are too low."""
    false_fits: int
    """Runs that ran out of memory and were said to fit."""
    false_does_not_fit: int

    @property
    def coverage(self) -> float:
        return self.expressed / self.rows

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "coverage": self.coverage}


def summarise(scored: Sequence[Scored]) -> list[Summary]:
    """Per source and metric, in the order of the rows; then per metric over all sources, of complete rows and of all."""
    keys = list(dict.fromkeys((s.source, s.metric) for s in scored))
    found = [
        _summary(source, metric, ALL, [s for s in scored if (s.source, s.metric) == (source, metric)])
        for source, metric in keys
    ]
    for metric in dict.fromkeys(s.metric for s in scored):
        for completeness in ("A", ALL):
            rows = [s for s in scored if s.metric == metric and completeness in (ALL, s.completeness)]
            if rows:
                found.append(_summary(ALL, metric, completeness, rows))
    return found


def _summary(source: str, metric: str, completeness: str, rows: list[Scored]) -> Summary:
    errors = [s.ratio - 1 for s in rows if s.ratio is not None]
    return Summary(
        source=source,
        metric=metric,
        completeness=completeness,
        rows=len(rows),
        expressed=sum(s.expressed for s in rows),
        median_abs_error=_of(median, [abs(e) for e in errors]),
        p90_abs_error=_of(_ninth_decile, [abs(e) for e in errors]),
        bias=_of(mean, errors),
        false_fits=sum(s.metric == "oom" and s.verdict in ("fits", "tight") for s in rows),
        false_does_not_fit=sum(s.metric == "fits" and s.verdict == "does_not_fit" for s in rows),
    )


def _ninth_decile(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def _of(function: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    return function(values) if values else None
