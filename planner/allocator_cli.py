"""The command `replay`: plays a recorded memory snapshot through memplan's allocator, or sets a predicted step against it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, cast

from ..errors import UserError
from .options import add_hardware_options, add_model_options, add_run_options, request_from

if TYPE_CHECKING:
    from .against import Against
    from .allocator.snapshot import Snapshot
    from .allocator.verify import Comparison

BLIND_TOLERANCE = 0.005  # of peak reserved; the worst of 94 recorded devices is 0.002
AGAINST_TOLERANCE = 0.001  # of both peaks of a predicted step; five recorded steps come out exact
_SHOWN_DIFFERENCES = 10
_SHOWN_LINES = 6


def add_commands(commands: Any) -> None:
    about = """Replays a PyTorch memory snapshot (pickle or JSON, gzipped or not) through memplan's caching allocator; or, with
        --against-trace, predicts the step of a model op by op and compares it with the recorded one.
        Exit code 0: it agrees, 1: it does not, 2: the file cannot be used."""
    parser = commands.add_parser("replay", help="replay a PyTorch memory snapshot and compare", description=about)
    parser.add_argument("file", metavar="FILE", help="a snapshot written by torch.cuda.memory._dump_snapshot")
    blind = "use sizes, streams and order only, no real address; agrees within 0.5 %% of peak reserved"
    parser.add_argument("--blind", action="store_true", help=blind)
    parser.add_argument("--device", type=int, metavar="N", help="only this device (default: all that have events)")
    parser.add_argument("--limit", metavar="SIZE", help="memory that the allocator can get, for example 24GiB (default: found)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    group = parser.add_argument_group("a predicted step instead of the recorded one; the options below describe it")
    model = "predict a step of MODEL from the snapshot's start state; agrees within 0.1 %% of both peaks"
    group.add_argument("--against-trace", dest="model", metavar="MODEL", help=model)
    step = "which optimizer step was recorded: the first one, or a later one (default: first)"
    group.add_argument("--step", choices=("first", "later"), default="first", help=step)
    torch = "of the recorded run, for example 2.6 (default: the one installed here)"
    group.add_argument("--torch", metavar="VERSION", help=torch)
    top = f"kinds of differing events that are shown (default: {_SHOWN_DIFFERENCES})"
    group.add_argument("--top", type=int, metavar="N", default=_SHOWN_DIFFERENCES, help=top)
    known = set(parser._option_string_actions)
    add_model_options(cast(argparse.ArgumentParser, _WithoutModel(parser)))
    add_hardware_options(parser, default="auto")
    add_run_options(parser)
    described = {o: a for o, a in parser._option_string_actions.items() if o not in known and o != "--alloc-conf"}
    parser.set_defaults(run=run_replay, of_the_step={o: (a.dest, a.default) for o, a in described.items()})


class _WithoutModel:
    """A parser that takes the options of a model and not MODEL itself, which --against-trace gives."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser

    def add_argument(self, name: str, **how: Any) -> None:
        """MODEL is the only argument outside the groups."""

    def add_argument_group(self, title: str) -> Any:
        return self._parser.add_argument_group(title)


def run_replay(args: argparse.Namespace) -> int:
    """0 when every device agrees, else 1."""
    import json

    from ..units import parse_bytes
    from .allocator.config import AllocConf
    from .allocator.snapshot import read_snapshot
    from .allocator.verify import compare

    if args.model is not None:
        return _run_against(args)
    for option, (name, default) in args.of_the_step.items():
        if getattr(args, name) != default:
            raise UserError(f"{option}: describes a predicted step", "Add --against-trace MODEL, or leave it out")
    conf = None if args.alloc_conf is None else AllocConf.parse(args.alloc_conf)
    limit = None if args.limit is None else parse_bytes(args.limit, "--limit")
    snapshot = read_snapshot(args.file)
    devices = _devices(args, snapshot)
    results = [compare(snapshot, device, blind=args.blind, conf=conf, limit_bytes=limit) for device in devices]
    all_agree = all(agrees(result) for result in results)
    if args.json:
        devices_out = [_as_dict(result) for result in results]
        print(json.dumps({"file": args.file, "agrees": all_agree, "devices": devices_out}, indent=2))
    else:
        for result in results:
            _print(result)
    return 0 if all_agree else 1


def _devices(args: argparse.Namespace, snapshot: Snapshot) -> list[int]:
    devices = snapshot.devices()
    if not devices:
        raise UserError(f"{args.file} has no recorded events", "Call torch.cuda.memory._record_memory_history() before the run")
    if args.device is None:
        return devices
    if args.device not in devices:
        raise UserError(f"{args.file} has no events of device {args.device}",
                        f"Devices with events: {', '.join(map(str, devices))}")  # fmt: skip
    return [args.device]


def _run_against(args: argparse.Namespace) -> int:
    import json
    import re

    from .against import against
    from .allocator.config import AllocConf
    from .allocator.snapshot import read_snapshot
    from .progress import progress
    from .trace.source import TraceSource

    for option, given in (("--blind", args.blind), ("--limit", args.limit is not None)):
        if given:
            raise UserError(f"{option}: has no meaning with --against-trace", "Leave one of them out")
    if args.torch is not None and not re.match(r"\d+\.\d+", args.torch):
        raise UserError(f"--torch {args.torch!r}: expected a version", "Write for example 2.6")
    if args.top < 0:
        raise UserError(f"--top {args.top}: must be 0 or more", "Leave it out for the default")
    snapshot = read_snapshot(args.file)
    device = _devices(args, snapshot)[0]
    conf = None if args.alloc_conf is None else AllocConf.parse(args.alloc_conf)
    request = request_from(args)
    with progress(f"recording one step of {args.model}", enabled=not args.json):
        found = against(snapshot, device, request, TraceSource(exact=True), step=args.step, torch_version=args.torch, conf=conf)
    agree = predicts(found)
    if args.json:
        question = {**request.as_data(), "step": args.step, "torch": args.torch}
        answer = {"file": args.file, "device": device, "agrees": agree, "question": question, **found.to_json()}
        print(json.dumps(answer, indent=2))
    else:
        _print_against(found, args.top, agree)
    return 0 if agree else 1


def predicts(found: Against) -> bool:
    """Whether both peaks of the whole step are within AGAINST_TOLERANCE."""
    return all(abs(ratio - 1.0) <= AGAINST_TOLERANCE for ratio in (found.whole.allocated_ratio, found.whole.reserved_ratio))


def _print_against(found: Against, top: int, agree: bool) -> None:
    from ..units import gib

    print(f"a {found.step} step, predicted op by op and played from the recording's start state")
    print(f"  {'':26}{'predicted':>14}{'measured':>14}{'ratio':>10}")
    for peaks in found.peaks:
        name = "" if peaks.phase == "all" else f", {peaks.phase}"
        for what, ours, real in (("allocated", peaks.predicted_allocated_bytes, peaks.measured_allocated_bytes),
                                 ("reserved", peaks.predicted_reserved_bytes, peaks.measured_reserved_bytes)):  # fmt: skip
            print(f"  {f'peak {what}{name}':26}{gib(ours, 3):>14}{gib(real, 3):>14}{_ratio(ours, real):>10}")
    print(f"  {'events':14}{'predicted':>12}{'recorded':>12}{'equal':>12}{'allocations equal':>22}")
    for e in found.events:
        allocs = f"{e.num_equal_allocs} of {e.num_predicted_allocs}, {e.num_recorded_allocs}"
        print(f"  {e.phase:14}{e.num_predicted:>12}{e.num_recorded:>12}{e.num_equal:>12}{allocs:>22}")
    if found.num_unmatched_frees:
        print(f"  {found.num_unmatched_frees} predicted frees are of tensors that the recorded loop had dropped before")
    print("agrees" if agree else f"DOES NOT AGREE within {AGAINST_TOLERANCE:.1%}")
    for difference in found.differences[:top]:
        print(f"  {difference.phase}, {difference.count} x")
        for side, lines in (("predicted", difference.only_predicted), ("recorded", difference.only_recorded)):
            for line in lines[:_SHOWN_LINES]:
                print(f"    only {side}: {line}")
            if len(lines) > _SHOWN_LINES:
                print(f"    only {side}: and {len(lines) - _SHOWN_LINES} more")
    if len(found.differences) > top:
        print(f"  and {len(found.differences) - top} more kinds of differences (--top)")


def agrees(result: Comparison) -> bool:
    """Exact: no difference at all.  Blind: peak reserved within BLIND_TOLERANCE, and no allocation failed that did not."""
    if result.differences:
        return False
    if result.blind:
        return abs(result.reserved_ratio - 1.0) <= BLIND_TOLERANCE
    return result.predicted == result.measured


def _as_dict(result: Comparison) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(result), "agrees": agrees(result), "reserved_ratio": result.reserved_ratio,
            "events_per_s": result.num_events / result.seconds if result.seconds else None}  # fmt: skip


def _print(result: Comparison) -> None:
    from ..units import gib

    how = "blind: sizes, streams and order only" if result.blind else "exact: with the driver's addresses"
    begin = "recorded from the first allocation" if result.cold else "start state found by walking back"
    print(f"device {result.device}: {result.num_events} events, {begin}; {how}")
    print(f"  {'':20}{'predicted':>14}{'measured':>14}{'ratio':>10}")
    predicted, measured = result.predicted, result.measured
    rows = (("peak requested", predicted.peak_requested_bytes, measured.peak_requested_bytes),
            ("allocated at the end", predicted.allocated_at_end_bytes, measured.allocated_at_end_bytes),
            ("peak reserved", predicted.peak_reserved_bytes, measured.peak_reserved_bytes))  # fmt: skip
    for name, ours, real in rows:
        print(f"  {name:20}{gib(ours, 3):>14}{gib(real, 3):>14}{_ratio(ours, real):>10}")
    print(f"  {'peak allocated':20}{gib(result.predicted_peak_allocated_bytes, 3):>14}{'not recorded':>14}")
    calls = predicted.num_segment_events, measured.num_segment_events
    print(f"  {'driver calls':20}{calls[0]:>14}{calls[1]:>14}{_ratio(*calls):>10}")
    if result.limit_bytes is not None:
        print(f"  the cache was flushed {result.num_flushes} times at a limit of {gib(result.limit_bytes, 3)}; "
              f"out of memory for the program: {result.num_ooms} times")  # fmt: skip
    speed = result.num_events / max(result.seconds, 1e-9)
    print(f"  {speed:,.0f} events/s; {'agrees' if agrees(result) else 'DOES NOT AGREE'}")
    for line in result.differences[:_SHOWN_DIFFERENCES]:
        print(f"    {line}")
    if len(result.differences) > _SHOWN_DIFFERENCES:
        print(f"    and {len(result.differences) - _SHOWN_DIFFERENCES} more differences")


def _ratio(predicted: int, measured: int) -> str:
    return f"{predicted / measured:.5f}" if measured else "1.00000" if predicted == 0 else "-"
