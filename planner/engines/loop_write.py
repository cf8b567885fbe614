"""What a plain loop must be told beside the model and the batch: autocast, and the shards of FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import CannotTell
from ..trace.options import AUTOCAST_DTYPE, HALF, PARAM_DTYPE

if TYPE_CHECKING:
    from ..request import Request


def loop_autocast(request: Request) -> str | None:
    """The dtype of autocast; None where the step runs without it."""
    if request.precision == "fp16-autocast":
        raise CannotTell("--stack loop with --precision fp16-autocast: a loop would need a GradScaler. Use bf16-autocast")
    adapter = request.adapter_settings
    stored = PARAM_DTYPE[request.precision]
    if adapter is not None and adapter.autocast and stored in HALF:
        return stored
    return AUTOCAST_DTYPE.get(request.precision)


def loop_settings(request: Request) -> dict[str, Any]:
    """{"fsdp", "blocks"} of run.json, as far as the question asks for them.

    Raises CannotTell for what the loop has no words for.
    """
    return _fsdp2(request) if request.strategy in ("fsdp2", "hsdp") else {}


def _fsdp2(request: Request) -> dict[str, Any]:
    from ..strategies.fsdp_door import settings_of, shards_of

    settings = settings_of(request, version=2)
    if settings.auto_wrap_policy != "TRANSFORMER_BASED_WRAP" or settings.wrap_embeddings or settings.ignored_modules:
        raise CannotTell("--stack loop shards the model's blocks and the rest. Use --stack trainer for other units")
    dtypes = {
        name: getattr(settings, name)
        for name in ("param_dtype", "reduce_dtype", "output_dtype")
        if getattr(settings, name) is not None
    }
    return {
        "blocks": list(settings.transformer_layer_cls_to_wrap),
        "fsdp": {
            "dtypes": dtypes,
            "reshard_after_forward": settings.reshard_after_forward,
            "copies": shards_of(request, settings)[1],
            "cpu_offload": settings.cpu_offload,
            "pin_memory": settings.offload_pin_memory,
        },
    }
