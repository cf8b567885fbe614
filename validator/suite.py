"""`memplan validate --suite`: many models at once, each in a worker process, and one table of what became of them.

* zoo: every architecture of `zoo.ZOO` trains for real on the CPU, and the predicted peak is compared with the run's own.
* types: every model type that transformers knows is traced from a tiny config; nothing is run.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError, did_you_mean
from .compare import TOLERANCE

SUITES = ("zoo", "types")
DEFAULT_TIMEOUT_S = {"zoo": 300.0, "types": 120.0}
_MAX_WORKERS = 4  # more gain little on the machines this was tried on, and each holds 1-2 GiB

OnDone = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ZooRow:
    """One architecture, trained for real: the peak of live bytes both ways, or the `reason` for which there is none."""

    name: str
    kind: str
    task: str
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    figures: int = 0
    """All figures compared: peak and rest of every phase, first step and later ones, and the components."""
    equal_figures: int = 0
    reason: str = ""

    @property
    def difference_bytes(self) -> int | None:
        if self.predicted_bytes is None or self.measured_bytes is None:
            return None
        return self.predicted_bytes - self.measured_bytes

    @property
    def ratio(self) -> float | None:
        """predicted / measured."""
        return self.predicted_bytes / self.measured_bytes if self.predicted_bytes and self.measured_bytes else None

    def within(self, tolerance: float) -> bool:
        difference = self.difference_bytes
        return difference is not None and self.measured_bytes is not None and abs(difference) <= tolerance * self.measured_bytes

    @property
    def exact(self) -> bool:
        return self.difference_bytes == 0

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "difference_bytes": self.difference_bytes, "ratio": self.ratio}


@dataclass(frozen=True, kw_only=True)
class ZooResult:
    """The whole zoo."""

    rows: tuple[ZooRow, ...]
    tolerance: float
    versions: Mapping[str, str]

    @property
    def within(self) -> int:
        return sum(row.within(self.tolerance) for row in self.rows)

    @property
    def exact(self) -> int:
        return sum(row.exact for row in self.rows)

    @property
    def worst(self) -> ZooRow | None:
        """The row whose ratio is farthest from 1."""
        return max((r for r in self.rows if r.ratio), key=lambda r: abs((r.ratio or 1.0) - 1.0), default=None)

    @property
    def exit_code(self) -> int:
        """0: all agree; 1: some differ, or could not run."""
        return int(self.within < len(self.rows))

    def to_json(self) -> dict[str, Any]:
        return {
            "suite": "zoo",
            "tolerance": self.tolerance,
            "architectures": len(self.rows),
            "within_tolerance": self.within,
            "exactly_equal": self.exact,
            "could_not_run": sum(bool(row.reason) for row in self.rows),
            "worst": self.worst.name if self.worst else None,
            "rows": [row.to_json() for row in self.rows],
            "versions": dict(self.versions),
        }

    def __str__(self) -> str:
        from .suite_report import zoo_text

        return zoo_text(self)


@dataclass(frozen=True, kw_only=True)
class TypeRow:
    """One model type: traced at `size` ("narrow", "shallow" or "default"), or not, for a reason."""

    name: str
    task: str = ""
    size: str = ""
    events: int = 0
    reason: str = ""

    @property
    def group(self) -> str:
        """The reason in the few words that it shares with other types."""
        from .model_types import group_of

        return group_of(self.reason) if self.reason else ""

    @property
    def is_part(self) -> bool:
        """Whether there is no model to trace: a config of a part of other models."""
        from .model_types import PART

        return self.reason == PART

    @property
    def own_reason(self) -> bool:
        """Whether the group says less than the reason."""
        from .model_types import RAISED

        return self.group == RAISED

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "group": self.group}


@dataclass(frozen=True, kw_only=True)
class TypesResult:
    """All model types."""

    rows: tuple[TypeRow, ...]
    versions: Mapping[str, str]

    @property
    def traced(self) -> int:
        return sum(not row.reason for row in self.rows)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Reasons with how many types they hold for, most first."""
        return Counter(row.group for row in self.rows if row.reason).most_common()

    @property
    def exit_code(self) -> int:
        """Always 0: which types trace is a fact, not a comparison."""
        return 0

    def to_json(self) -> dict[str, Any]:
        return {
            "suite": "types",
            "types": len(self.rows),
            "traced": self.traced,
            "reasons": dict(self.groups),
            "rows": [row.to_json() for row in self.rows],
            "versions": dict(self.versions),
        }

    def __str__(self) -> str:
        from .suite_report import types_text

        return types_text(self)


def run_suite(
    suite: str,
    *,
    only: Sequence[str] = (),
    tolerance: float | None = None,
    timeout_s: float | None = None,
    workers: int | None = None,
    on_done: OnDone | None = None,
) -> ZooResult | TypesResult:
    """Runs a suite and returns its table.

    `only`: names of architectures (zoo) or model types (types); all where it is empty.  `timeout_s`: for one model.  `workers`:
    processes at once.  `on_done` is called with a line for each model that is done.

    Raises UserError for a suite or a name that does not exist.
    """
    from ..planner.cache import library_versions
    from .pool import answers

    if tolerance is not None and not 0 <= tolerance < 1:
        raise UserError(f"--tolerance {tolerance:g}: expected a share between 0 and 1", "Write for example 0.01 for 1 %")
    if suite not in SUITES:
        raise UserError(f"--suite {suite!r} is not known", f"Choose one of {', '.join(SUITES)}")
    names = _names(suite, only)
    limit_s = DEFAULT_TIMEOUT_S[suite] if timeout_s is None else timeout_s
    allowed = TOLERANCE["cpu"] if tolerance is None else tolerance
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = workers or min(_MAX_WORKERS, cores)
    found: dict[str, dict[str, Any]] = {}
    for job, answer in answers([{"suite": suite, "name": name} for name in names], workers=count, timeout_s=limit_s):
        found[job["name"]] = answer
        if on_done is not None:
            on_done(f"{len(found):>{len(str(len(names)))}}/{len(names)}  {job['name']:<28}  {_said(suite, answer, allowed)}")
    versions = dict(library_versions())
    if suite == "types":
        return TypesResult(rows=tuple(TypeRow(name=n, **found[n]) for n in names), versions=versions)
    from .zoo import find

    rows = [ZooRow(name=n, kind=find(n).kind, task=find(n).task, **found[n]) for n in names]
    return ZooResult(rows=tuple(rows), tolerance=allowed, versions=versions)


def _names(suite: str, only: Sequence[str]) -> list[str]:
    if suite == "zoo":
        from .zoo import ZOO

        known = [a.name for a in ZOO]
    else:
        from .model_types import all_types

        known = all_types()
    for name in only:
        if name not in known:
            raise UserError(
                f"--only {name}: --suite {suite} has no such model", did_you_mean(name, known) or f"It has {len(known)} models"
            )
    return [name for name in known if name in only] if only else known


def _said(suite: str, answer: Mapping[str, Any], tolerance: float) -> str:
    if answer["reason"]:
        return f"{'not traced' if suite == 'types' else 'could not run'}: {answer['reason']}"[:160]
    if suite == "types":
        return f"traced ({answer['size']}, {answer['task']})"
    apart = answer["predicted_bytes"] - answer["measured_bytes"]
    word = "equal" if apart == 0 else "agrees" if abs(apart) <= tolerance * answer["measured_bytes"] else "DIFFERS"
    return f"{word:<7}  predicted {answer['predicted_bytes']:,}, measured {answer['measured_bytes']:,}, {apart:+,} bytes apart"
