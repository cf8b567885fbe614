"""A published row as a question to the planner; CannotTell, with the reason, where it cannot be one.

Nothing is filled in that a row does not say, but for what its source's `Profile` states, and for the GPU of rows that name
none: their figures depend on it in small workspaces only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CannotTell, UserError
from ..units import GiB
from .accuracy_models import attention_of, profile_of, spec_of, version_of
from .accuracy_rows import ADAPTER_METHODS, Row

if TYPE_CHECKING:
    from ..hardware.profile import Device
    from ..models.adapters import AdapterSettings
    from ..planner.request import Request
    from ..planner.strategies.fsdp_settings import FsdpSettings

_ANY_GPU = "a100-sxm-80gb"
_PARALLEL_WORDS = {"naive-pp": "pipeline parallelism", "fsdp-own": "the author's own FSDP"}
_SPLITS = ("tp", "pp", "cp", "ep")  # what divides a model otherwise than by data
_DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_PRECISION = {
    ("fp32", "none"): "fp32",
    ("bf16", "none"): "bf16",
    ("fp16", "none"): "fp16",
    ("fp32", "bf16"): "bf16-autocast",
    ("fp32", "fp16"): "fp16-autocast",
    # autocast finds bf16 weights as it wants them, and the ops that it widens widen themselves in these models
    ("bf16", "bf16"): "bf16",
    ("fp16", "fp16"): "fp16",
}
_RECOMPUTES = frozenset({"blocks_per_checkpoint", "recompute"})  # arguments of factories that recompute by themselves
_MODE = {"train": "train", "forward-backward": "train", "forward": "forward", "inference": "inference"}
# Checkpoints whose quantize_config.json has another group_size than most.
_GPTQ_GROUPS = {"TheBloke/Llama-2-70B-GPTQ": -1}
# (name, implementation) of a row -> the planner's name, where the step is a library's: its states have a type of their own.
_OF_LIBRARIES = {
    ("adam8bit", "bnb"): "adam-8bit",
    ("adamw8bit", "bnb"): "adamw-8bit",
    ("paged-adamw", "bnb"): "paged-adamw-32bit",
    ("lamb", "apex-fused"): "apex-lamb",
    ("badam", "unknown"): "badam",
}
_BLOCKWISE = ("badam",)  # methods that an optimizer is
_TRAINS_ITSELF = ("full", "none", *_BLOCKWISE)  # the model's own weights
# Steps without a state or a temporary: what a loop without an optimizer costs.
_NO_OPTIMIZER = ("sgd", "for-loop")


@dataclass(frozen=True)
class Question:
    """A request, and what the row itself says about the process beside the allocator."""

    request: Request
    context_bytes: int | None = None
    """The CUDA context as the source measured it; None: the catalogue's figure holds."""
    later_tokens: int | None = None
    """Of a sample after the first (`Profile.later_tokens`)."""


def question_of(row: Row) -> Question:
    """Raises CannotTell for a row that cannot be expressed."""
    from ..planner.loop import LoopFacts
    from ..planner.request import Request
    from ..planner.strategies import SINGLE, ZEROTH_ORDER
    from ..planner.strategies.deepspeed_settings import DeepSpeedSettings
    from ..planner.strategies.outside import with_nccl

    _refuse_what_is_not_modelled(row)
    profile = profile_of(row)
    gpus = row.hardware.num_gpus if _strategy(row) != SINGLE else 1
    device = with_nccl(_device(row), gpus, _strategy(row))
    zeroth_order = row.strategy.method in ZEROTH_ORDER
    method = row.strategy.method if zeroth_order or row.strategy.method in _BLOCKWISE else "full"
    optimizer, impl = ("adamw", "default") if zeroth_order else _optimizer(row)
    adapter = _adapter(row)
    spec = spec_of(row)
    several = profile.loop_of_several if row.strategy.parallel.kind != SINGLE else None
    loop: dict[str, Any] = {"grad_accum_steps": row.workload.grad_accum, **(profile.loop if several is None else several)}
    torch = version_of(row, "torch")
    if torch is not None and torch < (2, 0):
        loop.setdefault("set_to_none", False)  # the default of zero_grad before torch 2.0
    own_recompute = spec.factory is not None and not _RECOMPUTES.isdisjoint(spec.factory.kwargs)
    request = Request(
        model=spec,
        device=device,
        micro_batch_size=row.workload.micro_batch,
        seq_len=_seq_len(row),
        target_len=row.workload.target_len,
        image_size=row.workload.image_size,
        precision=_precision(row),
        method=adapter.kind if adapter is not None else method,
        loss="shifted" if zeroth_order else "model",  # of zo2 and MeZO, in the logits' own dtype
        adapter=adapter,
        strategy=_strategy(row),
        gpus=gpus,
        offload=() if zeroth_order else _offload(row),  # their blocks live on the host by themselves
        fsdp=_fsdp(row),
        deepspeed=DeepSpeedSettings(**profile.deepspeed) if profile.deepspeed else None,
        optimizer=optimizer,
        optimizer_impl=impl,
        recompute="none" if own_recompute else row.strategy.recompute or "none",
        reentrant=_reentrant(row),
        attention=attention_of(row),
        mode=_MODE[row.workload.phase],
        compiled=row.strategy.compile,
        use_cache=profile.use_cache,
        alloc_conf=profile.alloc_conf,
        loop=LoopFacts(**loop),
    )
    try:
        request.check()
    except UserError as error:
        raise CannotTell(str(error)) from error
    context = row.measured.phases.get("cuda_context")
    if context is None and profile.counts_driver:
        context = device.context_bytes + device.nominal_gb * GiB - device.total_bytes  # what the box has and torch does not
    return Question(request, context, profile.later_tokens)


def _refuse_what_is_not_modelled(row: Row) -> None:
    from ..planner.strategies import ZEROTH_ORDER

    strategy = row.strategy
    zeroth_order = strategy.method in ZEROTH_ORDER
    if strategy.method not in (*_TRAINS_ITSELF, *ADAPTER_METHODS, *ZEROTH_ORDER):
        raise CannotTell(f"method {strategy.method} is not modelled yet")
    if (
        strategy.offload.any
        and not zeroth_order
        and (strategy.parallel.kind == "single" or strategy.offload.activation == "cpu")
    ):
        raise CannotTell("offload of activations, and of anything on one GPU, is not modelled yet")
    if strategy.precision.low_precision_linears != "none":
        raise CannotTell(f"{strategy.precision.low_precision_linears} linears are not modelled")
    if strategy.optimizer.in_backward:
        raise CannotTell("an optimizer that steps inside backward is not modelled yet")
    if row.measured.scope != "per-gpu":
        raise CannotTell(f"the figure is {row.measured.scope.replace('-', ' ')}")


def _strategy(row: Row) -> str:
    """The planner's word for it; a source that wrote its own may hold what another strategy holds (`Profile.own`)."""
    from ..planner.request import STRATEGIES

    parallel = row.strategy.parallel
    own = profile_of(row).own
    if row.model.family == "custom" and row.model.config.get("custom_class") == "cs336":
        own = {"ddp": "", "zero1": "", **own}  # the course has its students write these themselves
    strategy = own.get(parallel.kind, parallel.kind)
    if not strategy:
        raise CannotTell(f"{_word(parallel.kind)} of the source's own making is not modelled")
    if strategy not in STRATEGIES:
        raise CannotTell(f"{_word(strategy)} is not modelled yet")
    for split in _SPLITS:
        if getattr(parallel, split) > 1:
            raise CannotTell(f"{split.upper()} is not modelled yet")
    return strategy


def _word(kind: str) -> str:
    return _PARALLEL_WORDS.get(kind, kind.upper().replace("ZERO", "ZeRO-"))


def _offload(row: Row) -> tuple[str, ...]:
    offload = row.strategy.offload
    places = (("optimizer", offload.optimizer), ("param", offload.param))
    return tuple(part if where == "cpu" else f"{part}:{where}" for part, where in places if where not in (None, "none"))


def _fsdp(row: Row) -> FsdpSettings | None:
    """FSDP as the source's launcher sets it up, with what the row says of it."""
    from ..planner.strategies.fsdp_settings import FsdpSettings

    parallel, kind = row.strategy.parallel, _strategy(row)
    if kind not in ("fsdp1", "fsdp2"):
        return None
    said: dict[str, Any] = {}
    if parallel.reshard_after_forward is not None:
        if kind == "fsdp1":
            said["sharding_strategy"] = "FULL_SHARD" if parallel.reshard_after_forward else "SHARD_GRAD_OP"
        elif parallel.reshard_after_forward is False:
            said["reshard_after_forward"] = False
    if _is_mixed(row):
        said["param_dtype"] = _DTYPE[str(parallel.mixed_precision_param_dtype)]
        said["stored_dtype"] = _DTYPE[str(row.strategy.precision.param_dtype)]
    profile = {k: v for k, v in profile_of(row).fsdp.items() if _is_mixed(row) or not k.endswith("_dtype")}
    return FsdpSettings(version=1 if kind == "fsdp1" else 2, **{**profile, **said})


def _seq_len(row: Row) -> int:
    """As the row has it, or, where that is only the longest allowed and the figure a mean, what the source's log says."""
    mean = profile_of(row).mean_tokens
    is_mean = row.measured.metric == "allocated_after" and row.workload.padded_or_packed == "assumed-full"
    return mean if mean is not None and is_mean else max(row.workload.seq_len, 1)


def _is_mixed(row: Row) -> bool:
    """Whether parameters are computed with in a narrower type than they are stored in."""
    narrow = row.strategy.parallel.mixed_precision_param_dtype
    return narrow in ("bf16", "fp16") and narrow != row.strategy.precision.param_dtype


def _device(row: Row) -> Device:
    from ..hardware.catalogue import find, resolve

    name = row.hardware.gpu
    memory = row.hardware.gpu_memory_gib
    generic = name == "unspecified" or re.fullmatch(r"generic-\d+gb", name) is not None
    if generic:
        name = profile_of(row).gpu or _ANY_GPU
    if find(name) is None:
        raise CannotTell(f"the GPU {name!r} is not in the catalogue")
    device, _ = resolve(name)
    if memory is None or row.measured.metric not in ("fits", "oom") or (not generic and _is_nominal(memory, device)):
        return device
    return device.with_memory(int(memory * GiB))


def _is_nominal(memory_gib: float, device: Device) -> bool:
    """Whether the row repeats the number on the box, which no card has for its programs."""
    return memory_gib == device.nominal_gb


def _precision(row: Row) -> str:
    p = row.strategy.precision
    if p.param_dtype is None:
        raise CannotTell("the dtype of the parameters is not known")
    if _is_mixed(row):  # what autocast would cast is narrow already, and the ops that it widens widen themselves
        return f"{row.strategy.parallel.mixed_precision_param_dtype}-mixed"
    if _strategy(row).startswith("zero") and p.param_dtype != "fp32" and p.master_weights == "fp32":
        return f"{p.param_dtype}-mixed"
    if p.master_weights in ("fp32", "bf16") and p.master_weights != p.param_dtype:
        raise CannotTell(f"{p.param_dtype} parameters with {p.master_weights} master weights are not modelled yet")
    found = _PRECISION.get((p.param_dtype, p.autocast))
    if found is None:
        raise CannotTell(f"{p.param_dtype} parameters under {p.autocast} autocast are not modelled")
    if p.grad_dtype is not None and p.grad_dtype != _trained_dtype(row):
        raise CannotTell(f"{p.grad_dtype} gradients of {_trained_dtype(row)} parameters are not modelled")
    return found


def _adapter(row: Row) -> AdapterSettings | None:
    """The adapter as peft would be told of it."""
    from ..models.adapters import BASE_QUANTS, KINDS, AdapterSettings

    said, precision = row.strategy.adapter, row.strategy.precision
    if said is None or profile_of(row).adapts_itself:
        return None
    if said.kind not in KINDS:
        raise CannotTell(f"adapter {said.kind} is not modelled yet")
    base_quant = {"gptq-4bit": "gptq"}.get(said.base_quant, said.base_quant)
    if base_quant not in BASE_QUANTS:
        raise CannotTell(f"a base quantised by {said.base_quant} is not modelled yet")
    kind = KINDS[said.kind]
    if said.adapter_dtype not in (None, "fp32", precision.param_dtype):
        raise CannotTell(f"{said.adapter_dtype} adapters of {precision.param_dtype} parameters are not modelled")
    in_fp32 = said.adapter_dtype != precision.param_dtype or precision.param_dtype == "fp32"
    given: dict[str, Any] = {
        "upcast": precision.nonquantised_upcast_fp32,
        "group_size": _GPTQ_GROUPS.get(row.model.ref) if base_quant == "gptq" else None,
        **(profile_of(row).adapter_of_several if row.hardware.num_gpus > 1 else {}),
    }
    return AdapterSettings(
        kind=said.kind,
        rank=said.rank if kind.rank else None,
        alpha=said.alpha if kind.alpha else None,
        dropout=said.dropout if kind.dropout else None,
        targets=tuple(said.targets) if kind.targets else (),
        modules_to_save=tuple(said.modules_to_save),
        virtual_tokens=said.num_virtual_tokens if kind.tokens else None,
        base_quant=base_quant,
        adapter_dtype=None if in_fp32 else "base",
        autocast=precision.autocast != "none",
        **given,
    )


def _trained_dtype(row: Row) -> str | None:
    """The dtype of what the optimizer steps on."""
    adapter = row.strategy.adapter
    return row.strategy.precision.param_dtype if adapter is None else adapter.adapter_dtype or "fp32"


def _optimizer(row: Row) -> tuple[str, str]:
    o = row.strategy.optimizer
    if o.name == "none" or row.workload.phase != "train":
        return _NO_OPTIMIZER
    if (o.name, o.impl) in _OF_LIBRARIES:
        return _OF_LIBRARIES[o.name, o.impl], "default"
    if o.name == "adafactor" and row.source.name == "hf-transformers-docs":
        return "hf-adafactor", "default"  # the Trainer's, whose state is fp32
    name = "sgd-momentum" if o.name == "sgd" and o.momentum else o.name
    from ..planner.optimizers.traced import impl_in, names

    if name not in names():
        raise CannotTell(f"optimizer {o.name} is not modelled yet")
    impl = {"unknown": "default", "n/a": "default", "apex-fused": "fused"}.get(o.impl, o.impl)
    if impl == "foreach" and any("torch default" in said for said in row.assumed):
        impl = "default"  # nobody read it: what torch takes depends on its version
    if impl not in ("default", "foreach", "fused", "for-loop"):
        raise CannotTell(f"optimizer {o.name} of {o.impl} is not modelled yet")
    if o.state_dtype is not None and o.state_dtype != _trained_dtype(row):
        raise CannotTell(f"{o.state_dtype} optimizer state of {_trained_dtype(row)} parameters is not modelled yet")
    return name, impl_in(name, impl, version_of(row, "torch"))


def _reentrant(row: Row) -> bool:
    """As stated; else what transformers' Trainer took: reentrant checkpoints before 5.0 (`gradient_checkpointing_kwargs`)."""
    if row.strategy.recompute_reentrant is not None:
        return row.strategy.recompute_reentrant
    version = version_of(row, "transformers")
    return version is not None and version < (5, 0)
