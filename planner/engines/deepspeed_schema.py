"""DeepSpeed's configuration, key by key: what is allowed, what has gone, and what moves bytes.

Source: deepspeed 0.19.8, deepspeed/runtime/config.py, zero/config.py, zero/offload_config.py, zero/leaf_module_config.py,
precision_config.py, constants.py.  DeepSpeed itself is not needed to read a file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..strategies.deepspeed_settings import LeafModules

#: Keys of older versions that 0.19 refuses even when they are switched off (config.py, _REMOVED_TOP_LEVEL_CONFIG_KEYS).
REMOVED: dict[str, str] = {
    "nebula": "Nebula checkpointing is gone: remove the block",
    "compression_training": "the compression library is gone: remove the block",
    "amp": "Apex AMP is gone: use bf16, fp16 or torch_autocast",
    "quantize_training": "mixture of quantization is gone: remove the block",
    "sparse_gradients": "it is gone: remove the key (nn.Embedding(sparse=True) needs none)",
    "eigenvalue": "mixture of quantization is gone: remove the block",
    "sparse_attention": "sparse attention is gone: remove the block",
    "elasticity": "elastic training is gone: write the batch sizes instead",
    "graph_harvesting": "graph harvesting is gone: remove the key",
    "curriculum_learning": "it moved to data_efficiency.data_sampling.curriculum_learning",
    "progressive_layer_drop": "progressive layer dropping is gone: remove the block",
}
#: The same below zero_optimization (config.py, _REMOVED_ZERO_CONFIG_KEYS).
REMOVED_ZERO: dict[str, str] = {
    "mics_shard_size": "MiCS is gone: zero_hpz_partition_size is the nearest that is left",
    "mics_hierarchical_params_gather": "MiCS is gone: remove the key",
    "zeropp_loco_param": "LoCo is gone: remove the key",
}

#: Top-level keys that decide nothing about memory during training.
NO_EFFECT = frozenset({
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "timers", "comms_logger",
    "tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "checkpoint", "datastates", "dataloader_drop_last",
    "disable_allgather", "disable_python_gc", "vocabulary_size", "prescale_gradients", "gradient_predivide_factor",
    "gradient_allreduce_op", "scheduler", "zero_allow_untested_optimizer", "managed_gradient_accumulation",
    "use_data_before_expert_parallelism", "seq_parallel_communication_data_type", "train_batch_size", "allgather_size",
    "model_checkpointing",
})  # fmt: skip
#: Top-level keys that this package reads.
READ = frozenset({
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "zero_optimization", "bf16",
    "bfloat16", "fp16", "torch_autocast", "data_types", "communication_data_type", "optimizer", "activation_checkpointing",
    "zero_force_ds_cpu_optimizer", "aio",
})  # fmt: skip
#: Blocks that change memory and are not modelled, with the key that switches them on and the values that do not.
UNMODELLED_BLOCKS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "hybrid_engine": ("enabled", (False,)),
    "tensor_parallel": ("autotp_size", (0, 1)),
    "expert_parallel": ("enabled", (False,)),
    "data_efficiency": ("enabled", (False,)),
    "compile": ("deepcompile", (False,)),
    "autotuning": ("enabled", (False,)),
    "msamp": ("enabled", (False,)),  # accelerate writes it for fp8
}
#: Other top-level keys that change memory, with the values that do not.
UNMODELLED_KEYS: dict[str, tuple[Any, ...]] = {"sequence_parallel_size": (1, None), "weight_quantization": (None,)}
#: Read by `deepspeed.pipe` alone, which takes a PipelineModule.
PIPELINE = "pipeline"

TOP_LEVEL = frozenset({*NO_EFFECT, *READ, *UNMODELLED_BLOCKS, *UNMODELLED_KEYS, PIPELINE})

#: deepspeed/runtime/config.py, DtypeEnum: every spelling that DeepSpeed takes -> ours.
DTYPES: dict[str, str] = {
    **dict.fromkeys(("torch.float16", "fp16", "float16", "half"), "float16"),
    **dict.fromkeys(("torch.float32", "fp32", "float32", "float"), "float32"),
    **dict.fromkeys(("torch.bfloat16", "bf16", "bfloat16"), "bfloat16"),
}

#: `optimizer.type` (lower case) -> memplan's name; engine.py, `_configure_basic_optimizer`.  Others are torch.optim's classes.
OPTIMIZERS: dict[str, str] = {
    "adam": "adam", "adamw": "adamw", "adagrad": "adagrad", "lamb": "lamb", "lion": "lion", "muon": "muon",
    "muadam": "adam", "muadamw": "adamw", "musgd": "sgd",
}  # fmt: skip
TORCH_OPTIMIZERS: dict[str, str] = {
    "Adam": "adam", "AdamW": "adamw", "SGD": "sgd", "Adagrad": "adagrad", "Adadelta": "adadelta", "Adamax": "adamax",
    "NAdam": "nadam", "RAdam": "radam", "RMSprop": "rmsprop", "Rprop": "rprop", "ASGD": "asgd", "Adafactor": "adafactor",
    "LBFGS": "lbfgs", "SparseAdam": "sparseadam", "Muon": "muon",
}  # fmt: skip

#: What ZeRO takes without `zero_allow_untested_optimizer`, by `optimizer.type` (zero/utils.py, ZERO_SUPPORTED_OPTIMIZERS;
#: mup's are torch's own classes).
TESTED_WITH_ZERO = frozenset({"adam", "adamw", "adagrad", "lion", "muon", "muadam", "muadamw"})


class _Section(BaseModel):
    """As DeepSpeedConfigModel: unknown keys are refused, and a number may be written 5e8."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, frozen=True)


class OffloadParamSection(_Section):
    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: int = Field(5, ge=0)
    buffer_size: int = Field(100_000_000, ge=0)
    max_in_cpu: int = Field(1_000_000_000, ge=0)
    pin_memory: bool = True


class OffloadOptimizerSection(_Section):
    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: int = Field(4, ge=0)
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = Field(1.0, ge=0.0, le=1.0)
    super_offload: bool = False
    cpuadam_cores_perc: float = Field(0.8, ge=0.0, le=1.0)


class ZenFlowSection(_Section):
    """zenflow_config.py, `ZenFlowConfig`; its "auto" values are values."""

    topk_ratio: float = Field(0.1, gt=0.0, lt=1.0)
    select_strategy: Literal["auto", "step", "epoch"] = "auto"
    select_interval: Literal["auto"] | int = "auto"
    update_interval: Literal["auto"] | int = "auto"
    overlap_step: bool = False
    offload: bool = False
    auto_ratio: float = Field(0.99, ge=0.0, le=1.0)
    full_warm_up_rounds: int = 0
    pt_reserved_cores_perc: float = Field(0.5, ge=0.0, le=1.0)


class LeafModuleSection(_Section):
    """leaf_module_config.py, `DeepSpeedZeroLeafModuleConfig`: one name may stand without a list."""

    classes: tuple[str, ...] = LeafModules().classes
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()

    @field_validator("classes", "names", "name_suffixes", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class ZeroSection(_Section):
    """`zero_optimization`.  Stage 3's own keys may be written with or without their prefix, as DeepSpeed takes both."""

    stage: int = Field(0, ge=0, le=3)
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = Field(500_000_000, gt=0)
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = Field(500_000_000, ge=0)
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: OffloadParamSection | None = None
    offload_optimizer: OffloadOptimizerSection | None = None
    zenflow: ZenFlowSection | None = None
    sub_group_size: int = Field(1_000_000_000, ge=0)
    cpu_offload_param: bool | None = None
    cpu_offload_use_pin_memory: bool | None = None
    cpu_offload: bool | None = None
    prefetch_bucket_size: int = Field(50_000_000, ge=0, alias="stage3_prefetch_bucket_size")
    param_persistence_threshold: int = Field(100_000, ge=0, alias="stage3_param_persistence_threshold")
    model_persistence_threshold: int = Field(sys.maxsize, ge=0, alias="stage3_model_persistence_threshold")
    max_live_parameters: int = Field(1_000_000_000, ge=0, alias="stage3_max_live_parameters")
    max_reuse_distance: int = Field(1_000_000_000, ge=0, alias="stage3_max_reuse_distance")
    gather_16bit_weights_on_model_save: bool = Field(False, alias="stage3_gather_16bit_weights_on_model_save")
    module_granularity_threshold: int = Field(0, alias="stage3_module_granularity_threshold")
    use_all_reduce_for_fetch_params: bool = Field(False, alias="stage3_use_all_reduce_for_fetch_params")
    allgather_sequential: bool = Field(False, alias="stage3_allgather_sequential")
    stage3_gather_fp16_weights_on_model_save: bool = False
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: int = Field(1, ge=0)
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: LeafModuleSection | None = None


class Fp16Section(_Section):
    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = Field(0.0, ge=0.0)
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1
    fp16_master_weights_and_grads: bool = False


class Bf16Section(_Section):
    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


#: Keys of zero_optimization that decide nothing about memory during training.
ZERO_NO_EFFECT = frozenset({
    "load_from_fp32_weights", "elastic_checkpoint", "gather_16bit_weights_on_model_save", "ignore_unused_parameters",
    "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks",
    "save_muon_momentum_buffer_in_memory", "allgather_partitions", "stage3_gather_fp16_weights_on_model_save",
})  # fmt: skip
#: Deprecated switches, with what replaces each: (key, value); None: nothing, DeepSpeed ignores it.
ZERO_DEPRECATED: dict[str, tuple[str, Any] | None] = {
    "cpu_offload": ("offload_optimizer", {"device": "cpu"}),
    "cpu_offload_param": ("offload_param", {"device": "cpu"}),
    "cpu_offload_use_pin_memory": None,
    "stage3_gather_fp16_weights_on_model_save": ("stage3_gather_16bit_weights_on_model_save", True),
}


def json_name(section: type[BaseModel], field: str) -> str:
    """The name of a field as the file has it."""
    alias = section.model_fields[field].alias
    return field if alias is None else alias


def known_keys(section: type[BaseModel]) -> list[str]:
    return [json_name(section, field) for field in section.model_fields]


def dtype(value: Any) -> str | None:
    """A dtype in any of DeepSpeed's spellings, or None."""
    return DTYPES.get(value.lower()) if isinstance(value, str) else None


def block(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """`data[key]` where it is a mapping, else an empty one."""
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}
