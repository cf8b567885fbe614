"""Scored rows as text and as the page docs/accuracy.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import mean, median

from ..units import GiB
from .accuracy_score import READINGS, UNSPECIFIED, Scored
from .accuracy_summary import ALL, Summary

_METRIC_WORDS = {
    "allocated_peak": "peak allocated (torch.cuda.max_memory_allocated)",
    "active_peak": "peak active",
    "reserved_peak": "peak reserved (torch.cuda.max_memory_reserved)",
    "nvml_peak": "peak of the process (nvidia-smi: reserved and context)",
    "allocated_after": "allocated at one point of the run",
    "reserved_minus_init": "peak reserved, less what was reserved before the model was made",
    "fits": "ran",
    "oom": "ran out of memory",
    "unspecified": "the source does not say which figure",
}


def as_text(scored: Sequence[Scored], summaries: Sequence[Summary]) -> str:
    """One line a row, then one a source and metric."""
    width = max((len(s.id) for s in scored), default=2)
    lines = [f"{'row':<{width}}  {'metric':<15}  {'predicted':>11}  {'measured':>11}  {'error':>7}"]
    lines += [f"{s.id:<{width}}  {s.metric:<15}  {_row_figures(s)}" for s in scored]
    lines += ["", *_table(summaries)]
    return "\n".join(lines)


def _row_figures(s: Scored) -> str:
    if not s.expressed:
        return f"not expressed: {s.reason}"
    if s.verdict is not None:
        return f"{_gib(s.predicted_bytes):>11}  {'-':>11}  {'-':>7}  {_judged(s)}"
    return f"{_gib(s.predicted_bytes):>11}  {_gib(s.measured_bytes):>11}  {_percent(s.ratio):>7}"


def _judged(s: Scored) -> str:
    right = (s.verdict == "does_not_fit") == (s.metric == "oom")
    return f"{s.verdict}, {'as it was' if right else 'which is wrong'}"


def _table(summaries: Sequence[Summary]) -> list[str]:
    width = max((len(s.source) for s in summaries), default=6)
    figures = f"{'expressed':>9}  {'median':>7}  {'90th':>7}  {'bias':>7}"
    head = f"{'source':<{width}}  {'metric':<19}  {'rows':<5}  {figures}  wrong verdicts"
    return [head, *(_summary_line(s, width) for s in summaries)]


def _summary_line(s: Summary, width: int) -> str:
    wrong = ""
    if s.false_fits or s.false_does_not_fit:
        wrong = f"{s.false_fits} false fits, {s.false_does_not_fit} false does-not-fits"
    elif s.metric in ("fits", "oom"):
        wrong = "none" if s.expressed else ""
    return (
        f"{s.source:<{width}}  {s.metric:<19}  {'A' if s.completeness == 'A' else 'A, B':<5}  "
        f"{f'{s.expressed}/{s.rows}':>9}  {_share(s.median_abs_error):>7}  {_share(s.p90_abs_error):>7}  "
        f"{_share(s.bias, sign=True):>7}  {wrong}"
    ).rstrip()


def as_page(scored: Sequence[Scored], summaries: Sequence[Summary], causes: Sequence[tuple[str, str]], versions: str) -> str:
    """The page that says how good the predictions are.  `causes`: (rows, what is not modelled) of known errors."""
    expressed = [s for s in scored if s.expressed]
    lines = [
        "# How accurate the predictions are",
        "",
        "Made by `memplan accuracy --write docs/accuracy.md`; do not edit.  Every row is a measurement that somebody",
        "published, of a run on a real GPU; `validator/published/rows.jsonl` names its source.  Each is compared with the",
        "figure of a prediction that means the same: allocated with allocated, reserved with reserved, `nvidia-smi` with",
        "reserved and context.  Nothing is fitted: the same planner answers `memplan fit`.  What a source's loop did is",
        "stated, with where it is to be read, in `validator/published/profiles.py`.",
        "",
        f"{len(scored)} rows, {len(expressed)} of them expressed.  Traced with {versions}.",
        "",
        "`A`: the source states all that a prediction needs.  `median` and `90th`: absolute error; `bias`: mean error, below",
        "zero where predictions are too low.",
        "",
        "## Over all sources",
        "",
        *_page_table([s for s in summaries if s.source == ALL]),
        "",
        "## Per source",
        "",
        *_page_table([s for s in summaries if s.source != ALL]),
        "",
        *_page_readings(scored),
        "## Known causes of error, not modelled yet",
        "",
        *(f"- {rows}: {cause}" for rows, cause in causes),
        "",
        "## Why rows cannot be expressed",
        "",
        "| rows | reason |",
        "|---:|---|",
        *(f"| {n} | {reason} |" for reason, n in Counter(s.reason for s in scored if not s.expressed).most_common()),
        "",
        "## Row by row",
        "",
        *_page_rows([s for s in scored if s.expressed or s.phases]),
    ]
    return "\n".join(lines) + "\n"


def _page_table(summaries: Sequence[Summary]) -> list[str]:
    lines = [
        "| source | figure | rows | expressed | median | 90th | bias | false fits | false does-not-fits |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for s in summaries:
        judged = s.metric in ("fits", "oom") and s.expressed
        lines.append(
            f"| {s.source} | {_METRIC_WORDS[s.metric]} | {'A' if s.completeness == 'A' else 'A, B'} "
            f"| {s.expressed} of {s.rows} | {_share(s.median_abs_error)} | {_share(s.p90_abs_error)} "
            f"| {_share(s.bias, sign=True)} | {s.false_fits if judged else ''} | {s.false_does_not_fit if judged else ''} |"
        )
    return lines


def _page_readings(scored: Sequence[Scored]) -> list[str]:
    """The rows of which nobody says what was measured, beside each figure that it may have been."""
    rows = [s for s in scored if s.metric == UNSPECIFIED and s.phases]
    if not rows:
        return []
    lines = [
        "## Rows whose source does not say which figure",
        "",
        "They are counted nowhere else.  Error of the prediction, should the figure be the one that the column names: median",
        "and mean over the source's rows.",
        "",
        f"| source | rows | {' | '.join(READINGS)} |",
        f"|---|---:|{'---:|' * len(READINGS)}",
    ]
    for source in dict.fromkeys(s.source for s in rows):
        mine = [s for s in rows if s.source == source]
        cells = []
        for name in READINGS:
            errors = [predicted / measured - 1 for predicted, measured in (s.phases[name] for s in mine)]
            cells.append(f"{_share(median(abs(e) for e in errors))}, {_share(mean(errors), sign=True)}")
        lines.append(f"| {source} | {len(mine)} | {' | '.join(cells)} |")
    return [*lines, ""]


def _page_rows(shown: Sequence[Scored]) -> list[str]:
    lines = ["| row | figure | predicted | measured | error |", "|---|---|---:|---:|---:|"]
    for s in shown:
        if s.verdict is not None:
            lines.append(f"| {s.id} | {s.metric} | {_gib(s.predicted_bytes)} | | {_judged(s)} |")
        elif not s.expressed:
            lines.append(f"| {s.id} | {s.metric} | | | |")
        else:
            figures = f"{_gib(s.predicted_bytes)} | {_gib(s.measured_bytes)} | {_percent(s.ratio)}"
            lines.append(f"| {s.id} | {s.metric} | {figures} |")
        for name, (predicted, measured) in s.phases.items():
            lines.append(f"| | {name} | {_gib(predicted)} | {_gib(measured)} | {_percent(predicted / measured)} |")
    return lines


def _gib(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / GiB:.3f} GiB"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio - 1:+.1%}"


def _share(value: float | None, *, sign: bool = False) -> str:
    return "" if value is None else f"{value:+.1%}" if sign else f"{value:.1%}"
