"""The command `accuracy`: predictions judged by measurements that others published."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError

_ABOUT = """Predicts every row of FILE.jsonl (one published measurement a line; without FILE: memplan's own collection) and
    compares.  Rows that cannot be expressed say why.  A line that is no row is named on stderr and left out.
    Exit code 0: scored, 2: there was nothing to score."""


def add_commands(commands: Any) -> None:
    """Adds `accuracy` to the sub-parsers of the command line."""
    parser = commands.add_parser("accuracy", help="score predictions against published measurements", description=_ABOUT)
    parser.add_argument("file", metavar="FILE.jsonl", nargs="?", help="rows to score (default: memplan's own collection)")
    parser.add_argument(
        "--where",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="only rows with this value: source=rasbt, metric=oom, completeness=A, strategy.method=full,lora (may be repeated)",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="rows that are predicted at once (default: one a core)")
    parser.add_argument("--write", metavar="PAGE.md", help="write the result as a page, as docs/accuracy.md is")
    errors = "write the errors by kind of run, which later predictions show as their own (planner/data/errors.json)"
    parser.add_argument("--errors", metavar="FILE.json", help=errors)
    parser.add_argument("--time", metavar="FILE.jsonl", help="score predicted speeds against published ones, and nothing else")
    parser.add_argument("--json", action="store_true", help="print JSON; sizes in bytes")
    parser.set_defaults(run=run_accuracy)


def run_accuracy(args: argparse.Namespace) -> int:
    """Prints the rows and their summary; 0 when any row was there to score."""
    from .accuracy_rows import read_rows
    from .accuracy_score import score
    from .accuracy_summary import summarise
    from .accuracy_where import select

    if args.time is not None:
        return _score_speeds(Path(args.time), as_json=args.json)
    if args.processes is not None and args.processes < 1:
        raise UserError(f"--processes {args.processes}: must be 1 or more", "Leave it out for one a core")
    file = Path(args.file) if args.file else Path(__file__).with_name("published") / "rows.jsonl"
    rows, problems = read_rows(file)
    for problem in problems:
        print(f"memplan: {file}, {problem}; the line is left out", file=sys.stderr)
    chosen = select(rows, args.where)
    if not chosen:
        why = "--where leaves no row" if rows else f"{file}: no row"
        raise UserError(why, "Loosen --where" if rows else "Give a file with one JSON object a line")
    with _bar(len(chosen)) as done:
        scored = score(chosen, processes=args.processes, done=done)
    summaries = summarise(scored)
    if args.write:
        _write_page(Path(args.write), scored, summaries)
    if args.errors:
        from ..files import write_for_user
        from ..planner.error_bars import as_text as bars_as_text
        from .accuracy_errors import published_errors

        write_for_user(args.errors, bars_as_text(published_errors(chosen, scored)))
    if args.json:
        import json

        data = {"rows": [s.to_json() for s in scored], "summary": [s.to_json() for s in summaries]}
        data["broken_lines"] = [{"line": p.line, "field": p.field, "problem": p.what} for p in problems]
        print(json.dumps(data, indent=2))
    else:
        from .accuracy_report import as_text

        print(as_text(scored, summaries))
    return 0


def _score_speeds(file: Path, *, as_json: bool) -> int:
    """Prints how close predicted tokens per second come, by source and GPU."""
    from ..planner.timeline.fit import accuracy

    report = accuracy(file)
    if not report.groups:
        raise UserError(f"{file}: no row can be asked", "The rows' fields are those of planner/timeline/published.py")
    if as_json:
        import json

        print(json.dumps(report.to_json(), indent=2))
    else:
        print(report)
    return 0


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("predicting", total=total)
        yield lambda count: progress.advance(task, count)


def _write_page(page: Path, scored: Any, summaries: Any) -> None:
    from ..files import write_for_user
    from ..planner.cache import library_versions
    from .accuracy_report import as_page
    from .published.causes import CAUSES

    versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    write_for_user(page, as_page(scored, summaries, CAUSES, versions))
