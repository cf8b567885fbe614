"""A student's own decoder for the CS336 assignment, written from its public description (NiuHuangxiaozi/assignment2-systems).

It differs from `cs336` in what autograd keeps: softmax computes its exponentials twice, the mask is filled in place, rotary
pairs are joined by cat, every block owns its rotary tables (kept on the host, copied at each use), and the loss looks at the
last token only.
Shapes: B batch, S tokens, H heads, D features of a head, M = H * D.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    def __init__(self, features_in: int, features_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features_out, features_in))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, features))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class RMSNorm(nn.Module):
    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        root = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + self.eps)
        return (x / root * self.weight).to(dtype)


def _rotate(x: Tensor) -> Tensor:
    """Rotary positions of pairs; the tables are made on the host and arrive as two [S, D / 2, 1] copies."""
    length, dim = x.shape[-2], x.shape[-1]
    sin = torch.empty(length, dim // 2).clone().unsqueeze(-1)
    cos = torch.empty(length, dim // 2).clone().unsqueeze(-1)
    pairs = x.unflatten(-1, (-1, 2))
    first, second = pairs[..., :1], pairs[..., 1:]
    turned_first = cos * first - sin * second
    turned_second = sin * first + cos * second
    return torch.cat([turned_first, turned_second], dim=-1).flatten(-2)


def _softmax(x: Tensor) -> Tensor:
    largest, _ = torch.max(x, dim=-1, keepdim=True)
    return torch.exp(x - largest) / torch.sum(torch.exp(x - largest), dim=-1, keepdim=True)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    products = torch.einsum("...qd,...kd->...qk", query, key)
    scores = products / torch.sqrt(torch.tensor(query.shape[-1]))
    masked = scores.masked_fill_(~mask.bool(), -math.inf)
    weights = _softmax(masked)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = Linear(features, features)
        self.k_proj = Linear(features, features)
        self.v_proj = Linear(features, features)
        self.output_proj = Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for t in (query, key, value))
        query = _rotate(query)
        key = _rotate(key)
        mask = torch.ones(length, length)  # the triangle is made on the host and copied
        out = _attention(query, key, value, mask)
        return self.output_proj(out.transpose(-3, -2).flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.w1 = Linear(features, hidden)
        self.w2 = Linear(hidden, features)
        self.w3 = Linear(features, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x)
        active = gate * torch.sigmoid(gate)
        up = self.w3(x)
        joined = active * up
        return self.w2(joined)


class Block(nn.Module):
    def __init__(self, features: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln1 = RMSNorm(features)
        self.ln2 = RMSNorm(features)
        self.attn = Attention(features, heads)
        self.ffn = SwiGLU(features, hidden)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln1(x)
        middle = self.attn(normed) + x
        normed_again = self.ln2(middle)
        return self.ffn(normed_again) + middle


class Decoder(nn.Module):
    def __init__(self, vocab_size: int, features: int, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token_embeddings = Embedding(vocab_size, features)
        self.layers = nn.ModuleList(Block(features, heads, hidden) for _ in range(layers))
        self.ln_final = RMSNorm(features)
        self.lm_head = Linear(features, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.ln_final(x)
        return self.lm_head(x)


def _last_token(logits: Tensor) -> Tensor:
    """`logits[:, -1, :]` as torch 2.6 records it: each colon is a slice whose backward fills a tensor of its input's size."""
    every = torch.ops.aten.slice.Tensor(logits, 0, 0, logits.shape[0])
    last = every.select(1, -1)
    return torch.ops.aten.slice.Tensor(last, 1, 0, logits.shape[2])


def _last_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of [B, V] by hand, with a one-hot target."""
    largest, _ = torch.max(logits, dim=-1, keepdim=True)
    log_weights = logits - largest - torch.log(torch.sum(torch.exp(logits - largest), dim=-1, keepdim=True))
    wanted = torch.zeros_like(log_weights)
    wanted.scatter_(-1, target.unsqueeze(-1), 1)
    return -torch.sum(wanted * log_weights) / logits.shape[0]


def build(
    vocab_size: int = 10_000,
    hidden_size: int = 512,
    intermediate_size: int = 1344,
    num_hidden_layers: int = 4,
    num_attention_heads: int = 16,
) -> Any:
    """A factory of memplan's form: (module, batch_fn, step_fn)."""
    module = Decoder(vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads)

    def batch(batch_size: int, seq_len: int) -> dict[str, Tensor]:
        ids = torch.arange(batch_size * seq_len).reshape(batch_size, seq_len) % vocab_size
        return {"ids": ids, "target": torch.arange(batch_size) % vocab_size}

    def step(model: nn.Module, inputs: Any) -> Tensor:
        logits = model(inputs["ids"])
        return _last_token_loss(_last_token(logits), inputs["target"])

    return module, batch, step
