"""The decoder of Stanford's CS336 assignments, written from its public description: what its published runs trained.

The course hands out a new edition every spring.  In that of 2025 every block makes its positions and looks the rotary table up
by them, twice, and joins the turned pairs by a stack; that of 2026 takes a slice of the table and joins by a cat, and its
forward keeps the embedded tokens to its end.
Pre-norm blocks with RMSNorm, rotary positions, causal attention with materialised fp32 scores, and SwiGLU; every linear map is
an einsum without bias, the head is not tied.  Shapes: B batch, S tokens, H heads, D features of a head, M = H * D.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Linear(nn.Module):
    """y = x W^T by einsum; W is [out, in]."""

    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features_out, features_in))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    """Rows of a table by indexing.

    `full_slices`: torch up to 2.8 recorded a bare colon in an index as a slice of its own, whose backward fills zeros of the
    table's size (TensorIndexing.h, applySlice); newer versions drop it.
    """

    def __init__(self, vocab_size: int, features: int, full_slices: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, features))
        self.full_slices = full_slices

    def forward(self, ids: Tensor) -> Tensor:
        table = torch.ops.aten.slice.Tensor(self.weight, 1) if self.full_slices else self.weight
        return table[ids]


class RMSNorm(nn.Module):
    """Computed in fp32, returned in the input's dtype."""

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        x = x * scale
        return (self.weight * x).to(dtype)


class Rotary(nn.Module):
    """Rotates pairs of features; cosines and sines are a table [2, positions, D / 2]."""

    table: Tensor

    def __init__(self, positions: int, head_dim: int, theta: float = 10_000.0) -> None:
        super().__init__()
        powers = torch.arange(0, head_dim, 2) / head_dim
        angles = torch.outer(torch.arange(positions), theta**-powers)
        self.register_buffer("table", torch.stack((torch.cos(angles), torch.sin(angles))), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """x: [B, H, S, D]; positions: [S], or None for the first S of them (the edition of 2026)."""
        first, second = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
        cos, sin = (self.table[:, : x.shape[-2]] if positions is None else self.table[:, positions]).unbind(0)
        turned_first = cos * first - sin * second
        turned_second = sin * first + cos * second
        if positions is None:
            return torch.cat((turned_first, turned_second), dim=-1)
        return torch.stack((turned_first, turned_second), dim=-1).flatten(-2)


def _softmax(x: Tensor) -> Tensor:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(shifted)
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """query, key, value: [B, H, S, D]; mask: [S, S], True where a query may look."""
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(query.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = _softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    def __init__(self, features: int, heads: int, edition: int) -> None:
        super().__init__()
        self.heads = heads
        self.edition = edition
        self.q_proj = Linear(features, features)
        self.k_proj = Linear(features, features)
        self.v_proj = Linear(features, features)
        self.output_proj = Linear(features, features)

    def forward(self, x: Tensor, rotary: Rotary, positions: Tensor | None = None) -> Tensor:  # frames drop arguments first
        length = x.shape[-2]
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for t in (query, key, value))
        positions = torch.arange(length, device=x.device) if self.edition < 2026 else None
        query = rotary(query, positions)
        key = rotary(key, positions)
        places = torch.arange(length, device=x.device)
        mask = places[:, None] >= places[None, :]
        out = _attention(query, key, value, mask)
        out = out.transpose(-3, -2).flatten(-2).contiguous()
        return self.output_proj(out)


def _silu(x: Tensor) -> Tensor:
    """A function of its own: its input dies when it returns."""
    return x * torch.sigmoid(x)


class SwiGLU(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.w1 = Linear(features, hidden)
        self.w2 = Linear(hidden, features)
        self.w3 = Linear(features, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(_silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, features: int, heads: int, hidden: int, edition: int) -> None:
        super().__init__()
        self.attn = Attention(features, heads, edition)
        self.ffn = SwiGLU(features, hidden)
        self.ln1 = RMSNorm(features)
        self.ln2 = RMSNorm(features)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        attended = self.attn(self.ln1(x), rotary)  # lives to the end of the block, as in the published code
        middle = x + attended
        return middle + self.ffn(self.ln2(middle))


def _run_blocks(blocks: Iterable[nn.Module], x: Tensor, rotary: Rotary) -> Tensor:
    for block in blocks:
        x = block(x, rotary)
    return x


class Decoder(nn.Module):
    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        positions: int,
        edition: int,
    ) -> None:
        super().__init__()
        self.edition = edition
        self.rotary = Rotary(positions, hidden_size // num_attention_heads)
        self.token_embeddings = Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            Block(hidden_size, num_attention_heads, intermediate_size, edition) for _ in range(num_hidden_layers)
        )
        self.ln_final = RMSNorm(hidden_size)
        self.lm_head = Linear(hidden_size, vocab_size)
        self.blocks_per_checkpoint = 0  # 0: nothing is recomputed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_embeddings(ids)
        embedded = x if self.edition >= 2026 else None  # noqa: F841  a name that keeps it
        if self.blocks_per_checkpoint:
            for start in range(0, len(self.layers), self.blocks_per_checkpoint):
                segment = list(self.layers)[start : start + self.blocks_per_checkpoint]
                x = checkpoint(_run_blocks, segment, x, self.rotary, use_reentrant=False)
        else:
            for block in self.layers:
                x = block(x, self.rotary)
        x = self.ln_final(x)
        return self.lm_head(x)


def _log_softmax(logits: Tensor) -> Tensor:
    largest = torch.max(logits, dim=-1, keepdim=True)[0]
    logits = logits - largest
    return logits - torch.log(torch.sum(torch.exp(logits), dim=-1, keepdim=True))


def _by_hand(logits: Tensor, targets: Tensor) -> Tensor:
    """logits: [B, S, V]; targets: [B, S]."""
    costs = -_log_softmax(logits)
    return torch.mean(torch.gather(costs, -1, targets.unsqueeze(-1)))


_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": lambda logits, targets: nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
    "by-hand": _by_hand,
    "mean": lambda logits, targets: logits.mean(),
    "none": lambda logits, targets: logits[0, 0, 0],  # a view: nothing is computed
}


def build(
    vocab_size: int = 10_000,
    hidden_size: int = 768,
    intermediate_size: int = 3072,
    num_hidden_layers: int = 12,
    num_attention_heads: int = 12,
    max_position_embeddings: int = 2048,
    loss: str = "cross-entropy",
    blocks_per_checkpoint: int = 0,
    full_slices: bool = False,
    edition: int = 2025,
    inference_mode: bool = False,
) -> Any:
    """A factory of memplan's form: (module, batch_fn, step_fn).

    `loss`: cross-entropy (torch's), by-hand (the course's own), mean (of the logits), or none.
    `blocks_per_checkpoint`: so many blocks are recomputed together (non-reentrant activation checkpointing); 0: none are.
    `full_slices`: as torch up to 2.8 records it, see `Embedding`.
    `edition`: 2025 or 2026, of the course's code.
    `inference_mode`: the step runs under `torch.inference_mode()`, as a run without a backward pass may.
    """
    if loss not in _LOSSES:
        raise ValueError(f"loss {loss!r}: expected one of {', '.join(_LOSSES)}")
    module = Decoder(
        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, max_position_embeddings, edition
    )
    module.blocks_per_checkpoint = blocks_per_checkpoint
    module.token_embeddings.full_slices = full_slices

    def batch(batch_size: int, seq_len: int) -> dict[str, Tensor]:
        ids = torch.arange(batch_size * seq_len).reshape(batch_size, seq_len) % vocab_size
        return {"ids": ids, "targets": ids.clone()}

    def step(model: nn.Module, inputs: Any) -> Tensor:
        with torch.inference_mode() if inference_mode else contextlib.nullcontext():
            return _LOSSES[loss](model(inputs["ids"]), inputs["targets"])

    return module, batch, step
