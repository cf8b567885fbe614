"""Errors by kind of run, for the error bars of later predictions: of published rows, and of validations on this machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from ..planner.error_bars import ErrorBar, kind_of

if TYPE_CHECKING:
    from .accuracy_rows import Row
    from .accuracy_score import Scored
    from .store import Record

_FIGURES = {"allocated_peak": "allocated", "active_peak": "allocated", "reserved_peak": "reserved", "nvml_peak": "device"}


def published_errors(rows: Sequence[Row], scored: Sequence[Scored]) -> tuple[ErrorBar, ...]:
    """Of rows whose configuration is stated in full (completeness A), without torch.compile."""
    complete = {row.id: row for row in rows if row.completeness == "A" and not row.strategy.compile}
    errors: list[tuple[str, str, str, float]] = []
    for s in scored:
        row, figure = complete.get(s.id), _FIGURES.get(s.metric)
        if row is None or figure is None or s.ratio is None:
            continue
        errors.append((figure, *kind_of(_method(row), row.hardware.num_gpus), s.ratio - 1))
    return _bars(errors, own=False)


def own_errors(records: Iterable[Record]) -> tuple[ErrorBar, ...]:
    """Of validations on real GPUs: a run on the CPU says nothing of a GPU's kernels."""
    errors: list[tuple[str, str, str, float]] = []
    for record in records:
        if record.device == "cpu" or record.measured is None:
            continue
        kind = kind_of(record.request.get("method", "full"), record.request.get("gpus", 1))
        for figure, key in (("allocated", "peak_bytes"), ("reserved", "reserved_peak_bytes")):
            predicted, measured = record.predicted.get(key), record.measured.get(key)
            if predicted and measured:
                errors.append((figure, *kind, predicted / measured - 1))
    return _bars(errors, own=True)


def _method(row: Row) -> str:
    """The row's method in the words of a request."""
    adapter = row.strategy.adapter
    return "lora" if adapter is not None else row.strategy.method


def _bars(errors: Iterable[tuple[str, str, str, float]], *, own: bool) -> tuple[ErrorBar, ...]:
    groups: dict[tuple[str, str, str], list[float]] = {}
    for figure, method, gpus, error in errors:
        groups.setdefault((figure, method, gpus), []).append(abs(error))
    return tuple(
        ErrorBar(
            figure=figure,
            method=method,
            gpus=gpus,
            num_rows=len(found),
            median=round(median(found), 5),
            p90=round(sorted(found)[math.ceil(0.9 * len(found)) - 1], 5),
            own=own,
        )
        for (figure, method, gpus), found in sorted(groups.items())
    )
