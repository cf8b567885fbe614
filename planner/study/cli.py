"""The command `study`."""

from __future__ import annotations

import argparse
import copy
import functools
import os
from typing import Any

from ...errors import UserError
from ..options import add_hardware_options, add_model_options, add_run_options, request_from

_WORDS = """Strategies side by side: what each step of training (init, forward, backward, optimizer step) holds, by component,
    on the GPU, in pinned and pageable host memory and on NVMe, and what is saved against the first column.
    Exit code 0: a table was made, 2: not one column could be answered."""
_DEFAULT = "ddp,zero1,zero2,zero3,fsdp2"


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("study", help="compare strategies: every step, component and place", description=_WORDS)
    add_model_options(parser)
    add_hardware_options(parser, default="auto")
    add_run_options(parser)
    answer = parser.add_argument_group("the study")
    answer.add_argument("--strategies", metavar="A,B", default=_DEFAULT, help=f"columns (default: {_DEFAULT})")
    answer.add_argument("--figure", metavar="FILE", help="draw it: a name that ends in .png or .svg")
    answer.add_argument("--html", metavar="FILE", help="write one page with the picture and the table")
    answer.add_argument("--json", action="store_true", help="print JSON; sizes in bytes")
    parser.set_defaults(run=run_study)


def run_study(args: argparse.Namespace) -> int:
    """Prints the table, draws the picture; 0 when there is a column."""
    import json
    import shutil
    import sys

    from ..progress import progress
    from ..request import OFFLOADS, STRATEGIES, one_of
    from ..trace.source import TraceSource
    from .figure import kind_of, write_figure
    from .page import write_page
    from .study import combinations, study
    from .table import WIDTH, render

    if args.strategy is not None:
        raise UserError(f"--strategy {args.strategy}: a study takes several", "Use --strategies A,B")
    for path in filter(None, (args.figure, args.html)):  # said before the work, not after it
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise UserError(f"cannot write {path!r}: there is no such folder", "Choose a folder that exists")
    if args.figure:
        kind_of(args.figure)
    strategies, offloads = _list(args.strategies, "--strategies"), _list(args.offload or "none", "--offload")
    for name in strategies:
        one_of("--strategy", name, STRATEGIES)
    for name in (part for offload in offloads for part in offload.split("+") if part != "none"):
        one_of("--offload", name, tuple(part for parts in OFFLOADS.values() for part in parts))
    pairs = combinations(strategies, offloads)

    def question(strategy: str, offload: str) -> Any:
        asked = copy.copy(args)
        asked.strategy, asked.offload = strategy, offload
        if strategy == "single":
            asked.gpus = asked.nodes = 1
        return request_from(asked)

    with progress(f"recording one step of {args.model}", enabled=not args.json) as say:
        asked = [(name, functools.partial(question, strategy, offload)) for name, strategy, offload in pairs]
        found = study(asked, TraceSource(), say)
    if args.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
        print(render(found, max(width, 60)))
    if not found.columns:
        return 2
    for path, write in ((args.figure, write_figure), (args.html, write_page)):
        if path:
            write(path, found)
            print(f"wrote {path}", file=sys.stderr)
    return 0


def _list(text: str, option: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UserError(f"{option} {text!r}: there is nothing between two commas", "Write names with a comma between them")
    return list(dict.fromkeys(parts))
