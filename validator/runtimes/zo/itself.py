"""`memplan validate --runtime zo2`: the prediction against zo2 itself on this machine's GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....errors import CannotTell
from ....planner.engines.zo_write import ZO2_LOSS
from ....planner.strategies.zo_settings import ZoSettings
from ...compare import TOLERANCE, Comparison, rows_of
from . import installed
from .run import ZoRun

if TYPE_CHECKING:
    from ....planner.request import Request
    from ....planner.trace.source import TraceSource


def validate_zo2(request: Request, traces: TraceSource, *, tolerance: float | None = None) -> Comparison:
    """Runs the steps with zo2's own classes and compares GPU peaks.

    Raises UserError where zo2 or a GPU is missing, CannotTell for what zo2 cannot do: both before anything is predicted.
    """
    from ...engines import predicted_on_cpu

    if request.method not in ("mezo", "zo2") or request.gpus > 1:
        raise CannotTell(f"--runtime zo2 with --method {request.method}: zo2 runs --method mezo and zo2, on one GPU")
    if request.frozen or request.adapter is not None:
        raise CannotTell("--runtime zo2 trains the whole model. Leave --freeze and adapters out")
    run = ZoRun.asked(
        request.model,
        request.method,
        request.zo or ZoSettings(),
        precision=request.precision,
        micro_batch_size=request.micro_batch_size,
        seq_len=request.seq_len,
        steps=request.loop.iterations,
        attention=request.attention,
        device="cuda",
    )
    theirs = installed.run_installed(run).ranks[0].usage()
    asked = request.but(loss=ZO2_LOSS[str(request.model.model_type)])
    trace = traces.step(asked, target="cuda")
    ours = predicted_on_cpu(asked, trace)
    return Comparison(
        question=asked.as_data(),
        device=request.device.name,
        tolerance=TOLERANCE["cuda"] if tolerance is None else tolerance,
        predicted=ours,
        measured=theirs,
        rows=rows_of(ours, theirs),
        notes=(*request.defaults, "zo2 itself ran, with its own loss; host memory is not compared"),
        versions=trace.versions,
    )
