"""Models of transformers as they ran under torch before 1.11: in eager attention, two things were other than today.

* softmax kept its input for the backward pass beside its output.  The backward kernel never read it; pytorch/pytorch pull
  request 65242 stopped saving it.  That is one more tensor of the scores' size in every block.
* transformers of the time always made an attention mask of the parameters' dtype and added it (BertModel.forward,
  `get_extended_attention_mask`), so that under autocast the scores became fp32 before the softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from memplan.models import ModelSpec
from memplan.models import build as build_model
from torch import Tensor, nn

_softmax = nn.functional.softmax


class _KeepsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        out = _softmax(x, dim=dim)
        ctx.dim, ctx.dtype = dim, x.dtype
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, out = ctx.saved_tensors
        return torch._softmax_backward_data(grads[0], out, ctx.dim, ctx.dtype), None


def _keeps_input(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _KeepsInput.apply(x if dtype is None else x.to(dtype), dim)


def _with_old_softmax(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` as it was; a block runs in the forward pass, and again where it is recomputed."""

    def run(*args: Any, **kwargs: Any) -> Any:
        nn.functional.softmax = _keeps_input  # type: ignore[assignment]
        try:
            return forward(*args, **kwargs)
        finally:
            nn.functional.softmax = _softmax

    return run


def build(config: Mapping[str, Any], task: str, attention: str = "eager") -> Any:
    """(module, batch_fn, step_fn) of the model that `config` (model_type included) describes, for `task`."""
    spec = ModelSpec(name=str(config["model_type"]), source="folder", task=task, config=dict(config))
    built = build_model(spec, dtype=torch.float32, attention=attention)
    for blocks in built.module.modules():
        if isinstance(blocks, nn.ModuleList):
            for block in blocks:
                block.forward = _with_old_softmax(block.forward)  # type: ignore[method-assign]

    def batch(batch_size: int, seq_len: int) -> dict[str, Any]:
        values = built.make_batch(batch_size, seq_len)
        if "input_ids" in values:
            values["attention_mask"] = torch.zeros(batch_size, 1, 1, seq_len)  # as it is added: nothing is masked
        return values

    return built.module, batch, built.step
