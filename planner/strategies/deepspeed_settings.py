"""What DeepSpeed's JSON says about memory, typed: every key that decides where bytes go, with DeepSpeed's own default.

Source: deepspeed 0.19.8, deepspeed/runtime/zero/config.py (`DeepSpeedZeroConfig`), offload_config.py and runtime/config.py.
Field names are those of the JSON.  What `Request` says already (stage, precision, micro batch, accumulation, clipping, the
optimizer's name) is not said again here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

OffloadDevice = Literal["cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class OffloadOptimizer:
    """`zero_optimization.offload_optimizer` (offload_config.py, `DeepSpeedZeroOffloadOptimizerConfig`)."""

    device: OffloadDevice = "cpu"
    nvme_path: str | None = None
    buffer_count: int = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: float = 1.0
    """Share of the sub-groups whose optimizer lives on the host (Twin-Flow, stage 3)."""


@dataclass(frozen=True, kw_only=True)
class OffloadParam:
    """`zero_optimization.offload_param` (offload_config.py, `DeepSpeedZeroOffloadParamConfig`)."""

    device: OffloadDevice = "cpu"
    nvme_path: str | None = None
    buffer_count: int = 5
    buffer_size: int = 100_000_000
    """Elements of one swap buffer."""
    max_in_cpu: int = 1_000_000_000
    """Elements of NVMe parameters that stay in host memory."""
    pin_memory: bool = True


@dataclass(frozen=True, kw_only=True)
class ZenFlow:
    """`zero_optimization.zenflow` (deepspeed/runtime/zenflow/zenflow_config.py, `ZenFlowConfig`), as far as it is modelled."""

    topk_ratio: float = 0.1
    """Share of a matrix's columns that step on the GPU."""
    select_strategy: Literal["step", "epoch"] = "epoch"
    select_interval: int = 1
    """Steps or epochs between two selections; 0: one selection, at the first step.  Epochs are not seen by the engine unless
    `deepspeed.initialize` makes the data loader."""
    update_interval: int = 1
    """Micro steps between two steps of the host's optimizer: DeepSpeed takes it for gradient_accumulation_steps."""
    full_warm_up_rounds: int = 0
    """Micro steps before the first selection, each with a step of the host's optimizer."""


@dataclass(frozen=True, kw_only=True)
class LeafModules:
    """`zero_optimization.leaf_module` (leaf_module_config.py): what stage 3 gathers as one unit, with all that is inside.

    By default the sparse blocks of three families, as transformers 5 names them.
    """

    classes: tuple[str, ...] = (
        "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
    """Names of classes, with or without their modules."""
    names: tuple[str, ...] = ()
    """Full names of modules in the model."""
    name_suffixes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings:
    """The knobs of one engine.  Sizes of buckets and thresholds are in elements, as in the JSON."""

    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    """None: on at stage 3, off below."""
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    use_multi_rank_bucket_allreduce: bool = True
    compute_grad_norm: bool = True
    parameter_alignment: bool = False
    """Stages 1 and 2: every parameter begins at a multiple of 16 bytes in the flat tensor."""
    round_robin_gradients: bool = False
    sub_group_size: int = 1_000_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_model_persistence_threshold: int = sys.maxsize
    stage3_allgather_sequential: bool = False
    stage3_use_all_reduce_for_fetch_params: bool = False
    zero_hpz_partition_size: int = 1
    memory_efficient_linear: bool = True
    leaf_module: LeafModules = LeafModules()
    offload_optimizer: OffloadOptimizer | None = None
    offload_param: OffloadParam | None = None
    zenflow: ZenFlow | None = None
    grad_accum_dtype: str | None = None
    """`data_types.grad_accum_dtype`: float32 | bfloat16 | float16; None: the model's."""
    communication_data_type: str | None = None
    """float32 | bfloat16 | float16; None: the model's."""
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False
    fp16_master_weights_and_grads: bool = False
    zero_force_ds_cpu_optimizer: bool = True
    """With an offloaded optimizer: Adam is `DeepSpeedCPUAdam`, not torch's."""
    muon: Literal["gram", "standard"] | None = None
    """The optimizer is DeepSpeed's Muon, with this `optimizer.params.ns_method`."""
    aio_block_size: int = 1_048_576
    """`aio.block_size`, bytes: smaller tensors are not swapped to NVMe."""
    aio_intra_op_parallelism: int = 1
    """`aio.intra_op_parallelism`: threads of one read or write; swapped tensors are padded for them."""
    zero_init: bool = False
    """The model is made under `deepspeed.zero.Init` (or transformers' `HfDeepSpeedConfig`): it never is whole on a device."""
    optimizer_groups: Literal["one", "decay"] = "one"
    """decay: two groups, as transformers' Trainer makes them (weights; biases and norms)."""

    def overlaps(self, stage: int) -> bool:
        return stage == 3 if self.overlap_comm is None else self.overlap_comm
