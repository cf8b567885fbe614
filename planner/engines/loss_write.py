"""loss.py of a written folder: another loss than the model's own, and MLPs in tiles of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import CannotTell
from ..trace.options import loss_parts

if TYPE_CHECKING:
    from ..request import Request

LOSS = "loss.py"
_WHOLE = ("single", "ddp", "release", "zero0", "zero1", "zero2")  # the head's weight is there when the loss wants it


def loss_settings(request: Request) -> dict[str, Any]:
    """What loss.py reads of run.json; {} where the model's own loss runs, and MLPs run whole.

    Raises CannotTell for a model of the user's own, and for strategies that gather the head's weight for the head alone.
    """
    found: dict[str, Any] = {}
    kind, parts = loss_parts(request.loss)
    if kind != "model":
        found["loss"] = kind
    if kind == "chunked":
        found["loss_chunks"] = parts
    if request.mlp_tiles:
        found["mlp_tiles"] = request.mlp_tiles
    if not found:
        return {}
    said = f"--loss {request.loss}" if request.loss != "model" else f"--tiled-mlp {request.mlp_tiles}"
    if request.model.factory is not None:
        raise CannotTell(f"train.py: {said} is for the function of yours that makes the model")
    if kind == "tiled":
        raise CannotTell(f"train.py: {said} is DeepSpeed's TiledFusedLogitsLoss, for a program of your own")
    if request.strategy not in _WHOLE:
        raise CannotTell(f"train.py: {said} with --strategy {request.strategy} is for a program of your own")
    return found


TEXT = '''"""The loss that run.json names in the place of the model's own, and its MLPs in tiles of tokens."""

import functools

import torch
from torch.nn.functional import cross_entropy, pad
from transformers.modeling_outputs import CausalLMOutput

MLPS = ("mlp", "MLP", "FeedForward", "FFN")  # ends of the names of their classes


def next_tokens(labels):
    """Labels moved one to the left, flat: each token is asked for the next one."""
    return pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)


def mean(total, targets, items):
    """`items`: the tokens of all micro batches of a step, where the Trainer counts them."""
    return total / ((targets != -100).sum() if items is None else items)


def shifted(logits, labels, vocab_size=None, num_items_in_batch=None, **kwargs):
    """Cross-entropy on shifted copies of the logits, in their own type."""
    logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    if num_items_in_batch is None:
        return cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
    return cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), reduction="sum") / num_items_in_batch


def plain(hidden, head, targets, items):
    """Cross-entropy on all logits at once, in their own type."""
    logits = head(hidden).flatten(0, 1)
    return cross_entropy(logits, targets) if items is None else cross_entropy(logits, targets, reduction="sum") / items


def chunked(hidden, head, targets, items, chunks):
    """The head and the loss, chunk after chunk, with logits in fp32."""
    pairs = zip(hidden.flatten(0, 1).chunk(chunks), targets.chunk(chunks), strict=True)
    losses = [cross_entropy(head(part).float(), labels, reduction="sum") for part, labels in pairs]
    return mean(torch.stack(losses).sum(), targets, items)


def liger(hidden, head, targets, items):
    """Liger's fused kernel of head and loss (liger-kernel), which makes the head's gradient before backward."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="mean" if items is None else "sum")
    found = loss(head.weight, hidden.flatten(0, 1), targets, getattr(head, "bias", None))
    return found if items is None else found / items


class TiledMLP(torch.autograd.Function):
    """Runs without autograd, tile by tile, and again in backward: its input is all that is kept."""

    @staticmethod
    def forward(ctx, x, own, tiles):
        ctx.own, ctx.tiles = own, tiles
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([own(tile) for tile in x.chunk(tiles, dim=-2)], dim=-2)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        needs, shape = x.requires_grad, x.shape
        x, gradient = x.detach().reshape(-1, shape[-1]), gradient.reshape(-1, shape[-1])
        of_x, start = torch.zeros_like(x), 0
        for tile in x.chunk(ctx.tiles, dim=0):
            tile.requires_grad_(needs)
            stop = start + len(tile)
            tile.grad = of_x[start:stop]
            with torch.enable_grad():
                out = ctx.own(tile)
            torch.autograd.backward(out, gradient[start:stop])
            start = stop
        return of_x.view(shape), None, None


def change(model, settings):
    """Puts what run.json says into the model: `mlp_tiles`, `loss` and `loss_chunks`."""
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model
    for part in inside.modules() if "mlp_tiles" in settings else ():
        if type(part).__name__.endswith(MLPS) and any(part.children()):
            part.forward = functools.partial(lambda own, x: TiledMLP.apply(x, own, settings["mlp_tiles"]), part.forward)
    name = settings.get("loss")
    if name == "shifted":
        inside.loss_function = shifted
    elif name:
        in_chunks = functools.partial(chunked, chunks=settings.get("loss_chunks"))
        loss = {"plain": plain, "chunked": in_chunks, "liger": liger}[name]

        @functools.wraps(model.forward)
        def forward(labels=None, num_items_in_batch=None, **inputs):
            hidden = inside.base_model(**inputs).last_hidden_state
            return CausalLMOutput(loss=loss(hidden, inside.get_output_embeddings(), next_tokens(labels), num_items_in_batch))

        model.forward = forward
'''
