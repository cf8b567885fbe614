"""Predicted against measured, row by row; deciding only, no printing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .measurement import DRIVER_USED, MOMENTS, STEPS, Usage

TOLERANCE = {"cpu": 0.001, "cuda": 0.01}  # of the peak: on the CPU every event is known; CUDA's kernels allocate for themselves
# Component -> the moment at which it is compared: when it is complete and nothing else has been dropped yet.
_MOMENT_OF = {"param": "init", "buffer": "init", "grad": "backward", "optimizer_state": "step"}
_PEAK = "peak"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure, both ways."""

    what: str
    """peak, "after" (what a phase leaves), a component, reserved, or device (what nvidia-smi shows)."""
    phase: str = ""
    step: str = ""
    predicted_bytes: int
    measured_bytes: int

    @property
    def ratio(self) -> float | None:
        """predicted / measured; None where nothing was measured."""
        return self.predicted_bytes / self.measured_bytes if self.measured_bytes else None

    @property
    def difference_bytes(self) -> int:
        return self.predicted_bytes - self.measured_bytes

    def within(self, tolerance: float) -> bool:
        return abs(self.difference_bytes) <= tolerance * self.measured_bytes

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "ratio": self.ratio}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The outcome of one validation, failure included: agrees, differs, or could not run (`reason`)."""

    question: Mapping[str, Any]
    device: str
    """What the step ran on: "cpu", or the GPU's name."""
    tolerance: float
    predicted: Usage
    measured: Usage | None = None
    rows: tuple[Row, ...] = ()
    reason: str = ""
    """Why nothing was measured, in one line."""
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    rank: int | None = None
    """Of which process; None where there is one, or one stands for all."""
    ranks: tuple[Comparison, ...] = ()
    """All of them, where each rank ran in a process of its own; this comparison then shows the most loaded one."""

    @property
    def peak(self) -> Row | None:
        """The row that decides: the peak of all steps."""
        return next((row for row in self.rows if row.what == _PEAK and not row.phase), None)

    @property
    def agrees(self) -> bool:
        return self.peak is not None and self.peak.within(self.tolerance) and all(rank.agrees for rank in self.ranks)

    @property
    def exit_code(self) -> int:
        """0 agrees, 1 differs, 2 could not run."""
        return 2 if self.measured is None else int(not self.agrees)

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys; sizes in bytes."""
        return {
            "outcome": "could_not_run" if self.measured is None else "agrees" if self.agrees else "differs",
            "reason": self.reason,
            "device": self.device,
            "counter": self.predicted.counter,
            "tolerance": self.tolerance,
            "rows": [row.to_json() for row in self.rows],
            "question": dict(self.question),
            "predicted": self.predicted.to_json(),
            "measured": self.measured.to_json() if self.measured else None,
            "notes": list(self.notes),
            "versions": dict(self.versions),
            **({"ranks": [rank.of_a_rank() for rank in self.ranks]} if self.ranks else {}),
        }

    def of_a_rank(self) -> dict[str, Any]:
        """What `to_json` says, without what all ranks share."""
        own = ("outcome", "reason", "rows", "predicted", "measured")
        return {"rank": self.rank, **{key: value for key, value in self.to_json().items() if key in own}}

    def __str__(self) -> str:
        from .report import render

        return render(self)


def rows_of(predicted: Usage, measured: Usage) -> tuple[Row, ...]:
    """The peak of all steps; the peak and the rest of every phase, first step and later ones; the components."""
    rows = [Row(what=_PEAK, predicted_bytes=predicted.peak_bytes, measured_bytes=measured.peak_bytes)]
    if predicted.reserved_peak_bytes is not None and measured.reserved_peak_bytes is not None:
        ours_reserved, theirs_reserved = predicted.reserved_peak_bytes, measured.reserved_peak_bytes
        rows.append(Row(what="reserved", predicted_bytes=ours_reserved, measured_bytes=theirs_reserved))
    if DRIVER_USED in predicted.detail and DRIVER_USED in measured.detail:
        on_card, really = predicted.detail[DRIVER_USED], measured.detail[DRIVER_USED]
        rows.append(Row(what="device", predicted_bytes=on_card, measured_bytes=really))
    for step in STEPS:
        for phase in MOMENTS:
            ours, theirs = predicted.phase(phase, step), measured.phase(phase, step)
            if ours is None or theirs is None:
                continue
            figures = [(_PEAK, ours.peak_bytes, theirs.peak_bytes), ("after", ours.after_bytes, theirs.after_bytes)]
            for what, mine, real in figures[phase == "init" :]:  # the making of a model is not modelled, only what it leaves
                rows.append(Row(what=what, phase=phase, step=step, predicted_bytes=mine, measured_bytes=real))
    for component, moment in _MOMENT_OF.items():
        ours_at, theirs_at = predicted.components.get(moment), measured.components.get(moment)
        if ours_at is not None and theirs_at is not None:
            mine, real = ours_at.get(component, 0), theirs_at.get(component, 0)
            rows.append(Row(what=component, phase=moment, predicted_bytes=mine, measured_bytes=real))
    return tuple(rows)
