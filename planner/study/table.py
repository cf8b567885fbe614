"""A study as text: one column a strategy, one block of rows a step, then places, savings and verdicts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ...units import GiB, MiB
from ..wording import COMPONENT, PHASE
from .study import Column, Study

WIDTH = 100
_LABEL = 36
_LEAST_CELL = 9
_PLACES = {"host_pinned": "pinned host memory", "host_pageable": "pageable host memory", "nvme": "NVMe"}
_VERDICT = {"fits": "fits", "tight": "tight", "does_not_fit": "no", "unknown": "?"}


def render(study: Study, width: int = WIDTH) -> str:
    """The tables, as many columns beside each other as `width` takes; then what was left out, and why."""
    if not study.columns:
        parts = ["CANNOT TELL"]
    else:
        unit, name = (MiB, "MiB") if max(c.prediction.reserved_peak_bytes for c in study.columns) < GiB else (GiB, "GiB")
        parts = ["\n".join(wrapped for line in _heading(study, name) for wrapped in textwrap.wrap(line, width))]
        cell = max([_LEAST_CELL, *(len(word) for c in study.columns for word in _heads(c.name))])
        room = max(1, (width - _LABEL) // (cell + 2))
        parts += [_block(study, study.columns[i : i + room], unit, cell) for i in range(0, len(study.columns), room)]
    if study.left_out:
        parts.append(_listed("Left out", [f"{name}: {reason}" for name, reason in study.left_out], width))
    said = _said(study)
    if said:
        parts.append(_listed("Advice", said, width))
    return "\n\n".join(parts)


def _listed(title: str, items: Sequence[str], width: int) -> str:
    lines = (line for item in items for line in textwrap.wrap(item, width, initial_indent="  - ", subsequent_indent="    "))
    return "\n".join([title, *lines])


def _heading(study: Study, unit: str) -> list[str]:
    first = study.columns[0].prediction
    q = first.question
    size = f"{first.num_params / 1e6:,.0f} million parameters"
    gpus, nodes = study.scale
    many = f"{gpus} x {first.gpu}" + (f" on {nodes} machines" if nodes > 1 else "")
    what = f"{q['model']} ({q['task']}), {size}, on {many}"
    how = f"micro batch {q['micro_batch_size']}, sequence {q['seq_len']}, {q['optimizer']}; sizes in {unit}, of one process"
    return [what, how]


def _heads(name: str) -> list[str]:
    """A column's name in lines: one word or part each."""
    return name.replace(" offloaded", "").replace("+", " +").replace(",", "").split()


def _block(study: Study, columns: Sequence[Column], unit: int, cell: int) -> str:
    def line(label: str, cells: Sequence[str]) -> str:
        return (f"{label:<{_LABEL}}" + "".join(f"  {text:>{cell}}" for text in cells)).rstrip()

    def size(num_bytes: int) -> str:
        return f"{num_bytes / unit:,.2f}" if num_bytes else "-"

    heads = [_heads(c.name) for c in columns]
    tall = max(map(len, heads))
    lines = [line("", [(h + [""] * tall)[i] for h in heads]) for i in range(tall)]
    for step in columns[0].steps:
        peaks = [c.steps[step].get("gpu") for c in columns]
        lines.append(line(f"GPU, {PHASE[step]}", []))
        for part in COMPONENT:
            sizes = [peak.components.get(part, 0) if peak else 0 for peak in peaks]
            if max(sizes) >= unit / 200:  # less would print as 0.00
                lines.append(line(f"  {COMPONENT[part]}", [size(n) for n in sizes]))
        lines.append(line("= in use by tensors", [size(peak.total_bytes if peak else 0) for peak in peaks]))
    lines.append(line("GPU, the highest of all steps", []))
    lines.append(line("  held by PyTorch (reserved)", [size(c.prediction.reserved_peak_bytes) for c in columns]))
    lines.append(line("  what nvidia-smi shows", [size(c.prediction.device_peak_bytes) for c in columns]))
    lines.append(line(f"  saving against {study.columns[0].name}", [_percent(study, c) for c in columns]))
    for place, words in _PLACES.items():
        sizes = [c.peak_bytes(place) for c in columns]
        if max(sizes) < unit / 200:
            continue
        lines.append(line(f"{words[:1].upper()}{words[1:]}", []))
        for step in columns[0].steps:
            sizes = [c.steps[step][place].total_bytes if place in c.steps[step] else 0 for c in columns]
            lines.append(line(f"  {PHASE[step]}", [size(n) for n in sizes]))
        if place == "host_pinned":
            taken = [c.prediction.host.pinned_reserved_bytes for c in columns]
            lines.append(line("  as the pinned allocator takes it", [size(n) for n in taken]))
    if any(c.prediction.host.node_bytes > unit / 200 for c in columns):
        lines.append(line("Host memory of one machine", [size(c.prediction.host.node_bytes) for c in columns]))
    lines.append(line("Does it fit?", [_VERDICT[c.prediction.verdict.value] for c in columns]))
    return "\n".join(lines)


def _percent(study: Study, column: Column) -> str:
    return "-" if column is study.columns[0] else f"{100 * study.saving(column):.1f} %"


def _said(study: Study) -> list[str]:
    """Hints of the columns, each once."""
    found: dict[str, list[str]] = {}
    for column in study.columns:
        for hint in column.prediction.hints:
            found.setdefault(hint, []).append(column.name)
    return [f"{'; '.join(names)}: {hint}" for hint, names in found.items()]
