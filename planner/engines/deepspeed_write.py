"""A question as DeepSpeed's own file: for `deepspeed.initialize`, or for transformers' Trainer.

The Trainer's file holds "auto" wherever TrainingArguments must say the value (transformers/integrations/deepspeed.py,
`trainer_config_process`), and numbers, not "auto", for the buckets: they are what the answer was computed with.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell
from ..strategies.deepspeed_engine import settings_of
from ..strategies.deepspeed_settings import DeepSpeedSettings
from .imported import AUTO

if TYPE_CHECKING:
    from ..request import Request

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # as communication_data_type wants them
NVME_FOLDER = "/local_nvme"  # as in DeepSpeed's own examples
_CLIP_AT = 1.0  # the norm; memory does not depend on it
#: Fields of DeepSpeedSettings under zero_optimization, and the stages at which they matter.
_ZERO_KEYS: dict[str, tuple[int, ...]] = {
    "reduce_bucket_size": (1, 2, 3),
    "allgather_bucket_size": (1, 2),
    "contiguous_gradients": (1, 2, 3),
    "reduce_scatter": (1, 2, 3),
    "round_robin_gradients": (),
    "sub_group_size": (3,),
    "stage3_prefetch_bucket_size": (3,),
    "stage3_max_live_parameters": (3,),
    "stage3_max_reuse_distance": (3,),
    "stage3_param_persistence_threshold": (3,),
    "stage3_model_persistence_threshold": (),
    "use_multi_rank_bucket_allreduce": (),
    "compute_grad_norm": (),
    "parameter_alignment": (),
    "stage3_allgather_sequential": (),
    "stage3_use_all_reduce_for_fetch_params": (),
    "zero_hpz_partition_size": (),
    "memory_efficient_linear": (),
}
#: Fields that are not keys of the file: whoever makes the model and the optimizer decides them.
_IN_THE_CODE = ("zero_init", "optimizer_groups")
_DEEPSPEED_ADAM = {"adam": "Adam", "adamw": "AdamW"}
_TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw-amsgrad": ("AdamW", {"amsgrad": True}),
    "sgd": ("SGD", {}), "sgd-momentum": ("SGD", {"momentum": 0.9}), "adagrad": ("Adagrad", {}), "adadelta": ("Adadelta", {}),
    "adamax": ("Adamax", {}), "nadam": ("NAdam", {}), "radam": ("RAdam", {}), "rmsprop": ("RMSprop", {}),
    "rmsprop-momentum": ("RMSprop", {"momentum": 0.9}), "rprop": ("Rprop", {}), "asgd": ("ASGD", {}), "lion": ("Lion", {}),
    "lamb": ("Lamb", {}), "muon": ("Muon", {}),
}  # fmt: skip
_IMPLS: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}


@dataclasses.dataclass(frozen=True)
class Written:
    """A configuration, and what it cannot say."""

    config: dict[str, Any]
    notes: tuple[str, ...] = ()


def deepspeed_config(request: Request, *, trainer: bool = False) -> Written:
    """ds_config.json for a question with a ZeRO strategy.

    `trainer`: for transformers' Trainer, with "auto" where TrainingArguments speak; else for `deepspeed.initialize`.
    Raises CannotTell for what DeepSpeed has no words for.
    """
    if not request.strategy.startswith("zero"):
        raise CannotTell(f"--strategy {request.strategy} is none of DeepSpeed's: there is no ds_config.json for it")
    stage = int(request.strategy.removeprefix("zero"))
    settings = settings_of(request)
    notes: list[str] = []
    if settings != _with_folders(settings):
        settings = _with_folders(settings)
        notes.append(f"write the folder of your NVMe disk in the place of {NVME_FOLDER}")
    clip = AUTO if trainer else _CLIP_AT if request.loop.clip_grad_norm else 0.0
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": AUTO if trainer else request.micro_batch_size,
        "gradient_accumulation_steps": AUTO if trainer else request.loop.grad_accum_steps,
        "gradient_clipping": clip,
        **({"train_batch_size": AUTO} if trainer else {}),
        **engine_config(settings, stage, request.precision, trainer=trainer),
    }
    if not (trainer and settings.optimizer_groups == "decay"):
        config.update(_optimizer(request, settings, trainer, notes))
    if settings.zero_init and not trainer:
        notes.append("make the model under deepspeed.zero.Init(), as the answer takes for granted")
    if stage == 3 and trainer and not settings.zero_init:
        notes.append("the Trainer makes the model under deepspeed.zero.Init, which the answer did not take for granted")
    if settings.optimizer_groups == "decay" and not trainer:
        notes.append("give the optimizer two groups, weights and the rest, as the answer takes for granted")
    return Written(config, tuple(notes))


def engine_config(settings: DeepSpeedSettings, stage: int, precision: str, *, trainer: bool = False) -> dict[str, Any]:
    """The part of ds_config.json that settings, stage and precision decide: no batch sizes, no clipping, no optimizer."""
    config = {**_precision(precision, settings, trainer), "zero_optimization": _zero(settings, stage)}
    if settings.grad_accum_dtype:
        config["data_types"] = {"grad_accum_dtype": _SHORT[settings.grad_accum_dtype]}
    if settings.communication_data_type:
        config["communication_data_type"] = _SHORT[settings.communication_data_type]
    return {**config, **_host(settings)}


def _with_folders(settings: DeepSpeedSettings) -> DeepSpeedSettings:
    """NVMe needs a folder, which `--offload` does not name."""
    made: dict[str, Any] = {}
    for part in ("offload_optimizer", "offload_param"):
        section = getattr(settings, part)
        if section is not None and section.device == "nvme" and section.nvme_path is None:
            made[part] = dataclasses.replace(section, nvme_path=NVME_FOLDER)
    return dataclasses.replace(settings, **made)


def _precision(precision: str, settings: DeepSpeedSettings, trainer: bool) -> dict[str, Any]:
    switched: Any = AUTO if trainer else True
    if precision == "bf16-mixed":
        masters = {"bf16_master_weights_and_grads": True} if settings.bf16_master_weights_and_grads else {}
        states = {"bf16_optimizer_states": True} if settings.bf16_optimizer_states else {}
        return {"bf16": {"enabled": switched, **masters, **states}}
    if precision == "fp16-mixed":
        masters = {"fp16_master_weights_and_grads": True} if settings.fp16_master_weights_and_grads else {}
        return {"fp16": {"enabled": switched, **masters}}
    if precision == "fp32":
        return {}
    if precision.endswith("-autocast") and trainer:
        raise CannotTell(f"--precision {precision}: the Trainer switches bf16 or fp16 on beside DeepSpeed's torch_autocast")
    if precision.endswith("-autocast"):
        dtype = "bfloat16" if precision.startswith("bf16") else "float16"
        return {"torch_autocast": {"enabled": True, "dtype": dtype}}
    raise CannotTell(f"--precision {precision}: DeepSpeed keeps fp32 masters. Use bf16-mixed, fp16-mixed or fp32")


def _zero(settings: DeepSpeedSettings, stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    default = DeepSpeedSettings()
    for key, stages in _ZERO_KEYS.items():
        value = getattr(settings, key)
        if stage in stages or value != getattr(default, key):
            zero[key] = value
    if settings.overlap_comm is not None:
        zero["overlap_comm"] = settings.overlap_comm
    if settings.leaf_module != default.leaf_module:
        zero["leaf_module"] = {key: list(names) for key, names in dataclasses.asdict(settings.leaf_module).items()}
    if settings.zenflow is not None:
        zero["zenflow"] = dataclasses.asdict(settings.zenflow)
    for part in ("offload_optimizer", "offload_param"):
        section = getattr(settings, part)
        if section is not None:
            zero[part] = {k: v for k, v in dataclasses.asdict(section).items() if v is not None}
    return zero


def _optimizer(request: Request, settings: DeepSpeedSettings, trainer: bool, notes: list[str]) -> dict[str, Any]:
    name, impl = request.optimizer, request.optimizer_impl
    auto: dict[str, Any] = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO) if trainer else {}
    if name in _DEEPSPEED_ADAM:
        mode = {"adam_w_mode": False} if name == "adam" else {}
        own = impl == "default" or (settings.offload_optimizer is not None and settings.zero_force_ds_cpu_optimizer)
        chosen = {} if own else {"torch_adam": True, **_IMPLS[impl]}
        return {"optimizer": {"type": _DEEPSPEED_ADAM[name], "params": {**auto, **mode, **chosen}}}
    if name not in _TORCH:
        notes.append(f"DeepSpeed makes no {name} by name: pass that optimizer to deepspeed.initialize")
        return {"zero_allow_untested_optimizer": True}
    kind, arguments = _TORCH[name]
    if settings.muon == "standard":
        arguments = {**arguments, "ns_method": settings.muon}
    torch_adam = {"torch_adam": True} if name == "adamw-amsgrad" else {}
    params = {**torch_adam, **arguments, **_IMPLS.get(impl, {}), **({"lr": AUTO, "weight_decay": AUTO} if trainer else {})}
    return {"optimizer": {"type": kind, "params": params}, "zero_allow_untested_optimizer": True}


def _host(settings: DeepSpeedSettings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    default = DeepSpeedSettings()
    if not settings.zero_force_ds_cpu_optimizer:
        found["zero_force_ds_cpu_optimizer"] = False
    aio = {
        field.name.removeprefix("aio_"): getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if field.name.startswith("aio_") and getattr(settings, field.name) != getattr(default, field.name)
    }
    return {**found, **({"aio": aio} if aio else {})}
