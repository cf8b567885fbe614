"""The runs of `gpu_check`: what each is there to show.  Models of the catalogue, random weights, 0.1 to 8 billion parameters.

Cheap ones come first, so that a short budget still says most.  The attention kernels that a case reaches are those of compute
capability 8.0 and newer (sdp_utils.cpp): flash for 16 bits without a mask, efficient for fp32 or with a mask, math for grouped
keys in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.  `options`: as for `memplan.fits`.  `recorded`: its memory history is compared event by event as well."""

    name: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    recorded: bool = False


_GPT2 = "openai-community/gpt2"
_LLAMA_1B = "meta-llama/Llama-3.2-1B"
_LLAMA_8B = "meta-llama/Llama-3.1-8B"


def _case(name: str, model: str, *, recorded: bool = False, **options: Any) -> Case:
    return Case(name=name, model=model, options=options, recorded=recorded)


def _llama(name: str, *, recorded: bool = False, **options: Any) -> Case:
    small = {"micro_batch_size": 1, "seq_len": 1024, "precision": "bf16"}
    return _case(f"llama-1b-{name}", _LLAMA_1B, recorded=recorded, **{**small, **options})


CASES: tuple[Case, ...] = (
    # precision, and the attention kernels
    _case("gpt2-fp32-efficient", _GPT2, recorded=True, micro_batch_size=4, seq_len=512, precision="fp32"),
    _case("gpt2-bf16-flash-dropout", _GPT2, recorded=True, micro_batch_size=8, seq_len=1024, precision="bf16"),
    _case("gpt2-autocast", _GPT2, recorded=True, micro_batch_size=8, seq_len=1024, precision="bf16-autocast"),
    _case("gpt2-fp16-autocast", _GPT2, micro_batch_size=8, seq_len=1024, precision="fp16-autocast"),
    _case("gpt2-eager", _GPT2, micro_batch_size=4, seq_len=1024, precision="bf16", attention="eager"),
    _llama("bf16-flash-grouped", recorded=True, micro_batch_size=2, seq_len=2048),
    _llama("fp32-math", precision="fp32"),
    _llama("autocast", precision="bf16-autocast"),
    _case("gemma3-1b-efficient-mask", "google/gemma-3-1b-pt", micro_batch_size=1, seq_len=1024, precision="bf16"),
    # recompute
    _case("gpt2-recompute-full", _GPT2, recorded=True, micro_batch_size=8, seq_len=1024, precision="bf16", recompute="full"),
    _llama("recompute-full", micro_batch_size=4, seq_len=2048, recompute="full"),
    _case(
        "qwen-0.5b-autocast-every-4", "Qwen/Qwen2.5-0.5B",
        micro_batch_size=4, seq_len=2048, precision="bf16-autocast", recompute="every-k:4",
    ),
    # optimizers
    _llama("adamw-fused", optimizer_impl="fused"),
    _llama("adamw-for-loop", optimizer_impl="for-loop"),
    _llama("sgd", optimizer="sgd"),
    _llama("adafactor", optimizer="adafactor"),
    # the loop
    _llama("accumulate-4", grad_accum_steps=4),
    _llama("zeroed-grads", set_to_none=False, zero_grad="before-forward"),
    _llama("kept-outputs", keep_outputs=True, zero_grad="before-backward"),
    _llama("clipped", clip_grad_norm=True),
    _llama("inference", mode="inference", micro_batch_size=8, seq_len=2048),
    # other architectures
    _case("bert-base-fp32", "google-bert/bert-base-uncased", micro_batch_size=16, seq_len=512, precision="fp32"),
    _case("t5-base-bf16", "google-t5/t5-base", micro_batch_size=8, seq_len=512, precision="bf16"),
    _case("vit-base-autocast", "google/vit-base-patch16-224", micro_batch_size=32, precision="bf16-autocast"),
    _case("whisper-small-bf16", "openai/whisper-small", micro_batch_size=4, precision="bf16"),
    _case("opt-1.3b-bf16", "facebook/opt-1.3b", micro_batch_size=2, seq_len=1024, precision="bf16"),
    # too large for any card of today: the answer must be that it does not fit
    _llama("out-of-memory", micro_batch_size=128, seq_len=4096),
    # large
    _case("llama-8b-recompute", _LLAMA_8B, micro_batch_size=1, seq_len=2048, precision="bf16", recompute="full"),
    _case("llama-8b", _LLAMA_8B, micro_batch_size=1, seq_len=2048, precision="bf16"),
)  # fmt: skip
