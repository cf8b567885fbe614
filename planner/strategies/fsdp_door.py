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
    if version == 1 and request.adapter_settings is not None:  # see `adapted`: fp32 adapters beside what is loaded narrow
        settings = replace(settings, param_dtype=None, reduce_dtype=None, buffer_dtype=None)
    return replace(settings, cpu_offload=True) if request.offload else settings


def adapted(request: Request, *, narrow_base: bool) -> Request:
    """The question whose trace is walked where an adapter trains.

    A base in 4 bits is not widened by `prepare_model_for_kbit_training` unless that is asked for, and its packed weights are
    stored in the type of the other weights: FSDP flattens them together.  With a 16-bit `param_dtype`, `narrow_base` says
    that all is computed as it is gathered; else adapters stay fp32 and the step runs under autocast.
    """
    from . import MIXED

    adapter = request.adapter_settings
    if adapter is None:
        return request
    mixed = request.precision in MIXED
    if adapter.base_quant not in ("none", "gptq"):
        upcast = bool(adapter.upcast)
        storage = adapter.quant_storage or ("float32" if upcast else _stored(request))
        adapter = replace(adapter, upcast=upcast, quant_storage=storage)
    if mixed and narrow_base:
        adapter = replace(adapter, adapter_dtype="base", autocast=False)
    precision = request.precision.removesuffix("-mixed") if not narrow_base else request.precision
    return request.but(adapter=adapter, precision=precision)


def _stored(request: Request) -> str:
    """In what a base that is loaded in the question's precision is stored."""
    return {"bf16": "bfloat16", "fp16": "float16"}.get(request.precision.removesuffix("-mixed"), "float32")


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
