"""`torch.nn.utils.clip_grad_norm_` with foreach norms: small blocks only, no copy of a gradient.

Source: torch/nn/utils/clip_grad.py and ATen/native/cuda/ForeachReduceOp.cu (`foreach_tensor_norm_cuda`): a buffer of
`tensors x chunks` partial sums, one 0-d result a tensor, their stack, the total norm and three scalars.
"""

from __future__ import annotations

from collections.abc import Sequence

_CHUNK = 65_536  # elements that one block of the multi-tensor kernel handles (ForeachReduceOp.cu, kChunkSize)
_FP32 = 4


def clip_grad_norm_events(shapes: Sequence[tuple[int, ...]], target: str) -> list[int]:
    """Bytes of the blocks that live at once while gradients of these shapes are clipped, in the order they are made."""
    if not shapes:
        return []
    sizes = []
    for shape in shapes:
        numel = 1
        for size in shape:
            numel *= size
        sizes.append(numel)
    partial = [len(sizes) * -(-max(sizes) // _CHUNK) * _FP32] if target == "cuda" else []
    return partial + [_FP32] * len(sizes) + [len(sizes) * _FP32] + [_FP32] * 4
