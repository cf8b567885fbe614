"""What a run of the step used, phase by phase: one form for the prediction and for the measurement, so that they compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PHASES = ("forward", "backward", "step")
MOMENTS = ("init", *PHASES)
STEPS = ("first", "later")
COMPONENTS = ("param", "buffer", "grad", "optimizer_state")  # what tensors hold: the rest lives inside a pass
Counter = Literal["live", "allocated", "reserved"]
DRIVER_USED = "driver_used_bytes"  # in `Usage.detail`: what nvidia-smi shows for the process when the run is over


@dataclass(frozen=True, kw_only=True)
class PhaseBytes:
    """One phase of one kind of step; bytes of one counter."""

    phase: str
    step: str
    """"first" (creates the optimizer state) or "later"."""
    peak_bytes: int
    """The highest value while the phase ran, its start included."""
    after_bytes: int
    """The value when the phase ended."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """One side of the comparison.

    `counter`: live = bytes asked for and not yet freed; allocated = torch's counter on CUDA, blocks rounded up.
    `components`: bytes when a phase of the last step ended (or init), by component: see COMPONENTS.
    """

    counter: Counter
    phases: tuple[PhaseBytes, ...]
    components: Mapping[str, Mapping[str, int]]
    reserved_peak_bytes: int | None = None
    notes: tuple[str, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The peak of the steps; the making of the model is not part of it."""
        return max((p.peak_bytes for p in self.phases if p.phase != "init"), default=0)

    def phase(self, phase: str, step: str) -> PhaseBytes | None:
        return next((p for p in self.phases if (p.phase, p.step) == (phase, step)), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "counter": self.counter,
            "peak_bytes": self.peak_bytes,
            "reserved_peak_bytes": self.reserved_peak_bytes,
            "phases": [vars(p) for p in self.phases],
            "components": {moment: dict(sizes) for moment, sizes in self.components.items()},
            "notes": list(self.notes),
            "detail": dict(self.detail),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Usage:
        return cls(
            counter=data["counter"],
            phases=tuple(PhaseBytes(**p) for p in data["phases"]),
            components={m: {c: int(n) for c, n in sizes.items()} for m, sizes in data["components"].items()},
            reserved_peak_bytes=data["reserved_peak_bytes"],
            notes=tuple(data["notes"]),
            detail=data["detail"],
        )
