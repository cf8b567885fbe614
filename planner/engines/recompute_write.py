"""recompute.py of a written folder: what the model's blocks keep for backward, for the Trainer and for a plain loop alike.

`--recompute full` has no such file: transformers' models do that themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import CannotTell
from ..recompute.policy import Policy
from ..trace.options import recompute_parts
from ..trace.prepare import saved_ops

if TYPE_CHECKING:
    from ..request import Request

RECOMPUTE = "recompute.py"
_WHOLE = ("single", "ddp", "release", "zero0", "zero1", "zero2")  # a block's weights are there whenever it runs


def recompute_settings(request: Request) -> dict[str, Any]:
    """What recompute.py reads of run.json; {} where every block is recomputed or none.

    `ranges`: [{"blocks": [first, last], "keep": ...}], where keep is "all", or {op: the numbers of its calls, null for each}.
    Raises CannotTell for segments of blocks whose weights are gathered one by one, or whose blocks differ.
    """
    kind, number, names = recompute_parts(request.recompute)
    if kind in ("none", "full"):
        return {}
    if kind == "keep":
        return {"reentrant": False, "ranges": _ranges(request.recompute)}
    if kind == "selective-op":
        kept = sorted(op for op in saved_ops(names) if not op.startswith("memplan."))
        return {"reentrant": False, "ops": dict.fromkeys(kept)}
    if kind == "selective-layer":
        return {"reentrant": request.reentrant, "every": number}
    what = f"train.py: --recompute {request.recompute} runs several blocks as one"
    if request.strategy not in _WHOLE:
        raise CannotTell(f"{what}, and --strategy {request.strategy} gathers each by itself. Use selective-layer or full")
    config = request.model.config or {}
    if config.get("is_encoder_decoder") or config.get("model_type") in ("t5", "mt5", "umt5"):
        raise CannotTell(
            f"{what}, and those of {request.model.name} hand on more than hidden states. Use selective-layer or full"
        )
    if len(set(config.get("layer_types") or ())) > 1:
        raise CannotTell(
            f"{what}, and the blocks of {request.model.name} differ in their attention. Use selective-layer or full"
        )
    return {"reentrant": request.reentrant, "segment": number}


def _ranges(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, kept in enumerate(Policy.parse(text).blocks):
        calls: dict[str, list[int]] = {}
        for op, call in sorted(kept or ()):
            calls.setdefault(op, []).append(call)
        keep: Any = "all" if kept is None else calls
        if found and found[-1]["keep"] == keep:
            found[-1]["blocks"][1] = number
        else:
            found.append({"blocks": [number, number], "keep": keep})
    return found


TEXT = '''"""What the blocks of a model keep for backward, and what of them is computed again there.

run.json says it: `ranges` of blocks with the results that they keep (calls of an op are counted from 0 in each block),
`ops` whose results every block keeps, `every` nth block recomputed whole, or a `segment` of blocks recomputed as one.
"""

import functools

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ATTENTION = (  # the fused kernels that go by one name
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_cudnn_attention",
    "flash_attn._flash_attn_forward",
)


def layers_of(model):
    """The model's blocks: the longest list of modules of one class."""
    lists = [list(part) for part in model.modules() if isinstance(part, (torch.nn.ModuleList, torch.nn.Sequential))]
    return max((blocks for blocks in lists if len({type(block) for block in blocks}) == 1), key=len)


def contexts(kept):
    """Those of one run of a block: the calls of its ops are counted in forward, and again when it is recomputed."""
    seen = {False: {}, True: {}}

    def policy(context, op, *args, **kwargs):
        name = str(getattr(op, "_overloadpacket", op))
        if name in ATTENTION and "attention" in kept:
            name = "attention"
        calls = seen[context.is_recompute]
        calls[name] = calls.get(name, -1) + 1
        is_kept = name in kept and (kept[name] is None or calls[name] in kept[name])
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def kept_by(settings, number):
    """{op: calls} whose results block `number` keeps; None: it is not recomputed."""
    if "every" in settings:
        return None if (number + 1) % settings["every"] else {}
    if "ops" in settings:
        return settings["ops"]
    for part in settings["ranges"]:
        if part["blocks"][0] <= number <= part["blocks"][1]:
            return None if part["keep"] == "all" else part["keep"]
    raise SystemExit(f"run.json does not say what block {number} keeps: it was planned for another model")


def again(forward, how):
    """The same forward, run once more in backward."""

    @functools.wraps(forward)
    def run(*args, **kwargs):
        return checkpoint(functools.partial(forward, **kwargs), *args, **how)

    return run


def join(blocks, how):
    """The first block runs all, as one that is recomputed; the others hand on what they are given."""
    forwards = [block.forward for block in blocks]
    in_tuple = []  # whether a block returns its hidden states in a tuple

    def run_all(hidden, *args, **kwargs):
        for forward in forwards:
            out = forward(hidden, *args, **kwargs)
            hidden = out[0] if isinstance(out, tuple) else out
        return out

    def first(*args, **kwargs):
        out = checkpoint(functools.partial(run_all, **kwargs), *args, **how)
        if isinstance(out, tuple) and len(out) > 1:
            raise SystemExit("The model's blocks hand on more than hidden states: plan it with another --recompute")
        in_tuple[:] = [isinstance(out, tuple)]
        return out

    def hand_on(hidden, *args, **kwargs):
        return (hidden,) if in_tuple[0] else hidden

    for block in blocks:
        block.forward = hand_on
    blocks[0].forward = first


def recompute(model, settings):
    """Changes the forward of the model's blocks as `settings` of run.json say."""
    blocks, how = layers_of(model), {"use_reentrant": settings["reentrant"]}
    size = settings.get("segment")
    for first in range(0, len(blocks), size) if size else ():
        join(blocks[first : first + size], how)
    for number, block in enumerate(() if size else blocks):
        kept = kept_by(settings, number)
        if kept is not None:
            more = {"context_fn": functools.partial(contexts, kept)} if kept else {}
            block.forward = again(block.forward, how | more)
'''
