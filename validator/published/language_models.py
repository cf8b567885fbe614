"""Causal language models of transformers with the loss of the time: what a version, or a fused kernel, made of the logits.

The model is the installed transformers' own; only the loss is another.  Each function names the source that it follows.
Shapes: B batch, S tokens, V vocabulary, N = B * S.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from memplan.models import ModelSpec
from memplan.models import build as build_model
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]  # of logits [rows, V] and targets [rows]


class _InPlace(torch.autograd.Function):
    """Cross entropy over materialised logits, whose backward kernel writes the gradient over them.

    One fp32 loss and one fp32 logsumexp a row (unsloth and FOAK, `Fast_CrossEntropyLoss`).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        losses = torch.empty(logits.shape[0], dtype=torch.float32)
        logsumexp = torch.empty(logits.shape[0], dtype=torch.float32)
        ctx.save_for_backward(logits, logsumexp, target)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, _, _ = ctx.saved_tensors
        return logits, None


class _FusedLinear(torch.autograd.Function):
    """Head and loss chunk by chunk; both gradients are made in forward (Liger-Kernel, fused_linear_cross_entropy.py)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        rows = hidden.shape[0]
        factor = -(-weight.shape[0] // hidden.shape[1])
        chunk = 1 << (-(-rows // factor) - 1).bit_length()
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
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
            if grad_weight is not None:
                torch.addmm(input=grad_weight, mat1=logits.t(), mat2=part, out=grad_weight)
        ctx.save_for_backward(grad_hidden.detach(), None if grad_weight is None else grad_weight.detach())
        return losses.sum() / rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden, grad_weight, None


class _FusedNorm(torch.autograd.Function):
    """RMSNorm in one kernel: its input and one fp32 number a row are saved; backward writes over the gradient it is given.

    FOAK and unsloth, `Fast_RMS_Layernorm` (kernels/rms_layernorm.py).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows)
        ctx.save_for_backward(x, torch.empty(rows.shape[0], dtype=torch.float32))
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _x, _scales = ctx.saved_tensors
        return grads[0], None


def _fuse_norms(model: nn.Module) -> None:
    for part in model.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = lambda x, weight=part.weight: _FusedNorm.apply(x, weight)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, target)


def _cross_entropy_in_place(logits: Tensor, target: Tensor) -> Tensor:
    losses = _InPlace.apply(logits, target)
    return losses.sum() / torch.count_nonzero(target != -100)


def _shifted(model: nn.Module, batch: Mapping[str, Any], loss: Loss) -> Tensor:
    """transformers up to 4.45: the model widens its logits, then copies them without the last token."""
    logits = model(**_without_labels(batch)).logits
    logits = logits.float()
    return _shifted_loss(logits, batch["labels"], loss)


def _shifted_by_function(model: nn.Module, batch: Mapping[str, Any], loss: Loss) -> Tensor:
    """transformers 4.46 to 4.49, `ForCausalLMLoss`: as before, while the caller still holds the logits as they were."""
    output = model(**_without_labels(batch))
    found = _widened_shifted_loss(output.logits, batch["labels"], loss)
    _widen(output)
    return found


def _shifted_narrow(model: nn.Module, batch: Mapping[str, Any], loss: Loss) -> Tensor:
    """The families that had a loss of their own up to 4.49 (GPTBigCode and others): shifted, and never widened."""
    output = model(**_without_labels(batch))
    found = _shifted_loss(output.logits, batch["labels"], loss)
    _widen(output)
    return found


def _whole(model: nn.Module, batch: Mapping[str, Any], loss: Loss) -> Tensor:
    """transformers from 4.50: the labels are shifted, the logits widened and used as they are."""
    output = model(**_without_labels(batch))
    found = _widened_loss(output.logits, batch["labels"], loss)
    _widen(output)
    return found


def _widen(output: Any) -> None:
    """accelerate under autocast returns what the model returns in fp32 (`convert_outputs_to_fp32`), the logits with it."""
    if torch.is_autocast_enabled("cpu"):
        output.logits = output.logits.float()


def _widened_shifted_loss(logits: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    logits = logits.float()
    return _shifted_loss(logits, labels, loss)


def _shifted_loss(logits: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    shifted = torch.ops.aten.slice(logits[:, :-1], 2).contiguous()  # until torch 2.9 `[..., :-1, :]` was two slices
    target = labels[..., 1:].contiguous()
    shifted = shifted.view(-1, shifted.size(-1))
    return loss(shifted, target.view(-1))


def _widened_loss(logits: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    logits = logits.float()
    target = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return loss(logits.view(-1, logits.size(-1)), target.view(-1))


def _fused_linear(model: nn.Module, batch: Mapping[str, Any], loss: Loss) -> Tensor:
    """Liger's head and loss, in the model's own forward (`_with_fused_head`)."""
    found: Tensor = model(**batch)
    return found


def _with_fused_head(model: nn.Module) -> None:
    """Replaces the forward as Liger does (transformers/model/llama.py, `lce_forward`): the logits never exist as a whole."""

    def forward(labels: Tensor, **batch: Any) -> Tensor:
        trunk, head = model.base_model, model.get_output_embeddings()  # type: ignore[operator]
        hidden = trunk(**batch).last_hidden_state  # type: ignore[operator]
        hidden = hidden[..., :-1, :].contiguous()
        target = labels[..., 1:].contiguous().view(-1)
        return _FusedLinear.apply(hidden.view(-1, hidden.size(-1)), head.weight, target)

    model.forward = forward


def _without_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in batch.items() if k != "labels"}


LOGITS = {
    "shifted": _shifted,
    "shifted-by-function": _shifted_by_function,
    "shifted-narrow": _shifted_narrow,
    "whole": _whole,
    "never": _fused_linear,
}
KERNELS: dict[str, Loss] = {"plain": _cross_entropy, "in-place": _cross_entropy_in_place}


def build(
    config: Mapping[str, Any],
    logits: str,
    kernel: str = "plain",
    attention: str = "sdpa",
    held: str = "",
    fused_norms: bool = False,
) -> Any:
    """(module, batch_fn, step_fn) of the causal language model that `config` (model_type included) describes.

    `logits`: a key of LOGITS; `kernel`: of KERNELS.  `held`: the last name of modules whose outputs of the forward pass live
    until the loss is there, as a key-value cache that views them does.  `fused_norms`: RMSNorm is one kernel.
    """
    spec = ModelSpec(name=str(config["model_type"]), source="folder", task="causal-lm", config=dict(config))
    built = build_model(spec, dtype=torch.float32, attention=attention)
    if logits == "never":
        _with_fused_head(built.module)
    if fused_norms:
        _fuse_norms(built.module)
    cache: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        if not torch.is_grad_enabled():  # inside a reentrant checkpoint: the recomputed outputs go with their block
            cache.append(output)

    for name, module in built.module.named_modules():
        if held and name.rpartition(".")[2] == held:
            module.register_forward_hook(keep)

    def step(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        try:
            return LOGITS[logits](model, batch, KERNELS[kernel])
        finally:
            cache.clear()

    return built.module, built.make_batch, step
