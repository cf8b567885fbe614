"""The configurations in which the real DeepSpeed engine judges the predicted ones: small models of five families, all knobs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..models.adapters import AdapterSettings
from ..planner.strategies.deepspeed_settings import DeepSpeedSettings, LeafModules, OffloadOptimizer, OffloadParam, ZenFlow

BATCH, SEQ = 2, 16
# By model: config.json.  Odd sizes, so that partitions are padded and parameters straddle the ranks.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 130, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 259, "architectures": ["LlamaForCausalLM"],
    },
    "bert": {
        "model_type": "bert", "hidden_size": 64, "intermediate_size": 132, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 301, "max_position_embeddings": 64, "architectures": ["BertForMaskedLM"],
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 257, "n_positions": 64,
        "architectures": ["GPT2LMHeadModel"],
    },
    "opt": {
        "model_type": "opt", "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 263, "max_position_embeddings": 64, "word_embed_proj_dim": 64, "architectures": ["OPTForCausalLM"],
    },
    "t5": {
        "model_type": "t5", "d_model": 48, "d_kv": 12, "d_ff": 100, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
        "vocab_size": 211, "architectures": ["T5ForConditionalGeneration"],
    },
    "llama-wide": {  # partitions of more than 1 MiB, which NVMe takes
        "model_type": "llama", "hidden_size": 768, "intermediate_size": 1540, "num_hidden_layers": 2, "num_attention_heads": 12,
        "num_key_value_heads": 4, "vocab_size": 2051, "architectures": ["LlamaForCausalLM"],
    },
    "mixtral": {  # its sparse blocks are leaf modules by default
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 259, "num_local_experts": 4, "num_experts_per_tok": 2,
        "architectures": ["MixtralForCausalLM"],
    },
    "qwen2-moe": {  # the same, with a shared expert
        "model_type": "qwen2_moe", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 259, "num_experts": 6, "num_experts_per_tok": 2, "architectures": ["Qwen2MoeForCausalLM"],
    },
    "olmoe": {  # not among DeepSpeed's default leaf modules
        "model_type": "olmoe", "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 259, "num_experts": 6, "num_experts_per_tok": 2,
        "architectures": ["OlmoeForCausalLM"],
    },
}  # fmt: skip
_JSON_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_OUTSIDE_OF_ZERO = {  # fields of DeepSpeedSettings that are no keys of `zero_optimization`
    "grad_accum_dtype", "communication_data_type", "bf16_master_weights_and_grads", "bf16_optimizer_states", "zero_init",
    "optimizer_groups", "aio_block_size", "aio_intra_op_parallelism", "zero_force_ds_cpu_optimizer",
    "muon", "fp16_master_weights_and_grads",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ZeroCase:
    """One configuration, said once for the engine and for the prediction."""

    stage: int
    model: str
    settings: DeepSpeedSettings
    precision: str = "bf16"  # of the stored parameters: fp32 | bf16 | fp16
    world_size: int = 2
    rank: int = 0
    grad_accum_steps: int = 1
    frozen: tuple[str, ...] = ()
    recompute: str = "none"
    reentrant: bool = False
    adapter: AdapterSettings | None = None  # as a training script makes it, before the engine casts
    iterations: int = 2
    own_adam: bool = False  # DeepSpeed's FusedAdam or DeepSpeedCPUAdam; else torch's AdamW, tensor by tensor
    quick: bool = False  # part of the subset that runs in a minute

    @property
    def name(self) -> str:
        said = [f"zero{self.stage}", self.model, self.precision, f"rank-{self.rank}-of-{self.world_size}"]
        said += [f"{self.grad_accum_steps}-micro-steps"] if self.grad_accum_steps > 1 else []
        said += ["frozen"] if self.frozen else []
        said += [f"recompute-{self.recompute}"] if self.recompute != "none" else []
        said += ["reentrant"] if self.reentrant else []
        said += _words(self.adapter) if self.adapter is not None else []
        said += ["own-adam"] if self.own_adam else []
        for key, value in _changed(self.settings).items():
            key = key.removeprefix("stage3_").replace("_", "-")
            if isinstance(value, LeafModules):
                names = [name for found in _changed(value).values() for name in found]
                said.append(f"leaves-{'-'.join(names) or 'none'}")
                continue
            if isinstance(value, ZenFlow):
                said.append("-".join([key, *(f"{name.replace('_', '-')}-{v}" for name, v in _changed(value).items())]))
                continue
            said.append(
                f"{key}-{'-'.join(map(str, _changed(value).values())) or value.device}" if _is_part(value) else f"{key}-{value}"
            )
        return "-".join(said)

    def config(self) -> dict[str, Any]:
        """The DeepSpeed JSON, without batch sizes."""
        changed = _changed(self.settings)
        zero = {
            key: {"device": value.device, **_changed(value)} if _is_part(value) else value
            for key, value in changed.items()
            if key not in _OUTSIDE_OF_ZERO
        }
        if "leaf_module" in zero:
            zero["leaf_module"] = {key: list(names) for key, names in _changed(self.settings.leaf_module).items()}
        found: dict[str, Any] = {"zero_optimization": {"stage": self.stage, **zero}}
        if self.settings.zenflow is not None:
            found["zero_optimization"]["zenflow"] = dataclasses.asdict(self.settings.zenflow)
            found["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}  # which the optimizer of the columns is made of
        if not self.settings.compute_grad_norm:
            found["gradient_clipping"] = 0.0  # else DeepSpeed clips at 1
        if self.precision != "fp32":
            found[self.precision] = {"enabled": True}
        if self.precision == "fp16":
            found["fp16"]["loss_scale"] = 1  # values are garbage: a step that overflows would be skipped
        for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            if key in changed:
                found["bf16"][key] = changed[key]
        if self.settings.fp16_master_weights_and_grads:
            found["fp16"]["fp16_master_weights_and_grads"] = True
        if self.settings.grad_accum_dtype:
            found["data_types"] = {"grad_accum_dtype": _JSON_DTYPES[self.settings.grad_accum_dtype]}
        if self.settings.communication_data_type:
            found["communication_data_type"] = _JSON_DTYPES[self.settings.communication_data_type]
        if self.settings.muon:
            found["optimizer"] = {"type": "Muon", "params": {"lr": 0.01, "ns_method": self.settings.muon}}
        if not self.settings.zero_force_ds_cpu_optimizer:
            found["zero_force_ds_cpu_optimizer"] = False
        aio = {key.removeprefix("aio_"): changed[key] for key in changed if key.startswith("aio_")}
        return {**found, **({"aio": aio} if aio else {})}


def _words(adapter: AdapterSettings) -> list[str]:
    packed = [adapter.base_quant] if adapter.base_quant != "none" else []
    stored = [f"in-{adapter.quant_storage}"] if adapter.quant_storage else []
    return [adapter.kind, *packed, *stored, *(["not-upcast"] if packed and adapter.upcast is False else [])]


def _is_part(value: Any) -> bool:
    return isinstance(value, (OffloadOptimizer, OffloadParam))


def _changed(settings: Any) -> dict[str, Any]:
    """The fields that differ from DeepSpeed's defaults."""
    return {f.name: v for f in dataclasses.fields(settings) if (v := getattr(settings, f.name)) != f.default}


def _case(stage: int, model: str, bucket: int = 20_000, **rest: Any) -> ZeroCase:
    own = {f.name for f in dataclasses.fields(ZeroCase)}
    settings = DeepSpeedSettings(reduce_bucket_size=bucket, **{k: v for k, v in rest.items() if k not in own})
    return ZeroCase(stage=stage, model=model, settings=settings, **{k: v for k, v in rest.items() if k in own})


def _knobs(persistence: int, live: int, reuse: int, prefetch: int) -> dict[str, int]:
    return {
        "stage3_param_persistence_threshold": persistence, "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": reuse, "stage3_prefetch_bucket_size": prefetch,
    }  # fmt: skip


_TIGHT = _knobs(100, 20_000, 0, 3_000)
_TORCH_ADAM = {"zero_force_ds_cpu_optimizer": False}
_BF16_MASTERS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
_FP32 = "float32"
_HOST_ADAM: dict[str, Any] = {"offload_optimizer": OffloadOptimizer(), "own_adam": True}


def _on(base_quant: str, **rest: Any) -> AdapterSettings:
    """LoRA on a quantised base, as it is when the engine gets it but for the dtype of the adapters."""
    return AdapterSettings(base_quant=base_quant, rank=4, upcast=False, autocast=False, **rest)


def _auto(width: int) -> dict[str, int]:
    """What transformers' Trainer puts in the place of "auto" (transformers 5, integrations/deepspeed.py)."""
    return {
        "bucket": width * width, "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }  # fmt: skip


CASES: tuple[ZeroCase, ...] = (
    # -- stage 0, and stage 1 behind BF16_Optimizer ------------------------------------------------------------------------
    _case(0, "llama", precision="fp32", grad_accum_steps=2),
    _case(0, "bert", optimizer_groups="decay", world_size=8, rank=3, quick=True),
    _case(0, "gpt2", precision="fp16", grad_accum_steps=2),
    _case(0, "opt", own_adam=True, optimizer_groups="decay", world_size=3, rank=1),
    _case(0, "t5", own_adam=True, grad_accum_steps=4, communication_data_type=_FP32),
    _case(1, "llama", grad_accum_dtype=_FP32, rank=1, quick=True),
    _case(1, "bert", grad_accum_dtype=_FP32, world_size=3, rank=2, grad_accum_steps=2, optimizer_groups="decay", own_adam=True),
    _case(1, "gpt2", grad_accum_dtype=_FP32, communication_data_type=_FP32, world_size=64, rank=63),
    # -- stages 1 and 2 --------------------------------------------------------------------------------------------------
    _case(1, "llama", world_size=3, rank=1, grad_accum_steps=2),
    _case(1, "bert", precision="fp32", rank=1, optimizer_groups="decay", grad_accum_steps=2, quick=True),
    _case(1, "opt", 4_000, grad_accum_steps=2, overlap_comm=True),
    _case(2, "llama", 5_000, rank=1, quick=True),
    _case(2, "bert", world_size=8, rank=7, grad_accum_steps=2),
    _case(2, "bert", world_size=8, rank=0, grad_accum_steps=2),
    _case(2, "gpt2", 5_000, precision="fp16", world_size=8, optimizer_groups="decay"),
    _case(2, "gpt2", 3_000, precision="fp32", world_size=3, rank=2, overlap_comm=True),
    _case(2, "llama", 5_000, grad_accum_dtype=_FP32, world_size=3, rank=2, grad_accum_steps=2, optimizer_groups="decay"),
    _case(2, "bert", 1_000, grad_accum_dtype=_FP32, world_size=64, rank=63),
    _case(1, "gpt2", 5_000, precision="fp16", grad_accum_dtype=_FP32, grad_accum_steps=2),
    _case(1, "gpt2", 5_000, precision="fp16", grad_accum_dtype=_FP32, world_size=3, rank=2, optimizer_groups="decay"),
    _case(2, "llama", 5_000, communication_data_type=_FP32, grad_accum_dtype=_FP32, world_size=3, rank=1),
    _case(2, "bert", 5_000, communication_data_type=_FP32, world_size=3, rank=1),
    _case(2, "opt", 5_000, reduce_scatter=False, rank=1),
    _case(2, "opt", 5_000, reduce_scatter=False, grad_accum_dtype=_FP32),
    _case(2, "llama", 5_000, contiguous_gradients=False, grad_accum_steps=2, world_size=3, rank=1),
    _case(1, "gpt2", 5_000, contiguous_gradients=False, grad_accum_steps=2),
    _case(2, "bert", 5_000, contiguous_gradients=False, grad_accum_dtype=_FP32, optimizer_groups="decay"),
    _case(2, "opt", 5_000, contiguous_gradients=False, overlap_comm=True, grad_accum_dtype=_FP32),
    _case(1, "gpt2", 5_000, contiguous_gradients=False, overlap_comm=True, grad_accum_steps=2),
    _case(2, "llama-wide", 1_500_000, contiguous_gradients=False, overlap_comm=True, world_size=8),
    _case(2, "llama", 5_000, round_robin_gradients=True, world_size=3, rank=1, optimizer_groups="decay"),
    _case(1, "bert", 5_000, round_robin_gradients=True, world_size=3, rank=2),
    _case(2, "llama", 5_000, **_BF16_MASTERS, world_size=3, rank=1, own_adam=True),
    _case(1, "bert", 5_000, **_BF16_MASTERS, optimizer_groups="decay", grad_accum_steps=2),
    _case(2, "opt", 5_000, **_BF16_MASTERS, grad_accum_dtype=_FP32, rank=1),
    _case(2, "llama", 5_000, parameter_alignment=True, world_size=3, rank=1),
    _case(1, "gpt2", 5_000, parameter_alignment=True, world_size=3, rank=2, precision="fp32", grad_accum_steps=2,
          optimizer_groups="decay"),
    _case(2, "bert", 5_000, parameter_alignment=True, grad_accum_dtype=_FP32, rank=1),
    _case(2, "opt", 5_000, use_multi_rank_bucket_allreduce=False, world_size=3, rank=1),
    _case(2, "bert", 5_000, use_multi_rank_bucket_allreduce=False, world_size=3, rank=1, grad_accum_dtype=_FP32),
    _case(2, "llama", 5_000, compute_grad_norm=False, world_size=3, rank=1),
    _case(1, "bert", 5_000, compute_grad_norm=False, precision="fp16", grad_accum_dtype=_FP32),
    _case(2, "t5", 5_000, precision="fp16", world_size=3, rank=1),  # transformers keeps `wo` in fp32, DeepSpeed does not
    # -- stages 1 and 2 with the optimizer on the host -------------------------------------------------------------------
    _case(2, "llama", 5_000, offload_optimizer=OffloadOptimizer(), own_adam=True, rank=1, quick=True),
    _case(2, "bert", offload_optimizer=OffloadOptimizer(), own_adam=True, world_size=3, rank=1, grad_accum_steps=2),
    _case(2, "gpt2", 5_000, precision="fp32", offload_optimizer=OffloadOptimizer(pin_memory=False), world_size=8, rank=7,
          grad_accum_steps=4, optimizer_groups="decay", **_TORCH_ADAM),
    _case(2, "opt", 5_000, precision="fp16", offload_optimizer=OffloadOptimizer(), own_adam=True, overlap_comm=True),
    _case(2, "bert", 5_000, grad_accum_dtype=_FP32, offload_optimizer=OffloadOptimizer(), own_adam=True, grad_accum_steps=2),
    _case(2, "llama", 5_000, **_HOST_ADAM, rank=1, iterations=3, quick=True,
          zenflow=ZenFlow(select_strategy="step", select_interval=2)),
    _case(2, "bert", **_HOST_ADAM, world_size=3, rank=1, iterations=3, grad_accum_steps=2,
          zenflow=ZenFlow(topk_ratio=0.3, select_strategy="step", select_interval=2, update_interval=2)),
    _case(2, "gpt2", 5_000, precision="fp32", **_HOST_ADAM, world_size=8, rank=7, iterations=3, optimizer_groups="decay",
          zenflow=ZenFlow(topk_ratio=0.05, select_strategy="step", select_interval=2)),
    _case(2, "opt", 8_000, precision="fp16", **_HOST_ADAM, world_size=8, rank=2, grad_accum_steps=4,
          zenflow=ZenFlow(update_interval=4)),
    _case(1, "llama", 5_000, offload_optimizer=OffloadOptimizer(), own_adam=True, world_size=3, rank=2, grad_accum_steps=2),
    _case(1, "opt", 5_000, grad_accum_dtype=_FP32, offload_optimizer=OffloadOptimizer(), own_adam=True, grad_accum_steps=2),
    _case(2, "llama", 5_000, **_BF16_MASTERS, offload_optimizer=OffloadOptimizer(), own_adam=True, grad_accum_steps=2),
    _case(2, "t5", 5_000, parameter_alignment=True, offload_optimizer=OffloadOptimizer(), own_adam=True, world_size=3, rank=1),
    _case(2, "gpt2", 5_000, bf16_master_weights_and_grads=True, offload_optimizer=OffloadOptimizer(), own_adam=True, rank=1),
    # -- Muon ------------------------------------------------------------------------------------------------------------
    _case(2, "llama", 5_000, muon="gram", own_adam=True, rank=1, quick=True),
    _case(2, "bert", muon="gram", own_adam=True, world_size=3, rank=1, grad_accum_steps=2, optimizer_groups="decay"),
    _case(2, "gpt2", 3_000, muon="gram", own_adam=True, precision="fp32", grad_accum_steps=3),
    _case(1, "gpt2", 5_000, muon="gram", own_adam=True, precision="fp16", world_size=8, rank=7, grad_accum_steps=2),
    _case(1, "opt", 5_000, muon="standard", own_adam=True, precision="fp32", overlap_comm=True),
    _case(2, "mixtral", 5_000, muon="standard", own_adam=True, round_robin_gradients=True, world_size=3, rank=2,
          grad_accum_steps=2),
    _case(2, "t5", 5_000, muon="standard", own_adam=True, precision="fp16", world_size=64, rank=63),
    _case(1, "llama", 5_000, muon="gram", own_adam=True, parameter_alignment=True, world_size=3, rank=2),
    _case(2, "llama", 5_000, muon="gram", own_adam=True, contiguous_gradients=False, rank=1),
    _case(1, "llama", 5_000, muon="gram", own_adam=True, world_size=3, rank=1, iterations=3,
          offload_optimizer=OffloadOptimizer()),
    _case(2, "mixtral", 5_000, muon="standard", own_adam=True, world_size=3, rank=2, grad_accum_steps=2,
          offload_optimizer=OffloadOptimizer()),
    _case(2, "llama", 5_000, muon="gram", own_adam=True, **_BF16_MASTERS),
    _case(3, "llama", 5_000, muon="gram", own_adam=True, reduce_scatter=False, rank=1, quick=True, **_TIGHT),
    _case(3, "bert", 200_000, muon="gram", own_adam=True, reduce_scatter=False, communication_data_type=_FP32, world_size=3,
          rank=2, grad_accum_steps=2, optimizer_groups="decay", **_TIGHT),
    _case(3, "gpt2", muon="gram", own_adam=True, reduce_scatter=False, precision="fp16", zero_init=True, world_size=5, rank=4,
          grad_accum_steps=2, **_TIGHT),
    _case(3, "t5", muon="standard", own_adam=True, reduce_scatter=False, precision="fp32", sub_group_size=9_000, world_size=3,
          rank=2, **_TIGHT),
    _case(3, "opt", 5_000, muon="standard", own_adam=True, reduce_scatter=False, grad_accum_dtype=_FP32, world_size=64, rank=63,
          iterations=3, **_TIGHT),
    _case(3, "mixtral", 5_000, muon="gram", own_adam=True, reduce_scatter=False, offload_optimizer=OffloadOptimizer(),
          offload_param=OffloadParam(), world_size=3, rank=1, grad_accum_steps=2, **_TIGHT),
    _case(3, "llama", 200_000, muon="standard", own_adam=True, reduce_scatter=False, grad_accum_dtype=_FP32,
          sub_group_size=20_000, offload_optimizer=OffloadOptimizer(), iterations=3, **_TIGHT),
    # -- stage 3 ---------------------------------------------------------------------------------------------------------
    _case(3, "llama", world_size=3, rank=1, overlap_comm=False, quick=True),
    _case(3, "bert", overlap_comm=False, iterations=3, **_TIGHT, quick=True),
    _case(3, "gpt2", 5_000, overlap_comm=False, world_size=3, rank=2, grad_accum_steps=2, **_TIGHT),
    _case(3, "bert", precision="fp32", world_size=8, rank=7, optimizer_groups="decay", iterations=3, overlap_comm=False,
          **_knobs(1_000, 60_000, 5_000, 10_000), sub_group_size=9_000),
    _case(3, "llama", recompute="full", overlap_comm=False, iterations=3, **_TIGHT),
    _case(3, "opt", 3_000, recompute="full", overlap_comm=False, world_size=3, rank=2, **_TIGHT),
    _case(3, "t5", overlap_comm=False, world_size=5, rank=4, iterations=3, **_TIGHT),
    _case(3, "t5", precision="fp16", world_size=3, rank=2, **_TIGHT),
    _case(3, "gpt2", frozen=("transformer.h.0",), overlap_comm=False, iterations=3, **_TIGHT),
    _case(3, "llama", 3_000, grad_accum_dtype=_FP32, grad_accum_steps=2, overlap_comm=True,
          **_knobs(0, 1_000_000_000, 1_000_000_000, 0)),
    _case(3, "gpt2", precision="fp16", world_size=3, rank=2, **_TIGHT),
    _case(3, "bert", 5_000, communication_data_type=_FP32, world_size=3, rank=1, **_TIGHT),
    _case(3, "llama", 5_000, communication_data_type=_FP32, grad_accum_dtype=_FP32, rank=1, grad_accum_steps=2, **_TIGHT),
    _case(3, "opt", 5_000, reduce_scatter=False, world_size=3, rank=2, grad_accum_dtype=_FP32, **_TIGHT),
    _case(3, "opt", 5_000, reduce_scatter=False, world_size=3, rank=1, **_TIGHT),
    _case(3, "llama", 200_000, reduce_scatter=False, grad_accum_dtype=_FP32, **_TIGHT),
    _case(3, "bert", 200_000, reduce_scatter=False, communication_data_type=_FP32, world_size=3, rank=2, **_TIGHT),
    _case(3, "gpt2", 5_000, contiguous_gradients=False, world_size=3, rank=1, grad_accum_steps=2, **_TIGHT),
    _case(3, "llama", zero_hpz_partition_size=2, world_size=4, rank=1, iterations=3, grad_accum_steps=2, **_TIGHT),
    _case(3, "bert", zero_hpz_partition_size=2, world_size=4, rank=3, iterations=3, **_knobs(1_000, 10**9, 10**9, 10_000)),
    _case(3, "gpt2", zero_init=True, world_size=3, rank=2, **_TIGHT),
    _case(3, "llama", 5_000, **_BF16_MASTERS, world_size=3, rank=1, own_adam=True, **_TIGHT),
    _case(3, "gpt2", 5_000, **_BF16_MASTERS, grad_accum_dtype=_FP32, grad_accum_steps=2, **_TIGHT),
    _case(3, "llama", 5_000, stage3_allgather_sequential=True, world_size=3, rank=1, iterations=3),
    _case(3, "bert", 5_000, stage3_allgather_sequential=True, offload_param=OffloadParam(), **_TIGHT),
    _case(3, "bert", 5_000, stage3_use_all_reduce_for_fetch_params=True, iterations=3, world_size=3, rank=1, **_TIGHT),
    _case(3, "gpt2", 5_000, stage3_use_all_reduce_for_fetch_params=True, recompute="full",
          **_knobs(1_000, 60_000, 50_000, 10_000)),
    # -- stage 3: mixtures of experts, leaf modules, and weights of which autograd saves views -------------------------------
    _case(3, "mixtral", overlap_comm=False, iterations=3, **_TIGHT, quick=True),
    _case(3, "mixtral", 5_000, world_size=4, rank=1, iterations=3, grad_accum_steps=2),
    _case(3, "mixtral", precision="fp32", world_size=3, rank=2, recompute="full", **_TIGHT),
    _case(3, "mixtral", 5_000, leaf_module=LeafModules(classes=()), iterations=3, **_TIGHT),
    _case(3, "mixtral", 5_000, offload_param=OffloadParam(), offload_optimizer=OffloadOptimizer(), own_adam=True,
          world_size=4, rank=3, grad_accum_steps=2, optimizer_groups="decay", **_TIGHT),
    _case(3, "mixtral", frozen=("model.layers.0.mlp.experts",), **_TIGHT),
    _case(3, "qwen2-moe", world_size=3, rank=1, iterations=3, **_TIGHT),
    _case(3, "qwen2-moe", precision="fp16", zero_hpz_partition_size=2, world_size=4, rank=2, iterations=3),
    _case(3, "mixtral", 5_000, stage3_use_all_reduce_for_fetch_params=True, iterations=3, **_TIGHT),
    _case(3, "olmoe", iterations=3, **_TIGHT),
    _case(3, "olmoe", recompute="full", iterations=3, **_TIGHT),
    _case(3, "olmoe", 5_000, leaf_module=LeafModules(classes=("OlmoeSparseMoeBlock",)), world_size=3, rank=2, **_TIGHT),
    _case(3, "llama", 5_000, leaf_module=LeafModules(name_suffixes=("mlp",)), world_size=3, rank=1, iterations=3, **_TIGHT),
    _case(3, "bert", 5_000, leaf_module=LeafModules(names=("bert.encoder.layer.1",)), iterations=3,
          **_knobs(1_000, 60_000, 50_000, 10_000)),
    _case(3, "gpt2", 5_000, leaf_module=LeafModules(classes=("GPT2Block",)), recompute="full", iterations=3,
          **_knobs(1_000, 60_000, 5_000, 10_000)),
    _case(3, "llama", memory_efficient_linear=False, iterations=3, **_TIGHT),
    _case(3, "bert", 5_000, memory_efficient_linear=False, world_size=3, rank=1, **_TIGHT),
    _case(3, "gpt2", 5_000, memory_efficient_linear=False, recompute="full", **_TIGHT),
    # what is frozen: DeepSpeed's linear saves its input all the same
    _case(3, "llama", frozen=("model.layers.0",), **_TIGHT),
    _case(3, "bert", 5_000, frozen=("bert.encoder.layer",), world_size=3, rank=1, grad_accum_steps=2, **_TIGHT),
    _case(3, "mixtral", 5_000, frozen=("model.layers.0",), **_TIGHT),
    _case(3, "t5", 5_000, frozen=("encoder.block.0", "decoder.block.1"), **_TIGHT),
    _case(3, "opt", 5_000, memory_efficient_linear=False, frozen=("model.decoder.layers.0",), **_TIGHT),
    # -- frozen weights in 4 or 8 bits ---------------------------------------------------------------------------------------
    _case(0, "llama", adapter=_on("nf4"), own_adam=True, grad_accum_steps=2),
    _case(1, "llama", 5_000, adapter=_on("int8"), precision="fp16", world_size=3, rank=1, grad_accum_steps=2),
    _case(2, "llama", 5_000, adapter=_on("nf4-dq"), rank=1, quick=True),
    _case(2, "gpt2", 3_000, adapter=_on("nf4", targets=("all-linear",)), precision="fp32", world_size=3, rank=2),
    _case(2, "llama", 5_000, adapter=_on("fp4", quant_storage="bfloat16"), recompute="full", own_adam=True,
          offload_optimizer=OffloadOptimizer()),
    _case(2, "llama", 5_000, adapter=_on("nf4-dq"), recompute="full", reentrant=True, world_size=3, rank=1),
    _case(2, "opt", 5_000, adapter=_on("gptq"), precision="fp16", optimizer_groups="decay", grad_accum_dtype=_FP32),
    _case(3, "llama", 5_000, adapter=_on("nf4-dq"), **_TIGHT, quick=True),
    _case(3, "llama", 5_000, adapter=_on("nf4-dq"), recompute="full", iterations=3, **_TIGHT),
    _case(3, "llama", adapter=_on("fp4", targets=("all-linear",)), precision="fp32", grad_accum_steps=2, rank=1),
    _case(3, "llama", 5_000, adapter=_on("nf4", quant_storage="float16"), precision="fp16", **_TIGHT),
    _case(3, "gpt2", 5_000, adapter=_on("nf4"), zero_hpz_partition_size=2, world_size=4, rank=1, **_TIGHT),
    _case(3, "llama", 5_000, adapter=_on("nf4"), stage3_allgather_sequential=True, world_size=3),
    _case(3, "llama", 5_000, adapter=_on("nf4"), offload_optimizer=OffloadOptimizer(), offload_param=OffloadParam(),
          own_adam=True, **_knobs(0, 20_000, 0, 3_000)),
    _case(3, "mixtral", 5_000, adapter=_on("nf4", targets=("q_proj", "v_proj")), **_TIGHT),
    _case(3, "opt", 5_000, adapter=_on("gptq"), precision="fp16", **_TIGHT),
    # -- fp16 masters ----------------------------------------------------------------------------------------------------
    _case(2, "llama", 5_000, precision="fp16", fp16_master_weights_and_grads=True, offload_optimizer=OffloadOptimizer(),
          own_adam=True, rank=1),
    _case(1, "bert", 5_000, precision="fp16", fp16_master_weights_and_grads=True, offload_optimizer=OffloadOptimizer(),
          own_adam=True, grad_accum_dtype=_FP32, world_size=3, rank=2, grad_accum_steps=2),
    _case(3, "gpt2", 5_000, precision="fp16", fp16_master_weights_and_grads=True, offload_optimizer=OffloadOptimizer(),
          own_adam=True, world_size=3, rank=2, grad_accum_steps=2, **_TIGHT),
    # -- stage 3 with parts on the host or on NVMe -----------------------------------------------------------------------
    _case(3, "llama", 5_000, offload_optimizer=OffloadOptimizer(), own_adam=True, rank=1, **_TIGHT, quick=True),
    _case(3, "bert", 5_000, offload_optimizer=OffloadOptimizer(), own_adam=True, world_size=3, rank=2, grad_accum_steps=2,
          sub_group_size=9_000, optimizer_groups="decay", **_TIGHT),
    _case(3, "gpt2", 5_000, precision="fp32", offload_optimizer=OffloadOptimizer(pin_memory=False), world_size=8, rank=7,
          grad_accum_steps=4, **_TIGHT, **_TORCH_ADAM),
    _case(3, "opt", 5_000, precision="fp16", offload_optimizer=OffloadOptimizer(), own_adam=True, **_TIGHT),
    _case(3, "llama", 5_000, grad_accum_dtype=_FP32, offload_optimizer=OffloadOptimizer(), own_adam=True,
          grad_accum_steps=2, **_TIGHT),
    _case(3, "bert", 5_000, bf16_master_weights_and_grads=True, offload_optimizer=OffloadOptimizer(), own_adam=True, **_TIGHT),
    _case(3, "llama", offload_optimizer=OffloadOptimizer(ratio=0.5), own_adam=True, sub_group_size=20_000, **_TIGHT),
    _case(3, "bert", offload_param=OffloadParam(), world_size=3, rank=1, iterations=3, **_TIGHT),
    _case(3, "t5", offload_param=OffloadParam(pin_memory=False), precision="fp32", **_TIGHT),
    _case(3, "gpt2", offload_param=OffloadParam(), offload_optimizer=OffloadOptimizer(), own_adam=True, world_size=64,
          rank=63, grad_accum_steps=2, optimizer_groups="decay", **_TIGHT),
    _case(3, "llama-wide", 1_000_000, offload_optimizer=OffloadOptimizer(device="nvme"), own_adam=True, **_TIGHT),
    _case(3, "llama-wide", 1_000_000, offload_optimizer=OffloadOptimizer(device="nvme", buffer_count=5), world_size=3, rank=2,
          sub_group_size=1_000_000, grad_accum_steps=2, aio_intra_op_parallelism=2, **_TIGHT, **_TORCH_ADAM),
    _case(3, "llama-wide", 1_000_000, precision="fp32", own_adam=True, **_TIGHT, sub_group_size=1_000_000,
          offload_optimizer=OffloadOptimizer(device="nvme", pipeline_read=True, buffer_count=12, pipeline_write=True)),
    _case(3, "llama-wide", 1_000_000, offload_param=OffloadParam(device="nvme", buffer_size=1_000_000), quick=True, **_TIGHT),
    _case(3, "llama-wide", 1_000_000, own_adam=True, **_TIGHT, sub_group_size=1_000_000,
          offload_optimizer=OffloadOptimizer(device="nvme"),
          offload_param=OffloadParam(device="nvme", buffer_size=1_000_000, buffer_count=12, max_in_cpu=2_000_000)),
    _case(3, "llama-wide", 1_000_000, own_adam=True, **_TIGHT, sub_group_size=1_000_000,
          offload_optimizer=OffloadOptimizer(device="nvme", fast_init=True),
          offload_param=OffloadParam(device="nvme", buffer_size=4_000_000, buffer_count=12, max_in_cpu=2_000_000)),
    _case(3, "bert", overlap_comm=None, optimizer_groups="decay", world_size=4, iterations=3, **_auto(64)),
)  # fmt: skip
