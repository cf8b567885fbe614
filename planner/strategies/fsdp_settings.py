"""What a configuration says about fully sharded data parallelism, typed: both versions, every knob that moves bytes.

Version 1 is `torch.distributed.fsdp.FullyShardedDataParallel`, version 2 is `fully_shard`.  Field names are those of
accelerate's `FullyShardedDataParallelPlugin` where it has one, else those of torch.  Defaults are torch's own (2.13): what a
program gets that calls torch directly.  accelerate and transformers have others; the reader of their files puts those in.

What `Request` says already (precision, micro batch, accumulation, clipping) is said again only where FSDP can differ from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...errors import UserError

Dtype = Literal["float32", "bfloat16", "float16"]
ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
WrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
BackwardPrefetch = Literal["BACKWARD_PRE", "BACKWARD_POST"]

HYBRID: tuple[ShardingStrategy, ...] = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_RESHARDS: tuple[ShardingStrategy, ...] = ("FULL_SHARD", "HYBRID_SHARD")
_SIZE_OF_A_UNIT = 100_000_000  # parameters; torch/distributed/fsdp/wrap.py, size_based_auto_wrap_policy(min_num_params=1e8)


@dataclass(frozen=True, kw_only=True)
class FsdpSettings:
    """The knobs of FSDP.  Fields of the other version are ignored, as torch has no place for them."""

    version: Literal[1, 2] = 2

    # What is sharded, and when it is gathered.
    sharding_strategy: ShardingStrategy = "FULL_SHARD"
    """Version 1.  The HYBRID ones shard inside a group of ranks and replicate over the groups."""
    reshard_after_forward: bool | int | None = None
    """Version 2.  None: wrapped modules drop their gathered parameters after forward, the root keeps them.  True or False:
    all drop, or all keep.  A number: blocks go back to shards over that many ranks only."""
    root_reshard_after_forward: bool | None = None
    """Version 2, where the root is wrapped with another value than its blocks (accelerate never passes it); None: as above."""
    dp_replicate_size: int | None = None
    """How many times the sharded model is there (HSDP).  None: once; under a HYBRID strategy of version 1 once per machine."""
    backward_prefetch: BackwardPrefetch | None = "BACKWARD_PRE"
    """Version 1.  PRE: the next unit is gathered before this one's gradients are computed, POST: after, None: not ahead."""
    forward_prefetch: bool = False
    """Version 1.  The next unit is gathered, as the last step did, before this one's forward runs."""
    limit_all_gathers: bool = True
    """Version 1.  The host waits so that at most two gathered units are in flight."""
    use_orig_params: bool = False
    """Version 1.  The optimizer sees the model's own parameters; False: one flat parameter for each unit."""

    # What is a unit.
    auto_wrap_policy: WrapPolicy = "TRANSFORMER_BASED_WRAP"
    """TRANSFORMER_BASED_WRAP: modules of the classes below; SIZE_BASED_WRAP: by parameter count; NO_WRAP: the root alone."""
    transformer_layer_cls_to_wrap: tuple[str, ...] = ()
    """Class names; empty: the classes that the model says must not be split (`_no_split_modules`), else its repeated block."""
    min_num_params: int = _SIZE_OF_A_UNIT
    """SIZE_BASED_WRAP: a module with more parameters (version 1: that are not in a unit yet) becomes a unit."""
    wrap_embeddings: bool = False
    """Version 2 under accelerate 1.15 (`fsdp2_prepare_model`): the input embedding is a unit of its own, and so are the final
    norm and the output embedding together, which keep their parameters after forward.  Tied embeddings: all three together."""
    ignored_modules: str | None = None
    """A regular expression; modules whose whole name matches it are not sharded."""

    units_inside_checkpoints: bool = False
    """Version 1, reentrant checkpoints.  A checkpoint is around a unit's call (transformers up to 4.52), not inside it."""

    # In which type.
    param_dtype: Dtype | None = None
    """What is gathered and computed in; None: as stored."""
    reduce_dtype: Dtype | None = None
    """What gradients are reduced in; None: as computed."""
    buffer_dtype: Dtype | None = None
    """Version 1: what buffers are cast to; None: as they are."""
    output_dtype: Dtype | None = None
    """Version 2: what the root's floating-point output is cast to; None: as computed."""
    stored_dtype: Dtype | None = None
    """Of the sharded parameters; None: as the model is made.  accelerate upcasts to float32 whenever it mixes precisions."""
    autocast: bool = False
    """accelerate: with a `param_dtype`, the model's forward also runs under torch.autocast, and what it returns is cast to
    float32 (`Accelerator.prepare_model`: `autocast_context`, `convert_outputs_to_fp32`)."""

    # What is elsewhere, or later again.
    cpu_offload: bool = False
    """Shards, their gradients and the optimizer live on the host."""
    offload_pin_memory: bool = True
    """Version 2, `CPUOffloadPolicy(pin_memory=...)`."""
    cpu_ram_efficient_loading: bool = False
    """Only rank 0 of a machine reads the weights; the others start empty and get their shards by broadcast."""
    sync_module_states: bool = False
    """Version 1: rank 0 broadcasts every unit when it is wrapped.  `cpu_ram_efficient_loading` switches it on."""
    activation_checkpointing: bool = False
    """Every unit is recomputed in backward (non-reentrant `checkpoint_wrapper`): `--recompute full`, where units are blocks."""
    activation_checkpointing_offload: bool = False
    """Version 2 under accelerate: what a checkpoint keeps goes to the host."""

    no_sync: bool = True
    """Micro steps but the last accumulate without reducing, as accelerate's and transformers' loops do."""

    def __post_init__(self) -> None:
        for name, value in (("dp_replicate_size", self.dp_replicate_size), ("min_num_params", self.min_num_params + 1)):
            if value is not None and value < 1:
                raise UserError(f"{name}: must be {1 if name == 'dp_replicate_size' else 0} or more", "Leave it out")
        reshard = self.reshard_after_forward
        if not isinstance(reshard, bool) and reshard is not None and reshard < 1:
            raise UserError(f"reshard_after_forward {reshard}: expected true, false or a number of ranks", "Leave it out")

    @property
    def reshards(self) -> bool:
        """Whether blocks drop what they gathered when their forward is over."""
        if self.version == 1:
            return self.sharding_strategy in _RESHARDS
        return self.reshard_after_forward is not False

    def replicas(self, nodes: int) -> int:
        """Over how many copies of the model gradients are reduced once more; 1 where every rank has its own shard."""
        if self.dp_replicate_size is not None:
            return self.dp_replicate_size
        return nodes if self.version == 1 and self.sharding_strategy in HYBRID else 1
