"""HiFT's AdamW: one group of layers is stepped at a time, and the moments of all others wait on the host.

The tensors of this rule are those of the *active group*; the next group's turn comes with the next batch (`blocks` says which
parameters make a group).  Step: both moments of each parameter are copied to the GPU (made there, the first time), torch's
AdamW runs on them, and they go back to pageable memory, one parameter after the other, each with its gradient; the copies on
the GPU stay in lists until all are back.
Source: github.com/misonsky/HiFT, hift/optimizers/torchAdamw.py, `_init_group`, `step`; hift/trainer.py,
`update_parameter_state`; hift/registerCallBack.py, `group_model` (one element a group).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..ledger import Tier
from .entry import Entry
from .rule import OptimizerRule, OptimizerTensor, StepEvent, StepEvents, StepKind
from .traced import traced_rule

_LAYER = re.compile(r"\.\d+\.")
_EMBEDDING = re.compile(r"embed|\.w[tp]e\.")


@dataclass(frozen=True)
class HiFT(OptimizerRule):
    name: str = "hift"
    impl: str = "default"  # of the AdamW inside
    target: str = "cuda"
    steps_one = False  # the moments of the whole group are fetched first

    def step(self, tensors: Sequence[OptimizerTensor]) -> StepEvents:
        if not tensors:
            return StepEvents((), ())
        adamw = traced_rule("adamw", self.impl, target=self.target).step(tensors)
        moments = [e for e in adamw.first if e.kind is StepKind.STATE]
        return StepEvents(
            tuple(_with_moments_away(adamw.first, moments, len(tensors), first=True)),
            tuple(_with_moments_away(adamw.later, moments, len(tensors), first=False)),
        )


def _with_moments_away(
    events: Sequence[StepEvent], moments: Sequence[StepEvent], count: int, *, first: bool
) -> Iterator[StepEvent]:
    """AdamW's own events, with moments that are on the GPU from here to the end of the step only."""
    slots = itertools.count()
    own: dict[int, int] = {}
    held: list[int] = []
    if not first:
        for moment in moments:
            held.append(next(slots))
            yield StepEvent(StepKind.TEMP, held[-1], moment.nbytes, moment.tensor)
    for event in events:
        if event.kind is StepKind.FREE:
            yield StepEvent(StepKind.FREE, own[event.slot], 0, event.tensor)
            continue
        own[event.slot] = next(slots)
        if event.kind is StepKind.STATE:
            held.append(own[event.slot])
        yield StepEvent(StepKind.TEMP, own[event.slot], event.nbytes, event.tensor)
    for tensor in range(count):
        if first:
            for moment in moments:
                if moment.tensor == tensor:
                    yield StepEvent(StepKind.STATE, next(slots), moment.nbytes, tensor, Tier.HOST_PAGEABLE)
        yield StepEvent(StepKind.DROP_GRAD, -1, 0, tensor)
    for slot in held:
        yield StepEvent(StepKind.FREE, slot, 0)


def blocks(names: Sequence[str]) -> list[list[str]]:
    """The parameters of each group: the embeddings, every layer, and every other module by itself (last norm, head)."""
    groups: dict[str, list[str]] = {}
    for name in names:
        found = _LAYER.search(f".{name}")
        key = found.group() if found else "embeddings" if _EMBEDDING.search(f".{name}") else name.rpartition(".")[0]
        groups.setdefault(key, []).append(name)
    return list(groups.values())


ENTRIES = (
    Entry(
        "hift",
        "hift",
        "b6ee560",
        "AdamW on one group of layers at a time, moments of the others on the host",
        "2*s on the host; on the GPU only those of the group, inside the step",
        "2*s of the active group, and what torch's AdamW makes for it",
        "hift/optimizers/torchAdamw.py: step",
        rule=HiFT,
        copies=2,
        not_with=(
            "gradients of frozen groups: all but the active one are frozen",
            "stepping inside backward: the moments of the whole group are fetched first",
        ),
        checked="nothing",
    ),
)
