"""The memory of a run as a picture: components stacked over its course, the phases, the peak, and the line of the card."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell
from ...files import write_for_user
from ...units import GiB, MiB
from ..study.figure import kind_of
from ..wording import COMPONENT
from . import colours
from .memory import Course, course

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..ledger import Ledger
    from ..prediction import Prediction
    from ..search.plan import Plan

SHORT = {"init": "start", "forward": "forward", "backward": "backward", "step": "optimizer"}
_NARROW = 0.05  # of the width: a stretch below it is not named


def draw(prediction: Prediction, ledger: Ledger) -> Figure:
    """The picture.  Raises CannotTell where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise CannotTell("drawing needs matplotlib: pip install matplotlib. Without --figure no picture is drawn") from error
    run = course(ledger)
    unit, name = (GiB, "GiB") if run.peak_bytes >= GiB else (MiB, "MiB")
    figure = NewFigure(figsize=(10, 4.6), layout="constrained")
    axes: Any = figure.add_subplot()
    parts = [part for part in colours.COMPONENT if part in run.components]
    heights = [run.components[part] / unit for part in parts]
    areas = axes.stackplot(run.events, heights, colors=[colours.COMPONENT[part] for part in parts], step="post")
    top = run.peak_bytes / unit
    usable = prediction.usable_bytes / unit
    near = 0.4 * usable < top  # a card that is far away would squeeze the curve
    ceiling = 1.16 * (max(top, usable) if near else top)
    axes.set_ylim(0, ceiling)
    axes.set_xlim(0, max(run.num_events - 1, 1))
    if near:
        axes.axhline(usable, color="black", linestyle="--", linewidth=1)
        said = f"what PyTorch can have of {prediction.gpu}: {usable:.1f} {name}"
        axes.annotate(said, (0, usable), (4, 3), textcoords="offset points", fontsize=8)
    _name_stretches(axes, run, ceiling)
    _mark_peak(axes, run, unit, name)
    axes.set_ylabel(f"GPU memory asked for by tensors ({name})")
    axes.set_xlabel("allocations and frees, in order")
    q = prediction.question
    axes.set_title(f"{q['model']}, {q['gpus']} x {prediction.gpu}, {q['strategy']}, {q['precision']}", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    labels = [COMPONENT[part].split(" (")[0] for part in parts]
    figure.legend(areas[::-1], labels[::-1], loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _name_stretches(axes: Any, run: Course, ceiling: float) -> None:
    for stretch in run.stretches[1:]:
        axes.axvline(stretch.start, color="black", linewidth=0.3)
    for stretch in run.stretches:
        if stretch.stop - stretch.start >= _NARROW * run.num_events:
            middle = (stretch.start + stretch.stop) / 2
            step = f"\nstep {stretch.iteration + 1}" if stretch.phase != "init" else ""
            words = SHORT.get(stretch.phase, stretch.phase) + step
            axes.annotate(words, (middle, ceiling), (0, -2), textcoords="offset points", ha="center", va="top", fontsize=8)


def _mark_peak(axes: Any, run: Course, unit: int, name: str) -> None:
    top = run.peak_bytes / unit
    late = run.peak > 0.7 * run.num_events
    axes.vlines(run.peak, 0, top, color="black", linewidth=0.8)  # it may be too short for a pixel
    axes.plot([run.peak], [top], marker="v", color="black", markersize=6)
    axes.annotate(
        f"peak {top:.2f} {name}", (run.peak, top), (-8 if late else 8, 3), textcoords="offset points",
        ha="right" if late else "left", fontsize=9, fontweight="bold",
    )  # fmt: skip


def draw_frontier(plan: Plan) -> Figure:
    """Speed against memory of a plan's rows, numbered as in its table."""
    try:
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise CannotTell("drawing needs matplotlib: pip install matplotlib. Without --figure no picture is drawn") from error
    rows = [(n, c) for n, c in enumerate(plan.candidates, 1) if c.tokens_per_s is not None]
    figure = NewFigure(figsize=(8, 4.6), layout="constrained")
    axes: Any = figure.add_subplot()
    x, y = [c.held_bytes / GiB for _, c in rows], [c.tokens_per_s or 0.0 for _, c in rows]
    if plan.objective == "pareto":
        axes.step(x, y, where="pre", color="#999999", linestyle=":")
    axes.scatter(x, y, color="#0072B2", zorder=3)
    for number, c in rows:
        at = (c.held_bytes / GiB, c.tokens_per_s or 0.0)
        axes.annotate(str(number), at, (0, 6), textcoords="offset points", ha="center", fontsize=9, fontweight="bold")
    usable = plan.usable_bytes / GiB
    axes.axvline(usable, color="black", linestyle="--", linewidth=1)
    axes.annotate(f"what PyTorch can have: {usable:.1f} GiB", (usable, 0.02), (-4, 0), ("data", "axes fraction"),
                  "offset points", rotation=90, ha="right", va="bottom", fontsize=8)  # fmt: skip
    axes.set_xlim(0, 1.05 * usable)
    axes.set_ylim(0, 1.15 * max(y, default=1.0))
    axes.set_xlabel("held by PyTorch on each GPU (GiB)")
    axes.set_ylabel(f"{'samples' if plan.counts_samples else 'tokens'} a second, all GPUs")
    axes.set_title(f"{plan.question['model']}, {plan.question['gpus']} x {plan.gpu}", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    names = "\n".join(f"{n}  {c.name}, batch {c.micro_batch_size} x {c.grad_accum_steps}" for n, c in rows)
    figure.supxlabel(names, fontsize=8, x=0.02, ha="left")
    return figure


def picture(prediction: Prediction, ledger: Ledger, kind: str) -> bytes:
    """The bytes of a PNG or SVG file."""
    return _saved(lambda: draw(prediction, ledger), kind)


def _saved(drawn: Callable[[], Figure], kind: str) -> bytes:
    import matplotlib

    stream = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "memplan"}):
        # no date and a fixed salt: one answer is one file, byte for byte
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        drawn().savefig(stream, format=kind, dpi=150, metadata=metadata)
    return stream.getvalue()


def write_figure(path: str, prediction: Prediction, ledger: Ledger) -> None:
    write_for_user(path, picture(prediction, ledger, kind_of(path)))


def write_frontier(path: str, plan: Plan) -> None:
    write_for_user(path, _saved(lambda: draw_frontier(plan), kind_of(path)))
