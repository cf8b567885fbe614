"""Puts a freshly built model into the state that the options ask for: frozen parts, attention, recompute, loss.

The tracer and the validator's real runs both come through here, so what is predicted is what is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ...errors import UserError, did_you_mean
from ...models import BuiltModel, ModelSpec, build
from ...models.adapters import base_of
from ...models.tiled import fused_linear_cross_entropy, tile_mlps, tiled_loss
from ..recompute.policy import ATTENTION, SELECTIVE, Op, Policy
from .options import AUTOCAST_DTYPE, PARAM_DTYPE, TraceOptions, loss_parts, recompute_parts

_MIN_BLOCKS = 2
_FLASH_PACKAGE = "memplan_flash"  # the name under which transformers finds the flash-attn path below
# Ops whose results selective recompute keeps, by the names that --recompute selective-op:... takes.
_SAVED_OPS: dict[str, tuple[str, ...]] = {
    "matmul": ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._grouped_mm"),
    ATTENTION: (
        "memplan.attention",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_cudnn_attention",
    ),
    "max": ("aten.max",),
}


def ready(spec: ModelSpec, options: TraceOptions, *, real: bool = False) -> BuiltModel:
    """The model of `spec` in the state that `options` ask for, ready for `step`; its notes say what was assumed.

    `real`: the step will run on a GPU, with the flash-attn package itself where that is asked for.
    Raises UserError where the model cannot be built or put into that state.
    """
    stand_in = options.attention == "flash_attention_2" and not real
    attention = "sdpa" if stand_in else options.attention  # switched below
    built = build(spec, dtype=getattr(torch, PARAM_DTYPE[options.precision]), attention=attention)
    module, notes = built.module, list(built.notes)
    if options.precision.endswith("-mixed") and options.adapter is None:
        _cast_all(module, options.precision)
    _freeze(module, options.frozen)
    if options.blockwise:
        notes.append(_train_one_block(module, options.blockwise))
    if options.adapter is not None:
        built, said = _adapted(built, spec, options, real)
        module, notes = built.module, notes + said
    module.train(options.mode != "inference")
    if not options.use_cache:
        notes += _without_cache(module)
    if stand_in:
        notes += _use_flash_package(module)
    if options.mlp_tiles:
        notes.append(
            f"{tile_mlps(module, options.mlp_tiles)} MLPs run in {options.mlp_tiles} tiles of tokens, and again in backward"
        )
    kind, number, names = recompute_parts(options.recompute)
    if kind == "full":
        notes += _recompute_all(module, options.reentrant)
    elif kind == SELECTIVE:
        raise UserError(
            f"--recompute {options.recompute}: it stands for a policy that is chosen first",
            "`memplan fit ... --recompute selective` prints it: give that keep:... here",
        )
    elif kind == "keep":
        notes += _recompute_by(module, Policy.parse(options.recompute), options.recompute)
    elif kind != "none":
        notes += _recompute_some(module, kind, number, names, options.reentrant)
    step, said = _loss_step(built, options.loss)
    return replace(built, step=step, notes=notes + said)


def _adapted(built: BuiltModel, spec: ModelSpec, options: TraceOptions, real: bool) -> tuple[BuiltModel, list[str]]:
    """The model with its adapter; in a 16-bit precision its step runs under autocast unless the adapter says no."""
    adapter, param_dtype = options.adapter, PARAM_DTYPE[options.precision]
    assert adapter is not None
    narrow = AUTOCAST_DTYPE.get(options.precision, param_dtype)
    from ...models.int8 import run_as_on_a_gpu

    module, said = adapter.apply(built.module, task=spec.task, compute_dtype=getattr(torch, narrow))
    built = replace(built, module=module)
    if options.precision.endswith("-mixed") and not adapter.upcasts:
        _cast_all(module, options.precision)
    if adapter.base_quant == "int8" and options.target == "cuda" and not real:
        run_as_on_a_gpu(module)
    if not adapter.autocast or param_dtype == "float32":
        return built, said
    own, dtype = built.step, getattr(torch, param_dtype)

    def step(module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        with torch.autocast("cuda" if real else "cpu", dtype=dtype, cache_enabled=options.autocast_cache):
            return own(module, batch)

    how = f"the step runs under {param_dtype} autocast, as the Trainer runs it with {options.precision}=True"
    return replace(built, step=step), [*said, how]


def _cast_all(module: nn.Module, precision: str) -> None:
    """Engines with fp32 masters cast every parameter, also those that `from_pretrained` keeps in fp32 (T5's `wo`), and the
    adapters that peft leaves in fp32 on an 8-bit or GPTQ base, and no buffer (deepspeed 0.19.8, runtime/engine.py,
    `_cast_module_mixed_precision`).  Packed weights are not numbers to be cast."""
    dtype = getattr(torch, PARAM_DTYPE[precision])
    for param in module.parameters():
        if param.dtype is torch.float32 and type(param).__name__ != "Params4bit":
            param.data = param.data.to(dtype)


def _freeze(module: nn.Module, prefixes: tuple[str, ...]) -> None:
    for prefix in prefixes:
        hit = [p for name, p in module.named_parameters() if name.startswith(prefix)]
        if not hit:
            tops = {name.split(".")[0] for name, _ in module.named_parameters()}
            raise UserError(
                f"--freeze {prefix}: no parameter begins with that",
                did_you_mean(prefix, tops) or "`memplan trace MODEL --params` lists them",
            )
        for param in hit:
            param.requires_grad_(False)


def _train_one_block(module: nn.Module, method: str) -> str:
    """Freezes all parameters but those of the block whose step needs most; which one that is."""
    from ..optimizers.methods import dearest_block

    own = {name: p for name, p in module.named_parameters() if p.requires_grad}
    block, said = dearest_block(method, {name: p.numel() * p.element_size() for name, p in own.items()})
    for name, param in own.items():
        param.requires_grad_(name in block)
    return said


def configs(module: nn.Module) -> list[Any]:
    """The config objects of a transformers model: its own and those of its parts (text, vision ...)."""
    own = getattr(module, "config", None)
    parts = [getattr(child, "config", None) for child in module.modules()]
    return list({id(c): c for c in (own, *parts) if c is not None}.values())


def _without_cache(module: nn.Module) -> list[str]:
    cached = [c for c in configs(module) if getattr(c, "use_cache", None)]
    for config in cached:
        config.use_cache = False
    return ["the model builds no key-value cache (use_cache=False, as transformers' Trainer sets)"] if cached else []


# -- attention -----------------------------------------------------------------------------------------------------------


def _use_flash_package(module: nn.Module) -> list[str]:
    """The flash-attn package through transformers: no mask is built, keys stay grouped, windows and causality are the kernel's.

    Without padding it saves what torch's own flash kernel saves (modeling_flash_attention_utils.py, _flash_attention_forward).
    """
    if not hasattr(module, "set_attn_implementation"):
        raise UserError("--attention flash_attention_2: only transformers models can switch to it", "Use --attention sdpa")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_FLASH_PACKAGE, _flash_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_FLASH_PACKAGE, lambda *args, **kwargs: None)
    for config in configs(module):
        config._attn_implementation_internal = _FLASH_PACKAGE
    return ["attention runs the flash-attn package on full sequences: no padding is cut out"]


def _flash_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float = 0.0, **kwargs: Any
) -> tuple[Tensor, None]:
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if query.dtype is torch.float32 and torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    out = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout if module.training else 0.0,
        is_causal=bool(causal) and query.size(2) == key.size(2),
        enable_gqa=query.size(1) != key.size(1),
    )
    return out.transpose(1, 2), None


# -- recompute -----------------------------------------------------------------------------------------------------------


def _recompute_all(module: nn.Module, reentrant: bool) -> list[str]:
    way = "reentrant" if reentrant else "non-reentrant"
    if getattr(module, "supports_gradient_checkpointing", False):
        module.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        if reentrant:
            module.enable_input_require_grads()  # type: ignore[operator]
        return [f"activation checkpointing is the model's own, {way}"]
    path, blocks = block_list(module)
    _wrap(module, path, [[b] for b in blocks], [True] * len(blocks), reentrant, None)
    return [f"each block of {path} is checkpointed, {way}"]


def _recompute_some(module: nn.Module, kind: str, number: int, names: tuple[str, ...], reentrant: bool) -> list[str]:
    path, blocks = block_list(module)
    if kind == "every-k":
        groups = [list(blocks[i : i + number]) for i in range(0, len(blocks), number)]
        _wrap(module, path, groups, [True] * len(groups), reentrant, None)
        return [f"{path} is checkpointed in segments of {number} blocks"]
    if kind == "selective-layer":
        _wrap(module, path, [[b] for b in blocks], [(i + 1) % number == 0 for i in range(len(blocks))], reentrant, None)
        return [f"every block of {path} whose number is a multiple of {number} is checkpointed"]
    saved = saved_ops(names)
    _wrap(module, path, [[b] for b in blocks], [True] * len(blocks), False, partial(_keeping, saved))
    return [f"blocks of {path} are recomputed, but for the results of {', '.join(names)}"]


def _recompute_by(module: nn.Module, policy: Policy, text: str) -> list[str]:
    path, blocks = block_list(module)
    if len(blocks) != len(policy.blocks):
        raise UserError(
            f"--recompute {text}: it speaks of {len(policy.blocks)} blocks, and {path} has {len(blocks)}",
            "Say it for every block, or use --recompute selective",
        )
    parent: Any = module.get_submodule(path)
    for number, (block, kept) in enumerate(zip(blocks, policy.blocks, strict=True)):
        contexts = partial(_keeping_calls, kept) if kept else None
        parent[number] = Recomputed([block], False, contexts, active=kept is not None)
    return [f"activation checkpointing of {path}, non-reentrant: {policy.words}"]


def _keeping_calls(kept: frozenset[Op]) -> Any:
    """Contexts for one block: the calls of its ops are counted, in forward and again when it is recomputed."""
    seen: tuple[dict[str, int], dict[str, int]] = ({}, {})

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(getattr(op, "_overloadpacket", op))
        name = ATTENTION if name in _SAVED_OPS[ATTENTION] else name
        calls = seen[context.is_recompute]
        calls[name] = calls.get(name, -1) + 1
        return CheckpointPolicy.MUST_SAVE if (name, calls[name]) in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def saved_ops(names: tuple[str, ...]) -> frozenset[str]:
    unknown = [n for n in names if n not in _SAVED_OPS and not n.startswith("aten.")]
    if unknown:
        hint = did_you_mean(unknown[0], _SAVED_OPS) or f"Known: {', '.join(_SAVED_OPS)}, or an op such as aten.mm"
        raise UserError(f"--recompute selective-op: {unknown[0]!r} is not known", hint)
    return frozenset(op for n in names for op in _SAVED_OPS.get(n, (n,)))


def _keeping(saved: frozenset[str]) -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(getattr(op, "_overloadpacket", op))
        return CheckpointPolicy.MUST_SAVE if name in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def block_list(module: nn.Module) -> tuple[str, list[nn.Module]]:
    """(path, blocks) of the longest list of equal blocks in `module`: what people call its layers."""
    best: tuple[str, list[nn.Module]] = ("", [])
    for path, child in module.named_modules():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) >= _MIN_BLOCKS:
            blocks = list(child)
            if len({type(b) for b in blocks}) == 1 and len(blocks) > len(best[1]):
                best = (path, blocks)
    if not best[1]:
        raise UserError(f"{type(module).__name__} has no list of equal blocks to recompute", "Use --recompute none")
    return best


def _wrap(
    module: nn.Module,
    path: str,
    groups: list[list[nn.Module]],
    recomputed: list[bool],
    reentrant: bool,
    contexts: Callable[[], Any] | None,
) -> None:
    parent_path, _, name = path.rpartition(".")
    parent = module.get_submodule(parent_path)
    old: Any = module.get_submodule(path)
    blocks = [Recomputed(g, reentrant, contexts, active=r) for g, r in zip(groups, recomputed, strict=True)]
    if not path:  # the model is its own list of blocks
        del old[:]
        old.extend(blocks)
        return
    setattr(parent, name, nn.Sequential(*blocks) if isinstance(old, nn.Sequential) else nn.ModuleList(blocks))
    if len(groups) < len(old):  # models that loop by a number of layers loop over the groups now
        for config in configs(module):
            if getattr(config, "num_hidden_layers", None) == len(old):
                config.num_hidden_layers = len(groups)


class Recomputed(nn.Module):
    """Blocks whose activations are dropped after forward and made again in backward.

    One that is not `active` runs as it is: what wraps the blocks of a model (FSDP's units) looks for a list of one class.
    """

    def __init__(
        self, blocks: list[nn.Module], reentrant: bool, contexts: Callable[[], Any] | None, *, active: bool = True
    ) -> None:
        super().__init__()
        self.active = active
        self.blocks = nn.ModuleList(blocks)
        self.reentrant = reentrant
        self.contexts = contexts

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # models ask their layers for attributes (attention_type, is_sliding ...)
            blocks: Any = super().__getattr__("blocks")
            return getattr(blocks[0], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self._run(hidden, *args, **kwargs)
        more: dict[str, Any] = {"context_fn": self.contexts} if self.contexts is not None else {}
        run = partial(self._run, **kwargs)
        return checkpoint(run, hidden, *args, use_reentrant=self.reentrant, **more)

    def _run(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        out: Any = hidden
        for block in self.blocks:
            out = block(out[0] if isinstance(out, tuple) else out, *args, **kwargs)
        return out


# -- loss ----------------------------------------------------------------------------------------------------------------


def _loss_step(built: BuiltModel, loss: str) -> tuple[Callable[[nn.Module, Mapping[str, Any]], Tensor], list[str]]:
    """The step with another loss than the model's own."""
    kind, parts = loss_parts(loss)
    if kind == "model":
        return built.step, []
    module = base_of(built.module)
    if not hasattr(module, "get_output_embeddings") or module.get_output_embeddings() is None:  # type: ignore[operator]
        raise UserError(f"--loss {loss}: {type(module).__name__} has no language-model head", "Use --loss model")
    if kind == "shifted":
        module.loss_function = _shifted_loss  # type: ignore[assignment]
        return built.step, ["the loss is cross-entropy on shifted copies of the logits, in their own dtype"]
    if kind == "plain":
        return _plain_loss, ["the loss is cross-entropy on the logits in their own dtype, without a copy in fp32"]
    if kind == "liger":
        return _liger_loss, ["the head and the loss are Liger's fused kernel: the head's gradient exists before backward"]
    if kind == "tiled":
        said = f"the head and the loss run in {parts} tiles of tokens, backward too, inside forward (TiledFusedLogitsLoss)"
        return partial(_tiled_loss, parts), [said]
    return partial(_chunked_loss, parts), [f"the head and the loss run in {parts} chunks of tokens, logits in fp32"]


def _targets(batch: Mapping[str, Any]) -> Tensor:
    """Labels moved one to the left, flat: token i is asked for token i + 1."""
    labels: Tensor = batch["labels"]
    return nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)


def _shifted_loss(logits: Tensor, labels: Tensor, vocab_size: int | None = None, **kwargs: Any) -> Tensor:
    """That of transformers before 4.46, and of zo2's models: inside the model's forward, what that holds is still there."""
    logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def _plain_loss(module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    logits = module(**{k: v for k, v in batch.items() if k != "labels"}).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), _targets(batch))


def _liger_loss(module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    hidden, head, targets = _before_the_head(module, batch)
    return fused_linear_cross_entropy(hidden, head.weight, targets, getattr(head, "bias", None))  # type: ignore[arg-type]


def _chunked_loss(parts: int, module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    hidden, head, targets = _before_the_head(module, batch)
    pairs = zip(hidden.chunk(parts), targets.chunk(parts), strict=True)
    losses = [nn.functional.cross_entropy(head(h).float(), t, reduction="sum") for h, t in pairs]
    return torch.stack(losses).sum() / targets.numel()


def _tiled_loss(parts: int, module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    hidden, head, targets = _before_the_head(module, batch)
    total = targets.numel()

    def loss_of(tile: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(head(tile).float(), labels, reduction="sum") / total

    return tiled_loss(loss_of, hidden, targets, parts)


def _before_the_head(module: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, nn.Module, Tensor]:
    """(hidden states of each token, the head, targets)."""
    module = base_of(module)
    body = module.base_model(**{k: v for k, v in batch.items() if k != "labels"})  # type: ignore[operator]
    return body.last_hidden_state.flatten(0, 1), module.get_output_embeddings(), _targets(batch)  # type: ignore[operator]
