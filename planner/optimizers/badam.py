"""BAdam 1.4 (BlockOptimizer around torch.optim.AdamW): one block of layers trains at a time, in fp32.

The tensors of this rule are those of the *active block*: BAdam freezes all others (`blocks` says which are which). State: an
fp32 copy of each parameter (made by the constructor), and AdamW's two fp32 moments, dropped at every switch of the block.
Step: fp32 copies of all gradients, one 16-bit gradient dropped after each, AdamW's own temporaries in fp32, and a 16-bit copy
of each parameter when it is written back.  Every 50 steps the next block's fp32 copies are made while the old ones are still
there; `later` is such a step (with a block as large as this one).
Source: badam/block_optim.py, `BlockOptimizer.step_single_gpu`, `_switch_trainable_params_single_gpu`, `infer_param_groups`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .entry import Entry
from .rule import OptimizerRule, OptimizerTensor, StepEvents
from .tape import FP32, Tape, is_half
from .traced import traced_rule

_EMBEDDING = r".*embed[^.]*\."
_LAYER = r".*layers.[^.]*\."


@dataclass(frozen=True)
class BAdam(OptimizerRule):
    name: str = "badam"
    impl: str = "default"  # of the AdamW inside
    target: str = "cuda"
    steps_one = False  # the gradients of the block are all copied first

    def step(self, tensors: Sequence[OptimizerTensor]) -> StepEvents:
        if not tensors:
            return StepEvents((), ())
        order = sorted(range(len(tensors)), key=lambda i: "bias" in tensors[i].name)  # two groups: weight decay and none
        high = [OptimizerTensor(tensors[i].shape, "float32", int("bias" in tensors[i].name)) for i in order]
        adamw = traced_rule("adamw", self.impl, target=self.target).step(high)
        init, first, later = Tape(), Tape(), Tape()
        _copies(init, tensors, kept=True)
        for tape, events in ((first, adamw.first), (later, adamw.later)):
            for tape.tensor, p in enumerate(tensors):
                if is_half(p):
                    tape.bind(f"grad{tape.tensor}", FP32 * p.numel)
                    tape.drop_grad()
            tape.replay(events, order)
            for tape.tensor, p in enumerate(tensors):
                if is_half(p):
                    tape.flash(p.nbytes)  # hp_param.to(lp_param.dtype)
            for tape.tensor, p in enumerate(tensors):
                tape.drop(f"grad{tape.tensor}")
                if not is_half(p):
                    tape.drop_grad()  # `.float()` of an fp32 gradient is the gradient: it goes with the copies
        _copies(later, tensors, kept=False)
        return StepEvents(first.done(), later.done(), init.done())


def _copies(tape: Tape, tensors: Sequence[OptimizerTensor], *, kept: bool) -> None:
    """`param.clone().float().detach()` of every parameter of a block."""
    for tape.tensor, p in enumerate(tensors):
        if is_half(p):
            tape.bind("clone", p.nbytes)
        if kept:
            tape.state(FP32 * p.numel)
        else:
            tape.bind(f"copy{tape.tensor}", FP32 * p.numel)
        tape.drop("clone")


def blocks(names: Sequence[str], *, include_embedding: bool = False, include_lm_head: bool = False) -> list[list[str]]:
    """The parameters of each block, by the library's own division of their names: a block a layer, and on request the embedding
    and everything else (head, last norm).  A parameter in none never trains."""
    prefixes: list[list[str]] = []
    others: list[str] = []
    for name in names:
        if any(prefix[0] in name for prefix in prefixes):
            continue
        found = re.findall(_LAYER, name) or (re.findall(_EMBEDDING, name) if include_embedding else [])
        if found:
            prefixes.append(found)
        else:
            others.append(name)
    if include_lm_head:
        prefixes.append(others)
    return [[name for name in names if any(prefix in name for prefix in block)] for block in prefixes]


ENTRIES = (
    Entry(
        "badam",
        "badam",
        "1.4",
        "AdamW in fp32 on one block of layers at a time",
        "12 of the active block (4 of them an fp32 copy of its parameters)",
        "fp32 gradients of the block, then AdamW's; at a switch the next block's fp32 copies",
        "badam/block_optim.py: BlockOptimizer",
        rule=BAdam,
        per_parameter=12.0,
        not_with=(
            "gradients of frozen blocks: all but the active block must be frozen",
            "the embedding and the head, which do not train unless asked for",
            "stepping inside backward: it needs all gradients of the block",
        ),
        checked="state and transient",
    ),
)
