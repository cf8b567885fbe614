"""What the doors of both FSDP versions ask alike."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ...errors import CannotTell, UserError
from .fsdp_settings import FsdpSettings

if TYPE_CHECKING:
    from ..request import Request


def settings_of(request: Request, *, version: Literal[1, 2]) -> FsdpSettings:
    """The knobs of the question, with what its other options say about them."""
    from . import MIXED

    settings = request.fsdp or FsdpSettings(version=version)
    if request.strategy == "hsdp" and settings.dp_replicate_size is None:
        settings = replace(settings, dp_replicate_size=request.nodes)
    if request.precision in MIXED and settings.param_dtype is None:
        settings = replace(settings, param_dtype=MIXED[request.precision])
    return replace(settings, cpu_offload=True) if request.offload else settings


def refuse_half_offload(offload: tuple[str, ...]) -> None:
    if offload and set(offload) != {"optimizer", "param"}:
        raise CannotTell(
            f"--offload {'+'.join(offload)}: FSDP moves parameters, gradients and the optimizer to the host together. "
            "Use --offload optimizer+param"
        )


def shards_of(request: Request, settings: FsdpSettings) -> tuple[int, int]:
    """(ranks that share one copy of the model, copies).  Raises UserError where the GPUs do not divide into copies."""
    replicas = settings.replicas(request.nodes)
    if request.gpus % replicas:
        raise UserError(f"dp_replicate_size {replicas}: {request.gpus} GPUs do not divide by it", "Choose a divisor")
    return request.gpus // replicas, replicas
