"""The command `scenarios`: the questions that people ask most, with the plan of each."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import UserError

_ABOUT = """Plans the questions that people ask most, and says where published runs agree.  Takes some minutes.
    Exit code 0: no published run differs, 1: one does."""


def add_commands(commands: Any) -> None:
    """Adds `scenarios` to the sub-parsers of the command line."""
    parser = commands.add_parser("scenarios", help="the plans of the questions that people ask most", description=_ABOUT)
    parser.add_argument("--published", metavar="FILE.jsonl", help="published measurements, as for `memplan accuracy`")
    parser.add_argument("--only", metavar="N,M", help="some of the questions, counted from 1")
    parser.add_argument("--write", metavar="FILE.md", action="append", default=[], help="write the table between its markers")
    parser.set_defaults(run=run_scenarios)


def run_scenarios(args: argparse.Namespace) -> int:
    """Prints the table; 1 where a published run differs."""
    from ..planner.progress import progress
    from .accuracy_rows import read_rows
    from .scenarios import SCENARIOS, all_answers, page, table, write_between

    only = _numbers(args.only, len(SCENARIOS))
    for name in args.write:
        if not Path(name).is_file():
            raise UserError(f"--write {name}: there is no such file", "Name a file that has the markers of the table")
    rows = read_rows(args.published)[0] if args.published else []
    with progress("planning") as say:
        answers = all_answers(rows, only, say)
    print(table(answers))
    for name in args.write:
        try:
            write_between(Path(name), table(answers) if Path(name).name == "README.md" else page(answers))
        except ValueError as error:
            raise UserError(f"--write {name}: {error}", "Put the two markers where the table shall stand") from error
    return int(any(answer.agrees is False for answer in answers))


def _numbers(text: str | None, most: int) -> list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if any(not 1 <= n <= most for n in numbers):
        raise UserError(f"--only {text!r}: expected numbers of 1 to {most}", "Write for example --only 1,3")
    return numbers
