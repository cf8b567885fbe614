"""The command `report`, and the pictures of `fit`: `--html` and `--figure`."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell, UserError

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..prediction import Prediction
    from ..request import Request
    from ..search.plan import Plan
    from ..timeline.engine import Span
    from ..trace.source import TraceSource

_WORDS = """Shows an answer again, from its file alone: plan.json (or the folder that holds it), or what `memplan fit --json`
    printed.  The configuration is simulated anew.  Exit code 0: shown, 2: the file is no answer."""
_HTML = "write one page that opens without a network: memory over a step, phases, lanes, tensors"
_FIGURE = "draw the memory of a step"


def add_commands(commands: Any) -> None:
    """Adds `report` to the sub-parsers of the command line."""
    parser = commands.add_parser("report", help="show a plan or an answer again, as text, page or picture", description=_WORDS)
    parser.add_argument("file", metavar="FILE", help="plan.json, its folder, or the JSON of `memplan fit`")
    parser.add_argument("--row", type=int, metavar="N", default=1, help="which row of a plan (default: 1)")
    add_options(parser)
    parser.set_defaults(run=run_report)


def add_options(parser: Any) -> None:
    """Adds `--html` and `--figure`."""
    parser.add_argument("--html", metavar="FILE.html", help=_HTML)
    parser.add_argument("--figure", metavar="FILE", help=f"{_FIGURE}; .png or .svg")


def run_report(args: argparse.Namespace) -> int:
    """Prints the report and writes what was asked for; 0."""
    from ..progress import progress
    from ..report import print_report
    from ..trace.source import TraceSource

    check_options(args)
    request, plan = read(args.file, args.row)
    with progress(f"recording one step of {request.model.name}"):
        prediction, ledger, spans = simulate_again(request, TraceSource())
    print_report(prediction)
    write(args, prediction, ledger, spans, plan)
    return 0


def check_options(args: argparse.Namespace) -> None:
    """Raises UserError for a file that could not be written: before the work, not after it."""
    if args.figure:
        check_figure(args.figure)
    if args.html:
        _check_folder(args.html)


def check_figure(path: str) -> None:
    """Raises UserError for a picture that could not be written."""
    from ..study.figure import kind_of

    kind_of(path)
    _check_folder(path)


def _check_folder(path: str) -> None:
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise UserError(f"cannot write {path!r}: there is no such folder", "Choose a folder that exists")


def read(path: str, row: int = 1) -> tuple[Request, Plan | None]:
    """The question that a file answers; with a plan, that of its row `row`, from 1.  Raises UserError."""
    import json
    from pathlib import Path

    from ..engines.plan_file import is_plan, written_of
    from ..question import request_of
    from ..search.api import request_of_plan
    from ..search.plan import Plan

    place = Path(path)
    file = place / "plan.json" if place.is_dir() else place
    expected = "Name a plan.json, its folder, or a file with what `memplan fit --json` prints"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else f"is not JSON: {error}"
        raise UserError(f"cannot read {str(file)!r}: {what}", expected) from error
    if not isinstance(data, dict):
        raise UserError(f"{file}: is no answer of memplan", expected)
    if data.get("kind") == "memplan plan":
        plan = Plan.from_json(data, str(file))
        return request_of_plan(plan, row - 1, str(file)), plan
    if row != 1:
        raise UserError(f"--row {row}: {file} holds one answer", "Leave --row out")
    if is_plan(data):
        return written_of(data, str(file)).request, None
    if data.get("question") is None:
        raise UserError(f"{file}: is no answer of memplan", expected)
    return request_of(data["question"], str(file)), None


def simulate_again(request: Request, traces: TraceSource) -> tuple[Prediction, Ledger, tuple[Span, ...]]:
    """The answer, its ledger, and the lanes of one step (none where the time cannot be told).  Raises CannotTell."""
    from ..predict import answer, simulated
    from ..timeline.engine import Engine
    from ..timeline.step_time import StepPlan

    request.check()
    trace = traces.step(request)
    run = simulated(request, trace)
    try:
        spans = tuple(Engine().run(StepPlan(request, trace, run.ledger, run.work).tasks()))
    except CannotTell:
        spans = ()
    return answer(request, trace, run), run.ledger, spans


def write(
    args: argparse.Namespace, prediction: Prediction, ledger: Ledger, spans: tuple[Span, ...], plan: Plan | None = None
) -> None:
    """Writes what `--html` and `--figure` name."""
    import sys

    if args.figure:
        from .figure import write_figure

        write_figure(args.figure, prediction, ledger)
        print(f"wrote {args.figure}", file=sys.stderr)
    if args.html:
        from .page import write_page

        write_page(args.html, prediction, ledger, spans, plan)
        print(f"wrote {args.html}", file=sys.stderr)
