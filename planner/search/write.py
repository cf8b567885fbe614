"""The folder that a plan leaves: the engines' files for its first row, plan.json, and how to start it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...errors import CannotTell
from ..engines.write import ACCELERATE, DEEPSPEED, files_of, write_texts
from ..strategies import ZEROTH_ORDER
from .api import best_request
from .plan import Candidate, Plan
from .table import command

if TYPE_CHECKING:
    from ..request import Request

PLAN, README = "plan.json", "README.md"


def write_plan(plan: Plan, base: Request, folder: str | os.PathLike[str], *, force: bool = False) -> tuple[str, ...]:
    """Writes the folder, whole or not at all; returns the names of its files.

    `base`: the question that the plan's first row chooses for.  Raises UserError where the folder cannot be made.
    """
    best = plan.best
    assert best is not None
    texts: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    try:
        if best.method in ZEROTH_ORDER or best.strategy == "release":
            raise CannotTell(f"{best.method if best.strategy != 'release' else 'gradient release'} is written in the program")
        files = files_of(best_request(best, base), folder)
        texts.update(files.texts)
        notes = files.notes
    except CannotTell as error:
        notes = (str(error),)
    texts[PLAN] = plan.text()
    texts[README] = _readme(plan, best, str(folder), tuple(texts), notes)
    write_texts(texts, folder, force=force)
    return tuple(texts)


def launch_command(best: Candidate, folder: str) -> str:
    """What starts the training script."""
    variables = f"PYTORCH_ALLOC_CONF={best.alloc_conf} " if best.alloc_conf else ""
    if best.method in ZEROTH_ORDER or best.strategy == "release":
        many = f"torchrun --nproc-per-node {best.gpus // best.nodes}" if best.gpus > 1 else "python"
        return f"{variables}{many} train.py"
    return f"{variables}accelerate launch --config_file {folder}/{ACCELERATE} train.py"


def _readme(plan: Plan, best: Candidate, folder: str, names: tuple[str, ...], notes: tuple[str, ...]) -> str:
    q = plan.question
    engine = f"{DEEPSPEED} is for `deepspeed.initialize`; " if DEEPSPEED in names else ""
    lines = [
        f"# {q['model']} on {q['gpus']} x {plan.gpu}: {best.name}",
        f"Start: `{launch_command(best, folder)}` ({engine}plan.json holds every figure).",
        f"Micro batch {best.micro_batch_size}, {best.grad_accum_steps} accumulated, {best.optimizer}, "
        f"sequence length {plan.seq_len}, {plan.global_batch_size} samples a step.",
        f"Check: `{command(plan, best)}`",
        f"To do: {'; '.join(notes) if notes else 'nothing; the files say it all'}.",
    ]
    return "\n".join(lines) + "\n"
