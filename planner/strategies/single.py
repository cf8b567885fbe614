"""One GPU, the plain PyTorch loop: everything lives on the device, `.grad` accumulates, the optimizer steps all parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import CannotTell
from ..clipping import clip_grad_norm_events
from ..ledger import Component
from ..optimizers.rule import OptimizerTensor, StepEvents
from ..simulate import Block, Simulation
from ..trace.steptrace import TensorSlot
from .base import Strategy

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.steptrace import StepTrace


class SingleDevice(Strategy):
    """`model.to(device)`, then per step: zero_grad, forward, backward, clip, optimizer.step()."""

    name = "single"

    def __init__(self) -> None:
        self._grads: dict[str, Block] = {}
        self._steps = 0

    def at_init(self, sim: Simulation) -> None:
        for slot in sim.trace.params:
            sim.place(Component.PARAM, slot.fqn, slot.shape, slot.dtype)
        for slot in sim.trace.buffers:
            sim.place(Component.BUFFER, slot.fqn, slot.shape, slot.dtype)
        if sim.trains:
            sim.run_optimizer(self._rule(sim).init, self._names(sim))

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        if block is None:
            return
        if param.fqn in self._grads:  # AccumulateGrad: `.grad += new`, in place; the new one goes
            sim.free(block)
        else:
            self._grads[param.fqn] = block

    def holds_grad(self, sim: Simulation, param: TensorSlot) -> bool:
        return param.fqn in self._grads

    def step(self, sim: Simulation) -> None:
        if sim.loop.clip_grad_norm:
            for event in clip_grad_norm_events([p.shape for p in self._trainable(sim)], sim.target):
                sim.run_temporary(event, "clip_grad_norm_")
        rule = self._rule(sim)
        names = self._names(sim)
        sim.run_optimizer(rule.later if self._steps else rule.first, names, drop_grad=lambda i: self._drop(sim, names[i]))
        self._steps += 1

    def zero_grad(self, sim: Simulation, set_to_none: bool) -> None:
        if set_to_none:
            for param in sim.trace.params:  # in the order of the parameters, as torch.optim walks them
                if param.fqn in self._grads:
                    sim.free(self._grads.pop(param.fqn))

    def _trainable(self, sim: Simulation) -> list[TensorSlot]:
        """Parameters that receive a gradient: torch.optim and clipping skip those whose `.grad` stays None."""
        return [sim.trace.params[i] for i in sorted(sim.trace.params_with_grad)]

    def _names(self, sim: Simulation) -> list[str]:
        return [p.fqn for p in self._trainable(sim)]

    def _rule(self, sim: Simulation) -> StepEvents:
        return sim.optimizer.step([OptimizerTensor.of(sim.trace, p) for p in self._trainable(sim)])

    def _drop(self, sim: Simulation, fqn: str) -> None:
        """The optimizer itself sets `.grad` to None."""
        if fqn in self._grads:
            sim.free(self._grads.pop(fqn))


def check(request: Request) -> None:
    """One GPU has no other place for its tensors and nobody to share them with."""
    from . import DISTRIBUTED, MIXED

    if request.gpus != 1:
        raise CannotTell(
            f"--gpus {request.gpus} with --strategy single. Name how they share the work: {', '.join(DISTRIBUTED)}"
        )
    if request.precision in MIXED:
        raise CannotTell(
            f"--precision {request.precision} (16-bit parameters with fp32 masters) belongs to DeepSpeed and FSDP. "
            "On one GPU use bf16, or bf16-autocast"
        )
    if request.offload:
        raise CannotTell(
            f"--offload {'+'.join(request.offload)} with --strategy single. DeepSpeed moves tensors to the host: "
            "use --strategy zero2 or zero3"
        )


def make(request: Request, trace: StepTrace) -> Strategy:
    return SingleDevice()


def said(request: Request) -> list[str]:
    return []
