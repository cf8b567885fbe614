"""A comparison as text: one line a way, then what could not be one, and why."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from ...units import GiB, MiB
from ..wording import columns
from .compare import Comparison, Row
from .ways import Way

WIDTH = 120
_VERDICT = {"fits": "yes", "tight": "tight", "does_not_fit": "no"}
_HEADS = ("", "", "", "weights", "master", "grads", "state", "= kept", "away", "step", "file", "peak", "fits", "batch")
_LEFT = 3  # columns of words


def render(found: Comparison, width: int = WIDTH) -> str:
    """The table and the refusals."""
    parts = []
    if not found.rows:
        parts.append("CANNOT TELL")
    else:
        unit, name = _unit(found)
        parts.append("\n".join(line for text in _heading(found, name) for line in textwrap.wrap(text, width)))
        parts.append("\n".join(_lines(found, unit)))
    for title, impossible in (("Impossible", True), ("Not modelled", False)):
        reasons = _grouped(found, impossible)
        if reasons:
            parts.append("\n".join([title, *(line for text in reasons for line in _item(text, width))]))
    return "\n\n".join(parts)


def _unit(found: Comparison) -> tuple[int, str]:
    highest = max(row.prediction.reserved_peak_bytes for row in found.rows)
    return (MiB, "MiB") if highest < GiB else (GiB, "GiB")


def _heading(found: Comparison, unit: str) -> list[str]:
    first = found.rows[0].prediction
    q = first.question
    what = f"{q['model']} ({q['task']}), {first.num_params / 1e6:,.0f} million parameters, on {first.gpu}, "
    what += f"micro batch {q['micro_batch_size']}, sequence {q['seq_len']}"
    kept = "weights .. state: bytes a parameter when backward has ended (master: with the error bits of split weights); "
    kept += "away: the same in managed or host memory"
    rest = f"step: made and dropped around a step, released gradients too; file: a checkpoint; peak: held by PyTorch; in {unit}"
    tried = sum(row.tried_batches for row in found.rows)
    batch = "batch: the largest micro batch that fits"
    if 0 < tried < len(found.rows):
        batch += f", searched for the first {tried} rows (--top all: for every row)"
    return [what, kept, f"{rest}; {batch}" if tried else rest]


def _lines(found: Comparison, unit: int) -> list[str]:
    rows = [_HEADS, *(_cells(row, found, unit) for row in found.rows)]
    empty = [i for i, head in enumerate(_HEADS) if all(row[i] in ("", "-") for row in rows[1:])]
    rows = [["" if i in empty else cell for i, cell in enumerate(row)] for row in rows]
    return columns(rows, frozenset(range(_LEFT, len(_HEADS))), indent=0)


def _cells(row: Row, found: Comparison, unit: int) -> Sequence[str]:
    way, kept = row.way, row.kept
    methods = {r.way.base.method for r in found.rows}
    precisions = {r.way.base.precision for r in found.rows}
    how = [way.base.method] * (len(methods) > 1) + [way.base.precision] * (len(precisions) > 1)

    def each(num_bytes: int) -> str:
        figure = row.per_parameter(num_bytes)
        return f"{figure:.3f}" if figure >= 0.0005 else "-"  # less would print as 0.000

    def size(num_bytes: int) -> str:
        return f"{num_bytes / unit:,.2f}" if num_bytes >= unit / 200 else "-"

    return (
        way.optimizer,
        " ".join(how),
        "released" if way.released else "",
        each(kept.param_bytes),
        each(kept.master_bytes),
        each(kept.grad_bytes),
        each(kept.state_bytes),
        each(kept.total_bytes),
        each(sum(kept.away_bytes.values())),
        size(max(row.first_step_bytes, row.later_step_bytes)),
        size(row.checkpoint_bytes),
        size(row.prediction.reserved_peak_bytes),
        _VERDICT[row.prediction.verdict.value],
        "" if not row.tried_batches else str(row.max_micro_batch_size or "none"),
    )


def _grouped(found: Comparison, impossible: bool) -> list[str]:
    """Each reason once, with the ways that it stops."""
    total = Counter(_how(way) for way in (*(r.way for r in found.rows), *(r.way for r in found.refused)))
    groups: dict[tuple[str, str], list[str]] = {}
    for refusal in found.refused:
        if refusal.impossible is impossible:
            groups.setdefault((refusal.reason, _how(refusal.way)), []).append(refusal.way.optimizer)
    said: dict[str, dict[str, list[str]]] = {}
    for (reason, how), names in groups.items():
        who = "every optimizer" if len(names) == total[how] > 1 else ", ".join(names)
        said.setdefault(reason, {}).setdefault(who, []).append(how)
    whose = {reason: "; ".join(f"{who} ({'; '.join(hows)})" for who, hows in each.items()) for reason, each in said.items()}
    return [f"{who}: {reason}" for reason, who in whose.items()]


def _how(way: Way) -> str:
    return f"{way.base.method}, {way.base.precision}{', released' if way.released else ''}"


def _item(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent="  - ", subsequent_indent="    ")
