"""From a question to the DeepSpeed engine that would answer it: which stage, which wrapper, which knobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import CannotTell
from .deepspeed_settings import DeepSpeedSettings

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.steptrace import StepTrace
    from .base import Strategy

_PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed")


def check(request: Request) -> None:
    """Raises CannotTell for what DeepSpeed refuses or this planner does not model."""
    if request.precision not in _PRECISIONS:
        raise CannotTell(f"--precision {request.precision}: DeepSpeed keeps fp32 masters. Use {', '.join(_PRECISIONS)}")
    if request.offload:
        raise CannotTell(f"--offload {'+'.join(request.offload)}: moving tensors to the host is not modelled yet. Leave it out")


def make(request: Request, trace: StepTrace) -> Strategy:
    settings = request.deepspeed or DeepSpeedSettings()
    gpus = request.gpus
    if request.strategy == "zero3":
        from .zero3 import Zero3, Zero3Options

        return Zero3(
            gpus,
            request.rank or 0,
            Zero3Options(
                reduce_bucket_size=settings.reduce_bucket_size,
                overlap_comm=settings.overlaps(3),
                grad_accum_dtype=settings.grad_accum_dtype,
                sub_group_size=settings.sub_group_size,
                stage3_prefetch_bucket_size=settings.stage3_prefetch_bucket_size,
                stage3_max_live_parameters=settings.stage3_max_live_parameters,
                stage3_max_reuse_distance=settings.stage3_max_reuse_distance,
                stage3_param_persistence_threshold=settings.stage3_param_persistence_threshold,
                stage3_model_persistence_threshold=settings.stage3_model_persistence_threshold,
            ),
        )
    from .flat import heaviest_rank
    from .zero12 import Zero1, Zero2, ZeroOptions

    rank = heaviest_rank(trace, gpus) if request.rank is None else request.rank
    stage = 1 if request.strategy == "zero1" else 2
    options = ZeroOptions(
        reduce_bucket_size=settings.reduce_bucket_size,
        overlap_comm=settings.overlaps(stage),
        grad_accum_dtype=settings.grad_accum_dtype,
    )
    return (Zero1 if stage == 1 else Zero2)(gpus, rank, options)


def said(request: Request) -> list[str]:
    knobs = "its default knobs" if request.deepspeed is None else "the knobs of your configuration"
    return [f"DeepSpeed 0.19 ZeRO-{request.strategy[-1]} with {knobs}, no offload, FusedAdam"]
