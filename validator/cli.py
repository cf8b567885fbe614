"""The command `validate` (`accuracy` is in `accuracy_cli`): runs the step for real and compares it with the prediction."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files import write_for_user
from ..planner.options import add_model_options, add_run_options, add_scale_options
from . import accuracy_cli, scenarios_cli

if TYPE_CHECKING:
    from .compare import Comparison
    from .store import Record

_ABOUT = """Runs one or more training steps of MODEL for real, on this machine's GPU or else on its CPU, measures every phase,
    and compares with the prediction.  Weights are random: nothing is downloaded but a model's config.
    With --suite, many models at once and no MODEL.  Exit code 0: the peaks agree, 1: they do not (or one of a suite could not
    be run), 2: it could not be run."""


def add_commands(commands: Any) -> None:
    """Adds `validate`, `accuracy` and `scenarios` to the sub-parsers of the command line."""
    accuracy_cli.add_commands(commands)
    scenarios_cli.add_commands(commands)
    parser = commands.add_parser("validate", help="run the step for real and compare with the prediction", description=_ABOUT)
    add_model_options(parser)
    for action in parser._actions:  # --records needs no model
        if action.dest == "model":
            action.nargs, action.required = "?", False
    add_scale_options(parser)
    add_run_options(parser)
    how = parser.add_argument_group("the real run")
    how.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPU where there is one (default)"
    )
    how.add_argument(
        "--steps", type=int, metavar="N", default=2, help="optimizer steps (default: 2, the first makes the state)"
    )
    how.add_argument("--threads", type=int, metavar="N", default=1, help="threads of a CPU run; 0: torch's choice (default: 1)")
    how.add_argument("--timeout", type=float, metavar="SECONDS", help="stop a run that takes longer (default: wait)")
    how.add_argument(
        "--tolerance", type=float, metavar="SHARE", help="how far the peaks may be apart (default: 0.001, GPU 0.01)"
    )
    how.add_argument(
        "--processes",
        action="store_true",
        help="on the CPU: run every rank of --strategy in a process of its own, as on GPUs (default: one process is one rank)",
    )
    how.add_argument(
        "--runtime",
        choices=("own", "zo2"),
        default="own",
        help="of --method mezo and zo2: memplan's own (default), or zo2 itself, where that package and a GPU are there",
    )
    how.add_argument("--snapshot", metavar="FILE.pickle", help="write the GPU's memory history for pytorch.org/memory_viz")
    kept = parser.add_argument_group("the records")
    kept.add_argument("--record", action=argparse.BooleanOptionalAction, default=True, help="remember the result (default)")
    kept.add_argument("--store", metavar="PATH", help="where results are remembered (default: memplan's own folder)")
    kept.add_argument("--records", action="store_true", help="list what was validated before, and run nothing")
    many = parser.add_argument_group("many models at once, on the CPU")
    many.add_argument(
        "--suite",
        choices=("zoo", "types", "zero"),
        help="zoo: every architecture of memplan's zoo, run for real; types: every model type of transformers, traced only; "
        "zero: ZeRO's stages and offload, by the real DeepSpeed engine",
    )
    many.add_argument("--only", metavar="NAME,...", help="these models of the suite (default: all)")
    many.add_argument("--jobs", type=int, metavar="N", help="models at once (default: one a core, 4 at most)")
    many.add_argument("--write", metavar="FILE.md", help="put the table into a Markdown page as well; its other parts stay")
    written = parser.add_argument_group("what --write has left")
    written.add_argument(
        "--plan",
        metavar="DIR|plan.json",
        help="run the folder of `memplan fit --write` or `memplan plan --write` as it is, with fresh weights, instead of MODEL",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; sizes in bytes")
    parser.set_defaults(run=run_validate, gpu="auto", gpu_memory=None)


def run_validate(args: argparse.Namespace) -> int:
    """Prints the comparison, or the records; 0 agrees, 1 differs, 2 could not run."""
    import json

    if args.suite is not None:
        return _run_suite(args)
    for option in ("only", "jobs", "write"):
        if getattr(args, option) is not None:
            raise UserError(f"--{option} belongs to --suite", "Add --suite zoo, or leave it out")
    if args.records:
        from .store import records

        found = records(args.store)
        print(json.dumps([vars(r) for r in found], indent=2) if args.json else _table(found))
        return 0
    comparison = _compare(args)
    if args.json:
        from ..version import __version__

        print(json.dumps({"version": __version__, **comparison.to_json()}, indent=2))
    else:
        print(comparison)
    return comparison.exit_code


def _run_suite(args: argparse.Namespace) -> int:
    """Lines of progress go to stderr, the table to stdout."""
    import json
    import sys

    from .suite import run_suite
    from .suite_report import write_section

    if args.model is not None:
        raise UserError(
            f"--suite {args.suite} takes no MODEL, got {args.model}", "Use --only NAME,... to choose from the suite"
        )
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs {args.jobs}: must be 1 or more", "Leave it out for the default")
    _check_timeout(args.timeout)
    if args.suite == "zero":
        return _run_zero(args)
    result = run_suite(
        args.suite,
        only=[name for name in (args.only or "").split(",") if name],
        tolerance=args.tolerance,
        timeout_s=args.timeout,
        workers=args.jobs,
        on_done=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if args.write is not None:
        write_section(result, args.write)
    if args.json:
        from ..version import __version__

        print(json.dumps({"version": __version__, **result.to_json()}, indent=2))
    else:
        print(result)
    return result.exit_code


def _run_zero(args: argparse.Namespace) -> int:
    """Every number of every configuration, predicted and measured; 1 when one is not right."""
    import json
    import sys

    from .zero_cases import CASES
    from .zero_suite import page, render, run

    wanted = [name for name in (args.only or "").split(",") if name]
    chosen = [case for case in CASES if not wanted or any(name in case.name for name in wanted)]
    if not chosen:
        raise UserError(f"--only {args.only}: no configuration has that in its name", "Leave it out for all")
    rows = run(chosen, lambda line: print(line, file=sys.stderr, flush=True))
    if args.write is not None:
        write_for_user(args.write, page(rows))
    if args.json:
        print(json.dumps({"rows": [{**vars(row), "ratio": row.ratio, "right": row.is_right} for row in rows]}, indent=2))
    else:
        print(render(rows))
    return int(any(not row.is_right for row in rows))


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and timeout_s <= 0:
        raise UserError(f"--timeout {timeout_s:g}: must be more than 0", "Leave it out to wait")


def _compare(args: argparse.Namespace) -> Comparison:
    from dataclasses import replace

    from ..planner.options import request_from
    from ..planner.progress import progress
    from .api import ANY_GPU, resolve_device, run
    from .store import remember

    if args.plan is not None:
        return _compare_plan(args)
    if args.model is None:
        raise UserError("MODEL is missing", "Name a model, or use --records to list what was validated")
    for option, least in (("steps", 1), ("threads", 0)):
        if getattr(args, option) < least:
            raise UserError(f"--{option} {getattr(args, option)}: must be {least} or more", "Leave it out for the default")
    _check_timeout(args.timeout)
    if args.runtime == "zo2":
        return _against_zo2(args)
    device = resolve_device(args.device, getattr(args, "gpus", None) or 1)
    args.gpu = "auto" if device == "cuda" else ANY_GPU
    request = request_from(args).but(iterations=args.steps)
    request.check()
    with progress(f"predicting and running {args.model}", enabled=not args.json):
        comparison = run(
            request,
            device,
            tolerance=args.tolerance,
            timeout_s=args.timeout,
            threads=args.threads or None,
            snapshot=args.snapshot,
            processes=args.processes,
        )
    warning = remember(comparison, args.store) if args.record else None
    return replace(comparison, notes=(*comparison.notes, warning)) if warning else comparison


def _against_zo2(args: argparse.Namespace) -> Comparison:
    from ..hardware.detect import gpus
    from ..planner.options import request_from
    from ..planner.trace.source import TraceSource
    from .api import ANY_GPU
    from .runtimes.zo.itself import validate_zo2

    args.gpu = "auto" if gpus() else ANY_GPU  # without one it is refused below, after a missing zo2
    request = request_from(args).but(iterations=args.steps)
    request.check()
    return validate_zo2(request, TraceSource(), tolerance=args.tolerance)


def _compare_plan(args: argparse.Namespace) -> Comparison:
    """Of a written folder, which says by itself what runs."""
    from dataclasses import replace

    from ..planner.progress import progress
    from .plan_run import run_plan
    from .store import remember

    if args.model is not None:
        raise UserError(f"--plan takes no MODEL, got {args.model}", "The folder says which model runs")
    for option in ("snapshot", "processes"):
        if getattr(args, option):
            raise UserError(f"--{option} does not go with --plan", "Leave it out")
    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: must be 1 or more", "Leave it out for the default")
    _check_timeout(args.timeout)
    with progress(f"predicting and running {args.plan}", enabled=not args.json):
        comparison = run_plan(args.plan, device=args.device, steps=args.steps, tolerance=args.tolerance, timeout_s=args.timeout)
    warning = remember(comparison, args.store) if args.record else None
    return replace(comparison, notes=(*comparison.notes, warning)) if warning else comparison


def _table(found: list[Record]) -> str:
    from ..units import human

    if not found:
        return "No records yet: `memplan validate MODEL` makes one."
    lines = [f"{'made (UTC)':<20}  {'outcome':<13}  {'predicted':>10}  {'measured':>10}  what"]
    for r in found:
        measured = human(r.measured["peak_bytes"]) if r.measured else "-"
        asked = r.request
        what = f"{asked['model']} on {r.device}, micro batch {asked['micro_batch_size']}, sequence {asked['seq_len']}"
        what += f", {asked['precision']}"
        what += f": {r.reason}" if r.reason else ""
        lines.append(f"{r.made[:19]:<20}  {r.outcome:<13}  {human(r.predicted['peak_bytes']):>10}  {measured:>10}  {what}")
    return "\n".join(lines)
