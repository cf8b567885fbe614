"""`memplan plan --from FILE`: what a training file holds fast while memplan searches the rest.

The model, its method and optimizer, the length of samples, the samples of a step, attention, loss and clipping are the
file's; how the run is placed on the GPUs (strategy, precision, recompute, offload, micro batch) is what is searched.
"""

from __future__ import annotations

import argparse
from typing import Any

_SEARCHED = ("strategy", "precision", "recompute", "offload", "micro_batch_size", "grad_accum_steps")


def take_file(args: argparse.Namespace) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(what else every candidate has, notes); fills in `args` where the command line said nothing.

    Raises UserError for a file that cannot be used, CannotTell for one that says something that is not modelled.
    """
    from ...models import load
    from ...models.overrides import parse_settings
    from ..engines.detect import read_config
    from ..engines.imported import apply
    from ..options import settle_model

    settle_model(args)
    if not args.from_file:
        return {}, ()
    imported = read_config(args.from_file)
    model = load(args.model, task=args.task, overrides=parse_settings(args.set), trust_remote_code=args.trust_remote_code)
    given = {"gpus": args.gpus, "nodes": args.nodes, "seq_len": args.seq, "attention": args.attention, "loss": args.loss}
    made = apply(imported, {name: value for name, value in given.items() if value is not None}, model.config)
    notes = [note for note in made["notes"] if "NOT UNDERSTOOD" in note or "is taken, not" in note]
    taken = []
    for option, name in (
        ("gpus", "gpus"),
        ("nodes", "nodes"),
        ("seq", "seq_len"),
        ("attention", "attention"),
        ("loss", "loss"),
    ):
        if getattr(args, option) is None and made.get(name) is not None:
            setattr(args, option, made[name])
            taken.append(f"--{option} {made[name]}")
    for name in ("method", "optimizer"):
        if getattr(args, name) is None and made.get(name) is not None:
            setattr(args, name, str(made[name]))
            taken.append(f"--{name} {made[name]}")
    if made.get("clip_grad_norm"):
        args.clip_grad_norm = True
    micro = made.get("micro_batch_size")
    if args.global_batch is None and micro is not None:
        args.global_batch = micro * (made.get("grad_accum_steps") or 1) * (args.gpus or 1)
        taken.append(f"--global-batch {args.global_batch}")
    searched = [imported.said[name].key for name in _SEARCHED if name in imported.said]
    notes.append(f"{imported.source}: held fast: {', '.join(taken) or 'nothing'}")
    if searched:
        notes.append(f"{imported.source}: {', '.join(dict.fromkeys(searched))}: searched anew")
    same = made.get("adapter") is not None and args.method == made.get("method")
    return ({"adapter": made["adapter"]} if same else {}), tuple(notes)
