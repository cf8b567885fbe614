"""`--where KEY=VALUE`: which rows are meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import UserError, did_you_mean
from .accuracy_rows import Row

# Short names for what is asked most; every other key is a path such as strategy.optimizer.name.
_SHORT = {
    "source": "source.name",
    "gpu": "hardware.gpu",
    "num_gpus": "hardware.num_gpus",
    "model": "model.ref",
    "family": "model.family",
    "task": "workload.task",
    "phase": "workload.phase",
    "method": "strategy.method",
    "optimizer": "strategy.optimizer.name",
    "parallel": "strategy.parallel.kind",
    "strategy": "strategy.parallel.kind",
    "recompute": "strategy.recompute",
    "attention": "strategy.attention",
    "loss": "strategy.loss",
    "metric": "measured.metric",
}


def select(rows: Sequence[Row], conditions: Iterable[str]) -> list[Row]:
    """The rows that meet every condition; `a=x,y` means that a is x or y.

    Raises UserError for a key that rows do not have.
    """
    chosen = [(row, _flat(row.model_dump())) for row in rows]
    for condition in conditions:
        key, equals, wanted = condition.partition("=")
        if not equals or not key:
            raise UserError(f"--where {condition!r} is not KEY=VALUE", "Write for example --where source=rasbt")
        path = _SHORT.get(key, key)
        known = {k for _, flat in chosen for k in flat} if chosen else set()
        if chosen and path not in known:
            raise UserError(f"--where {key}: rows have no such key", did_you_mean(key, [*known, *_SHORT]))
        values = {value.strip().lower() for value in wanted.split(",")}
        chosen = [(row, flat) for row, flat in chosen if _text(flat.get(path)) in values]
    return [row for row, _ in chosen]


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower()
