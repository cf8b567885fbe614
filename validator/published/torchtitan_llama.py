"""The Llama of torchtitan as its benchmarks of December 2024 ran it, written from its source: selective recompute and loss.

Source: torchtitan at 9dec370, torchtitan/models/llama/model.py (`Attention`, `FeedForward`, `TransformerBlock`),
parallelisms/parallelize_llama.py (`_apply_ac_to_transformer_block`) and train.py (`loss_fn`).
Shapes: B batch, S tokens, H heads, K key heads, D features of a head, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_ROTARY_BASE = 500_000.0
# What selective recompute keeps; of the matrix products only the first, third, fifth ... of a block.
_KEPT = (
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "memplan.attention",
    "aten.max",
)
RECOMPUTES = ("none", "full", "selective-op")


class RMSNorm(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        normed = _normed(x.float()).type_as(x)
        return normed * self.weight


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """x: [B, S, H, D]; angles: [S, D / 2], complex."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turns = angles[: x.shape[1]].view(1, x.shape[1], 1, -1)
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


def _repeated(x: Tensor, times: int) -> Tensor:
    """x: [B, S, K, D] -> [B, S, H, D]."""
    if times == 1:
        return x
    batch, length, heads, features = x.shape
    return x.unsqueeze(3).expand(batch, length, heads, times, features).reshape(batch, length, heads * times, features)


class Attention(nn.Module):
    def __init__(self, features: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.size = features // heads
        self.times = heads // key_heads
        self.wq = nn.Linear(features, heads * self.size, bias=False)
        self.wk = nn.Linear(features, key_heads * self.size, bias=False)
        self.wv = nn.Linear(features, key_heads * self.size, bias=False)
        self.wo = nn.Linear(heads * self.size, features, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        query, key, value = (t.unflatten(-1, (-1, self.size)) for t in (self.wq(x), self.wk(x), self.wv(x)))
        query, key = _turned(query, angles), _turned(key, angles)
        keys, values = _repeated(key, self.times), _repeated(value, self.times)
        out = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True
        )
        out = out.transpose(1, 2).contiguous()
        return self.wo(out.flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(features, hidden, bias=False)
        self.w2 = nn.Linear(hidden, features, bias=False)
        self.w3 = nn.Linear(features, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, features: int, heads: int, key_heads: int, hidden: int, recompute: str) -> None:
        super().__init__()
        self.attention = Attention(features, heads, key_heads)
        self.feed_forward = FeedForward(features, hidden)
        self.attention_norm = RMSNorm(features)
        self.ffn_norm = RMSNorm(features)
        self.recompute = recompute

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        if self.recompute == "none":
            return self._run(x, angles)
        more: dict[str, Any] = {"context_fn": _selective} if self.recompute == "selective-op" else {}
        out: Tensor = checkpoint(self._run, x, angles, use_reentrant=False, preserve_rng_state=False, **more)
        return out

    def _run(self, x: Tensor, angles: Tensor) -> Tensor:
        middle = x + self.attention(self.attention_norm(x), angles)
        return middle + self.feed_forward(self.ffn_norm(middle))


def _selective() -> Any:
    seen = {True: 0, False: 0}  # matrix products, in the recomputation and in forward

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(getattr(op, "_overloadpacket", op))
        keeps = name in _KEPT
        if name == "aten.mm":
            seen[context.is_recompute] += 1
            keeps = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Transformer(nn.Module):
    def __init__(
        self, vocab_size: int, features: int, hidden: int, blocks: int, heads: int, key_heads: int, longest: int, recompute: str
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, features)
        self.layers = nn.ModuleList(TransformerBlock(features, heads, key_heads, hidden, recompute) for _ in range(blocks))
        self.norm = RMSNorm(features)
        self.output = nn.Linear(features, vocab_size, bias=False)
        size = features // heads
        rates = _ROTARY_BASE ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(longest), rates)
        self.angles = torch.polar(torch.ones_like(angles), angles)  # no buffer: it keeps its type when the model is narrowed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, self.angles)
        x = self.norm(x)
        return self.output(x)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def build(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    seq_len: int,
    recompute: str = "none",
) -> Any:
    """A factory of memplan's form: (module, batch_fn, step_fn).  `recompute`: one of RECOMPUTES; `seq_len`: the longest."""
    if recompute not in RECOMPUTES:
        raise ValueError(f"recompute {recompute!r}: expected one of {', '.join(RECOMPUTES)}")
    module = Transformer(
        vocab_size,
        hidden_size,
        intermediate_size,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads,
        seq_len,
        recompute,
    )

    def batch(batch_size: int, seq_len: int) -> dict[str, Tensor]:
        ids = torch.arange(batch_size * seq_len).reshape(batch_size, seq_len) % vocab_size
        return {"tokens": ids, "labels": ids.clone()}

    def step(model: nn.Module, inputs: Any) -> Tensor:
        prediction = model(inputs["tokens"])
        loss = _loss(prediction, inputs["labels"])
        del prediction
        return loss

    return module, batch, step
