"""A question as accelerate's YAML and as transformers' TrainingArguments.

Both hold the same words for FSDP, with and without a `fsdp_` prefix (accelerate/commands/config/cluster.py,
transformers/training_args.py); for ZeRO they name DeepSpeed's own file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell
from ..strategies.deepspeed_engine import settings_of
from ..strategies.fsdp_settings import HYBRID, FsdpSettings
from .deepspeed_write import Written
from .fsdp_config import MIXED_DTYPES, with_mixed_precision
from .training_args import optim_of

if TYPE_CHECKING:
    from ..request import Request

_TYPES = {"single": "NO", "ddp": "MULTI_GPU"}
_MIXED = {f"{short}-{kind}": short for short in MIXED_DTYPES for kind in ("mixed", "autocast")}
#: What no memory depends on: each step is reported on the screen, and no checkpoint is written.
_PROGRAM = {"output_dir": "output", "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
_DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "stored_dtype")


def accelerate_config(request: Request, deepspeed_file: str | None = None) -> Written:
    """The YAML of `accelerate launch --config_file`, as data; `deepspeed_file`: ds_config.json for a ZeRO strategy.

    Raises CannotTell for what accelerate has no words for.
    """
    notes: list[str] = []
    mixed = mixed_of(request)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _TYPES.get(request.strategy, "FSDP"),
        "num_processes": request.gpus,
        "num_machines": request.nodes,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed,
    }
    if request.nodes > 1:
        notes.append("accelerate.yaml: machine_rank and main_process_ip differ from machine to machine")
    if request.strategy.startswith("zero"):
        del config["mixed_precision"]  # DeepSpeed's file has it, and accelerate refuses both
        config["distributed_type"] = "DEEPSPEED"
        zero_init = settings_of(request).zero_init
        config["deepspeed_config"] = {"deepspeed_config_file": deepspeed_file, "zero3_init_flag": zero_init}
    elif request.strategy not in _TYPES:
        settings = fsdp_of(request)
        config["fsdp_config"] = {f"fsdp_{key}": value for key, value in _fsdp_block(settings, notes).items()}
        if not settings.limit_all_gathers and settings.version == 1:
            notes.append("limit_all_gathers false: accelerate.yaml has no word for it")
        if settings.version == 2 and (settings.dp_replicate_size or 1) > 1:
            copies = settings.dp_replicate_size or 1
            config["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": copies,
                "parallelism_config_dp_shard_size": request.gpus // copies,
            }
        _say_dtypes(settings, mixed, notes)
    if request.compiled:
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    return Written(config, tuple(notes))


def training_arguments(request: Request, deepspeed_file: str | None = None) -> Written:
    """The TrainingArguments that run the question; `deepspeed_file`: the Trainer's ds_config.json for a ZeRO strategy."""
    notes: list[str] = []
    mixed = mixed_of(request)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": request.micro_batch_size,
        "gradient_accumulation_steps": request.loop.grad_accum_steps,
        "max_grad_norm": 1.0 if request.loop.clip_grad_norm else 0.0,
        "bf16": mixed == "bf16",
        "fp16": mixed == "fp16",
        **_PROGRAM,
        **_optim(request, notes),
        **_recompute(request, notes),
    }
    if request.use_cache:
        arguments["use_cache"] = True
    if request.compiled:
        arguments["torch_compile"] = True
    if request.strategy.startswith("zero"):
        arguments["deepspeed"] = deepspeed_file
    elif request.strategy not in _TYPES:
        settings = fsdp_of(request)
        if settings.activation_checkpointing:
            arguments["activation_checkpointing"] = False
        arguments["fsdp"] = True
        arguments["fsdp_config"] = _trainer_block(settings, notes)
        _say_dtypes(settings, mixed, notes)
    return Written(arguments, tuple(notes))


def mixed_of(request: Request) -> str:
    """`mixed_precision`: no | bf16 | fp16.  An adapter on a 16-bit base is stepped under autocast unless it says no."""
    adapter = request.adapter_settings
    if adapter is not None and adapter.autocast and request.precision in MIXED_DTYPES:
        return request.precision
    return _MIXED.get(request.precision, "no")


def fsdp_of(request: Request) -> FsdpSettings:
    """The settings of an FSDP question: its own, or `fully_shard` on every block, with the types of its precision."""
    settings = request.fsdp
    if settings is None:
        version: Any = 1 if request.strategy == "fsdp1" else 2
        settings = FsdpSettings(version=version)
    if request.offload:
        settings = replace(settings, cpu_offload=True)
    if settings.param_dtype is None:
        settings = with_mixed_precision(settings, _MIXED.get(request.precision, "no"))
    if request.strategy == "hsdp" and settings.version == 2 and settings.dp_replicate_size is None:
        settings = replace(settings, dp_replicate_size=request.nodes)
    if request.recompute == "full" and settings.auto_wrap_policy == "TRANSFORMER_BASED_WRAP":
        settings = replace(settings, activation_checkpointing=True)
    return settings


def _fsdp_block(settings: FsdpSettings, notes: list[str]) -> dict[str, Any]:
    """The keys of accelerate's `fsdp_config`, without prefix."""
    block: dict[str, Any] = {
        "version": settings.version,
        "offload_params": settings.cpu_offload,
        "auto_wrap_policy": settings.auto_wrap_policy,
        "cpu_ram_efficient_loading": settings.cpu_ram_efficient_loading,
        "activation_checkpointing": settings.activation_checkpointing,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    if settings.auto_wrap_policy == "TRANSFORMER_BASED_WRAP" and settings.transformer_layer_cls_to_wrap:
        block["transformer_layer_cls_to_wrap"] = ",".join(settings.transformer_layer_cls_to_wrap)
    if settings.auto_wrap_policy == "SIZE_BASED_WRAP":
        block["min_num_params"] = settings.min_num_params
    if settings.ignored_modules is not None:
        block["ignored_modules"] = settings.ignored_modules
    if settings.version == 1:
        block |= {
            "sharding_strategy": settings.sharding_strategy,
            "backward_prefetch": settings.backward_prefetch or "NO_PREFETCH",
            "forward_prefetch": settings.forward_prefetch,
            "use_orig_params": settings.use_orig_params,
            "sync_module_states": settings.sync_module_states or settings.cpu_ram_efficient_loading,
        }
        if settings.sharding_strategy in HYBRID and settings.dp_replicate_size is not None:
            notes.append("HYBRID_SHARD replicates over machines: accelerate has no word for another number of copies")
        return block
    reshard = settings.reshard_after_forward
    if reshard is not None and not isinstance(reshard, bool):
        raise CannotTell(f"reshard_after_forward {reshard}: accelerate and transformers take true or false")
    if reshard is True and settings.root_reshard_after_forward is not False and not settings.wrap_embeddings:
        notes.append("reshard_after_forward true: accelerate keeps the root's parameters all the same")
    block["reshard_after_forward"] = reshard is not False
    block["activation_checkpointing_offload"] = settings.activation_checkpointing_offload
    if not settings.wrap_embeddings:
        notes.append("accelerate wraps embeddings and head apart from the root, which the answer did not take for granted")
    return block


def _trainer_block(settings: FsdpSettings, notes: list[str]) -> dict[str, Any]:
    """The same in the words of transformers' `fsdp_config`."""
    block = _fsdp_block(settings, notes)
    block["cpu_offload"] = block.pop("offload_params")
    if settings.transformer_layer_cls_to_wrap and "transformer_layer_cls_to_wrap" in block:
        block["transformer_layer_cls_to_wrap"] = list(settings.transformer_layer_cls_to_wrap)
    if settings.version == 1:
        if block.pop("sharding_strategy") != "FULL_SHARD":
            raise CannotTell(
                f"sharding_strategy {settings.sharding_strategy}: transformers' Trainer always makes it FULL_SHARD"
            )
        block["limit_all_gathers"] = settings.limit_all_gathers
    for key in ("ignored_modules", "activation_checkpointing_offload"):
        if block.pop(key, None):
            notes.append(f"{key}: transformers' fsdp_config has no word for it")
    return block


def _say_dtypes(settings: FsdpSettings, mixed: str, notes: list[str]) -> None:
    """accelerate makes every type of the policy the same one."""
    written = with_mixed_precision(FsdpSettings(version=settings.version), mixed)
    for field in _DTYPE_FIELDS:
        asked, made = getattr(settings, field), getattr(written, field)
        if asked != made and not (field in ("output_dtype", "buffer_dtype") and asked is None):
            notes.append(f"{field} {asked}: accelerate's mixed_precision {mixed} makes it {made}")


def _optim(request: Request, notes: list[str]) -> dict[str, Any]:
    if request.strategy.startswith("zero") and settings_of(request).optimizer_groups == "one":
        return {}  # DeepSpeed's file makes it
    impl = "foreach" if request.optimizer_impl == "default" else request.optimizer_impl
    optim = optim_of(request.optimizer, impl)
    if optim is None:
        said = f"--optimizer {request.optimizer} --optimizer-impl {request.optimizer_impl}"
        notes.append(f"{said}: TrainingArguments has no word for it, pass it to the Trainer (optimizers=...)")
        return {}
    return {"optim": optim}


def _recompute(request: Request, notes: list[str]) -> dict[str, Any]:
    """`every_n_layers` begins with the first block, `selective-layer:N` with block N: which of them matters to the peak."""
    if request.recompute == "none":
        return {}
    if request.recompute != "full":
        notes.append(f"--recompute {request.recompute}: TrainingArguments has no word for it, write it in the program")
        return {}
    kwargs = {"activation_checkpointing_kwargs": {"use_reentrant": True}} if request.reentrant else {}
    return {"activation_checkpointing": True, **kwargs}
