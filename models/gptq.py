"""Frozen weights as GPTQ stores them: 4 bits in int32, scales in fp16, computed with by the kernels that can train (triton v2).

A stand-in for the layer of AutoGPTQ and GPTQModel (nn_modules/qlinear/qlinear_tritonv2.py), for traces only: it has the same
buffers, and allocates what `quant_matmul_248` does (triton_utils/dequant.py), which is the whole weight in fp16 for each
product, in forward and again in backward.  It holds no values and computes none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CannotTell, UserError

GROUP = 128  # weights of a column that share a scale and a zero: what published checkpoints use
_PACKED = 8  # 4-bit numbers in one int32
_MULTIPLE = 32  # of the widths that the kernel takes (qlinear_tritonv2.py, __init__)


_stands_in = False


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Within it, a module with values gets the stand-in too: for runs of which sizes matter and values are garbage."""
    global _stands_in
    _stands_in = True
    try:
        yield
    finally:
        _stands_in = False


class GptqLinear(nn.Module):
    """`infeatures` x `outfeatures`, stored in 4 bits."""

    def __init__(
        self, infeatures: int, outfeatures: int, bias: bool, as_parameters: bool = False, group_size: int | None = None
    ) -> None:
        super().__init__()
        self.infeatures, self.outfeatures = infeatures, outfeatures
        groups = 1 if group_size == -1 else -(-infeatures // (group_size or GROUP))
        for name, rows, columns in (
            ("qweight", infeatures // _PACKED, outfeatures),
            ("qzeros", groups, outfeatures // _PACKED),
        ):
            if as_parameters:  # the same bytes as fp16, which is what can be sharded with the rest
                values = torch.empty(rows * 2, columns, dtype=torch.float16)
                self.register_parameter(name, nn.Parameter(values, requires_grad=False))
            else:
                self.register_buffer(name, torch.empty(rows, columns, dtype=torch.int32))
        self.register_buffer("scales", torch.empty(groups, outfeatures, dtype=torch.float16))
        self.register_buffer("g_idx", torch.empty(infeatures, dtype=torch.int32))
        self.register_buffer("bias", torch.empty(outfeatures, dtype=torch.float16) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.outfeatures)
        out = _Product.apply(x.reshape(-1, self.infeatures), self.infeatures, self.outfeatures)
        out = out.half().reshape(shape)
        return out + self.bias if self.bias is not None else out


class _Product(torch.autograd.Function):
    """A product with the dequantised weight, which is made for it and dropped."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, rows: int, columns: int) -> Tensor:
        ctx.size = rows, columns
        weight = torch.empty(rows, columns, dtype=torch.float16)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight = torch.empty(*ctx.size, dtype=torch.float16)
        return grads[0] @ weight.t(), None, None


def quantise(
    module: nn.Module, kept: list[str], as_parameters: bool = False, group_size: int | None = None
) -> tuple[nn.Module, list[str]]:
    """(`module` with its linear layers stored by GPTQ, what was done in words).  `kept`: paths that stay.

    `as_parameters`: the packed weights are frozen parameters instead of buffers.  `group_size`: None: GROUP; -1: a column.

    Raises UserError for widths that the kernel does not take, CannotTell for a module with values: this layer computes none.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if not _stands_in and not isinstance(next(module.parameters()), FakeTensor):
        raise CannotTell("--base-quant gptq: its kernels run on a GPU only, and are not run here")
    linears = [(path, part) for path, part in module.named_modules() if type(part).__name__ in ("Linear", "Conv1D")]
    replaced = 0
    for path, part in linears:
        if any(path == name or path.startswith(name + ".") for name in kept):
            continue
        rows, columns = part.weight.shape if type(part).__name__ == "Conv1D" else part.weight.shape[::-1]  # type: ignore[union-attr,index]
        if rows % _MULTIPLE or columns % _MULTIPLE:
            raise UserError(
                f"--base-quant gptq: {path} is {rows} x {columns}, and its kernel takes multiples of {_MULTIPLE}",
                "Use --base-quant nf4",
            )
        new = GptqLinear(int(rows), int(columns), part.bias is not None, as_parameters, group_size)
        new._forward_hooks.update(part._forward_hooks)
        module.set_submodule(path, new)
        replaced += 1
    if not replaced:
        raise UserError(f"--base-quant gptq: {type(module).__name__} has no linear layer", "Leave --base-quant out")
    groups = "one group a column" if group_size == -1 else f"groups of {group_size or GROUP}"
    module.is_loaded_in_4bit, module.quantization_method = True, "gptq"  # type: ignore[assignment]
    return module, [
        f"{replaced} linear layers are stored in 4 bits (GPTQ, {groups}); embeddings, norms and the head are not",
        "GPTQ's products make the whole weight in fp16 (triton v2 kernels)",
    ]
