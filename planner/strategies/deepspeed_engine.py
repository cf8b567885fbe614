"""From a question to the DeepSpeed engine that would answer it: which stage, which wrapper, which knobs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import CannotTell, UserError
from . import MIXED
from .deepspeed_settings import DeepSpeedSettings, OffloadDevice, OffloadOptimizer, OffloadParam
from .zero_host import master_dtype

if TYPE_CHECKING:
    from ...models.adapters import AdapterSettings
    from ..request import Request
    from ..trace.steptrace import StepTrace
    from .base import Strategy

FOUR_BITS = ("nf4", "nf4-dq", "fp4", "fp4-dq")
_PARTITIONS_PARAMS = 3  # the stage
_NOT_WITH_ZENFLOW = (
    "contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce", "round_robin_gradients", "parameter_alignment",
    "grad_accum_dtype", "communication_data_type", "bf16_master_weights_and_grads", "fp16_master_weights_and_grads", "muon",
)  # fmt: skip
_PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed")


def check(request: Request) -> None:
    """Raises UserError for what DeepSpeed refuses, CannotTell for what is not modelled; both name the JSON's key."""
    if request.precision not in _PRECISIONS:
        raise CannotTell(f"--precision {request.precision}: DeepSpeed keeps fp32 masters. Use {', '.join(_PRECISIONS)}")
    stage = int(request.strategy[-1])
    settings = settings_of(request)
    if settings.muon is not None:
        _check_muon(stage, settings, MIXED.get(request.precision, "float32"))
    _check_base(request, stage)
    _check_offload(stage, settings)
    _check_knobs(stage, settings, MIXED.get(request.precision, "float32"))
    _check_norm(stage, settings, clips=request.loop.clip_grad_norm)
    _check_zenflow(request, stage, settings)
    ranks = settings.zero_hpz_partition_size
    if stage == _PARTITIONS_PARAMS and request.gpus % ranks:
        raise UserError(
            f"zero_optimization.zero_hpz_partition_size {ranks}: {request.gpus} GPUs do not divide by it",
            "Take the number of GPUs of one machine",
        )


def _check_muon(stage: int, settings: DeepSpeedSettings, dtype: str) -> None:
    if stage == 0:
        raise CannotTell("optimizer.type Muon at stage 0 is not modelled. Use --strategy zero1 to zero3, or --optimizer adamw")
    if settings.bf16_master_weights_and_grads and not settings.bf16_optimizer_states:
        raise UserError(
            "bf16.bf16_master_weights_and_grads with fp32 states and optimizer.type Muon: DeepSpeed refuses it",
            "Set bf16_optimizer_states as well",
        )
    if stage == _PARTITIONS_PARAMS:
        _check_muon_3(settings)
        return
    if (settings.grad_accum_dtype or dtype) != dtype:
        raise CannotTell(
            f"optimizer.type Muon with data_types.grad_accum_dtype {settings.grad_accum_dtype} is not modelled. Leave it out"
        )
    if not settings.use_multi_rank_bucket_allreduce:
        raise CannotTell(
            "optimizer.type Muon with zero_optimization.use_multi_rank_bucket_allreduce: false is not modelled. Leave it out"
        )


def _check_muon_3(settings: DeepSpeedSettings) -> None:
    optimizer, key = settings.offload_optimizer, "zero_optimization.offload_optimizer"
    if settings.reduce_scatter:
        raise UserError(
            "optimizer.type Muon with zero_optimization.reduce_scatter: DeepSpeed refuses it at stage 3",
            "Set reduce_scatter to false in the configuration, or use --strategy zero2",
        )
    if optimizer is not None and (optimizer.device == "nvme" or optimizer.ratio != 1):
        part = f"{key}.ratio {optimizer.ratio}" if optimizer.device == "cpu" else f"{key}.device nvme"
        raise CannotTell(f"optimizer.type Muon with {part} is not modelled. Offload all of it to the host")


def _check_base(request: Request, stage: int) -> None:
    adapter = request.adapter_settings
    if adapter is None or adapter.base_quant == "none":
        return
    what = f"--base-quant {adapter.base_quant} with --strategy {request.strategy}"
    if adapter.base_quant == "gptq" and request.precision != "fp16-mixed":
        raise UserError(
            f"{what} and --precision {request.precision}: GPTQ's products are of fp16, and DeepSpeed runs no autocast",
            "Use --precision fp16-mixed, or --base-quant nf4",
        )
    if adapter.packed_as_parameters:
        raise CannotTell(f"{what}: packed weights that are parameters are modelled for FSDP only. Leave that out")
    dtype, stored = MIXED.get(request.precision), adapter.quant_storage or "uint8"
    if dtype is not None and adapter.base_quant in FOUR_BITS and stored not in ("uint8", dtype):
        raise UserError(
            f"{what} and bnb_4bit_quant_storage {stored}: DeepSpeed casts what lies in {stored} to {dtype}, packed weights "
            "too, which destroys them",
            f"Set bnb_4bit_quant_storage to uint8 or {dtype}",
        )
    if stage == _PARTITIONS_PARAMS:
        _check_partitioned_base(what, adapter.base_quant, settings_of(request))
        if request.reentrant and request.recompute != "none" and adapter.base_quant in FOUR_BITS:
            raise CannotTell(
                f"{what} and --reentrant: how long a reentrant checkpoint holds gathered 4-bit weights is not modelled. "
                "Use --strategy zero2, or leave --reentrant out"
            )


def _check_partitioned_base(what: str, quant: str, settings: DeepSpeedSettings) -> None:
    """Stage 3."""
    if quant == "int8":
        raise UserError(
            f"{what}: bitsandbytes keeps the whole 8-bit weights on every GPU beside the partitions that DeepSpeed makes of "
            "them, so nothing is saved",
            "Use --strategy zero2, or --base-quant nf4",
        )
    if settings.stage3_use_all_reduce_for_fetch_params and quant in FOUR_BITS:
        raise CannotTell(
            f"{what} and zero_optimization.stage3_use_all_reduce_for_fetch_params is not modelled: DeepSpeed puts parameters "
            "of one dtype into its buffer. Leave it out"
        )
    if settings.offload_param is not None and settings.offload_param.device == "nvme":
        raise CannotTell(f"{what} and zero_optimization.offload_param.device nvme is not modelled. Use device cpu")


def _check_offload(stage: int, settings: DeepSpeedSettings) -> None:
    optimizer, param = settings.offload_optimizer, settings.offload_param
    if param is not None and stage < _PARTITIONS_PARAMS:
        raise UserError(f"zero_optimization.offload_param at stage {stage}: parameters are whole there", "Use --strategy zero3")
    if optimizer is None:
        return
    if stage == 0:
        raise UserError(
            "zero_optimization.offload_optimizer at stage 0: nothing is offloaded there", "Use --strategy zero1 to zero3"
        )
    if optimizer.ratio != 1 and stage < _PARTITIONS_PARAMS:
        raise UserError(
            f"zero_optimization.offload_optimizer.ratio {optimizer.ratio} at stage {stage}: DeepSpeed refuses it",
            "Leave it out, or use --strategy zero3",
        )


def _check_knobs(stage: int, settings: DeepSpeedSettings, dtype: str) -> None:
    said = [
        (
            f"data_types.grad_accum_dtype {settings.grad_accum_dtype} with a {dtype} model",
            (settings.grad_accum_dtype or dtype) not in (dtype, "float32"),
        ),
    ]
    for key, is_asked in said:
        if is_asked:
            raise CannotTell(f"{key} is not modelled yet. Leave it out")
    _check_masters(stage, settings, dtype)
    if stage == 0 and (settings.grad_accum_dtype or dtype) != dtype:
        raise UserError(
            f"data_types.grad_accum_dtype {settings.grad_accum_dtype} at stage 0: DeepSpeed refuses it with a {dtype} model",
            "Leave it out, or use --strategy zero1 to zero3",
        )


def _check_norm(stage: int, settings: DeepSpeedSettings, *, clips: bool) -> None:
    """config.py and stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__`."""
    if settings.compute_grad_norm:
        return
    key = "zero_optimization.compute_grad_norm: false"
    if stage not in (1, 2):
        raise UserError(f"{key} at stage {stage}: allowed at stages 1 and 2", "Leave it out")
    if clips:
        raise UserError(f"{key} with gradient clipping: DeepSpeed refuses it", "Set gradient_clipping to 0, or leave it out")
    if settings.offload_optimizer is not None:
        raise UserError(f"{key} with an offloaded optimizer: DeepSpeed refuses it", "Leave it out")


def _check_zenflow(request: Request, stage: int, settings: DeepSpeedSettings) -> None:
    """runtime/zenflow/engine.py, zenflow_stage_1_and_2.py (`_configure_zenflow`)."""
    zenflow, key = settings.zenflow, "zero_optimization.zenflow"
    if zenflow is None:
        return
    if settings.offload_optimizer is None or stage == 0:
        raise UserError(f"{key} without an offloaded optimizer: DeepSpeed refuses it", "Set offload_optimizer.device to cpu")
    if not steps_by_itself(request, settings):
        raise UserError(
            f"{key} with {request.optimizer} of torch: ZenFlow steps with DeepSpeed's own Adam only", "Use DeepSpeed's AdamW"
        )
    if zenflow.select_strategy == "step" and 0 < zenflow.select_interval < zenflow.update_interval:
        raise UserError(
            f"{key}.select_interval {zenflow.select_interval} below update_interval {zenflow.update_interval}: DeepSpeed "
            "refuses it",
            "Raise select_interval to a multiple of update_interval",
        )
    if request.loop.grad_accum_steps != zenflow.update_interval:
        raise UserError(
            f"{key}.update_interval {zenflow.update_interval} with gradient_accumulation_steps "
            f"{request.loop.grad_accum_steps}: DeepSpeed accumulates over update_interval whatever the other says",
            "Give both the same number",
        )
    plain = DeepSpeedSettings()
    unmodelled = ["overlap_comm"] if settings.overlaps(stage) else []
    unmodelled += [name for name in _NOT_WITH_ZENFLOW if getattr(settings, name) != getattr(plain, name)]
    if stage != 2:
        raise CannotTell(f"{key} at stage {stage} is not modelled. Use --strategy zero2")
    if unmodelled:
        raise CannotTell(f"{key} with {unmodelled[0]} {getattr(settings, unmodelled[0])} is not modelled. Leave it out")


def _check_masters(stage: int, settings: DeepSpeedSettings, dtype: str) -> None:
    """base_optimizer.py, `_configure_master_weights`."""
    masters, states = settings.bf16_master_weights_and_grads, settings.bf16_optimizer_states
    if settings.fp16_master_weights_and_grads:
        _check_fp16_masters(stage, settings, dtype)
    optimizer = settings.offload_optimizer
    if master_dtype(settings) != "float32" and optimizer is not None and optimizer.device == "nvme" and stage == 3:
        raise UserError(
            "16-bit masters (master_weights_and_grads) with offload_optimizer.device nvme: DeepSpeed 0.19.8 fails in its first "
            "step, whose swap buffers are asked for in fp32",
            "Offload to the host (device cpu), or keep fp32 masters",
        )
    if states and not masters:
        raise UserError("bf16.bf16_optimizer_states without bf16_master_weights_and_grads: DeepSpeed refuses it", "Set both")
    if masters and (stage == 0 or dtype != "bfloat16"):
        raise CannotTell(
            f"bf16.bf16_master_weights_and_grads at stage {stage} with a {dtype} model is not modelled. Leave it out"
        )
    if masters and not states and settings.offload_optimizer is None:
        raise UserError(
            "bf16.bf16_master_weights_and_grads with fp32 states on the GPU: DeepSpeed refuses it",
            "Set bf16_optimizer_states as well, or offload the optimizer",
        )


def _check_fp16_masters(stage: int, settings: DeepSpeedSettings, dtype: str) -> None:
    key = "fp16.fp16_master_weights_and_grads"
    if settings.bf16_master_weights_and_grads:
        raise UserError(f"{key} and bf16.bf16_master_weights_and_grads: DeepSpeed takes one of them", "Leave one out")
    if stage == 0:
        raise UserError(f"{key} at stage 0: DeepSpeed refuses it", "Use --strategy zero1 to zero3")
    if dtype != "float16":
        raise CannotTell(f"{key} with a {dtype} model is not modelled. Leave it out")
    if settings.offload_optimizer is None or settings.muon is not None:
        raise UserError(
            f"{key} without DeepSpeedCPUAdam: DeepSpeed refuses it",
            "Offload the optimizer (--offload optimizer), and use adamw",
        )


def traced_as(request: Request) -> Request:
    """The question whose trace is walked where an adapter trains: see `cast`."""
    adapter = request.adapter_settings
    if adapter is None or request.precision not in MIXED:
        return request
    return request.but(adapter=cast(adapter))


def cast(adapter: AdapterSettings) -> AdapterSettings:
    """What is left of an adapter once the engine has cast the module to 16 bits: adapters, and what
    `prepare_model_for_kbit_training` widened, but no packed weights and no buffers (deepspeed 0.19.8, runtime/engine.py,
    `_cast_module_mixed_precision`)."""
    upcast = adapter.upcast if adapter.base_quant == "none" else False
    return replace(adapter, adapter_dtype="base", autocast=False, upcast=upcast)


def make(request: Request, trace: StepTrace) -> Strategy:
    settings = settings_of(request)
    if settings.zenflow is not None:
        # the iterations that are simulated are to have what a later selection takes
        every = replace(settings.zenflow, select_strategy="step", select_interval=settings.zenflow.update_interval)
        settings = replace(settings, zenflow=every)
    return strategy_of(
        int(request.strategy[-1]),
        settings,
        trace,
        request.gpus,
        request.rank,
        own_adam=steps_by_itself(request, settings),
        total_bytes=request.device.total_bytes,
    )


def steps_by_itself(request: Request, settings: DeepSpeedSettings) -> bool:
    """Whether the optimizer is DeepSpeed's own Adam.  Offloading takes it unless it is told not to.

    So it is for what DeepSpeed's Muon leaves to Adam.
    """
    if settings.muon is not None:
        return True
    forced = settings.offload_optimizer is not None and settings.zero_force_ds_cpu_optimizer
    return request.optimizer in ("adam", "adamw") and (request.optimizer_impl == "default" or forced)


def settings_of(request: Request) -> DeepSpeedSettings:
    """The knobs of the question; `--offload` fills in DeepSpeed's defaults where they do not say what is offloaded.

    Where no knobs are given, stage 3 makes the model under `deepspeed.zero.Init`, as transformers' Trainer does.
    """
    settings = request.deepspeed or DeepSpeedSettings(zero_init=request.strategy == "zero3")
    optimizer, param = settings.offload_optimizer, settings.offload_param
    if optimizer is None and (device := _device_of("optimizer", request.offload)):
        optimizer = OffloadOptimizer(device=device)
    if param is None and (device := _device_of("param", request.offload)):
        param = OffloadParam(device=device)
    muon = (settings.muon or "gram") if request.optimizer == "muon" else None
    zero_init = settings.zero_init and not is_quantised(request)
    return replace(settings, offload_optimizer=optimizer, offload_param=param, muon=muon, zero_init=zero_init)


def is_quantised(request: Request) -> bool:
    """Whether the base is loaded quantised: transformers then makes the model without `deepspeed.zero.Init`, whole on every
    GPU, and the engine partitions it (5.24, modeling_utils.py, `get_init_context`)."""
    adapter = request.adapter_settings
    return adapter is not None and adapter.base_quant != "none"


def _device_of(part: str, offload: tuple[str, ...]) -> OffloadDevice | None:
    return "nvme" if f"{part}:nvme" in offload else "cpu" if part in offload else None


def strategy_of(
    stage: int,
    settings: DeepSpeedSettings,
    trace: StepTrace,
    world_size: int,
    rank: int | None,
    *,
    own_adam: bool,
    total_bytes: int | None = None,
) -> Strategy:
    """The strategy of one rank; None: the most loaded one.

    `own_adam`: the optimizer is DeepSpeed's own, FusedAdam or on the host DeepSpeedCPUAdam; else the simulation's rule.
    `total_bytes`: of the GPU; None: enough for everything.
    """
    if stage == 3:
        from .zero3 import Zero3

        return Zero3(world_size, rank or 0, settings, own_adam=own_adam)
    if stage == 0:
        from .zero0 import Zero0

        return Zero0(world_size, rank or 0, settings, own_adam=own_adam)
    dtypes = {p.dtype for p in trace.params}
    if stage == 1 and settings.offload_optimizer is None and (dtypes, settings.grad_accum_dtype) == ({"bfloat16"}, "float32"):
        from .zero_bf16 import Bf16Optimizer

        return Bf16Optimizer(world_size, rank or 0, settings, own_adam=own_adam)
    from .flat import heaviest_rank
    from .zero12 import Zero1, Zero2

    if rank is None:
        rank = heaviest_rank(
            trace, world_size, settings.optimizer_groups, reorders=settings.round_robin_gradients,
            aligned=settings.parameter_alignment, muon=settings.muon is not None,
        )  # fmt: skip
    if settings.zenflow is not None:
        from .zero_zenflow import ZenFlow2

        return ZenFlow2(world_size, rank, settings, own_adam=own_adam, total_bytes=total_bytes)
    return (Zero1 if stage == 1 else Zero2)(world_size, rank, settings, own_adam=own_adam, total_bytes=total_bytes)


def said(request: Request) -> list[str]:
    settings = settings_of(request)
    knobs = "its default knobs" if request.deepspeed is None else "the knobs of your configuration"
    parts = [
        f"{name} on {'NVMe' if part.device == 'nvme' else 'the host'}"
        for name, part in (("optimizer", settings.offload_optimizer), ("parameters", settings.offload_param))
        if part is not None
    ]
    adam = "DeepSpeedCPUAdam" if settings.offload_optimizer is not None else "FusedAdam"
    adam = f"Muon (its updates as they are before they are compiled: at most that) and {adam}" if settings.muon else adam
    steps = adam if steps_by_itself(request, settings) else f"{request.optimizer} of torch"
    found = [f"DeepSpeed 0.19 ZeRO-{request.strategy[-1]} with {knobs}, {' and '.join(parts) or 'no offload'}, {steps}"]
    if settings.zero_init and request.deepspeed is None:
        found.append("the model is made under deepspeed.zero.Init, as transformers' Trainer does")
    if settings.zenflow is not None:
        found.append("ZenFlow after its warm-up, with new columns in every update interval: the highest peak that it has")
    if is_quantised(request) and request.strategy == "zero3":
        found.append("a quantised model is loaded whole on every GPU, and partitioned then (no deepspeed.zero.Init)")
    if request.reentrant and request.recompute != "none" and request.strategy == "zero3":
        found.append("at stage 3 a reentrant recompute is answered as one that is not: the peak is an upper bound")
    optimizer = settings.offload_optimizer
    if optimizer is not None and optimizer.device == "nvme" and int(request.strategy[-1]) < _PARTITIONS_PARAMS:
        found.append("below stage 3 DeepSpeed keeps in host memory what it is asked to put on NVMe")
    return found
