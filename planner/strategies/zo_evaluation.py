"""`--zo-eval-batch`: whether the evaluations between zeroth-order steps fit as well.

An evaluation has no perturbation, but it has the loss of the model's own class, a larger batch, and under MeZO and ZO2 the
key-value cache that `config.use_cache` leaves on; it can need more than training.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...units import gib
from ..prediction import Prediction, Verdict

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.source import TraceSource


def evaluation_of(request: Request) -> Request | None:
    """The question about the evaluation that `request` names; None where it names none."""
    if request.zo is None or request.zo.eval_batch is None or request.mode != "train":
        return None
    settings = replace(request.zo, eval_batch=None)
    return request.but(mode="inference", micro_batch_size=request.zo.eval_batch, zo=settings)


def with_evaluation(prediction: Prediction, request: Request, traces: TraceSource) -> Prediction:
    """The answer to `request` with what its evaluation needs as a hint; where it does not fit, nothing does."""
    from ..predict import predict

    asked = evaluation_of(request)
    if asked is None or prediction.verdict is Verdict.UNKNOWN:
        return prediction
    found = predict(asked, traces)
    which = f"an evaluation with micro batch {asked.micro_batch_size}"
    if found.verdict is Verdict.UNKNOWN:
        return replace(prediction, hints=(*prediction.hints, f"{which} cannot be told: {found.reason}"))
    more = "more" if found.reserved_peak_bytes > prediction.reserved_peak_bytes else "no more"
    hint = (
        f"{which} peaks at {gib(found.allocated_peak_bytes)} in use and {gib(found.reserved_peak_bytes)} reserved, "
        f"{more} than training" + ("; that is tight" if found.verdict is Verdict.TIGHT else "")
    )
    prediction = replace(prediction, hints=(*prediction.hints, hint))
    if found.verdict is not Verdict.DOES_NOT_FIT or not prediction.fits:
        return prediction
    return replace(prediction, verdict=found.verdict, reason=f"training fits, {which} does not: {found.reason}")
