"""The vision transformer of torchvision (`torchvision.models.vit_l_16` and the like), written from its public description.

Patches by a convolution, a class token, learned positions; pre-norm blocks whose attention is `torch.nn.MultiheadAttention`
without weights returned; GELU; a linear head on the class token.  Dropout is 0.  Shapes: B images, S tokens, M features.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn


def _older_attention(query: Tensor, *rest: Any, _attention: Any = nn.functional.scaled_dot_product_attention) -> Tensor:
    """Until torch 2.2 the flash kernel laid its output out by batch, so that `nn.MultiheadAttention` copied it."""
    out: Tensor = _attention(query, *rest)
    return out.clone() if query.dtype in (torch.float16, torch.bfloat16) else out


class Block(nn.Module):
    def __init__(self, features: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(features, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(features, heads, dropout=0.0, batch_first=True)
        self.dropout = nn.Dropout(0.0)
        self.ln_2 = nn.LayerNorm(features, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(features, hidden), nn.GELU(), nn.Dropout(0.0), nn.Linear(hidden, features), nn.Dropout(0.0)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.ln_1(tokens)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self.dropout(x)
        x = x + tokens
        return x + self.mlp(self.ln_2(x))


class VisionTransformer(nn.Module):
    def __init__(
        self, features: int, heads: int, hidden: int, layers: int, image_size: int, patch_size: int, labels: int
    ) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, features, kernel_size=patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, features))
        self.pos_embedding = nn.Parameter(torch.empty(1, (image_size // patch_size) ** 2 + 1, features))
        self.layers = nn.ModuleList(Block(features, heads, hidden) for _ in range(layers))
        self.ln = nn.LayerNorm(features, eps=1e-6)
        self.head = nn.Linear(features, labels)

    def forward(self, images: Tensor) -> Tensor:
        with patch.object(nn.functional, "scaled_dot_product_attention", _older_attention):
            return self._classes(images)

    def _classes(self, images: Tensor) -> Tensor:
        x = self.conv_proj(images).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(images.shape[0], -1, -1), x], dim=1)
        x = x + self.pos_embedding
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x)[:, 0])


def build(
    hidden_size: int = 1024,
    num_attention_heads: int = 16,
    intermediate_size: int = 4096,
    num_hidden_layers: int = 24,
    image_size: int = 224,
    patch_size: int = 16,
    num_labels: int = 10,
) -> Any:
    """(module, batch_fn, step_fn).  The head has ten classes unless told otherwise: the runs replaced it for CIFAR-10."""
    module = VisionTransformer(
        hidden_size, num_attention_heads, intermediate_size, num_hidden_layers, image_size, patch_size, num_labels
    )

    def batch(batch_size: int, seq_len: int) -> dict[str, Tensor]:
        images = torch.empty(batch_size, 3, image_size, image_size)
        return {"images": images, "labels": torch.arange(batch_size) % num_labels}

    def step(model: nn.Module, inputs: Any) -> Tensor:
        return nn.functional.cross_entropy(model(inputs["images"]), inputs["labels"])

    return module, batch, step
