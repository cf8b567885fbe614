"""Stage 1 of a bf16 model whose gradients are accumulated in fp32: DeepSpeed's `BF16_Optimizer`, which is no ZeRO optimizer.

Source: deepspeed 0.19.8, deepspeed/runtime/bf16_optimizer.py; chosen by engine.py, `_do_optimizer_sanity_check`, when nothing
is offloaded.  With L and ps = L / N of `flat`, n elements of a parameter:

    parameters   2 * L, one flat tensor a group        masters   4 * ps        states   rule(ps), made by the first step
    gradients    4 * L in fp32, all of them, from the start; and those of autograd, 2 * P, from backward to the end of the step
    backward     at its end 4 * n of each gradient, to be added to the fp32 one
    reduction    at the boundary 2 * L, a copy in the communication's dtype; before it 4 * L flat where there are several groups
"""

from __future__ import annotations

from ...errors import CannotTell
from ..ledger import Component, Tier
from ..optimizers.rule import OptimizerTensor
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE, TensorSlot
from .base import Strategy
from .deepspeed_settings import DeepSpeedSettings
from .flat import REDUCED_AT_ONCE, FlatGroup, check_rank, flat_group, optimizer_groups
from .zero_host import FP32, Adam, play


class Bf16Optimizer(Strategy):
    """Ranks differ in nothing that is counted."""

    name = "zero1"

    def __init__(
        self, world_size: int, rank: int = 0, settings: DeepSpeedSettings | None = None, *, own_adam: bool = False
    ) -> None:
        check_rank(rank, world_size)
        self.world_size, self.rank = world_size, rank
        self.settings = settings or DeepSpeedSettings()
        self._adam = Adam(own_adam, self.settings)
        self._groups: list[FlatGroup] = []
        self._grads: dict[str, Block] = {}
        self._steps = 0

    def at_init(self, sim: Simulation) -> None:
        dtypes = {p.dtype for p in sim.trace.params if p.requires_grad}
        if dtypes != {"bfloat16"}:
            raise CannotTell(f"BF16_Optimizer with parameters in {', '.join(sorted(dtypes))} is not modelled. Use bf16-mixed")
        (self._e,) = {ITEMSIZE[dtype] for dtype in dtypes}
        originals = {p.fqn: sim.place(Component.PARAM, p.fqn, p.shape, p.dtype) for p in sim.trace.params}
        for slot in sim.trace.buffers:
            sim.place(Component.BUFFER, slot.fqn, slot.shape, slot.dtype)
        for params in optimizer_groups(sim.trace, self.settings.optimizer_groups):
            group = flat_group(params, self.world_size, self.rank)
            self._groups.append(group)
            if len(params) > 1 or group.length != group.numel:  # else the one tensor is the flat one
                pad = group.length - group.numel
                padding = sim.alloc(Component.TEMP, pad * self._e, what="padding") if pad else None
                sim.alloc(Component.PARAM, group.length * self._e, what="flat parameters")
                if padding is not None:
                    sim.free(padding)
                for param in params:
                    sim.free(originals[param.fqn])
            clone = sim.alloc(Component.TEMP, group.partition * self._e, what="clone of the partition")
            sim.alloc(Component.MASTER_WEIGHT, group.partition * FP32, what="fp32 partition")
            sim.free(clone)
            sim.alloc(Component.GRAD, group.length * FP32, what="fp32 gradients")
        play(sim, self._adam.rule(sim).step(self._tensors()).init, Tier.GPU, *self._names())

    def _tensors(self) -> list[OptimizerTensor]:
        return [OptimizerTensor((group.partition,), "float32", number) for number, group in enumerate(self._groups)]

    def _names(self) -> list[str]:
        return [f"fp32 partition of group {number}" for number in range(len(self._groups))]

    def holds_grad(self, sim: Simulation, param: TensorSlot) -> bool:
        """`clear_lp_grads` writes zeros between the micro steps."""
        return param.fqn in self._grads

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        if block is not None and param.fqn in self._grads:
            sim.free(block)
        elif block is not None:
            self._grads[param.fqn] = block

    def end_of_micro_step(self, sim: Simulation, micro_batch: int) -> None:
        """`update_hp_grads`; and at the boundary `buffered_allreduce_fallback` of the flat fp32 gradients."""
        for group in self._groups:
            for param in group.params:
                if param.fqn in self._grads:
                    sim.run_temporary(param.numel * FP32, "gradient in fp32")
        if micro_batch < sim.loop.grad_accum_steps - 1:
            return
        waiting: list[FlatGroup] = []
        for group in self._groups:
            waiting.append(group)
            if sum(g.length for g in waiting) > REDUCED_AT_ONCE:
                self._all_reduce(sim, waiting)
                waiting = []
        self._all_reduce(sim, waiting)

    def _all_reduce(self, sim: Simulation, groups: list[FlatGroup]) -> None:
        if not groups:
            return
        elements, comm = sum(group.length for group in groups), self.settings.communication_data_type or "bfloat16"
        made = []
        if len(groups) > 1:
            made.append(sim.alloc(Component.COMM_BUFFER, elements * FP32, what="flat copy for all-reduce"))
        if comm != "float32":
            what = "copy in the communication's dtype"
            made.append(sim.alloc(Component.COMM_BUFFER, elements * ITEMSIZE[comm], what=what))
        sim.enqueue("all_reduce", elements * ITEMSIZE[comm])
        for block in made:
            sim.free(block)

    def step(self, sim: Simulation) -> None:
        events = self._adam.rule(sim).step(self._tensors())
        play(sim, events.later if self._steps else events.first, Tier.GPU, *self._names())
        sim.enqueue("all_gather", sum(group.length for group in self._groups) * self._e)
        for block in self._grads.values():
            sim.free(block)
        self._grads.clear()
        self._steps += 1
