"""Parts of a step that run in tiles of tokens, so that the large tensors between them are never whole.

`fused_linear_cross_entropy` is the head and the loss in one, as Liger's kernel does it (liger-kernel 0.8.5,
ops/fused_linear_cross_entropy.py): for one chunk of tokens after the other the logits are made, turned into their own
gradient in place, and multiplied into the gradients of the hidden states and of the head.  So both gradients exist, whole,
*before* backward starts, and the logits never do:

    held from forward    tokens x hidden x s of the hidden states' gradient, vocabulary x hidden x s of the head's
    transient            chunk x vocabulary x s of the logits; where the head's gradient is fp32 one product of its size (under
                         autocast in 16 bits; cards from sm80 on add it in place: an upper bound);
                         chunk = the power of two at or above tokens / (vocabulary / hidden), both divisions rounded up

`tile_mlps` runs every MLP without autograd in tiles, and again in backward, tile by tile (DeepSpeed's TiledMLP of arXiv
2506.13996; deepspeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py).  Its input is all that is kept.

`tiled_loss` is the head and the loss tile by tile, and each tile's backward at once, inside forward (TiledFusedLogitsLoss of
the same file): the gradient of the hidden states is kept to backward, that of the head goes into its `.grad` with every tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError

IGNORED = -100  # label of tokens that count nothing
_NAMES = ("mlp", "MLP", "FeedForward", "FFN")  # ends of the class names of MLPs that map (.., hidden) to (.., hidden)


def chunk_of(tokens: int, vocabulary: int, hidden: int) -> int:
    """Tokens in one chunk (fused_linear_cross_entropy_forward: `inc_factor`, `chunk_size`)."""
    parts = -(-vocabulary // hidden)
    return min(1 << (-(-tokens // parts) - 1).bit_length(), tokens)


def fused_linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
    """The mean loss over the tokens that have a label.  `hidden`: (tokens, width); `weight`: (vocabulary, width)."""
    loss: Tensor = _FusedLinearCrossEntropy.apply(hidden, weight, labels, bias)
    return loss


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        tokens, width = hidden.shape
        step = chunk_of(tokens, weight.shape[0], width)
        of_hidden = torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight) if weight.requires_grad else None
        of_bias = torch.zeros_like(bias) if bias is not None and bias.requires_grad else None
        losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
        counted = (labels != IGNORED).sum()
        in_place = dtype == hidden.dtype == weight.dtype  # `_can_use_mm_out`: one buffer for the logits of all chunks
        room = torch.empty(step, weight.shape[0], dtype=dtype, device=hidden.device) if in_place else None
        for start in range(0, tokens, step):
            part = hidden[start : start + step]
            if room is not None:
                logits = room[: len(part)]
                torch.mm(part, weight.t(), out=logits)
                logits = logits if bias is None else logits.add_(bias)
            else:
                logits = part.to(dtype) @ weight.to(dtype).t()
                logits = logits if bias is None else logits + bias
            losses[start : start + step] = _to_gradient(logits, labels[start : start + step], counted)
            if room is not None:
                torch.mm(logits, weight, out=of_hidden[start : start + step])
            else:
                of_hidden[start : start + step] = logits.to(dtype) @ weight.to(dtype)
            if of_weight is not None:
                if room is not None and dtype != torch.float32:
                    torch.addmm(of_weight, logits.t(), part, out=of_weight)
                else:
                    of_weight += torch.mm(logits.t(), part.to(logits.dtype))
            if of_bias is not None:
                of_bias += logits.sum(0)
            del logits
        del room
        ctx.save_for_backward(of_hidden.detach(), of_weight, of_bias)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        for gradient in (of_hidden, of_weight, of_bias):
            if gradient is not None:
                gradient.mul_(grads[0])  # element_mul_kernel, in place
        return of_hidden, of_weight, None, of_bias


def _to_gradient(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """Turns logits into the gradient of their mean loss, in place, as one kernel does; returns the losses.

    A kernel has no temporaries, so this goes row by row where there are values; a trace sees one op that writes in place.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    losses = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    if isinstance(logits, FakeTensor) or logits.is_meta:
        logits.exp_()
        return losses
    for row, label in enumerate(labels.tolist()):
        if label == IGNORED:
            logits[row].zero_()
            continue
        wide = logits[row].float()
        chance = torch.softmax(wide, -1)
        losses[row] = -torch.log(chance[label]) / counted
        chance[label] -= 1
        logits[row].copy_(chance / counted)
    return losses


def tiled_loss(loss_of: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, labels: Tensor, tiles: int) -> Tensor:
    """The sum of `loss_of(tile of hidden, tile of labels)`; `hidden`: (tokens, width).

    The gradients of what `loss_of` uses beside its tile are those of this sum, whatever is done with it later: DeepSpeed scales
    the gradient of `hidden` alone.
    """
    loss: Tensor = _TiledLoss.apply(loss_of, hidden, labels, tiles)
    return loss


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss_of: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, labels: Tensor, tiles: int) -> Tensor:
        needs = hidden.requires_grad
        hidden = hidden.detach().requires_grad_(needs)
        incoming = torch.tensor(1.0, dtype=hidden.dtype, device=hidden.device)
        of_hidden = torch.zeros_like(hidden) if needs else None
        losses, start = [], 0
        for tile, targets in zip(hidden.chunk(tiles), labels.chunk(tiles), strict=True):
            tile.requires_grad_(needs)
            if of_hidden is None:
                losses.append(loss_of(tile, targets))
                continue
            tile.grad = of_hidden[start : start + len(tile)]
            with torch.enable_grad():
                losses.append(loss_of(tile, targets))
            torch.autograd.backward(losses[-1], incoming)
            start += len(tile)
        total = torch.cat([loss.unsqueeze(0) for loss in losses]).sum()
        if of_hidden is not None:
            ctx.save_for_backward(of_hidden.detach())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (of_hidden,) = ctx.saved_tensors
        return None, of_hidden.mul_(grads[0]), None, None


def tile_mlps(module: nn.Module, tiles: int) -> int:
    """Makes every MLP of `module` run in `tiles` tiles of tokens; returns how many there are.  Raises UserError for none."""
    found = [part for part in module.modules() if type(part).__name__.endswith(_NAMES) and any(part.children())]
    for part in found:
        part.forward = _Tiled(part, type(part).forward, tiles)
    if not found:
        raise UserError(
            f"--tiled-mlp {tiles}: {type(module).__name__} has no module whose class is called an MLP", "Leave it out"
        )
    return len(found)


class _Tiled:
    """`forward` in tiles.  An object of a class: a copy of the module copies it too."""

    def __init__(self, part: nn.Module, own: Callable[..., Tensor], tiles: int) -> None:
        self.part, self.own, self.tiles = part, own, tiles

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = _TiledMLP.apply(self.own, self.part, x, self.tiles)
        return out


class _TiledMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Callable[..., Tensor], part: nn.Module, x: Tensor, tiles: int) -> Tensor:
        ctx.own, ctx.part, ctx.tiles = own, part, tiles
        ctx.save_for_backward(x)
        with torch.no_grad():
            made = [own(part, tile) for tile in x.chunk(tiles, dim=-2)]
        return torch.cat(made, dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        needs, shape = x.requires_grad, x.shape
        x = x.detach().reshape(-1, shape[-1])
        incoming = grads[0].reshape(-1, shape[-1])
        of_x = torch.zeros_like(x)
        start = 0
        for tile in x.chunk(ctx.tiles, dim=0):
            tile.requires_grad_(needs)
            stop = start + len(tile)
            tile.grad = of_x[start:stop]
            with torch.enable_grad():
                out = ctx.own(ctx.part, tile)
            torch.autograd.backward(out, incoming[start:stop])
            start = stop
        return None, None, of_x.view(shape), None
