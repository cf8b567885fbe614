"""litgpt's own GPT with its LoRA as its resource tables of 2023 ran it, written from its source: chunked head and loss.

Source: Lightning-AI/litgpt between 6178c7c and 94eba0b, lit_gpt/model.py (flash-attn 2 where it is installed), lit_gpt/lora.py
(`LoRAQKVLinear`: one product for query, key and value, its update padded with zeros), lit_gpt/rmsnorm.py, finetune/lora.py and
lit_gpt/utils.py (`chunked_cross_entropy`).  The tables name 8641822, which is older; but on Llama 2 they hold 2 bytes a token,
feature and norm that only the RMSNorm of 6178c7c keeps (it widens its input), and they were published after it.
4-bit layers: Fabric's BitsandbytesPrecision makes every linear layer one, the head too; bitsandbytes 0.41
(autograd/_functions.py, `MatMul4Bit`) makes the whole weight for each product, and keeps the product's input.
Shapes: B batch, S tokens, H heads, G groups of keys, D features of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 128  # tokens of the head and of the loss
_BLOCK, _NESTED_BLOCK = 64, 256  # weights that share a scale; scales that share one
_TABLES_BYTES = {"nf4": 16 * 4, "nf4-dq": 16 * 4 + 256 * 4 + 4}  # of each layer
QUANTS = ("none", *_TABLES_BYTES)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What lit_gpt/config.py says of a family."""

    gated: bool
    norms: str
    bias: bool
    head_bias: bool
    parallel: bool
    one_norm: bool
    rotary: float  # share of a head's features that turn


FAMILIES = {
    "llama": Shape(gated=True, norms="rms", bias=False, head_bias=False, parallel=False, one_norm=False, rotary=1.0),
    "gpt_neox": Shape(gated=False, norms="layer", bias=True, head_bias=False, parallel=True, one_norm=False, rotary=0.25),
    "phi": Shape(gated=False, norms="layer", bias=True, head_bias=True, parallel=True, one_norm=True, rotary=0.5),
}


class RMSNorm(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.float()
        scale = torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
        normed = x * scale
        return (self.weight * normed).to(kind)


def _unpacked(rows: int, columns: int, kind: torch.dtype) -> Tensor:
    """`dequantize_4bit(...).to(...)`: in fp16, as Fabric packed it (`_quantize_weight`), then a copy in the input's type."""
    return torch.empty(rows, columns, dtype=torch.float16).to(kind)


class _Product4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, rows: int, columns: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.size = rows, columns
        return nn.functional.linear(x, _unpacked(rows, columns, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns = ctx.size
        return grads[0] @ _unpacked(rows, columns, grads[0].dtype), None, None, None


class Linear4(nn.Module):
    """A linear layer in 4 bits: two weights a byte, and its statistics, as bytes."""

    def __init__(self, inside: int, outside: int, bias: bool, quant: str) -> None:
        super().__init__()
        self.size = outside, inside
        numel = inside * outside
        self.weight = nn.Parameter(torch.empty(-(-numel // 2), 1, dtype=torch.uint8), requires_grad=False)
        blocks = -(-numel // _BLOCK)
        scales = 4 * blocks if quant == "nf4" else blocks + 4 * -(-blocks // _NESTED_BLOCK)
        self.register_buffer("statistics", torch.empty(scales + _TABLES_BYTES[quant], dtype=torch.uint8))
        self.bias = nn.Parameter(torch.empty(outside)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Product4.apply(x, self.weight, *self.size)
        return out if self.bias is None else out + self.bias


def _linear(inside: int, outside: int, bias: bool, quant: str) -> nn.Module:
    return nn.Linear(inside, outside, bias=bias) if quant == "none" else Linear4(inside, outside, bias, quant)


class AdaptedQKV(nn.Module):
    """Query and value adapted, key not: the update is put into zeros of the whole width."""

    def __init__(self, inside: int, shape: tuple[int, int], rank: int, dropout: float, bias: bool, quant: str) -> None:
        super().__init__()
        query, key = shape
        self.outside, self.adapted = query + 2 * key, query + key
        self.equal = query == key
        self.shape = query, key
        self.linear = _linear(inside, self.outside, bias, quant)
        self.lora_dropout = nn.Dropout(dropout)
        self.lora_A = nn.Parameter(torch.empty(2 * rank, inside))
        self.lora_B = nn.Parameter(torch.empty(self.adapted, rank))

    def forward(self, x: Tensor) -> Tensor:
        pretrained = self.linear(x)
        after_a = nn.functional.linear(self.lora_dropout(x), self.lora_A)
        update = self._wide(after_a.transpose(-2, -1)).transpose(-2, -1)
        return pretrained + self._padded(update) * 2.0

    def _wide(self, x: Tensor) -> Tensor:
        weight = self.lora_B.unsqueeze(-1)
        if self.equal:
            return nn.functional.conv1d(x, weight, groups=2)
        pairs = zip(x.chunk(2, dim=1), weight.split(self.shape), strict=True)
        return torch.cat([nn.functional.conv1d(a, b) for a, b in pairs], dim=1)

    def _padded(self, x: Tensor) -> Tensor:
        query, key = self.shape
        x = x.transpose(0, 1)
        zeros = x.new_zeros((*x.shape[:-1], self.outside)).view(-1, self.outside)
        places = torch.cat((torch.arange(query), torch.arange(query + key, self.outside)))
        filled = zeros.index_copy(1, places, x.reshape(-1, self.adapted))
        return filled.view((*x.shape[:-1], self.outside)).transpose(0, 1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    out = (x * cos) + (turned * sin)
    return out.type_as(x)


class Attention(nn.Module):
    def __init__(self, features: int, heads: int, groups: int, shape: Shape, rank: int, dropout: float, quant: str) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, features // heads
        self.turning = int(shape.rotary * self.size)
        self.attn = AdaptedQKV(features, (features, groups * self.size), rank, dropout, shape.bias, quant)
        self.proj = _linear(features, features, shape.bias, quant)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, features = x.size()
        times = self.heads // self.groups
        qkv = self.attn(x)
        qkv = qkv.view(batch, length, self.groups, times + 2, self.size).permute(0, 2, 3, 1, 4)
        query, key, value = qkv.split((times, 1, 1), dim=2)
        if self.groups != 1:
            key = key.expand(batch, self.groups, times, length, self.size)
            value = value.expand(batch, self.groups, times, length, self.size)
        query, key, value = (t.reshape(batch, -1, length, self.size) for t in (query, key, value))
        turned_query = _turned(query[..., : self.turning], cos, sin)
        turned_key = _turned(key[..., : self.turning], cos, sin)
        query = torch.cat((turned_query, query[..., self.turning :]), dim=-1)
        key = torch.cat((turned_key, key[..., self.turning :]), dim=-1)
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        together = out.transpose(1, 2).reshape(batch, length, features)
        return self.proj(together)


class Mlp(nn.Module):
    def __init__(self, features: int, hidden: int, shape: Shape, quant: str) -> None:
        super().__init__()
        self.gated = shape.gated
        self.fc_1 = _linear(features, hidden, shape.bias, quant)
        if shape.gated:
            self.fc_2 = _linear(features, hidden, shape.bias, quant)
        self.proj = _linear(hidden, features, shape.bias, quant)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            x = self.fc_1(x)
            x = nn.functional.gelu(x)
            return self.proj(x)
        gate, up = self.fc_1(x), self.fc_2(x)
        x = nn.functional.silu(gate) * up
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, features: int, hidden: int, shape: Shape, attention: Attention, quant: str) -> None:
        super().__init__()
        self.parallel = shape.parallel
        self.norm_1 = _norm(features, shape)
        self.attn = attention
        self.norm_2 = None if shape.one_norm else _norm(features, shape)
        self.mlp = Mlp(features, hidden, shape, quant)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm_1(x)
        attended = self.attn(normed, cos, sin)
        if self.parallel:
            second = normed if self.norm_2 is None else self.norm_2(x)
            return x + attended + self.mlp(second)
        assert self.norm_2 is not None
        x = x + attended
        return x + self.mlp(self.norm_2(x))


def _norm(features: int, shape: Shape) -> nn.Module:
    return RMSNorm(features) if shape.norms == "rms" else nn.LayerNorm(features)


class Gpt(nn.Module):
    def __init__(
        self, config: Mapping[str, int], shape: Shape, rank: int, dropout: float, quant: str, longest: int, sharded: bool
    ) -> None:
        super().__init__()
        features, heads = config["hidden_size"], config["num_attention_heads"]
        groups = config.get("num_key_value_heads", heads)
        self.lm_head = _linear(features, config["vocab_size"], shape.head_bias, quant)
        self.wte = nn.Embedding(config["vocab_size"], features)
        self.h = nn.ModuleList(
            Block(
                features,
                config["intermediate_size"],
                shape,
                Attention(features, heads, groups, shape, rank, dropout, quant),
                quant,
            )
            for _ in range(config["num_hidden_layers"])
        )
        self.ln_f = _norm(features, shape)
        turning = int(shape.rotary * features // heads)
        rates = 10_000.0 ** -(torch.arange(0, turning, 2) / turning)
        angles = torch.outer(torch.arange(longest), rates).repeat(1, 2)
        # no buffers: made anew in fp32 when the longest sample is known; FSDP casts them (FSDPPrecision, `buffer_dtype`)
        self.turns = tuple(t.bfloat16() if sharded else t for t in (torch.cos(angles), torch.sin(angles)))
        for name, param in self.named_parameters():
            param.requires_grad = "lora_" in name or (sharded and name.startswith("h."))

    def forward(self, tokens: Tensor) -> list[Tensor]:
        cos, sin = (t[: tokens.size(1)] for t in self.turns)
        x = self.wte(tokens)
        for block in self.h:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        return _widened([self.lm_head(part) for part in x.split(_CHUNK, dim=1)])


def _widened(chunks: list[Tensor]) -> list[Tensor]:
    """What Fabric returns of a 16-bit model (`convert_output`): everything in torch's default type."""
    return [chunk.float() for chunk in chunks]


def _loss(chunks: list[Tensor], targets: Tensor) -> Tensor:
    """`chunked_cross_entropy` of the logits without the last token's."""
    chunks[-1] = chunks[-1][..., :-1, :]
    rows = [chunk.reshape(-1, chunk.size(-1)) for chunk in chunks]
    wanted = [chunk.reshape(-1) for chunk in targets[..., 1:].split(chunks[0].size(1), dim=1)]
    losses = [nn.functional.cross_entropy(a, b, reduction="none") for a, b in zip(rows, wanted, strict=True)]
    return torch.cat(losses).mean()


def build(
    family: str, config: Mapping[str, int], rank: int, dropout: float, seq_len: int, quant: str = "none", sharded: bool = False
) -> Any:
    """A factory of memplan's form: (module, batch_fn, step_fn).  `family`: of FAMILIES; `quant`: of QUANTS.

    `sharded`: FSDP with original parameters.  A block's are views of one flat tensor, which needs a gradient since LoRA's part
    of it does, so autograd makes those of the frozen ones too (_flat_param.py, `_init_flat_param_and_metadata`,
    `_use_unsharded_views`).
    """
    module = Gpt(config, FAMILIES[family], rank, dropout, quant, seq_len, sharded)

    def batch(batch_size: int, seq_len: int) -> dict[str, Tensor]:
        ids = torch.arange(batch_size * seq_len).reshape(batch_size, seq_len) % config["vocab_size"]
        return {"tokens": ids, "labels": ids.clone()}

    def step(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        return _loss(model(inputs["tokens"]), inputs["labels"])

    return module, batch, step
