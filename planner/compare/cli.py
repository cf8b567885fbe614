"""The command `compare`."""

from __future__ import annotations

import argparse
import contextlib
import copy
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell, UserError
from ..options import ADAPTER_OPTIONS, add_hardware_options, add_model_options, add_run_options, request_from

if TYPE_CHECKING:
    from ..request import Request

_WORDS = """Every way to train MODEL on one GPU in one table: what each optimizer keeps in bytes a parameter (weights, master
    weights, gradients, state), what its step makes beside that, what a checkpoint takes, the peak, and the largest batch
    that fits; with gradients kept or released inside backward, and under several methods.
    Exit code 0: a table was made, 2: not one way could be answered."""
_DEFAULT = (
    "adamw,adafactor,sgd,flash-adamw,adamw-8bit,paged-adamw-8bit,torchao-adamw-4bit,lion,muon,galore-adamw,apollo-mini,lomo"
)
_TOP = "24"
_ALL = "all"
_SORTS = ("peak", "kept", "checkpoint")
_RELEASES = ("both", "yes", "no")
_PLURALS = {"optimizer": "optimizers", "method": "methods", "precision": "precisions"}


def add_commands(commands: Any) -> None:
    """Adds `compare` to the sub-parsers of the command line."""
    parser = commands.add_parser(
        "compare",
        help="compare optimizers and methods: bytes a parameter, step, checkpoint, peak, largest batch",
        description=_WORDS,
        conflict_handler="resolve",  # --grad-release has three values here
    )
    add_model_options(parser)
    add_hardware_options(parser, default="auto")
    add_run_options(parser)
    answer = parser.add_argument_group("the comparison")
    names = f"all of `memplan optimizers list`, or names, with options: flash-adamw:master_weight_bits=32 (default: {_DEFAULT})"
    answer.add_argument("--optimizers", metavar="all|A,B", default=_DEFAULT, help=names)
    answer.add_argument("--methods", metavar="A,B", help="full,lora,qlora,galore,badam ... (default: full)")
    answer.add_argument("--precisions", metavar="A,B", help="bf16-autocast,bf16 ... (default: as the weights are stored)")
    released = "whether gradients are dropped inside backward (default: both ways)"
    answer.add_argument("--grad-release", choices=_RELEASES, default="both", help=released)
    answer.add_argument("--sort", choices=_SORTS, default="peak", help="what comes first (default: the lowest peak)")
    answer.add_argument(
        "--top", metavar="N|all", default=_TOP, help=f"rows whose largest batch is searched, from the first (default: {_TOP})"
    )
    answer.add_argument("--json", action="store_true", help="print JSON; sizes in bytes")
    parser.set_defaults(run=run_compare)


def run_compare(args: argparse.Namespace) -> int:
    """Prints the table; 0 when it has a row."""
    import gc
    import json
    import os
    import sys

    from ..progress import progress
    from ..trace.source import TraceSource
    from .compare import compare
    from .table import render
    from .ways import RELEASES, optimizers_of, ways

    top = _top(args.top)
    if args.strategy not in (None, "single"):
        raise UserError(f"--strategy {args.strategy}: a comparison is of one GPU", "Use `memplan study` for several")
    for one, many in _PLURALS.items():
        if getattr(args, one) is not None:
            raise UserError(f"--{one} {getattr(args, one)}: a comparison takes several", f"Use --{many} A,B")
    optimizers = optimizers_of(args.optimizers)
    bases = [
        _base(args, method, precision)
        for method in _list(args.methods, "--methods")
        for precision in _list(args.precisions, "--precisions")
    ]
    for base in bases:
        with contextlib.suppress(CannotTell):  # that one is left out with its reason; a mistake ends it here
            (base.but(strategy="release") if base.method == "lomo" and args.grad_release != "no" else base).check()
    with progress(f"recording one step of {args.model}", enabled=not args.json) as say:
        asked = ways(bases, optimizers, RELEASES[args.grad_release])
        gc.disable()  # millions of small objects and no cycles: looking for some takes a tenth of the time
        found = compare(asked, TraceSource(), top=top, sort=args.sort, say=say)
        gc.enable()
    try:
        print(json.dumps(found.to_json(), indent=2) if args.json else render(found), flush=True)
    except BrokenPipeError:  # `memplan compare ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if found.rows else 2


def _top(text: str) -> int | None:
    """Rows whose largest batch is searched; None for all."""
    if text == _ALL:
        return None
    if not text.isdecimal():
        raise UserError(f"--top {text}: must be a number of rows, or {_ALL}", f"Leave it out for {_TOP}")
    return int(text)


def _base(args: argparse.Namespace, method: str | None, precision: str | None) -> Request:
    """The question without its optimizer."""
    from ...models.adapters import ADAPTER_METHODS

    asked = copy.copy(args)
    asked.method, asked.precision, asked.strategy, asked.grad_release = method, precision, "single", False
    if method not in ADAPTER_METHODS:  # the options of adapters are for the methods that have one
        for option in ADAPTER_OPTIONS:
            setattr(asked, option, None if not isinstance(getattr(args, option), bool) else False)
    return request_from(asked)


def _list(text: str | None, option: str) -> list[str | None]:
    if text is None:
        return [None]
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UserError(f"{option} {text!r}: there is nothing between two commas", "Write names with a comma between them")
    return list(dict.fromkeys(parts))
