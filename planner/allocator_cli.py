"""The command `replay`: plays a recorded memory snapshot through memplan's allocator and says how close it comes."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:
    from .allocator.verify import Comparison

BLIND_TOLERANCE = 0.005  # of peak reserved; the worst of 94 recorded devices is 0.002
_SHOWN_DIFFERENCES = 10


def add_commands(commands: Any) -> None:
    about = """Replays a PyTorch memory snapshot (pickle or JSON, gzipped or not) through memplan's caching allocator.
        Exit code 0: it agrees, 1: it does not, 2: the file cannot be used."""
    parser = commands.add_parser("replay", help="replay a PyTorch memory snapshot and compare", description=about)
    parser.add_argument("file", metavar="FILE", help="a snapshot written by torch.cuda.memory._dump_snapshot")
    blind = "use sizes, streams and order only, no real address; agrees within 0.5 %% of peak reserved"
    parser.add_argument("--blind", action="store_true", help=blind)
    parser.add_argument("--device", type=int, metavar="N", help="only this device (default: all that have events)")
    parser.add_argument("--alloc-conf", metavar="TEXT", help="settings as in PYTORCH_ALLOC_CONF (default: the snapshot's)")
    parser.add_argument("--limit", metavar="SIZE", help="memory that the allocator can get, for example 24GiB (default: found)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_replay)


def run_replay(args: argparse.Namespace) -> int:
    """0 when every device agrees, else 1."""
    import json

    from ..units import parse_bytes
    from .allocator.config import AllocConf
    from .allocator.snapshot import read_snapshot
    from .allocator.verify import compare

    conf = None if args.alloc_conf is None else AllocConf.parse(args.alloc_conf)
    limit = None if args.limit is None else parse_bytes(args.limit, "--limit")
    snapshot = read_snapshot(args.file)
    devices = snapshot.devices()
    if args.device is not None:
        if args.device not in devices:
            raise UserError(f"{args.file} has no events of device {args.device}",
                            f"Devices with events: {', '.join(map(str, devices)) or 'none'}")  # fmt: skip
        devices = [args.device]
    if not devices:
        raise UserError(f"{args.file} has no recorded events", "Call torch.cuda.memory._record_memory_history() before the run")
    results = [compare(snapshot, device, blind=args.blind, conf=conf, limit_bytes=limit) for device in devices]
    all_agree = all(agrees(result) for result in results)
    if args.json:
        devices_out = [_as_dict(result) for result in results]
        print(json.dumps({"file": args.file, "agrees": all_agree, "devices": devices_out}, indent=2))
    else:
        for result in results:
            _print(result)
    return 0 if all_agree else 1


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
