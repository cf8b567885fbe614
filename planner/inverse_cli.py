"""`memplan fit MODEL --max-batch | --max-seq | --min-gpus`: what the user types."""

from __future__ import annotations

import argparse
import copy
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .options import request_from, settle_model

if TYPE_CHECKING:
    from .inverse import Inverse
    from .request import Request

_ASKED = ("max_batch", "max_seq", "min_gpus")


def add_options(group: argparse._ArgumentGroup) -> None:
    """The three questions, one at a time."""
    one = group.add_mutually_exclusive_group()
    one.add_argument("--max-batch", action="store_true", help="find the largest micro batch that fits")
    one.add_argument("--max-seq", action="store_true", help="find the longest samples that fit, up to the model's own limit")
    one.add_argument("--min-gpus", action="store_true", help="find the fewest GPUs that fit (default strategy: fsdp2)")


def is_asked(args: argparse.Namespace) -> bool:
    return any(getattr(args, name) for name in _ASKED)


def run(args: argparse.Namespace) -> int:
    """Prints the figure, why there is no better one, and the whole answer there; 0: found, 1: nothing fits, 2: no answer."""
    import json

    from ..version import __version__
    from .inverse import in_words
    from .progress import progress

    asked = next(name for name in _ASKED if getattr(args, name))
    for option in ("write", "html", "figure"):
        if getattr(args, option, None):
            raise UserError(f"--{option} with {_typed(asked)}: it takes one answer", f"Find the figure first, then --{option}")
    for option, said in (
        ("--micro-batch", args.micro_batch and asked == "max_batch"),
        ("--seq", args.seq and asked == "max_seq"),
    ):
        if said:
            raise UserError(f"{option} with {_typed(asked)}: that is what is searched", f"Leave {option} out")
    if asked == "min_gpus" and (args.gpus or args.nodes):
        raise UserError("--min-gpus with --gpus or --nodes: that is what is searched", "Leave them out")
    settle_model(args)
    with progress(f"recording one step of {args.model}", enabled=not args.json):
        found = _found(asked, args)
    if args.json:
        print(json.dumps({"version": __version__, **found.to_json()}, indent=2), flush=True)
    else:
        from .report import print_report

        print(in_words(found) + "\n")
        shown = found.prediction or found.next_prediction
        if shown is not None:
            print_report(shown)
    return 1 if found.value is None else 0


def _typed(asked: str) -> str:
    return "--" + asked.replace("_", "-")


def _found(asked: str, args: argparse.Namespace) -> Inverse:
    from .inverse import fewest, largest_batch, longest
    from .trace.source import TraceSource

    traces = TraceSource()
    if asked == "max_batch":
        return largest_batch(request_from(args), traces, strict=args.strict)
    if asked == "max_seq":
        return longest(request_from(args), traces, strict=args.strict)
    notes = _share_out(args)
    return fewest(lambda gpus, nodes: _with(args, gpus, nodes), traces, strict=args.strict, notes=notes)


def _with(args: argparse.Namespace, gpus: int, nodes: int) -> Request:
    changed: Any = copy.copy(args)
    changed.gpus, changed.nodes = gpus, nodes
    return request_from(changed)


def _share_out(args: argparse.Namespace) -> tuple[str, ...]:
    """A strategy that shares the model out, where neither the options nor their file name one."""
    from .inverse import sharing

    if args.strategy is not None or args.grad_release:
        return ()
    options: dict[str, Any] = {"strategy": None}
    if args.from_file:
        from .engines.detect import read_config

        said = read_config(args.from_file).said
        options["strategy"] = said["strategy"].value if "strategy" in said else None
    notes = sharing(options)
    if notes:
        args.strategy = options["strategy"]
    return notes
