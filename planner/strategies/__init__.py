"""Training strategies, one file each.

A *door* is the module that turns a question into a strategy: `check(request)` refuses what it cannot do (UserError for a
mistake, CannotTell for what is not modelled), `make(request, trace)` builds the strategy, and `said(request)` says what it
takes for granted.  A door may also have `traced_as(request)`, the question whose trace is walked, and `prepared(trace)`, that
trace as the runtime runs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal

from ...errors import UserError

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.steptrace import StepTrace
    from .base import Strategy

SINGLE = "single"
_DOORS = {
    SINGLE: "single",
    "release": "release",
    "ddp": "ddp",
    "zero0": "deepspeed_engine",
    "zero1": "deepspeed_engine",
    "zero2": "deepspeed_engine",
    "zero3": "deepspeed_engine",
    "fsdp1": "fsdp1",
    "fsdp2": "fsdp2",
    "hsdp": "fsdp2",
}
# Methods that have a loop of their own, whatever the strategy.
_METHOD_DOORS = {"mezo": "mezo", "zo2": "zo2", "distzo2": "distzo2", "badam": "layerwise", "hift": "layerwise", "l2l": "l2l"}
ZEROTH_ORDER = ("mezo", "zo2", "distzo2")
RELAY = "l2l"
DISTRIBUTED = tuple(name for name in _DOORS if name not in (SINGLE, "release"))
MIXED: dict[str, Literal["bfloat16", "float16"]] = {
    "bf16-mixed": "bfloat16",
    "fp16-mixed": "float16",
}  # 16-bit parameters in compute, fp32 ones behind them


ACTIVATION = "activation"  # what leaves the GPU whatever the strategy: autograd's saved tensors


def _inner(request: Request) -> Request:
    """The question without what `offloaded_activations` answers."""
    return request.but(offload=tuple(part for part in request.offload if part != ACTIVATION))


def _door(request: Request) -> Any:
    name = _METHOD_DOORS.get(request.method) or _DOORS[request.strategy]
    if request.strategy == "hsdp" and request.fsdp is not None and request.fsdp.version == 1:
        name = "fsdp1"  # HYBRID_SHARD of FullyShardedDataParallel
    return importlib.import_module(f"{__name__}.{name}")


def check_strategy(request: Request) -> None:
    """Raises UserError or CannotTell where the strategy does not go with the rest of the question."""
    if request.rank is not None and not 0 <= request.rank < request.gpus:
        raise UserError(f"--rank {request.rank}: expected 0 to {request.gpus - 1}", "Ranks count from 0, over all nodes")
    if request.gpus % request.nodes:
        raise UserError(
            f"--gpus {request.gpus} on --nodes {request.nodes}: the GPUs do not divide over the machines",
            "--gpus is the number of GPUs in all",
        )
    if ACTIVATION in request.offload:
        from .offloaded_activations import check

        check(request)
        request = _inner(request)
    _door(request).check(request)


def traced_as(request: Request) -> Request:
    """The question whose trace `request` is answered from."""
    traced: Request = getattr(_door(request), "traced_as", lambda same: same)(request)
    return traced


def prepared(request: Request, trace: StepTrace) -> StepTrace:
    """`trace` as the runtime of `request` runs it."""
    ready: StepTrace = getattr(_door(request), "prepared", lambda same: same)(trace)
    return ready


def make_strategy(request: Request, trace: StepTrace) -> Strategy:
    """A fresh strategy for `request`, for its rank, or the most loaded one.  `trace` is the micro step it is walked with."""
    inner = _inner(request)
    strategy: Strategy = _door(inner).make(inner, trace)
    if ACTIVATION in request.offload:
        from .offloaded_activations import OffloadedActivations

        strategy = OffloadedActivations(strategy)
    return strategy


def said_of(request: Request) -> list[str]:
    """What is taken for granted about the strategy, in words; nothing for one GPU."""
    said: list[str] = _door(request).said(request)
    if said and request.gpus > 1:
        who = "the most loaded" if request.rank is None else f"rank {request.rank}"
        said[0] += f"; {who} of {request.gpus} ranks is shown"
    if ACTIVATION in request.offload:
        from .offloaded_activations import said as said_of_activations

        said = [*said, *said_of_activations(request)]
    return said
