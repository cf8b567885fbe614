"""BAdam and HiFT: all parameters are on the GPU, and one block of layers trains at a time.

The rest is frozen, so it has no gradients, backward stops at the block that trains, and linear layers above it keep only what
the gradient of their input needs.  The trace is that of the dearest block (`optimizers.methods.dearest_block`), which is in
training once a round:

    peak = parameters + activations down to the block + gradients and step of the block

BAdam keeps the block's fp32 copy and moments on the GPU and drops them when the next block's turn comes; HiFT keeps all
moments on the host and fetches the group's inside the step.
Sources: badam/block_optim.py 1.4, `switch_trainable_params`; hift/trainer.py, `update_parameter_state`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import CannotTell, UserError
from ..ledger import Component, Tier
from ..simulate import Simulation
from .base import Strategy
from .single import SingleDevice

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.steptrace import StepTrace

_MOMENTS = 2  # of AdamW


class Layerwise(SingleDevice):
    """One GPU; the optimizer sees the parameters of one block."""

    name = "layerwise"


class LayerwiseOnHost(Layerwise):
    """The moments of all blocks are on the host, those of the others from the start: each had its turn before."""

    def at_init(self, sim: Simulation) -> None:
        super().at_init(sim)
        active = set(self._names(sim))
        for slot in sim.trace.params:
            if slot.fqn not in active:
                for _ in range(_MOMENTS):
                    sim.place(Component.OPTIMIZER_STATE, slot.fqn, slot.shape, slot.dtype, Tier.HOST_PAGEABLE)

    def step(self, sim: Simulation) -> None:
        moved = _MOMENTS * sum(slot.nbytes for slot in self._trainable(sim))
        super().step(sim)
        sim.enqueue("moments copied to and from pageable memory", moved)  # of which no speed is known


def check(request: Request) -> None:
    """One GPU, and a training step."""
    from . import MIXED, SINGLE

    method = request.method
    if request.mode != "train":
        raise UserError(f"--method {method} with --mode {request.mode}: it is a way to train", "Leave --mode out")
    if request.strategy == "release":
        raise UserError(
            f"--method {method} with --grad-release: the step needs all gradients of the block at once",
            "Leave --grad-release out",
        )
    if request.strategy != SINGLE or request.gpus != 1:
        raise CannotTell(f"--method {method} on several GPUs is not modelled. Ask for one")
    if request.precision in MIXED:
        raise CannotTell(f"--precision {request.precision} with --method {method} is not modelled. Use bf16 or fp32")
    if request.offload:
        raise CannotTell(f"--offload {'+'.join(request.offload)} with --method {method} is not modelled. Leave it out")


def make(request: Request, trace: StepTrace) -> Strategy:
    return LayerwiseOnHost() if request.method == "hift" else Layerwise()


def said(request: Request) -> list[str]:
    found = ["the cache that the optimizer empties after every step is not emptied here: less may be reserved"]
    if request.method == "hift":
        found.append("the moments of all groups are on the host: every group has been trained once")
    return found
