"""A Comparison as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..planner.strategies import ZEROTH_ORDER
from ..units import human
from .compare import Comparison, Row

_COUNTERS = {
    "live": "live bytes: asked for and not yet freed, without an allocator's rounding",
    "allocated": "torch.cuda's allocated bytes: blocks as the caching allocator rounds them",
}


def render(comparison: Comparison) -> str:
    """The verdict first, then predicted, measured and ratio of every phase and component."""
    lines = [_verdict(comparison), _setting(comparison)]
    if comparison.measured is not None:
        lines += ["", *_table(comparison.rows), "", f"Counted: {_COUNTERS[comparison.predicted.counter]}."]
    else:
        lines.append(f"Predicted peak: {human(comparison.predicted.peak_bytes)}.")
    if comparison.ranks:
        lines += ["", *_ranks(comparison.ranks), ""]
    lines += [f"Note: {note}." for note in comparison.notes]
    return "\n".join(lines)


def _verdict(comparison: Comparison) -> str:
    peak = comparison.peak
    if peak is None:
        return f"COULD NOT RUN  {comparison.reason}"
    word = "AGREES " if comparison.agrees else "DIFFERS"
    off = abs(peak.difference_bytes) / peak.measured_bytes if peak.measured_bytes else 0.0
    return (
        f"{word}  peak predicted {human(peak.predicted_bytes)}, measured {human(peak.measured_bytes)}: "
        f"{off:.3%} apart, {comparison.tolerance:.1%} allowed"
    )


def _setting(comparison: Comparison) -> str:
    asked = comparison.question
    steps = asked["loop"]["iterations"] if asked["mode"] == "train" else 1
    return (
        f"{asked['model']} on {comparison.device}: {steps} {'step' if steps == 1 else 'steps'} run for real, "
        f"micro batch {asked['micro_batch_size']}, sequence {asked['seq_len']}, {asked['precision']}"
        + (f", {_how(asked, comparison.rank)}" if asked["mode"] == "train" else f", {asked['mode']}")
    )


def _how(asked: Mapping[str, Any], rank: int | None) -> str:
    """Optimizer and strategy, or the zeroth-order method, which has neither."""
    number = "" if rank is None else f"{rank} "
    gpus = f", rank {number}of {asked['gpus']}" if asked.get("gpus", 1) > 1 else ""
    method, strategy = asked.get("method", "full"), asked.get("strategy", "single")
    if method in ZEROTH_ORDER:
        return str(method) + gpus
    return asked["optimizer"] + (f", {strategy}" if strategy != "single" else "") + gpus


def _table(rows: tuple[Row, ...]) -> list[str]:
    cells = [("", "predicted", "measured", "ratio", "bytes apart")]
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.4f}"
        cells.append((_name(row), human(row.predicted_bytes), human(row.measured_bytes), ratio, f"{row.difference_bytes:+,}"))
    widths = [max(len(c[i]) for c in cells) for i in range(len(cells[0]))]
    return ["  ".join([c[0].ljust(widths[0]), *(c[i].rjust(widths[i]) for i in range(1, len(c)))]).rstrip() for c in cells]


def _ranks(ranks: tuple[Comparison, ...]) -> list[str]:
    """A line a rank: the figures of the whole run, or why there are none."""
    whole = {"peak": "peak", "reserved": "reserved", "device": "nvidia-smi"}
    shown = [what for what in whole if any(row.what == what and not row.phase for rank in ranks for row in rank.rows)]
    cells = [("each rank", *(f"{whole[what]}{side}" for what in shown for side in (" predicted", " measured", " ratio")))]
    for rank in ranks:
        line = [f"rank {rank.rank}"]
        for what in shown:
            row = next((row for row in rank.rows if row.what == what and not row.phase), None)
            ratio = "-" if row is None or row.ratio is None else f"{row.ratio:.4f}"
            line += [human(row.predicted_bytes), human(row.measured_bytes), ratio] if row else ["-", "-", "-"]
        cells.append(tuple(line))
    widths = [max(len(c[i]) for c in cells) for i in range(len(cells[0]))]
    lines = ["  ".join([c[0].ljust(widths[0]), *(c[i].rjust(widths[i]) for i in range(1, len(c)))]).rstrip() for c in cells]
    lines += [f"rank {rank.rank}: {rank.reason}" for rank in ranks if rank.reason]
    return lines


def _name(row: Row) -> str:
    if not row.phase:
        return "peak of all steps" if row.what == "peak" else f"peak {row.what.replace('_', ' ')}"
    if row.what == "after":
        return f"{_step(row)}after {row.phase}"
    if row.what == "peak":
        return f"{_step(row)}{row.phase} peak"
    return f"{row.what.replace('_', ' ')}, after {row.phase}"


def _step(row: Row) -> str:
    return {"first": "first step: ", "later": "later steps: "}[row.step] if row.phase != "init" else ""
