"""A suite's result as text for a terminal, and as one section of a Markdown page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..files import write_whole
from .suite import TypeRow, TypesResult, ZooResult, ZooRow
from .tiny import SIZES

_HEAD = ("architecture", "kind", "task", "predicted", "measured", "ratio", "bytes apart", "figures equal")
_RIGHT = frozenset({"predicted", "measured", "ratio", "bytes apart", "figures equal"})
_TITLE = """# The zoo

Written by `memplan validate --suite zoo --write docs/zoo.md` and `memplan validate --suite types --write docs/zoo.md`; each
renews its own section.
"""
_ABOUT_ZOO = """Each architecture is a narrow config of its family with random weights.  Two full training steps (AdamW) run for
real on the CPU, in fp32; every event of torch's allocator is counted.  *Predicted* and *measured* are the peaks of live bytes
of all steps.  *Figures equal* says how many of all compared figures are equal to the byte: the peak and the rest of every
phase, in the first step and in later ones, and the bytes of every component."""
_ABOUT_TYPES = """Every model type in transformers' `CONFIG_MAPPING`, from the defaults of its config made tiny: *narrow* (few
layers, small widths), else *shallow* (few layers), else the *default* itself.  One training step is traced for a GPU; nothing
is run."""


def zoo_text(result: ZooResult) -> str:
    """The table, then the summary."""
    cells = [_HEAD, *(_cells(row) for row in result.rows)]
    widths = [max(len(c[i]) for c in cells) for i in range(len(_HEAD))]
    lines = []
    for row in cells:
        aligned = [text.rjust(w) if head in _RIGHT else text.ljust(w) for text, w, head in zip(row, widths, _HEAD, strict=True)]
        lines.append("  ".join(aligned).rstrip())
    failed = [f"{row.name}: {row.reason}" for row in result.rows if row.reason]
    return "\n".join([*lines, "", *_zoo_summary(result), *(["", "Could not run:", *failed] if failed else [])])


def types_text(result: TypesResult) -> str:
    """How many trace, then the reasons with the types that they hold for."""
    lines = _types_summary(result)
    for group, count in result.groups:
        lines += ["", f"{count} x {group}:"]
        lines += [f"  {row.name}: {row.reason}" for row in result.rows if row.group == group]
    return "\n".join(lines)


def write_section(result: ZooResult | TypesResult, path: str | os.PathLike[str]) -> None:
    """Puts the result's section into a Markdown page; what else stands there stays."""
    place = Path(path)
    name, section = ("zoo", _zoo_markdown(result)) if isinstance(result, ZooResult) else ("types", _types_markdown(result))
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    block = f"{begin}\n{section}\n{end}\n"
    text = place.read_text(encoding="utf-8") if place.exists() else _TITLE
    if begin in text and end in text:
        before, _, rest = text.partition(begin)
        text = before + block + rest.partition(end)[2].removeprefix("\n")
    else:
        text = f"{text.rstrip()}\n\n{block}"
    place.parent.mkdir(parents=True, exist_ok=True)
    write_whole(place, text)


def _zoo_summary(result: ZooResult) -> list[str]:
    worst = result.worst
    lines = [
        f"{result.within} of {len(result.rows)} architectures within {result.tolerance:.1%}, {result.exact} exactly equal, "
        f"{sum(bool(row.reason) for row in result.rows)} could not run."
    ]
    if worst is not None and worst.ratio is not None and not worst.exact:
        lines.append(f"Worst: {worst.name}, {abs(worst.ratio - 1.0):.4%} ({worst.difference_bytes:+,} bytes).")
    figures, equal = sum(r.figures for r in result.rows), sum(r.equal_figures for r in result.rows)
    lines.append(f"Of all {figures:,} figures (phases and components as well), {equal:,} are equal to the byte.")
    return lines


def _types_summary(result: TypesResult) -> list[str]:
    sizes = [(size, sum(row.size == size for row in result.rows)) for size in SIZES]
    of = ", ".join(f"{count} {size}" for size, count in sizes if count)
    parts = sum(row.is_part for row in result.rows)
    lines = [f"{result.traced} of {len(result.rows)} model types trace" + (f" ({of})." if of else ".")]
    if parts:
        lines.append(
            f"Without the {parts} that are only parts of another model: {result.traced} of {len(result.rows) - parts}."
        )
    return lines


def _zoo_markdown(result: ZooResult) -> str:
    rule = ["---:" if head in _RIGHT else "---" for head in _HEAD]
    lines = ["## Predicted and measured", "", _ABOUT_ZOO, "", f"Made with {_versions(result.versions)}.", ""]
    lines += [*_zoo_summary(result), "", _row(_HEAD), _row(rule), *(_row(_cells(row)) for row in result.rows)]
    failed = [f"- {row.name}: {_escaped(row.reason)}" for row in result.rows if row.reason]
    return "\n".join([*lines, *(["", "Could not run:", "", *failed] if failed else [])])


def _types_markdown(result: TypesResult) -> str:
    lines = [
        "## All model types",
        "",
        _ABOUT_TYPES,
        "",
        f"Made with {_versions(result.versions)}.",
        "",
        *_types_summary(result),
    ]
    lines += ["", "| why not | types |", "| --- | ---: |", *(_row((group, str(count))) for group, count in result.groups)]
    lines += ["", "| model type | traced as | size | why not |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(_type_row(row) for row in result.rows)])


def _cells(row: ZooRow) -> tuple[str, ...]:
    head = (row.name, row.kind, row.task)
    predicted = f"{row.predicted_bytes:,}" if row.predicted_bytes is not None else "-"
    if row.measured_bytes is None or row.ratio is None:
        return (*head, predicted, "-", "-", "-", "-")
    figures = f"{row.equal_figures}/{row.figures}"
    return (*head, predicted, f"{row.measured_bytes:,}", f"{row.ratio:.6f}", f"{row.difference_bytes:+,}", figures)


def _type_row(row: TypeRow) -> str:
    if not row.reason:
        return _row((row.name, row.task, row.size, ""))
    return _row((row.name, row.task, "", _escaped(row.reason if row.own_reason else row.group)))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if name in ("torch", "transformers"))
