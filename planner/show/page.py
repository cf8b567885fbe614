"""An answer as one HTML page that needs nothing else: what was asked, the course of memory, phases, lanes, tensors, the plan.

The pictures are plotly's; its script (about 4 MB) is put into the page, so that it opens without a network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell
from ...files import write_for_user
from ...units import GiB, MiB
from ..wording import LANE, PHASE
from . import colours
from .figure import SHORT
from .html import asked, candidates, label, tensors, verdict
from .memory import course

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..prediction import Prediction
    from ..search.plan import Plan
    from ..timeline.engine import Span

_FONT = {"family": "system-ui, sans-serif", "size": 13}
_LAYOUT = {"font": _FONT, "template": "plotly_white", "plot_bgcolor": "white", "hoverlabel": {"font": {"size": 12}}}
_SPANS = 2000  # of the lanes; neighbours are joined above it
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.verdict { font-size: 1.15rem; font-weight: 600; margin: .3rem 0 1rem; }
.fits { color: #00664b; } .tight { color: #8a5a00; } .does_not_fit { color: #a33b00; }
table { border-collapse: collapse; font-size: 14px; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.plot { width: 100%; } ul { padding-left: 1.2rem; } .small { color: #555; font-size: 13px; }
"""


def write_page(path: str, prediction: Prediction, ledger: Ledger, spans: Sequence[Span] = (), plan: Plan | None = None) -> None:
    """Writes `page` to `path`, whole or not at all."""
    write_for_user(path, page(prediction, ledger, spans, plan))


def page(prediction: Prediction, ledger: Ledger, spans: Sequence[Span] = (), plan: Plan | None = None) -> str:
    """The HTML text.  `spans`: the lanes of one step; `plan`: the ranking that the answer is the first row of.

    Raises CannotTell where plotly is missing.
    """
    q = prediction.question
    title = f"{q['model']} on {q['gpus']} x {prediction.gpu}"
    parts = [f"<h1>{escape(title)}</h1>", verdict(prediction), asked(prediction)]
    figures: list[tuple[str, dict[str, Any]]] = []
    if plan is not None:
        parts += ["<h2>The plan</h2>", candidates(plan)]
        if len(plan.candidates) > 1:
            figures.append(("frontier", frontier(plan)))
            parts.append(_place("frontier", 340))
    parts += ["<h2>Memory of one GPU over the course of two steps</h2>", _place("course", 460)]
    figures.append(("course", memory(prediction, ledger)))
    parts += ["<h2>Peak of each phase</h2>", _place("phases", 120 + 48 * len(prediction.phases))]
    figures.append(("phases", phases(prediction)))
    if spans:
        shown = lanes(spans)
        parts += ["<h2>One step, lane by lane</h2>", _place("lanes", 130 + 46 * len({s.lane for s in spans}))]
        figures.append(("lanes", shown))
    parts += ["<h2>Largest tensors at the peak</h2>", tensors(ledger, str(q.get("alloc_conf", "")))]
    said = [*prediction.hints, *prediction.assumptions]
    parts += ["<h2>Assumed</h2>", "<ul>" + "".join(f"<li>{escape(s)}</li>" for s in said) + "</ul>"]
    draw = "\n".join(f"Plotly.newPlot({json.dumps(name)}, {_script(figure)}, {_CONFIG});" for name, figure in figures)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n<script>{_plotly()}</script></head>\n<body>\n" + "\n".join(parts) + f"\n<script>\n{draw}\n"
        "</script>\n</body></html>\n"
    )


_CONFIG = '{"responsive": true, "displaylogo": false}'


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise CannotTell("the page's pictures need plotly: pip install plotly. --figure draws with matplotlib") from error
    script: str = get_plotlyjs()
    return script


def _script(figure: Mapping[str, Any]) -> str:
    """JSON that is safe between <script> tags: names of models and modules are the user's."""
    text = json.dumps(figure["data"], separators=(",", ":")) + ", " + json.dumps(figure["layout"], separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _place(name: str, height: int) -> str:
    return f'<div class="plot" id="{name}" style="height:{height}px"></div>'


# -- the pictures: plotly's `data` and `layout` ---------------------------------------------------------------------------


def memory(prediction: Prediction, ledger: Ledger) -> dict[str, Any]:
    """Components stacked over the events of the run, the peak, and what PyTorch can have."""
    run = course(ledger)
    unit, name = (GiB, "GiB") if run.peak_bytes >= GiB else (MiB, "MiB")
    events = run.events.tolist()
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines", "line": {"width": 0, "shape": "hv"}, "stackgroup": "live",
            "fillcolor": colours.COMPONENT[part], "name": label(part), "x": events,
            "y": [round(v / unit, 4) for v in run.components[part].tolist()],
            "hovertemplate": f"%{{y:.3f}} {name}",
        }
        for part in colours.COMPONENT if part in run.components
    ]  # fmt: skip
    top, usable = run.peak_bytes / unit, prediction.usable_bytes / unit
    shapes: list[dict[str, Any]] = [
        {"type": "line", "x0": s.start, "x1": s.start, "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0.5}}
        for s in run.stretches[1:]
    ]
    notes: list[dict[str, Any]] = [
        {
            "x": run.peak,
            "y": top,
            "text": f"<b>peak {top:.2f} {name}</b>",
            "showarrow": True,
            "arrowhead": 2,
            "ax": 0,
            "ay": -28,
        }
    ]
    notes += [
        {
            "x": (s.start + s.stop) / 2, "y": 1.0, "yref": "paper", "yanchor": "bottom", "showarrow": False,
            "text": SHORT.get(s.phase, s.phase) + (f"<br>step {s.iteration + 1}" if s.phase != "init" else ""),
            "font": {"size": 11},
        }
        for s in run.stretches if s.stop - s.start >= 0.05 * run.num_events
    ]  # fmt: skip
    if near := 0.4 * usable < top:
        line = {"color": "black", "width": 1, "dash": "dash"}
        shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": usable, "y1": usable, "line": line})
        notes.append({"xref": "paper", "x": 0, "xanchor": "left", "y": usable, "yanchor": "bottom", "showarrow": False,
                      "text": f"what PyTorch can have: {usable:.1f} {name}", "font": {"size": 11}})  # fmt: skip
    layout = {
        **_LAYOUT,
        "hovermode": "x unified",
        "xaxis": {"title": {"text": "allocations and frees, in order"}, "range": [0, run.num_events - 1]},
        "yaxis": {
            "title": {"text": f"asked for by tensors ({name})"},
            "range": [0, 1.15 * (max(top, usable) if near else top)],
        },
        "shapes": shapes,
        "annotations": notes,
        "legend": {"traceorder": "reversed"},
        "margin": {"t": 50, "r": 10, "b": 50, "l": 70},
    }
    return {"data": data, "layout": layout}


def phases(prediction: Prediction) -> dict[str, Any]:
    """A bar for each phase at its peak, by component."""
    order = list(prediction.phases)[::-1]  # plotly draws the first at the bottom
    tallest = max(m.requested_bytes for m in prediction.phases.values())
    unit, name = (GiB, "GiB") if tallest >= GiB else (MiB, "MiB")
    data = []
    for part, colour in colours.COMPONENT.items():
        sizes = [prediction.phases[p].components.get(part, 0) / unit for p in order]
        if any(sizes):
            data.append(
                {
                    "type": "bar", "orientation": "h", "name": label(part), "marker": {"color": colour},
                    "y": [PHASE.get(p, p) for p in order], "x": [round(s, 4) for s in sizes],
                    "hovertemplate": f"%{{x:.3f}} {name}",
                }
            )  # fmt: skip
    layout = {
        **_LAYOUT,
        "barmode": "stack",
        "xaxis": {"title": {"text": f"asked for by tensors ({name})"}},
        "yaxis": {"automargin": True},
        "margin": {"t": 30, "r": 10, "b": 50, "l": 10},
        "legend": {"traceorder": "normal"},
    }
    return {"data": data, "layout": layout}


def lanes(spans: Sequence[Span]) -> dict[str, Any]:
    """What each lane does over the seconds of one step."""
    joined = _joined(spans)
    order = [lane for lane in LANE if any(s[0] == lane for s in joined)][::-1]
    order += sorted({s[0] for s in joined} - set(order))
    data = []
    for lane in order:
        own = [s for s in joined if s[0] == lane]
        data.append(
            {
                "type": "bar", "orientation": "h", "name": LANE.get(lane, lane), "showlegend": False,
                "marker": {"color": colours.LANE.get(lane, "#555555")}, "y": [LANE.get(lane, lane)] * len(own),
                "base": [round(start, 6) for _, _, start, _ in own],
                "x": [round(end - start, 6) for _, _, start, end in own],
                "text": [name for _, name, _, _ in own], "textposition": "none",
                "hovertemplate": "%{text}<br>from %{base:.4f} s for %{x:.4f} s<extra></extra>",
            }
        )  # fmt: skip
    layout = {
        **_LAYOUT,
        "barmode": "overlay",
        "xaxis": {"title": {"text": "seconds from the start of the step"}},
        "yaxis": {"automargin": True},
        "margin": {"t": 30, "r": 10, "b": 50, "l": 10},
    }
    return {"data": data, "layout": layout}


def _joined(spans: Sequence[Span]) -> list[tuple[str, str, float, float]]:
    """(lane, name, start, end) in seconds; neighbours closer than a pixel are one where there are very many."""
    gap = max((s.end_s for s in spans), default=0.0) / _SPANS if len(spans) > _SPANS else 0.0
    last: dict[str, list[Any]] = {}
    found: list[list[Any]] = []
    for span in sorted(spans, key=lambda s: s.start_s):
        if span.end_s <= span.start_s:
            continue
        before = last.get(span.lane)
        if gap and before is not None and span.start_s - before[3] < gap:
            before[3] = max(before[3], span.end_s)
            if span.name not in before[1].split(", ") and len(before[1]) < 60:
                before[1] += f", {span.name}"
            continue
        last[span.lane] = [span.lane, span.name, span.start_s, span.end_s]
        found.append(last[span.lane])
    return [(lane, name, start, end) for lane, name, start, end in found]


def frontier(plan: Plan) -> dict[str, Any]:
    """Speed against memory of the candidates; those that no other beats in both are joined."""
    rows = [(n, c) for n, c in enumerate(plan.candidates, 1) if c.tokens_per_s is not None]
    points = sorted((c.held_bytes / GiB, c.tokens_per_s or 0.0) for _, c in rows)
    best: list[tuple[float, float]] = []
    for x, y in points:
        if not best or y > best[-1][1]:
            best.append((x, y))
    unit = "samples" if plan.counts_samples else "tokens"
    speeds = [y for _, y in points] or [0.0]
    low, high = 0.85 * min(speeds), 1.1 * max(speeds)
    data = [
        {
            "type": "scatter", "mode": "lines", "x": [x for x, _ in best], "y": [y for _, y in best], "showlegend": False,
            "line": {"color": "#999999", "dash": "dot", "shape": "hv"}, "hoverinfo": "skip",
        },
        {
            "type": "scatter", "mode": "markers+text", "x": [c.held_bytes / GiB for _, c in rows],
            "y": [c.tokens_per_s for _, c in rows], "text": [str(n) for n, _ in rows], "textposition": "top center",
            "marker": {"size": 10, "color": "#0072B2"}, "customdata": [c.name for _, c in rows], "showlegend": False,
            "hovertemplate": f"%{{customdata}}<br>%{{x:.2f}} GiB, %{{y:,.0f}} {unit} a second<extra></extra>",
        },
    ]  # fmt: skip
    layout = {
        **_LAYOUT,
        "xaxis": {"title": {"text": "held by PyTorch on a GPU (GiB)"}},
        "yaxis": {"title": {"text": f"{unit} a second"}, "range": [low, high]},
        "margin": {"t": 30, "r": 10, "b": 50, "l": 70},
    }
    return {"data": data, "layout": layout}
