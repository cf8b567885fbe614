"""What a CUDA step records that a fake CPU step would not: put in where the two differ, at trace time.

The trace runs on fake `cpu` tensors, whose dispatch keys choose CPU implementations.  For the cuda target the composite ops
whose CUDA branch is another one are given that branch here (a `torch.library` implementation for the AutogradCPU key, removed
after the trace):

* dropout        one fused op with a mask of one byte an element (ATen/native/Dropout.cpp, `is_fused_kernel_acceptable`)
* attention      one op with what the fused kernels save, or the math form (ATen/native/transformers/cuda/sdp_utils.cpp)
* rms_norm       `_fused_rms_norm`: saves the input and one fp32 per row (ATen/native/layer_norm.cpp, torch >= 2.9)
* softmax        of fp16 with dtype=fp32: no fp32 copy of the input (ATen/native/SoftMax.cpp, `softmax`)
* statistics     of layer_norm are fp32 on CUDA whatever the input (layer_norm_kernel.cu, `layer_norm_cuda`)
* autocast       CUDA's op lists (ATen/autocast_mode.h): see `autocast`

What a kernel allocates *inside* depends on the GPU; that is `planner.kernels`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from . import autocast
from .options import SdpaCall, SdpaClass

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@dataclass
class Choices:
    """What was decided during a trace, for the assumptions; and the sizes that differ from the fake tensors' own."""

    kernels: set[str] = field(default_factory=set)
    cuda: bool = True

    @property
    def assumptions(self) -> list[str]:
        if not self.kernels:
            return []
        return [f"attention (SDPA) runs torch's {' and '.join(sorted(self.kernels))} kernel" + "s" * (len(self.kernels) > 1)]

    def storage_bytes(self, func: Any, index: int, tensor: torch.Tensor, args: Any) -> int:
        """Bytes of output `index` of `func` in the real run, or -1: as the fake tensor says."""
        if index > 0 and func is aten.native_layer_norm.default and tensor.dtype in _HALF:
            weight = args[2]
            if self.cuda or (weight is not None and weight.dtype is torch.float32):  # the CPU's mixed-dtype kernel
                return tensor.numel() * 4  # mean and rstd
        return -1


@contextlib.contextmanager
def as_cuda(active: bool, sdpa: SdpaClass) -> Iterator[Choices]:
    """While open, composite ops on (fake) CPU tensors take their CUDA branch."""
    choices = Choices(cuda=active)
    if not active:
        yield choices
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel is overridden: that is the purpose
        library = torch.library.Library("aten", "IMPL")
        try:
            library.impl("dropout", _dropout, "AutogradCPU")
            library.impl("rms_norm", _rms_norm, "AutogradCPU")
            library.impl("softmax.int", _softmax, "AutogradCPU")
            library.impl("scaled_dot_product_attention", _attention(sdpa, choices), "AutogradCPU")
            with autocast.cuda_lists():
                yield choices
        finally:
            library._destroy()


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * 0
    return torch.native_dropout(x, p, train)[0]


def _rms_norm(x: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None) -> torch.Tensor:
    if weight is not None and weight.dtype != x.dtype:  # mixed dtypes fall back to the composite (layer_norm.cpp, rms_norm)
        wide = x.float() if x.dtype in _HALF else x
        eps = torch.finfo(wide.dtype).eps if eps is None else eps
        dims = list(range(x.dim() - len(shape), x.dim()))
        normed = wide * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True) + eps)
        return (normed * weight).to(x.dtype)
    return aten._fused_rms_norm(x, shape, weight, eps)[0]


def _softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    if dtype is None or dtype == x.dtype:
        return aten._softmax(x, dim, False)
    if x.dtype is torch.float16 and dtype is torch.float32:
        return _HalfToFloatSoftmax.apply(x, dim)
    return aten._softmax(x.to(dtype), dim, False)


class _HalfToFloatSoftmax(torch.autograd.Function):
    """softmax that reads fp16 and writes fp32; its backward writes fp16 (`_softmax_backward_data` with input_dtype)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
        out = torch.empty_like(x, dtype=torch.float32)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (out,) = ctx.saved_tensors
        return torch.empty_like(out, dtype=torch.float16), None


def _attention(sdpa: SdpaClass, choices: Choices) -> Any:
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        heads = query.size(-3) if query.dim() >= 3 else 1
        call = SdpaCall(
            dtype=str(query.dtype).removeprefix("torch."),
            query_len=query.size(-2),
            key_len=key.size(-2),
            query_heads=heads,
            key_heads=key.size(-3) if key.dim() >= 3 else 1,
            head_dim=query.size(-1),
            value_dim=value.size(-1),
            has_mask=attn_mask is not None,
            dropout=dropout_p,
            causal=is_causal,
            gqa=enable_gqa,
            requires_grad=torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)),
        )
        kernel = sdpa.choose(call) if query.dim() == 4 else "math"
        choices.kernels.add(kernel)
        mask = _convert_mask(attn_mask, query.dtype)
        if kernel == "math":
            return aten._scaled_dot_product_attention_math(
                query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        if kernel == "efficient" and mask is not None:
            mask = _align_mask(mask, query, key)
        head_dim = query.size(-1)
        if kernel == "flash" and head_dim % 8:  # padded to a multiple of 8, and the result cut (attention.cpp, pad_last_dim)
            pad = 8 - head_dim % 8
            query, key, value = (torch.nn.functional.pad(t, (0, pad)) for t in (query, key, value))
        out = _FusedAttention.apply(query, key, value, mask, dropout_p, is_causal, kernel)
        return out[..., :head_dim] if out.size(-1) != head_dim else out

    return attention


def _convert_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A bool mask becomes 0 / -inf in the query's dtype, one tensor a call (attention.cpp, convert_boolean_attn_mask)."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype)
    infinity = torch.full((), float("-inf"), dtype=dtype)
    return torch.where(mask, zero, infinity)


def _align_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The efficient kernel wants rows of a multiple of 16: else the expanded mask is copied (attention.cpp, pad_bias)."""
    full = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    if key.size(2) % 16:
        pad = 16 - key.size(2) % 16
        return torch.nn.functional.pad(full, (0, pad))[..., : key.size(2)]
    if any(stride % 16 for stride in full.stride()[:3]):
        return full.contiguous()
    return full


_library = torch.library.Library("memplan", "DEF")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout_p, bool is_causal, str kernel, "
    "bool training) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor out, Tensor logsumexp, "
    "Tensor rng_state, float dropout_p, bool is_causal, str kernel, bool mask_grad) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _attention_meta(query: Any, key: Any, value: Any, mask: Any, p: float, causal: bool, kernel: str, training: bool) -> Any:
    """out is laid out like the query (flash: `empty_like(q_padded)`, flash_api.cpp) or [batch, seq, head, dim] (efficient);
    logsumexp is fp32 [batch, head, seq] (the efficient kernel rounds seq up to 32: `planner.kernels`); rng_state stands for the
    seed and offset that the kernel leaves on the GPU."""
    batch, heads, length, _ = query.shape
    if kernel == "flash":
        out = torch.empty_like(query.transpose(1, 2)).transpose(1, 2)
    else:
        out = query.new_empty((batch, length, heads, value.size(-1))).transpose(1, 2)
    statistics = query.new_empty((batch, heads, length) if training else (0,), dtype=torch.float32)
    return out, statistics, query.new_empty((2,), dtype=torch.int64)


def _attention_backward_meta(
    grad: Any, query: Any, key: Any, value: Any, mask: Any, out: Any, lse: Any, rng: Any, p: float, c: bool, k: str, m: bool
) -> Any:
    """Gradients are laid out like their tensors (flash) or [batch, seq, head, dim] (efficient): equal in bytes."""

    def like(tensor: Any) -> Any:
        if k == "flash":
            return torch.empty_like(tensor.transpose(1, 2)).transpose(1, 2)
        batch, heads, length, dim = tensor.shape
        return tensor.new_empty((batch, length, heads, dim)).transpose(1, 2)

    mask_grad = torch.empty_like(mask) if m else query.new_empty((0,))
    return like(query), like(key), like(value), mask_grad


_library.impl("attention", _attention_meta, "Meta")
_library.impl("attention_backward", _attention_backward_meta, "Meta")


class _FusedAttention(torch.autograd.Function):
    """Saves what the flash and efficient kernels save: q, k, v, mask, out, logsumexp, rng state."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, p: float, causal: bool, kernel: str) -> Any:
        training = any(ctx.needs_input_grad[:3])
        out, lse, rng = torch.ops.memplan.attention(query, key, value, mask, p, causal, kernel, training)
        ctx.save_for_backward(query, key, value, mask, out, lse, rng)
        ctx.arguments = (p, causal, kernel, mask is not None and ctx.needs_input_grad[3])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        query, key, value, mask, out, lse, rng = ctx.saved_tensors
        grads = torch.ops.memplan.attention_backward(grad, query, key, value, mask, out, lse, rng, *ctx.arguments)
        return *grads[:3], grads[3] if ctx.arguments[3] else None, None, None, None
