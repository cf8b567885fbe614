"""Training strategies, one file each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import CannotTell

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.steptrace import StepTrace
    from .base import Strategy

SINGLE = "single"
DISTRIBUTED = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
_FLOAT_INPUTS = ("image-classification", "speech-seq2seq", "ctc", "audio-classification", "custom")
_SMALL_BUFFER = 1024  # elements: rotary frequencies and the like
MIXED = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}  # 16-bit parameters in compute, fp32 ones behind them


def make_strategy(request: Request, trace: StepTrace) -> Strategy:
    """A fresh strategy for `request`, for the most loaded rank.  `trace` is the micro step that it will be walked with."""
    name, gpus = request.strategy, request.gpus
    if name in ("zero1", "zero2"):
        from .flat import heaviest_rank
        from .zero12 import Zero1, Zero2

        return (Zero1 if name == "zero1" else Zero2)(gpus, heaviest_rank(trace, gpus))
    if name == "zero3":
        from .zero3 import Zero3

        return Zero3(gpus)
    if name == "ddp":
        from .ddp import DistributedDataParallel

        return DistributedDataParallel(gpus)
    if name == "fsdp2":
        from .fsdp2 import Fsdp2Settings, FullyShard

        if request.precision in MIXED:
            _must_suit_narrow_trace(request, trace)
        return FullyShard(gpus, Fsdp2Settings(param_dtype=MIXED.get(request.precision)))
    from .single import SingleDevice

    return SingleDevice()


def _must_suit_narrow_trace(request: Request, trace: StepTrace) -> None:
    """Mixed FSDP2 is simulated with a trace whose tensors are all 16-bit: fp32 inputs and large fp32 buffers would widen it."""
    wide = [b for b in trace.buffers if b.dtype in ("float32", "bfloat16", "float16") and b.numel > _SMALL_BUFFER]
    if wide or request.model.task in _FLOAT_INPUTS:
        what = f"the buffer {wide[0].fqn}" if wide else "the model's floating-point input"
        raise CannotTell(
            f"--strategy fsdp2 --precision {request.precision}: {what} stays fp32, which is not modelled yet. Use fp32 or bf16"
        )


def said_of(request: Request) -> list[str]:
    """What is taken for granted about the strategy, in words; nothing for one GPU."""
    said = {
        "ddp": "DistributedDataParallel with its defaults: buckets of 25 MiB, gradients beside them",
        "zero1": "DeepSpeed 0.19 ZeRO-1 with its default knobs, no offload, FusedAdam",
        "zero2": "DeepSpeed 0.19 ZeRO-2 with its default knobs, no offload, FusedAdam",
        "zero3": "DeepSpeed 0.19 ZeRO-3 with its default knobs, no offload, FusedAdam",
        "fsdp2": "fully_shard on every block and on the model, parameters dropped after forward but the root's",
    }.get(request.strategy)
    return [f"{said}; the most loaded of {request.gpus} ranks is shown"] if said else []
