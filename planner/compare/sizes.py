"""What one way to train keeps, makes and saves, read from the ledger of its run.

*Kept* is what is alive when backward has ended and the optimizer has not stepped yet, in the last simulated iteration:
weights, master weights, gradients, optimizer state.  For fp32 AdamW that is 4 + 4 + 8 = 16 bytes a parameter.  A gradient
that was released by then is not kept; it counts among the *transient* bytes, with what the optimizer makes and drops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..ledger import Component, Ledger, Tier
from ..optimizers.flashoptim import FlashOptim
from ..optimizers.lomo import AdaLomo
from ..optimizers.rule import OptimizerTensor
from ..trace.steptrace import Phase

if TYPE_CHECKING:
    from ..optimizers.rule import OptimizerRule, StepEvents
    from ..trace.steptrace import StepTrace

_STEP = "optimizer step"  # label of the blocks that `Simulation.run_optimizer` makes
_KEPT = (Component.PARAM, Component.MASTER_WEIGHT, Component.GRAD, Component.OPTIMIZER_STATE)
_AWAY = (Tier.GPU_MANAGED, Tier.HOST_PINNED, Tier.HOST_PAGEABLE, Tier.NVME)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes on the GPU between the end of backward and the step; `away_bytes`: the same kinds of bytes in other places."""

    param_bytes: int
    master_bytes: int
    """fp32 masters, and the error bits that make a split weight one (FlashOptim)."""
    grad_bytes: int
    state_bytes: int
    away_bytes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return self.param_bytes + self.master_bytes + self.grad_bytes + self.state_bytes


def stepped(trace: StepTrace) -> list[OptimizerTensor]:
    """The tensors that an optimizer of one GPU steps: those that receive a gradient."""
    return [OptimizerTensor.of(trace, trace.params[i]) for i in sorted(trace.params_with_grad)]


def kept(ledger: Ledger, error_bytes: int = 0) -> Kept:
    """What the run keeps; `error_bytes` of its optimizer state are the rest of split weights."""
    backward = np.flatnonzero((ledger.phase == Phase.BACKWARD) & (ledger.iteration == ledger.iteration.max(initial=0)))
    row = int(backward[-1]) if len(backward) else len(ledger) - 1
    parts = ledger.components_after(row)
    away = {}
    for tier in _AWAY:
        there = ledger.components_after(row, tier)
        if total := sum(there.get(c.label, 0) for c in _KEPT):
            away[tier.name.lower()] = total
    return Kept(
        param_bytes=parts.get(Component.PARAM.label, 0),
        master_bytes=parts.get(Component.MASTER_WEIGHT.label, 0) + error_bytes,
        grad_bytes=parts.get(Component.GRAD.label, 0),
        state_bytes=parts.get(Component.OPTIMIZER_STATE.label, 0) - error_bytes,
        away_bytes=away,
    )


def transients(ledger: Ledger, released: bool) -> tuple[int, int]:
    """(first step, later steps): the most that the optimizer makes and drops; `released`: with the gradients in hand."""
    rows = ledger.rows()
    block = ledger.block[rows]
    ids, born = np.unique(block, return_index=True)
    is_step = np.array([what == _STEP for _, what in ledger.labels], bool)[ledger.label[rows[born]]]
    component = ledger.component[rows[born]]
    counts = (component == Component.TEMP) & is_step
    if released:
        counts |= component == Component.GRAD
    chosen = counts[np.searchsorted(ids, block)]
    live = np.cumsum(np.where(chosen, ledger.delta_bytes[rows], 0))
    iteration = ledger.iteration[rows]
    first, later = live[iteration == 0], live[iteration > 0]
    highest = int(first.max(initial=0))
    return highest, int(later.max(initial=0)) if len(later) else highest


def error_bytes(rule: OptimizerRule, tensors: Sequence[OptimizerTensor]) -> int:
    """Bytes of the optimizer's state that complete 16-bit parameters to master weights."""
    return sum(map(rule.error_bytes, tensors)) if isinstance(rule, FlashOptim) else 0


def saved_bytes(rule: OptimizerRule, events: StepEvents, tensors: Sequence[OptimizerTensor]) -> int:
    """Tensors of `optimizer.state_dict()`: the state as it is, wherever it lies, except where the library does otherwise.

    FlashOptim: see `FlashOptim.checkpoint_bytes`.  AdaLomo has its state in attributes that no state dictionary holds
    (lomo_optim/adalomo.py).  torchao's CPUOffloadOptimizer saves its two states, not the pinned copies of parameter and
    gradient (torchao/optim/cpu_offload.py, `state_dict`).
    """
    if isinstance(rule, FlashOptim):
        return rule.checkpoint_bytes(tensors)
    if isinstance(rule, AdaLomo):
        return 0
    return events.state_bytes - events.state_bytes_in(Tier.HOST_PINNED)


def model_bytes(trace: StepTrace, adapter: bool) -> int:
    """Parameters as they are saved: all, or with an adapter those that train (peft's `save_pretrained`).  No buffers."""
    return sum(p.nbytes for p in trace.params if p.requires_grad or not adapter)
