"""The commands `fit` and `trace`: what the user types, and which part answers."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from . import allocator_cli, explain_cli, inverse_cli
from .compare import cli as compare_cli
from .optimizers import cli as optimizers_cli
from .options import add_hardware_options, add_model_options, add_run_options, request_from, settle_model
from .search import cli as search_cli
from .show import cli as show_cli
from .study import cli as study_cli

if TYPE_CHECKING:
    from .prediction import Prediction
    from .request import Request

_TRACE_GPU = "a100-80gb"  # a trace needs a card only to know which fused attention kernels it has
_FIT = """Answers before the run starts: does one training step of MODEL fit on the GPU, where does every byte go, and
    what would make it fit.  Nothing is downloaded but a model's config, no weights are made, no GPU is needed.
    Exit code 0: it fits, 1: it does not, 2: no answer (bad input, or something that is not modelled)."""
_TRACE = """Records one training step of MODEL without weights, data or GPU, and says what it does: modules, ops, FLOPs,
    what stays alive for backward, and the biggest tensors at the peak."""


def add_commands(commands: Any) -> None:
    """Adds `fit`, `trace`, `replay`, `study` and `optimizers` to the sub-parsers of the command line."""
    fit = commands.add_parser("fit", help="will it fit on my GPU, and where does every byte go?", description=_FIT)
    add_model_options(fit, named_by_file=True)
    add_hardware_options(fit, default="auto")
    add_run_options(fit)
    answer = fit.add_argument_group("the answer")
    answer.add_argument(
        "--no-advice", action="store_true", help="leave out what still fits and what would make it fit (faster)"
    )
    answer.add_argument("--strict", action="store_true", help="a tight fit is a failure: exit code 1")
    inverse_cli.add_options(answer)
    answer.add_argument("--write", metavar="DIR", help="write the files that run it: ds_config.json, accelerate.yaml ...")
    answer.add_argument("--force", action="store_true", help="with --write: into a folder that is there already")
    stacks = "with --write: trainer, transformers' Trainer (where it can), or loop, a plain loop of torch or DeepSpeed"
    answer.add_argument("--stack", metavar="S", default="auto", help=stacks)
    show_cli.add_options(answer)
    answer.add_argument("--json", action="store_true", help="print JSON; sizes in bytes")
    fit.set_defaults(run=run_fit)

    trace = commands.add_parser("trace", help="record one training step and say what it does", description=_TRACE)
    add_model_options(trace, named_by_file=True)
    add_hardware_options(trace, default=_TRACE_GPU)
    add_run_options(trace)
    answer = trace.add_argument_group("the answer")
    target = "whose choices are recorded: a GPU's (default), or a CPU's, to compare with a CPU run"
    answer.add_argument("--target", choices=("cuda", "cpu"), default="cuda", help=target)
    answer.add_argument("--out", metavar="FILE.json", help="write the trace as JSON")
    answer.add_argument("--snapshot", metavar="FILE.pickle", help="write the simulated run for pytorch.org/memory_viz")
    lanes = "write the simulated steps, lane by lane, for ui.perfetto.dev or chrome://tracing"
    answer.add_argument("--timeline", metavar="FILE.json", help=lanes)
    answer.add_argument("--timeline-steps", type=int, metavar="N", default=3, help="steps in it (default: 3)")
    answer.add_argument("--params", action="store_true", help="list every parameter, with what --freeze can name")
    answer.add_argument("--top", type=int, metavar="N", default=10, help="rows of each list (default: 10)")
    trace.set_defaults(run=run_trace)

    allocator_cli.add_commands(commands)
    study_cli.add_commands(commands)
    optimizers_cli.add_commands(commands)
    explain_cli.add_commands(commands)
    search_cli.add_commands(commands)
    show_cli.add_commands(commands)
    compare_cli.add_commands(commands)


def run_fit(args: argparse.Namespace) -> int:
    """Prints the answer; 0 fits, 1 does not fit (or tight, with --strict), 2 cannot tell."""
    import json

    from ..version import __version__
    from .progress import progress

    if inverse_cli.is_asked(args):
        return inverse_cli.run(args)
    if args.write:  # said before the work, not after it
        from .engines.write import check_folder, check_stack

        check_folder(args.write, force=args.force)
        check_stack(args.stack)
    show_cli.check_options(args)
    settle_model(args)
    with progress(f"recording one step of {args.model}", enabled=not args.json) as say:
        request, prediction = _predict(args, say)
    try:
        if args.json:
            print(json.dumps({"version": __version__, **prediction.to_json()}, indent=2), flush=True)
        else:
            from .report import print_report

            print_report(prediction)
    except BrokenPipeError:  # `memplan fit ... | head -1`: the exit code still is the answer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if args.write and prediction.verdict != "unknown":
        _write(args.write, request, prediction, force=args.force, stack=args.stack)
    if (args.html or args.figure) and prediction.verdict != "unknown":
        from .trace.source import TraceSource

        _, ledger, spans = show_cli.simulate_again(request, TraceSource())
        show_cli.write(args, prediction, ledger, spans)
    return prediction.verdict.exit_code(args.strict)


def _write(folder: str, request: Request, prediction: Prediction, *, force: bool, stack: str) -> None:
    from .engines.write import write_folder

    files = write_folder(request, folder, force=force, prediction=prediction, stack=stack)
    print(f"wrote {folder}: {', '.join(files.texts)}", file=sys.stderr)
    for note in files.notes:
        print(f"note: {note}", file=sys.stderr)


def _predict(args: argparse.Namespace, say: Any) -> tuple[Request, Prediction]:
    from .predict import predict
    from .recompute.choice import chosen
    from .trace.source import TraceSource

    source = TraceSource()
    request = chosen(request_from(args), source)
    prediction = predict(request, source)
    if args.no_advice or prediction.verdict == "unknown":
        return request, prediction
    from .advice import advise

    say("looking for what still fits" if prediction.fits else "looking for changes that make it fit")
    return request, advise(prediction, request, source)


def run_trace(args: argparse.Namespace) -> int:
    """Prints what one step does, and writes the files that were asked for."""
    from .predict import simulated
    from .progress import progress
    from .strategies import prepared, traced_as
    from .trace.source import trace_options
    from .trace_report import params_table, summary

    if args.top < 1:
        raise UserError(f"--top {args.top}: must be 1 or more", "Leave it out for 10")
    if args.timeline_steps < 1:
        raise UserError(f"--timeline-steps {args.timeline_steps}: must be 1 or more", "Leave it out for 3")
    for path in filter(None, (args.out, args.snapshot, args.timeline)):  # said before the work, not after it
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise UserError(f"cannot write {path!r}: there is no such folder", "Choose a folder that exists")
    request = request_from(args)
    request.check()
    with progress(f"recording one step of {args.model}"):
        from .trace.tracer import trace_step

        trace = prepared(request, trace_step(request.model, trace_options(traced_as(request), args.target)))
        run = simulated(request, trace)
    print(summary(trace, run.ledger, top=args.top))
    if args.params:
        print("\n" + params_table(trace))
    if args.out:
        from .export import write_trace

        write_trace(args.out, trace)
        print(f"\nwrote {args.out}", file=sys.stderr)
    if args.snapshot:
        from .export import write_run

        write_run(args.snapshot, run.ledger, request.alloc_conf)
        print(f"wrote {args.snapshot}: open it at https://pytorch.org/memory_viz", file=sys.stderr)
    if args.timeline:
        from .timeline.export import repeated
        from .timeline.export import write_trace as write_lanes
        from .timeline.step_time import StepPlan

        plan = StepPlan(request, trace, run.ledger, run.work)
        write_lanes(repeated(plan.tasks, args.timeline_steps), args.timeline)
        print(f"wrote {args.timeline}: open it at https://ui.perfetto.dev", file=sys.stderr)
    return 0
