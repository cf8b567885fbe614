"""Frozen weights in 8 bits, as transformers loads them with bitsandbytes (LLM.int8).

    packed weight   int8, of the weight's own shape
    scales          fp32, one a row

The layer is the library's own, `bnb.nn.Linear8bitLt`.  On a CPU it runs there as it is.  For a GPU's trace its product is
written out, since its kernels run on one only (bitsandbytes 0.50.2, MatMul8bitLt of autograd/_functions.py and the kernels of
backends/cuda/ops.py):

    forward    the input in fp16, its 8-bit form and a scale a row; with a threshold the search for outliers (absolute values
               and a mask of the input's size); the product in int32, in fp16 and in the input's dtype; where there are
               outliers, these columns of input and weight, and the sum of both products
    kept       the input, as it came: unlike a 4-bit layer, this one holds what it was given until backward
    backward   the whole weight in the input's dtype

Which columns are outliers depends on values: as many as `OUTLIERS` are taken, which is what large models have (arXiv
2208.07339, table 4: up to seven hidden dimensions).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UserError

if TYPE_CHECKING:
    from torch import nn

THRESHOLD = 6.0  # transformers' llm_int8_threshold
OUTLIERS = 7  # columns


def quantise(module: nn.Module, kept: list[str]) -> tuple[nn.Module, list[str]]:
    """(`module` with its linear layers in 8 bits, what was done in words).  `kept`: paths that stay.

    Raises UserError for a model without linear layers.
    """
    import bitsandbytes as bnb
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    old: dict[str, Any] = dict(module.named_modules())
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=THRESHOLD)
    with unset_fake_temporarily():
        replace_with_bnb_linear(module, modules_to_not_convert=kept, quantization_config=config)
    replaced = 0
    for path, layer in module.named_modules():
        part: Any = layer
        before = old.get(path)
        if part is before or before is None or not isinstance(part, bnb.nn.Linear8bitLt):
            continue
        weight = before.weight.detach()
        weight = weight.T if type(before).__name__ == "Conv1D" else weight  # GPT-2's, stored the other way round
        if isinstance(weight, FakeTensor):
            _pack_fake(part, weight)
        else:
            make: Any = bnb.nn.Int8Params
            part.weight = make(weight.contiguous(), requires_grad=False, has_fp16_weights=False).to(weight.device)
            part.init_8bit_state()
        part.register_buffer("weight_scales", part.state.SCB, persistent=False)
        if before.bias is not None:
            part.bias = torch.nn.Parameter(before.bias.detach(), requires_grad=False)
        part._forward_hooks.update(before._forward_hooks)
        replaced += 1
    if not replaced:
        raise UserError(f"--base-quant int8: {type(module).__name__} has no linear layer that transformers would quantise",
                        "Leave --base-quant out")  # fmt: skip
    module.is_loaded_in_8bit = True  # type: ignore[assignment]
    module.train(module.training)
    return module, [
        f"{replaced} linear layers are stored in 8 bits (LLM.int8, threshold {THRESHOLD:g}; bitsandbytes); embeddings, norms "
        "and the head are not",
        f"{OUTLIERS} columns of the input of an 8-bit layer are outliers",
    ]


def _count_products() -> None:
    """Tells torch how much work an 8-bit product is, which its own counter does not know."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    op = torch.ops.aten._int_mm
    if op in flop_registry:
        return

    def flops(rows: Any, columns: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
        return 2 * int(rows[0]) * int(rows[1]) * int(columns[1])

    register_flop_formula(op)(flops)


def run_as_on_a_gpu(module: nn.Module) -> None:
    """The 8-bit layers of `module` make what a GPU's kernels make, for a trace; they compute no values."""
    _count_products()
    for layer in module.modules():
        part: Any = layer
        if type(part).__name__ == "Linear8bitLt" and hasattr(part, "state"):
            part.forward = _Forward(part)


class _Forward:
    """`Linear8bitLt.forward` on a GPU.  An object of a class: a copy of the layer copies it too."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __call__(self, x: Tensor) -> Tensor:
        part = self.part
        if part.bias is not None and part.bias.dtype != x.dtype:
            part.bias.data = part.bias.data.to(x.dtype)
        out: Tensor = _Product.apply(x, part.weight, part.weight_scales, part.bias, part.state.threshold)
        return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1]) if x.dim() == 3 else x
        packed = _quantised(x.to(torch.float16), threshold)
        columns = x[:, :OUTLIERS].contiguous() if threshold > 0 else None
        of_weight = None
        if columns is not None:
            of_weight = (weight[:, :OUTLIERS].contiguous() * scales.unsqueeze(1)).to(x.dtype).t()
        out = _scaled_product(packed, weight, bias, x.dtype)
        if columns is not None and of_weight is not None:
            out = out.addmm(columns, of_weight)
        ctx.shape, ctx.bias_dtype = shape, None if bias is None else bias.dtype
        ctx.kept = (columns, x, weight, scales) if ctx.needs_input_grad[0] else (None, x.dtype, weight, scales)
        return out.reshape(*shape[:-1], weight.shape[0]) if len(shape) == 3 else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, x, weight, scales = ctx.kept
        grad = grads[0]
        bias_grad = grad.sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[3] else None
        if grad.dim() == 3:
            grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        if not ctx.needs_input_grad[0]:
            return None, None, None, bias_grad, None
        dense = weight.to(x.dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))
        return torch.matmul(grad.to(x.dtype), dense).view(ctx.shape), None, None, bias_grad, None


def _quantised(half: Tensor, threshold: float) -> Tensor:
    """`int8_vectorwise_quant`: the packed input (and its scales); looks for outliers where there is a threshold."""
    scales = torch.empty(half.shape[0], dtype=torch.float32)
    packed = torch.empty(half.shape, dtype=torch.int8)
    if threshold > 0:
        outliers = half.abs() >= threshold
        outliers.any(dim=0)
    packed.scales = scales  # type: ignore[attr-defined]  # alive as long as the packed input is
    return packed


def _scaled_product(packed: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`int8_scaled_mm`: int32, then fp16, then `dtype`."""
    whole = torch._int_mm(packed, weight.t())
    out = torch.empty_like(whole, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        out.add_(bias)
    return out.to(dtype)


def _pack_fake(part: Any, weight: Tensor) -> None:
    """Tensors of the same sizes without values."""
    part.weight = torch.nn.Parameter(torch.empty(weight.shape, dtype=torch.int8), requires_grad=False)
    part.weight.CB = part.weight.SCB = None
    part.state.CB = part.weight.data
    part.state.SCB = torch.empty(weight.shape[0], dtype=torch.float32)
