"""Gradient release, the optimizer inside backward: a parameter is stepped as soon as its gradient is there, and that goes.

What runs is a hook on each parameter: an optimizer of its own steps that one tensor, and `.grad` becomes None.  So one gradient
lives at a time, with the temporaries of its step beside it:

    peak = parameters + states + the largest (gradient + temporaries of its step)

and what is left of the activations by then.  States are made inside the first backward.  A *tied* embedding is no different to
its hook, but autograd keeps the head's share of the gradient until the embedding's is there, and adds the two out of place:
three gradients of that size, with release or without.

LOMO hooks the gradient *tensor*, before it is accumulated: each hook steps the parameter before, and the last one is stepped
when backward has returned.  So two gradients live at a time.

Sources: `Tensor.register_post_accumulate_grad_hook` (torch, tutorial "optimizer step in backward"); flashoptim/optimizers.py
0.1.4, `enable_gradient_release`, `_register_plain_hooks`; transformers/trainer_optimizer.py 5.24, `_setup_low_rank_optimizer`
(layer-wise); lomo_optim/lomo.py 0.1.1, `fuse_update`, `fused_backward`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import CannotTell, UserError
from ..ledger import Component
from ..optimizers.rule import OptimizerTensor, StepEvents
from ..simulate import Block, Simulation
from ..trace.steptrace import TensorSlot
from .base import Strategy

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.steptrace import StepTrace


class GradientRelease(Strategy):
    """One GPU; every parameter has an optimizer of its own, which steps inside backward."""

    name = "release"

    def __init__(self) -> None:
        self._stepped: set[str] = set()
        self._waiting: tuple[TensorSlot, Block] | None = None  # LOMO's: its step comes with the next hook

    def at_init(self, sim: Simulation) -> None:
        for slot in sim.trace.params:
            sim.place(Component.PARAM, slot.fqn, slot.shape, slot.dtype)
        for slot in sim.trace.buffers:
            sim.place(Component.BUFFER, slot.fqn, slot.shape, slot.dtype)
        if sim.trains:
            for index in sorted(sim.trace.params_with_grad):
                slot = sim.trace.params[index]
                sim.run_optimizer(self._rule(sim, slot).init, [slot.fqn])

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        if block is None:
            raise CannotTell(
                f"--strategy release: the gradient of {param.fqn} comes in several parts, and a hook would step after each. "
                "Use --strategy single"
            )
        if not sim.optimizer.in_backward:
            self._release(sim, param, block)
            return
        self._release_waiting(sim)
        self._waiting = (param, block)

    def end_of_micro_step(self, sim: Simulation, micro_batch: int) -> None:
        self._release_waiting(sim)

    def _release_waiting(self, sim: Simulation) -> None:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._release(sim, *waiting)

    def _release(self, sim: Simulation, param: TensorSlot, block: Block) -> None:
        rule = self._rule(sim, param)
        events = rule.later if param.fqn in self._stepped else rule.first
        self._stepped.add(param.fqn)
        left = [block]
        sim.run_optimizer(events, [param.fqn], drop_grad=lambda _: sim.free(left.pop()))
        for gradient in left:  # the rule does not drop it: the hook does, after the step
            sim.free(gradient)

    def _rule(self, sim: Simulation, param: TensorSlot) -> StepEvents:
        return sim.optimizer.step([OptimizerTensor.of(sim.trace, param)])


def check(request: Request) -> None:
    """A released gradient cannot be accumulated, clipped with the others, unscaled later, or reduced by DDP."""
    from ..optimizers.catalogue import optimizer_rule
    from . import MIXED

    if request.loop.grad_accum_steps > 1:
        raise UserError(
            f"--strategy release with --grad-accum {request.loop.grad_accum_steps}: each gradient is gone before the next",
            "Leave --grad-accum out, or use --strategy single",
        )
    if request.loop.clip_grad_norm:
        raise UserError(
            "--strategy release with --clip-grad-norm: the norm of all gradients is known when the first are gone",
            "Leave --clip-grad-norm out, or use --strategy single",
        )
    if request.precision == "fp16-autocast":
        raise UserError(
            "--strategy release with --precision fp16-autocast: a GradScaler unscales gradients that are gone by then",
            "Use --precision bf16-autocast",
        )
    if request.precision in MIXED:
        raise CannotTell(f"--precision {request.precision} with --strategy release is not modelled. Use bf16 or fp32")
    if request.offload:
        raise CannotTell(f"--offload {'+'.join(request.offload)} with --strategy release is not modelled. Leave it out")
    if request.gpus != 1:
        raise CannotTell(
            f"--gpus {request.gpus} with --strategy release is not modelled yet (DDP and FSDP1 refuse it). Ask for one"
        )
    if request.mode == "train" and not optimizer_rule(request.optimizer, request.optimizer_impl).steps_one:
        raise UserError(
            f"--strategy release with --optimizer {request.optimizer}: it needs all gradients at once",
            "Use --strategy single",
        )


def make(request: Request, trace: StepTrace) -> Strategy:
    return GradientRelease()


def said(request: Request) -> list[str]:
    return ["every parameter is stepped inside backward by an optimizer of its own, and its gradient dropped"]
