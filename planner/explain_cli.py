"""The commands `explain` and `diff`."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import CannotTell, UserError
from .options import add_hardware_options, add_model_options, add_run_options, request_from

_EXPLAIN = """What lies on the GPU at the peak of a training step: the largest tensors with the module and op that made them,
    and every module's share.  Exit code 0: explained, 2: no answer."""
_DIFF = """Two answers of `memplan fit --json` side by side: what was asked differently, and each component at its peak.
    Exit code 0: compared, 2: a file is no answer."""
_TIERS = ("gpu", "host_pinned", "host_pageable", "nvme")


def add_commands(commands: Any) -> None:
    """Adds `explain` and `diff` to the sub-parsers of the command line."""
    explain = commands.add_parser("explain", help="what lies on the GPU at the peak, tensor by tensor", description=_EXPLAIN)
    add_model_options(explain)
    add_hardware_options(explain, default="auto")
    add_run_options(explain)
    answer = explain.add_argument_group("the answer")
    answer.add_argument("--tier", choices=_TIERS, default="gpu", help="which memory (default: gpu)")
    answer.add_argument("--top", type=int, metavar="N", default=15, help="rows of each list (default: 15)")
    answer.add_argument("--json", action="store_true", help="print JSON; sizes in bytes")
    explain.set_defaults(run=run_explain)

    diff = commands.add_parser("diff", help="compare two answers of `memplan fit --json`", description=_DIFF)
    diff.add_argument("before", metavar="A.json")
    diff.add_argument("after", metavar="B.json")
    diff.add_argument("--json", action="store_true", help="print JSON; sizes in bytes")
    diff.set_defaults(run=run_diff)


def run_explain(args: argparse.Namespace) -> int:
    """Prints the two tables; 0."""
    import json

    from .explain import explain, render
    from .ledger import Tier
    from .predict import predict_with_ledger
    from .progress import progress
    from .trace.source import TraceSource

    if args.top < 1:
        raise UserError(f"--top {args.top}: must be 1 or more", "Leave it out for 15")
    request = request_from(args)
    with progress(f"recording one step of {args.model}", enabled=not args.json):
        prediction, ledger = predict_with_ledger(request, TraceSource())
        if ledger is None:
            raise CannotTell(prediction.reason)
        found = explain(ledger, tier=Tier[args.tier.upper()], alloc_conf=request.alloc_conf)
    print(json.dumps(found.to_json(), indent=2) if args.json else render(found, top=args.top))
    return 0


def run_diff(args: argparse.Namespace) -> int:
    """Prints the comparison; 0."""
    import json
    from dataclasses import asdict

    from .explain import changed, differences, read_answer, render_difference

    before, after = read_answer(args.before), read_answer(args.after)
    if args.json:
        asked = [
            {"option": key, "before": old, "after": new} for key, old, new in changed(before["question"], after["question"])
        ]
        rows = [{**asdict(d), "change": d.change} for d in differences(before, after)]
        print(json.dumps({"asked": asked, "bytes": rows}, indent=2))
    else:
        print(render_difference(before, after))
    return 0
