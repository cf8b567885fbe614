"""Fits the coefficients of the roofline on published training speeds, and judges them on groups that the fit did not see.

    python -m memplan.planner.timeline.fit throughput.jsonl            judges the stored coefficients
    python -m memplan.planner.timeline.fit throughput.jsonl --fit      fits them anew, judges them, and stores them

A *group* is the rows of one source on one GPU.  Every second group, in the order of their names, is fitted on; the others
judge.  A row's error is |predicted / published - 1| of tokens (or samples) per second and GPU.  Kendall's tau compares the
order of the rows within a group of five or more.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import CannotTell, UserError
from . import published
from .roofline import Coefficients, coefficients
from .step_time import StepPlan

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.source import TraceSource

SMALLEST_RANKED_GROUP = 5
_BOUNDS = {  # where a coefficient can lie
    "matmul": (0.4, 1.0), "convolution": (0.1, 1.0), "attention": (0.2, 1.0), "attention_hopper": (0.2, 1.0),
    "memory": (0.4, 1.0), "matmul_k_half": (1.0, 400.0), "gap": (0.5e-6, 8e-6), "host_op": (2e-6, 2e-5),
    "collective": (0.3, 1.0), "fused_memory": (0.3, 1.0),
}  # fmt: skip
# Where the fit begins, and what it stays near where the rows say little: from kernels alone.
_PRIORS = {
    "matmul": 0.9, "convolution": 0.5, "attention": 0.66, "attention_hopper": 0.41, "memory": 0.8, "matmul_k_half": 64.0,
    "gap": 2e-6, "host_op": 8e-6, "collective": 0.9, "fused_memory": 0.5,
}  # fmt: skip
_PRIOR_SOURCES = {
    "attention": "FlashAttention 2 forward 179.5 of the 271 TFLOPS of a product on A100, Azure's benchmarking guide",
    "attention_hopper": "FlashAttention 2 forward 327.9 of the 794 TFLOPS of a product on H100, Azure's benchmarking guide",
    "memory": "copies at 0.79 to 0.87 of the bandwidth, Azure's benchmarking guide",
    "host_op": "by judgement: 5 to 10 microseconds are usual for an eager op",
}
_PULL = 0.5  # towards them: a deviation counts as half as large an error of one row
_UNITS = {"matmul_k_half": "elements", "gap": "s", "host_op": "s"}
_COMMAND = "python -m memplan.planner.timeline.fit throughput.jsonl --fit"
_LOOSE = 0.2  # of log(predicted / published): beyond it a row counts less (soft L1), as sources differ in more than they state


@dataclass(frozen=True)
class Case:
    """A published row and the step that predicts it.  One micro step is `one`; another adds `two - one`."""

    row: published.Published
    one: StepPlan
    two: StepPlan | None

    def rate(self, c: Coefficients) -> float:
        """Tokens (or samples) per second and GPU."""
        request = self.row.request
        self.one.price(c)
        seconds = self.one.seconds()
        if self.two is not None:
            self.two.price(c)
            seconds += (self.two.seconds() - seconds) * (request.loop.grad_accum_steps - 1)
        samples = request.micro_batch_size * request.loop.grad_accum_steps
        return samples * (1 if self.row.counts_samples else request.seq_len) / seconds


@dataclass(frozen=True)
class GroupScore:
    name: tuple[str, str]
    fitted: bool
    rows: int
    median_error: float
    bias: float
    """The median of predicted / published."""
    tau: float | None
    """None for a group of fewer than five rows."""


@dataclass(frozen=True)
class Report:
    groups: tuple[GroupScore, ...]
    refused: Mapping[str, int]
    """Why rows could not be asked, and how many."""
    rows: int
    errors: Mapping[bool, float] = field(default_factory=dict)
    """Median error over the rows of groups that were fitted (True) and that were not (False)."""

    @property
    def covered(self) -> int:
        return sum(g.rows for g in self.groups)

    def taus(self, fitted: bool) -> list[float]:
        return [g.tau for g in self.groups if g.fitted is fitted and g.tau is not None]

    def to_json(self) -> dict[str, Any]:
        """Plain data; errors are shares."""
        groups = [{**asdict(g), "name": list(g.name)} for g in self.groups]
        errors = {"fitted" if fitted else "held_out": error for fitted, error in self.errors.items()}
        return {
            "groups": groups,
            "median_error": errors,
            "rows": self.rows,
            "covered": self.covered,
            "refused": dict(self.refused),
        }

    def __str__(self) -> str:
        lines = [f"{'source':34} {'GPU':16} {'rows':>4}  {'':9} {'median error':>12} {'bias':>5} {'tau':>5}"]
        for g in self.groups:
            tau = "" if g.tau is None else f"{g.tau:5.2f}"
            seen = "fitted" if g.fitted else "held out"
            lines.append(f"{g.name[0][-34:]:34} {g.name[1]:16} {g.rows:4}  {seen:9} {g.median_error:12.1%} {g.bias:5.2f} {tau}")
        for fitted, name in ((True, "groups that were fitted"), (False, "groups that were not")):
            taus = self.taus(fitted)
            if fitted in self.errors:
                ranked = (
                    f"; Kendall tau median {np.median(taus):.2f}, lowest {min(taus):.2f}, of {len(taus)} groups" if taus else ""
                )
                lines.append(f"{name}: median error {self.errors[fitted]:.1%}{ranked}")
        lines.append(f"covered: {self.covered} of {self.rows} rows; not:")
        lines += [f"  {count:4}  {reason}" for reason, count in self.refused.items()]
        return "\n".join(lines)


def cases_of(file: Path) -> tuple[list[Case], dict[str, int], int]:
    """The rows in scope as cases, why others cannot be asked, and how many are in scope.  Traces are cached."""
    from ..trace.source import TraceSource

    rows = [row for row in published.read(file) if published.in_scope(row)]
    batches = published.stated_batches(rows)
    source = TraceSource()
    cases, refused = [], Counter[str]()
    for row in rows:
        try:
            cases.append(case_of(published.question_of(row, batches), source))
        except (CannotTell, UserError) as error:
            refused[str(error)] += 1
    return cases, dict(refused.most_common()), len(rows)


def case_of(row: published.Published, source: TraceSource) -> Case:
    """Simulates the row's step.  Raises CannotTell or UserError where the planner cannot."""
    several = row.request.loop.grad_accum_steps > 1
    return Case(row, _plan(row, source, 1), _plan(row, source, 2) if several else None)


def _plan(row: published.Published, source: TraceSource, micro_steps: int) -> StepPlan:
    from ..kernels import Kernels
    from ..optimizers.traced import traced_rule
    from ..predict import optimizer_impl
    from ..simulate import simulate
    from ..strategies import make_strategy

    request: Request = row.request
    trace = source.step(request)
    ledger, work = simulate(
        trace,
        make_strategy(request, trace),
        optimizer=traced_rule(request.optimizer, optimizer_impl(request)),
        loop=replace(request.loop, iterations=1, grad_accum_steps=micro_steps),
        kernels=Kernels.for_device(request.device, trace.versions["torch"]),
    )
    return StepPlan(request, trace, ledger, work, tf32=row.tf32)


def is_fitted(group: tuple[str, str], groups: Sequence[tuple[str, str]]) -> bool:
    """Every second group, in the order of their names."""
    return sorted(groups).index(group) % 2 == 0


def priors() -> Coefficients:
    """Where the fit begins."""
    return Coefficients(**_PRIORS)


def fit(cases: Sequence[Case]) -> Coefficients:
    """The coefficients that bring the fitted groups closest, each group counting as the root of its number of rows."""
    from scipy.optimize import least_squares

    sizes = Counter(case.row.group for case in cases)
    seen = [case for case in cases if is_fitted(case.row.group, list(sizes))]
    weights = np.array([sizes[case.row.group] ** -0.25 for case in seen])
    names = list(_BOUNDS)
    first = np.log([_PRIORS[n] for n in names])
    low, high = (np.log([_BOUNDS[n][side] for n in names]) for side in (0, 1))

    def residuals(logs: np.ndarray) -> np.ndarray:
        c = Coefficients(**{n: float(v) for n, v in zip(names, np.exp(logs), strict=True)})
        errors = np.array([np.log(case.rate(c) / case.row.rate) for case in seen]) * weights
        return np.concatenate([errors, (logs - first) * _PULL])

    best = least_squares(residuals, first, bounds=(low, high), loss="soft_l1", f_scale=_LOOSE, diff_step=0.01, max_nfev=12)
    return Coefficients(**{n: float(f"{v:.4g}") for n, v in zip(names, np.exp(best.x), strict=True)})


def judge(cases: Sequence[Case], refused: Mapping[str, int], rows: int, c: Coefficients | None = None) -> Report:
    """How close `c` (default: the stored ones) comes, by group."""
    from scipy.stats import kendalltau

    c = c or coefficients()
    by_group: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for case in cases:
        by_group.setdefault(case.row.group, []).append((case.rate(c), case.row.rate))
    scores = []
    errors: dict[bool, list[float]] = {}
    for name in sorted(by_group):
        predicted, measured = np.array(by_group[name]).T
        error = np.abs(predicted / measured - 1)
        tau = float(kendalltau(predicted, measured).statistic) if len(error) >= SMALLEST_RANKED_GROUP else None
        fitted = is_fitted(name, list(by_group))
        errors.setdefault(fitted, []).extend(error.tolist())
        scores.append(
            GroupScore(name, fitted, len(error), float(np.median(error)), float(np.median(predicted / measured)), tau)
        )
    medians = {fitted: float(np.median(found)) for fitted, found in errors.items()}
    return Report(tuple(scores), dict(refused), rows, medians)


def accuracy(file: Path) -> Report:
    """How close the stored coefficients come to the rows of `file`."""
    return judge(*cases_of(file))


def store(c: Coefficients, cases: Sequence[Case], report: Report, file: Path) -> None:
    """Writes the coefficients, and what they were fitted on and came to, into the data file."""
    from ...files import write_whole

    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    groups = [g for g in report.groups if g.fitted]
    said = f"fitted; {_COMMAND}, on {sum(g.rows for g in groups)} published steps of {len(groups)} groups (source and GPU)"
    kept = "not fitted, as no row of the fitted groups depends on it; "
    data["coefficients"] = {
        name: {
            "value": value,
            **({"unit": _UNITS[name]} if name in _UNITS else {}),
            "source": kept + _PRIOR_SOURCES.get(name, "by judgement") if np.isclose(value, _PRIORS[name], rtol=1e-3) else said,
        }
        for name, value in asdict(c).items()
    }
    data["fit"] = {
        "command": _COMMAND,
        "fitted_groups": [" ".join(g.name) for g in groups],
        "median_error": {"fitted": round(report.errors[True], 4), "held_out": round(report.errors[False], 4)},
        "kendall_tau_median": {"fitted": _middle(report.taus(True)), "held_out": _middle(report.taus(False))},
        "rows": {"in_scope": report.rows, "covered": report.covered},
    }
    write_whole(file, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def _middle(values: list[float]) -> float | None:
    return round(float(np.median(values)), 3) if values else None


def main(arguments: Sequence[str]) -> int:
    """The command; see the module's docstring."""
    files = [a for a in arguments if not a.startswith("-")]
    if len(files) != 1 or set(arguments) - {files[0], "--fit"}:
        print(__doc__, file=sys.stderr)
        return 2
    cases, refused, rows = cases_of(Path(files[0]))
    if "--fit" not in arguments:
        print(judge(cases, refused, rows))
        return 0
    c = fit(cases)
    report = judge(cases, refused, rows, c)
    print(report)
    store(c, cases, report, Path(__file__).parents[2] / "hardware" / "data" / "roofline.json")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"memplan: {error}", file=sys.stderr)
        sys.exit(2)
