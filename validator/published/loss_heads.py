"""Loss heads alone, as Liger-Kernel's benchmark runs them: logits (or hidden states and a head) -> cross entropy.

The tensors that the benchmark makes outside the measured function, with their gradients, are parameters here.  The fused
variants allocate what Liger-Kernel 0.2.1 allocates (liger_kernel/ops/cross_entropy.py, fused_linear_cross_entropy.py).
Shapes: N = batch x sequence rows, V vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _InPlace(torch.autograd.Function):
    """Cross entropy whose kernel writes the gradient over the logits: one fp32 (or logits-dtype) loss a row, nothing else."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        losses = torch.zeros(logits.shape[0], dtype=logits.dtype)
        count = (target != -100).sum()
        ctx.save_for_backward(logits.detach())
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (logits,) = ctx.saved_tensors
        return logits, None


class _FusedLinear(torch.autograd.Function):
    """Head and loss chunk by chunk; both gradients are made in forward.

    The chunk is the power of two that is not below N / ceil(V / H) rows.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        rows = hidden.shape[0]
        factor = -(-weight.shape[0] // hidden.shape[1])
        chunk = 1 << (-(-rows // factor) - 1).bit_length()
        grad_weight = torch.zeros_like(weight)
        grad_hidden = torch.zeros_like(hidden)
        losses = torch.zeros(rows, dtype=torch.float32)
        logits = scaled = None
        for start in range(0, rows, chunk):
            part = hidden[start : start + chunk]
            logits = part @ weight.t()
            logits = logits.float()
            logits = logits.to(hidden.dtype)
            scaled = logits * 1.0
            grad_hidden[start : start + chunk] = scaled @ weight
            torch.addmm(input=grad_weight, mat1=logits.t(), mat2=part, out=grad_weight)
        ctx.save_for_backward(grad_hidden.detach(), grad_weight.detach())
        return losses.sum() / rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden, grad_weight, None


class LogitsLoss(nn.Module):
    def __init__(self, rows: int, vocab_size: int, fused: bool) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.empty(rows, vocab_size))
        self.fused = fused

    def forward(self, target: Tensor) -> Tensor:
        if self.fused:
            return _InPlace.apply(self.logits, target)
        return nn.functional.cross_entropy(self.logits, target)


class HeadLoss(nn.Module):
    def __init__(self, rows: int, hidden_size: int, vocab_size: int, fused: bool) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.empty(rows, hidden_size))
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        # the benchmark makes the plain and the fused head, and calls one (benchmark_fused_linear_cross_entropy.py at 0.2.1)
        self.other_weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.fused = fused

    def forward(self, target: Tensor) -> Tensor:
        if self.fused:
            return _FusedLinear.apply(self.hidden, self.weight, target)
        return self._plain(target)

    def _plain(self, target: Tensor) -> Tensor:
        logits = nn.functional.linear(self.hidden, self.weight)
        return nn.functional.cross_entropy(logits, target)


def build(rows: int, vocab_size: int, hidden_size: int | None = None, fused: bool = False) -> Any:
    """(module, batch_fn).  `hidden_size` None: the logits are given.  `rows`: batch x sequence, the size of its tensors."""
    module = LogitsLoss(rows, vocab_size, fused) if hidden_size is None else HeadLoss(rows, hidden_size, vocab_size, fused)

    def batch(batch_size: int, seq_len: int) -> dict[str, Tensor]:
        return {"target": torch.arange(batch_size * seq_len) % vocab_size}

    return module, batch
