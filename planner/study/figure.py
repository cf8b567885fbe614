"""A study as a picture: for each strategy its steps side by side, stacked by component, under the line of the card."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell, UserError
from ...files import write_for_user
from ...units import GiB, MiB
from ..show.colours import COMPONENT as COLOURS
from ..wording import COMPONENT
from .study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("png", "svg")
_SHORT = {"init": "init", "forward": "fwd", "backward": "bwd", "step": "step"}
_BAR = 0.8  # of the distance between bars
_GAP = 1.0  # between strategies


def draw(study: Study) -> Figure:
    """The picture.  Raises CannotTell where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure as NewFigure
    except ImportError as error:
        raise CannotTell(
            "drawing needs matplotlib: pip install matplotlib. Without --figure and --html no picture is drawn"
        ) from error
    first = study.columns[0].prediction
    total = first.total_bytes
    steps = list(study.columns[0].steps)
    tallest = max(c.peak_bytes() for c in study.columns)
    unit, name = (MiB, "MiB") if tallest < GiB else (GiB, "GiB")
    bars = len(study.columns) * (len(steps) + _GAP)
    figure = NewFigure(figsize=(max(6.0, 2.2 + 0.42 * bars), 5.2), layout="constrained")
    axes: Any = figure.add_subplot()
    seen: dict[str, Any] = {}
    ticks: list[tuple[float, str]] = []
    for number, column in enumerate(study.columns):
        left = number * (len(steps) + _GAP)
        for offset, step in enumerate(steps):
            bottom = 0.0
            peak = column.steps[step].get("gpu")
            for part, colour in COLOURS.items():
                height = (peak.components.get(part, 0) if peak else 0) / unit
                if height:
                    drawn = axes.bar(left + offset, height, _BAR, bottom, color=colour, edgecolor="white", linewidth=0.4)
                    seen.setdefault(part, drawn)
                    bottom += height
            ticks.append((left + offset, _SHORT[step]))
        middle = left + (len(steps) - 1) / 2
        words = column.name.replace(", ", "\n").replace(" offloaded", "\noffloaded")
        axes.annotate(
            words, (middle, 0), (0, -24), ("data", "axes fraction"), "offset points", ha="center", va="top", fontsize=9
        )
    axes.set_xticks([x for x, _ in ticks], [label for _, label in ticks], fontsize=8)
    axes.set_ylabel(f"GPU memory in use by tensors ({name})")
    if tallest > 0.4 * first.usable_bytes:  # a card that is far away would squeeze the bars
        axes.axhline(first.usable_bytes / unit, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            f"what PyTorch can have of {first.gpu}",
            (0, first.usable_bytes / unit),
            (2, 3),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_title(f"{first.question['model']}, {study.scale[0]} x {first.gpu} ({total / GiB:.0f} GiB)", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    order = [part for part in COLOURS if part in seen][::-1]
    figure.legend([seen[p] for p in order], [COMPONENT[p] for p in order], loc="outside right upper", fontsize=8, frameon=False)
    return figure


def picture(study: Study, kind: str) -> bytes:
    """The bytes of a PNG or SVG file."""
    import matplotlib

    stream = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "memplan"}):
        # no date and a fixed salt: one study is one file, byte for byte
        draw(study).savefig(stream, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return stream.getvalue()


def write_figure(path: str, study: Study) -> None:
    write_for_user(path, picture(study, kind_of(path)))


def kind_of(path: str) -> str:
    """ "png" or "svg" by the end of the name.  Raises UserError for another one."""
    kind = os.path.splitext(path)[1].lstrip(".").lower()
    if kind not in KINDS:
        raise UserError(f"--figure {path}: expected a name that ends in .png or .svg", "Choose one of them")
    return kind
