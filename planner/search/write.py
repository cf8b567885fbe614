"""The folder that a plan leaves: what runs its first row, plan.json, and how to start it."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from ...errors import CannotTell
from ..engines.plan_file import PLAN, README, Files, as_run, hashes, readme
from ..engines.write import AUTO, files_of, write_texts
from ..strategies import ZEROTH_ORDER
from .api import best_request
from .plan import Plan

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.source import TraceSource


def write_plan(
    plan: Plan,
    base: Request,
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    traces: TraceSource | None = None,
    stack: str = AUTO,
) -> Files:
    """Writes the folder, whole or not at all; returns its files.

    `base`: the question that the plan's first row chooses for.  `traces`: those of the search, for what plan.json says was
    predicted.  Raises UserError where the folder cannot be made.
    """
    best = plan.best
    assert best is not None
    request = best_request(best, base)
    try:
        files = files_of(request, stack)
    except CannotTell as error:
        files = Files({}, (str(error),))
    texts = dict(files.texts)
    steps = f"the SGD of {best.method}" if best.method in ZEROTH_ORDER else best.optimizer
    size = (
        f"Micro batch {best.micro_batch_size}, {best.grad_accum_steps} accumulated, {steps}, "
        f"sequence length {plan.seq_len}, {plan.global_batch_size} samples a step."
    )
    question = plan.question
    texts[README] = readme(f"{question['model']} on {question['gpus']} x {plan.gpu}: {best.name}", str(folder), files, size)
    written = dataclasses.replace(
        plan, predicted=_predicted(as_run(request, texts), traces), launch=files.launch, files=hashes(texts)
    )
    texts[PLAN] = written.text()
    write_texts(texts, folder, force=force)
    return Files(texts, files.notes, files.launch)


def _predicted(request: Request, traces: TraceSource | None) -> dict[str, object]:
    from ..predict import predict
    from ..trace.source import TraceSource

    return predict(request, traces or TraceSource()).to_json()
