"""A user's factory becomes a `BuiltModel`: what it may return, and what is made of each part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from . import batch as batches
from . import factory, tasks
from .built import BuiltModel
from .spec import FactoryRef, ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_BATCH_HELP = (
    "Return (module, batch_fn), where batch_fn(batch, seq) gives the keyword arguments of forward, for example "
    "def batch_fn(batch, seq): ids = torch.zeros(batch, seq, dtype=torch.long); return dict(input_ids=ids, labels=ids)"
)


def build_from_factory(spec: ModelSpec, ref: FactoryRef, dtype: torch.dtype, attention: str) -> BuiltModel:
    """Calls the factory: a module | (module, batch_fn) | (module, batch_fn, step_fn); UserError for anything else."""
    import torch

    made = factory.call(ref)
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], torch.nn.Module):
        got = f"({', '.join(type(p).__name__ for p in parts)})" if isinstance(made, tuple) else type(made).__name__
        raise UserError(f"{ref} returned {got}", "Return a torch.nn.Module, (module, batch_fn) or (module, batch_fn, step_fn)")
    module, batch_fn, step_fn = (*parts, None, None)[:3]
    for what, function in (("batch_fn", batch_fn), ("step_fn", step_fn)):
        if function is not None and not callable(function):
            raise UserError(f"{ref}: {what} is a {type(function).__name__}, not a function", _BATCH_HELP)
    notes = list(spec.notes)
    cast = _cast(module, dtype, notes)
    used = getattr(getattr(module, "config", None), "_attn_implementation", None) or attention
    if batch_fn is None:
        config: Any = getattr(module, "config", None)
        if getattr(config, "model_type", None) is None:
            raise UserError(f"{ref} returned a {type(module).__name__} without a batch_fn", _BATCH_HELP)
        # a transformers model says itself what it eats
        inputs = batches.Inputs(config=config, task=tasks.default_task(config.to_dict()), module=module, dtype=dtype)
        own_step = inputs.step if step_fn is None else factory.guard(f"{ref}: step_fn", ref, step_fn)
        return BuiltModel(module=module, make_batch=inputs.make, step=own_step, attention=used, notes=notes + inputs.notes)
    user_batch = factory.guard(f"{ref}: batch_fn", ref, batch_fn)

    def make(batch_size: int, seq_len: int, *, target_len: int | None = None, image_size: int | None = None) -> dict[str, Any]:
        values = user_batch(batch_size, seq_len)
        if not isinstance(values, Mapping):
            raise UserError(f"{ref}: batch_fn returned a {type(values).__name__}, expected a dict", _BATCH_HELP)
        floats = {k for k, v in values.items() if isinstance(v, torch.Tensor) and v.dtype == torch.float32}
        return {k: v.to(dtype) if cast and k in floats and k != "labels" else v for k, v in values.items()}

    forward = factory.guard(f"{ref}: the forward pass", ref, lambda module, batch: module(**batch))
    user_step = forward if step_fn is None else factory.guard(f"{ref}: step_fn", ref, step_fn)

    def step(module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        return _loss(user_step(module, batch), ref)

    return BuiltModel(module=module, make_batch=make, step=step, attention=used, notes=notes)


def _cast(module: nn.Module, dtype: torch.dtype, notes: list[str]) -> bool:
    """Casts an all-fp32 module to `dtype`; one that already mixes dtypes, or is 16-bit, is the user's own choice."""
    import torch

    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if dtypes == {torch.float32} and dtype != torch.float32:
        for tensor in (*module.parameters(), *module.buffers()):  # module.to() cannot swap tensors under a fake mode
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        return True
    if dtypes and dtypes != {dtype}:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        notes.append(f"the factory's module has parameters in {names}: kept, not cast to {str(dtype).removeprefix('torch.')}")
    return False


def _loss(output: Any, ref: FactoryRef) -> Tensor:
    import torch

    loss = output
    if not isinstance(output, torch.Tensor):
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(output).__name__}"
        raise UserError(f"{ref}: the step returned {got}, expected a scalar loss (or an output with .loss)",
                        "Return the loss from forward, or give a third value step_fn(module, batch) -> loss")  # fmt: skip
    return loss
