"""FSDP as accelerate's YAML and transformers' `fsdp_config` describe it, read as accelerate 1.15 and transformers 5.24 do.

Sources: accelerate/commands/launch.py (defaults of the launcher), accelerate/utils/launch.py (`prepare_multi_gpu_env`),
accelerate/utils/dataclasses.py (`FullyShardedDataParallelPlugin.__post_init__`, `set_mixed_precision`), accelerate/utils/
fsdp_utils.py (`fsdp2_prepare_model`), transformers/training_args.py (`_process_fsdp_args`, `_apply_legacy_fsdp_to_config`).

Under version 1, accelerate's `sharding_strategy` is always set (FULL_SHARD unless named), and goes before
`reshard_after_forward`, which therefore does nothing there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast, get_args

from ...errors import UserError, did_you_mean
from ..strategies.fsdp_settings import HYBRID, BackwardPrefetch, Dtype, FsdpSettings, ShardingStrategy, WrapPolicy
from .text import shown

_STRATEGIES: tuple[str, ...] = get_args(ShardingStrategy)
_POLICIES: tuple[str, ...] = get_args(WrapPolicy)
_PREFETCHES: tuple[str, ...] = (*get_args(BackwardPrefetch), "NO_PREFETCH")
MIXED_DTYPES: dict[str, Dtype] = {"bf16": "bfloat16", "fp16": "float16"}
_TRUE, _FALSE = ("1", "true", "yes", "y", "t", "on"), ("0", "false", "no", "n", "f", "off")  # accelerate's str_to_bool

#: Keys of both kinds of file, without their `fsdp_` prefix; the value says which version has a use for them.
KEYS: dict[str, Literal["both", "1", "2", "none"]] = {
    "version": "both",
    "sharding_strategy": "1",
    "reshard_after_forward": "2",
    "offload_params": "both",
    "cpu_offload": "both",
    "auto_wrap_policy": "both",
    "transformer_layer_cls_to_wrap": "both",
    "min_num_params": "both",
    "backward_prefetch": "1",
    "forward_prefetch": "1",
    "limit_all_gathers": "1",
    "use_orig_params": "1",
    "sync_module_states": "1",
    "cpu_ram_efficient_loading": "both",
    "activation_checkpointing": "both",
    "activation_checkpointing_offload": "2",
    "ignored_modules": "both",
    "state_dict_type": "none",
    "xla": "none",
    "xla_fsdp_v2": "none",
    "xla_fsdp_settings": "none",
    "xla_fsdp_grad_ckpt": "none",
}
_LEGACY = {"full_shard": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "no_shard": "NO_SHARD", "hybrid_shard": "HYBRID_SHARD",
           "hybrid_shard_zero2": "HYBRID_SHARD_ZERO2"}  # fmt: skip
_DEFAULT_MIN_PARAMS = 100_000_000  # accelerate launch --fsdp_min_num_params


class _Values:
    """The keys of one block, without prefix, with the messages for what they must not be."""

    def __init__(self, data: Mapping[str, Any], source: str, block: str) -> None:
        self.source, self.block = source, block
        self.raw = {key.removeprefix("fsdp_"): value for key, value in data.items()}
        self.names = {key.removeprefix("fsdp_"): f"{block}.{key}" for key in data}
        self.notes: list[str] = []

    def name(self, key: str) -> str:
        return self.names.get(key, f"{self.block}.{key}")

    def wrong(self, key: str, allowed: str) -> UserError:
        return UserError(f"{self.source}: {self.name(key)} is {shown(self.raw.get(key))}: {allowed}", "Correct the file")

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        text = str(value).lower()
        if value is None:
            return default
        if text not in (*_TRUE, *_FALSE):
            raise self.wrong(key, "expected true or false")
        return text in _TRUE

    def number(self, key: str, default: int) -> int:
        value = self.raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0 or value < 0:
            raise self.wrong(key, "expected a whole number")
        return int(value)

    def choice(self, key: str, known: tuple[str, ...], default: str) -> str:
        """One of `known`, by name in any case, or by its number from 1, as torch's enums count."""
        value = self.raw.get(key)
        if value is None:
            return default
        text = str(value).upper()
        if text.isdigit() and 1 <= int(text) <= len(known):
            return known[int(text) - 1]
        if text not in known:
            raise self.wrong(key, f"expected one of {', '.join(known)}. {did_you_mean(text, known)}".strip())
        return text

    def classes(self) -> tuple[str, ...]:
        value = self.raw.get("transformer_layer_cls_to_wrap")
        if value is None:
            return ()
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.wrong("transformer_layer_cls_to_wrap", "expected class names")
        return tuple(value)

    def version(self, default: Literal[1, 2]) -> Literal[1, 2]:
        value = str(self.raw.get("version", default))
        if value not in ("1", "2"):
            raise self.wrong("version", "expected 1 or 2")
        return 1 if value == "1" else 2

    def say_idle(self, version: int) -> None:
        for key in self.raw:
            use = KEYS.get(key)
            if use is None:
                self.notes.append(f"nobody knows {self.name(key)}. {did_you_mean(key, KEYS)}".strip())
            elif use in "12" and use != str(version):
                self.notes.append(f"{self.name(key)} has no effect under version {version}")


def from_accelerate(block: Mapping[str, Any], source: str) -> tuple[FsdpSettings, list[str]]:
    """`fsdp_config` of an accelerate YAML, with the launcher's defaults, and what there is to say about it."""
    values = _Values(block, source, "fsdp_config")
    version = values.version(1)
    if values.flag("cpu_ram_efficient_loading", True) and not values.flag("sync_module_states", True):
        raise UserError(
            f"{source}: {values.name('cpu_ram_efficient_loading')} needs {values.name('sync_module_states')}, which is false",
            "Set it to true: accelerate refuses to launch otherwise",
        )
    strategy = values.choice("sharding_strategy", _STRATEGIES, "FULL_SHARD")
    common = _common(values, version, strategy, policy="NO_WRAP", loading=True)
    return replace(common, use_orig_params=values.flag("use_orig_params", True), limit_all_gathers=True), values.notes


def from_trainer(fsdp: Any, block: Mapping[str, Any], source: str) -> tuple[FsdpSettings, list[str]]:
    """`fsdp` and `fsdp_config` of TrainingArguments, with the Trainer's defaults, and what there is to say about it."""
    values = _Values(block, source, "fsdp_config")
    version = values.version(2)
    _legacy(values, fsdp, version)
    settings = _common(values, version, "FULL_SHARD", policy="TRANSFORMER_BASED_WRAP", loading=False)
    gathers = values.flag("limit_all_gathers", True)
    return replace(settings, use_orig_params=values.flag("use_orig_params", True), limit_all_gathers=gathers), values.notes


def _legacy(values: _Values, fsdp: Any, version: int) -> None:
    """The words that `fsdp` held before it was a switch: they go into the block, where it does not say otherwise."""
    words = fsdp.split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else []
    for word in words:
        if not isinstance(word, str):
            raise UserError(
                f"{values.source}: fsdp holds {shown(word)}: expected words", "Write true, and the rest in fsdp_config"
            )
        if word in _LEGACY:
            if version == 2 and word not in ("full_shard", "shard_grad_op"):
                raise UserError(f"{values.source}: fsdp {word!r} is there under version 1 only", "Set fsdp_config.version to 1")
            values.raw.setdefault("reshard_after_forward", _LEGACY[word] if version == 1 else word == "full_shard")
        elif word == "offload":
            values.raw.setdefault("cpu_offload", True)
        elif word != "auto_wrap" and word.lower() not in _TRUE:
            raise UserError(
                f"{values.source}: fsdp is {word!r}: not known", did_you_mean(word, [*_LEGACY, "offload", "auto_wrap"])
            )


def _common(values: _Values, version: Literal[1, 2], strategy: str, *, policy: str, loading: bool) -> FsdpSettings:
    values.say_idle(version)
    wrap = values.choice("auto_wrap_policy", _POLICIES, policy)
    min_params = values.number("min_num_params", _DEFAULT_MIN_PARAMS if policy == "NO_WRAP" else 0)
    if wrap == "SIZE_BASED_WRAP" and min_params == 0:
        wrap = "NO_WRAP"
        values.notes.append(f"{values.name('min_num_params')} is 0: nothing but the whole model is wrapped")
    if wrap == "NO_WRAP":
        values.notes.append(
            f"{values.name('auto_wrap_policy')} wraps nothing but the whole model: all of it is gathered at once"
        )
    checkpointing = values.flag("activation_checkpointing", False)
    offloaded = values.flag("activation_checkpointing_offload", False)
    if offloaded and (not checkpointing or version == 1):
        raise values.wrong("activation_checkpointing_offload", "needs activation_checkpointing, and version 2")
    prefetch = values.choice("backward_prefetch", _PREFETCHES, "NO_PREFETCH")
    efficient = values.flag("cpu_ram_efficient_loading", loading)
    ignored = values.raw.get("ignored_modules")
    if values.flag("xla", False):
        raise values.wrong("xla", "XLA devices are not GPUs")
    return FsdpSettings(
        version=version,
        sharding_strategy=cast(ShardingStrategy, strategy),
        reshard_after_forward=values.flag("reshard_after_forward", True) if version == 2 else None,
        backward_prefetch=None if prefetch == "NO_PREFETCH" else cast(BackwardPrefetch, prefetch),
        forward_prefetch=values.flag("forward_prefetch", False) if version == 1 else False,
        auto_wrap_policy=cast(WrapPolicy, wrap),
        transformer_layer_cls_to_wrap=values.classes() if wrap == "TRANSFORMER_BASED_WRAP" else (),
        min_num_params=min_params,
        wrap_embeddings=version == 2,
        ignored_modules=None if ignored is None else str(ignored),
        cpu_offload=values.flag("offload_params", False) or values.flag("cpu_offload", False),
        cpu_ram_efficient_loading=efficient,
        sync_module_states=version == 1 and (efficient or values.flag("sync_module_states", True)),
        activation_checkpointing=checkpointing,
        activation_checkpointing_offload=offloaded,
    )


def with_mixed_precision(settings: FsdpSettings, mixed: str) -> FsdpSettings:
    """The policy that accelerate makes of `mixed_precision`: fp32 shards, everything else in the one narrow type."""
    dtype = MIXED_DTYPES.get(mixed)
    if dtype is None:
        return settings
    return replace(
        settings,
        param_dtype=dtype,
        reduce_dtype=dtype,
        buffer_dtype=dtype if settings.version == 1 else None,
        output_dtype=dtype if settings.version == 2 else None,
        stored_dtype="float32",
        autocast=True,
    )


def strategy_of(settings: FsdpSettings) -> str:
    """The word of `--strategy`."""
    replicated = (settings.dp_replicate_size or 1) > 1
    if replicated or (settings.version == 1 and settings.sharding_strategy in HYBRID):
        return "hsdp"
    return f"fsdp{settings.version}"
