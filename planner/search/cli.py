"""The command `plan`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ...errors import UserError
from ..options import add_hardware_options, add_model_options

if TYPE_CHECKING:
    from ..request import Request
    from .space import Wanted

_WORDS = """Which configuration should I run?  Searches strategies, precisions, recompute, offload and micro batches for a given
    global batch, simulates what could be best, and ranks it.  Full training is not given up unless nothing else fits, or
    --method says so.  Exit code 0: there is a plan, 1: nothing fits, 2: no answer."""


def add_commands(commands: Any) -> None:
    parser = commands.add_parser("plan", help="which configuration should I run?", description=_WORDS)
    add_model_options(parser, named_by_file=True)
    add_hardware_options(parser, default="auto")
    held = "a training file, as for `memplan fit`: model, method, optimizer, lengths and samples of a step are its own"
    parser.add_argument("--from", dest="from_file", metavar="FILE", help=held)
    what = parser.add_argument_group("what may be chosen (lists with commas; without it memplan chooses)")
    what.add_argument(
        "--global-batch", type=int, metavar="N", help="samples in one optimizer step, of all GPUs (default: 8 each)"
    )
    methods = (
        "as for `memplan fit`: full, lora, qlora, galore, badam, lomo, mezo, zo2 ..; any: full, lora, qlora and zeroth order"
    )
    what.add_argument("--method", metavar="A,B", help=methods)
    what.add_argument("--strategy", metavar="A,B", help="single, release, ddp, zero1 .. zero3, fsdp1, fsdp2, hsdp")
    what.add_argument("--precision", metavar="A,B", help="as for `memplan fit` (default: 16-bit compute, fp32 masters)")
    what.add_argument("--optimizer", metavar="A,B", help="of `memplan optimizers list` (default: adamw)")
    what.add_argument("--recompute", metavar="A,B", help="none, full, every-k:2, selective-op ... (default: none,full)")
    what.add_argument("--offload", metavar="A,B", help="none, optimizer, optimizer+param, ... (default: what the strategy has)")
    what.add_argument("--attention", metavar="A", help="sdpa (default), eager, flash2")
    what.add_argument("--loss", metavar="L", help="hf (default), plain, shifted, chunked")
    what.add_argument("--clip-grad-norm", action="store_true", help="gradients are clipped by norm before the step")
    what.add_argument("--alloc-conf", metavar="TEXT", help="settings as in PYTORCH_ALLOC_CONF")
    answer = parser.add_argument_group("the answer")
    objectives = "throughput (default), memory, cost: GPU-seconds, also with fewer GPUs, quality-first"
    answer.add_argument("--objective", metavar="O", default="throughput", help=objectives)
    frontier = "the frontier instead of a ranking: the fastest, then what is fastest with less memory, and so on"
    answer.add_argument("--pareto", action="store_true", help=frontier)
    answer.add_argument("--figure", metavar="FILE", help="draw the rows: speed against memory; .png or .svg")
    answer.add_argument("--top", type=int, metavar="N", default=3, help="rows (default: 3)")
    answer.add_argument("--json", action="store_true", help="print plan.json; sizes in bytes, times in seconds")
    answer.add_argument("--write", metavar="DIR", help="make a folder with the first row's configuration files and plan.json")
    answer.add_argument("--force", action="store_true", help="write into a folder that is there")
    stacks = "with --write: trainer, transformers' Trainer (where it can), or loop, a plain loop of torch or DeepSpeed"
    answer.add_argument("--stack", metavar="S", default="auto", help=stacks)
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> int:
    """Prints the plan, writes its folder; 0 where something fits."""
    import shutil
    import sys

    from ..engines.write import check_folder, check_stack
    from ..progress import progress
    from ..show.cli import check_figure
    from ..trace.source import TraceSource
    from .api import make_plan
    from .frontier import frontier
    from .table import WIDTH, render

    if args.top < 1:
        raise UserError(f"--top {args.top}: must be 1 or more", "Leave it out for 3")
    if args.write:
        check_folder(args.write, force=args.force)  # said before the work, not after it
        check_stack(args.stack)
    if args.figure:
        check_figure(args.figure)
    if args.pareto and args.objective != "throughput":
        raise UserError(f"--pareto with --objective {args.objective}: the frontier has both ends", "Leave one of them out")
    wanted, bases = asked(args)  # settles MODEL, too
    with progress(f"recording one step of {args.model}", enabled=not args.json) as say:
        traces = TraceSource()
        if args.pareto:
            plan = frontier(bases, wanted, traces, say=say)
        else:
            plan = make_plan(bases, wanted, traces, top=args.top, say=say)
    if args.json:
        print(plan.text(), end="")
    else:
        width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
        print(render(plan, max(width, 60)))
    if args.figure and plan.best is not None:
        from ..show.figure import write_frontier

        write_frontier(args.figure, plan)
        print(f"wrote {args.figure}", file=sys.stderr)
    if args.write and plan.best is not None:
        from .write import write_plan

        files = write_plan(plan, bases[plan.best.gpus], args.write, force=args.force, traces=traces, stack=args.stack)
        print(f"wrote {args.write}: {', '.join(files.texts)}", file=sys.stderr)
    elif args.write:
        print("nothing fits: no folder was written", file=sys.stderr)
    return 0 if plan.fits else 1


def asked(args: argparse.Namespace) -> tuple[Wanted, dict[int, Request]]:
    """(the choices, the question by number of GPUs) that the options say.  Raises UserError with the option's name."""
    from dataclasses import replace

    from ...models import load
    from ...models.overrides import parse_settings
    from ...units import parse_bytes
    from ..request import METHODS
    from .api import DEFAULT_PER_GPU, questions
    from .from_file import take_file
    from .space import ANY, Wanted

    for option in ("micro_batch", "seq", "target_len", "image_size", "gpus", "nodes", "global_batch"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UserError(f"--{option.replace('_', '-')} {value}: must be 1 or more", "Leave it out for the default")
    more, notes = take_file(args)
    gpus = args.gpus or 1
    offloads = _listed(args.offload, "--offload")
    wanted = Wanted(
        global_batch_size=args.global_batch or DEFAULT_PER_GPU * gpus,
        methods=_known(_listed(args.method, "--method"), (*METHODS, ANY), "--method"),
        strategies=_listed(args.strategy, "--strategy"),
        precisions=_listed(args.precision, "--precision"),
        optimizers=_listed(args.optimizer, "--optimizer"),
        recomputes=_listed(args.recompute, "--recompute"),
        offloads=None if offloads is None else tuple(() if o == "none" else tuple(o.split("+")) for o in offloads),
        micro_batch_size=args.micro_batch,
        objective=args.objective,
    )
    wanted.check()
    _check_names(wanted)
    model = load(args.model, task=args.task, overrides=parse_settings(args.set), trust_remote_code=args.trust_remote_code)

    bases = questions(
        model,
        args.gpu,
        gpus,
        wanted,
        named=args.global_batch is not None,
        nodes=args.nodes,
        gpu_memory=args.gpu_memory,
        seq_len=args.seq,
        target_len=args.target_len,
        image_size=args.image_size,
        attention=args.attention,
        loss=args.loss,
        alloc_conf=args.alloc_conf,
        clip_grad_norm=args.clip_grad_norm,
        host_ram_bytes=args.host_ram and parse_bytes(args.host_ram, "--host-ram"),
        nvme_bytes=args.nvme and parse_bytes(args.nvme, "--nvme"),
        **more,
    )
    return wanted, {count: replace(base, defaults=(*base.defaults, *notes)) for count, base in bases.items()}


def _listed(text: str | None, option: str) -> tuple[str, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UserError(f"{option} {text!r}: there is nothing between two commas", "Write names with a comma between them")
    return tuple(dict.fromkeys(parts))


def _known(values: tuple[str, ...] | None, names: tuple[str, ...], option: str) -> tuple[str, ...] | None:
    from ...errors import did_you_mean

    for value in values or ():
        if value not in names:
            hint = did_you_mean(value, names) or f"Choose of {', '.join(names)}"
            raise UserError(f"{option} {value!r} is not known", hint)
    return values


def _check_names(wanted: Wanted) -> None:
    """Names that no configuration has are a mistake of the user's, not a reason to find nothing."""
    from ..optimizers.catalogue import entry_of
    from ..request import OFFLOADS, PRECISIONS, STRATEGIES
    from ..trace.options import recompute_parts

    _known(wanted.strategies, STRATEGIES, "--strategy")
    _known(wanted.precisions, PRECISIONS, "--precision")
    for offload in wanted.offloads or ():
        _known(offload, tuple(part for parts in OFFLOADS.values() for part in parts), "--offload")
    for recompute in wanted.recomputes or ():
        recompute_parts(recompute)
    for optimizer in wanted.optimizers or ():
        entry_of(optimizer.partition(":")[0])
