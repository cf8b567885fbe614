"""ZeRO stage 0: DeepSpeed's data parallelism without sharding, behind one of three optimizers.

Source: deepspeed 0.19.8, deepspeed/runtime/engine.py (`_do_optimizer_sanity_check`, `_configure_fp16_optimizer`,
`buffered_allreduce_fallback`) and deepspeed/runtime/fp16: fused_optimizer.py (`FP16_Optimizer`, behind FusedAdam) and
unfused_optimizer.py (`FP16_UnfusedOptimizer`, behind any other).  With P elements in all, e bytes of the model's dtype:

    parameters   e * P; 16-bit behind FusedAdam: one flat tensor a group
    masters      4 * P, 16-bit models only: one a parameter, or one flat tensor a group
    states       rule(P), made by a step of zero gradients at the start; fp32: by the first step
    gradients    e * P, from backward to the end of the step
    reduction    e * min(P, 500 million) flat at the boundary, and as much in the communication's dtype, if it is another one
    step         4 * P gradients in fp32: all at once beside those of e * P, or group by group in their place (FusedAdam)

`reduce_bucket_size` plays no role.  Left out: scalars.
"""

from __future__ import annotations

from ...errors import CannotTell, UserError
from ..ledger import Component, Tier
from ..optimizers.rule import OptimizerTensor, StepEvents
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE, TensorSlot
from .base import Strategy
from .deepspeed_settings import DeepSpeedSettings
from .flat import REDUCED_AT_ONCE, check_rank, optimizer_groups
from .zero_host import FP32, Adam, play


class Zero0(Strategy):
    """Every rank holds everything.  `own_adam`: FusedAdam steps."""

    name = "zero0"

    def __init__(
        self, world_size: int, rank: int = 0, settings: DeepSpeedSettings | None = None, *, own_adam: bool = False
    ) -> None:
        check_rank(rank, world_size)
        self.settings = settings or DeepSpeedSettings()
        self._own_adam = own_adam
        self._adam = Adam(own_adam, self.settings)
        self._groups: list[list[TensorSlot]] = []
        self._grads: dict[str, Block] = {}
        self._steps = 0

    @property
    def _is_fused(self) -> bool:
        return self._own_adam and self._e != FP32

    # -- initialisation ------------------------------------------------------------------------------------------------------

    def at_init(self, sim: Simulation) -> None:
        self._groups = optimizer_groups(sim.trace, self.settings.optimizer_groups)
        dtypes = {p.dtype for group in self._groups for p in group}
        if len(dtypes) != 1:
            raise UserError(
                f"{self.name}: parameters of {len(dtypes)} dtypes ({', '.join(sorted(dtypes))})",
                "DeepSpeed would cast them, which is not modelled: use bf16-mixed or fp32",
            )
        (self._dtype,) = dtypes
        self._e = ITEMSIZE[self._dtype]
        if (self.settings.grad_accum_dtype or self._dtype) != self._dtype:
            raise CannotTell(
                f"data_types.grad_accum_dtype {self.settings.grad_accum_dtype} with a {self._dtype} model: DeepSpeed refuses "
                "it without ZeRO. Leave it out, or take stage 1 or higher"
            )
        originals = {p.fqn: sim.place(Component.PARAM, p.fqn, p.shape, p.dtype) for p in sim.trace.params}
        for slot in sim.trace.buffers:
            sim.place(Component.BUFFER, slot.fqn, slot.shape, slot.dtype)
        if self._e == FP32:
            play(sim, self._events(sim).init, Tier.GPU, *self._names())
            return
        for group in self._groups:
            if self._is_fused:
                self._flatten(sim, group, originals)
            else:
                self._copy(sim, group)
        self._step_with_zeros(sim)

    def _flatten(self, sim: Simulation, group: list[TensorSlot], originals: dict[str, Block]) -> None:
        """`FP16_Optimizer.__init__`: clones, a flat tensor of them, and a flat master."""
        elements = sum(p.numel for p in group)
        clones = [sim.alloc(Component.TEMP, p.numel * self._e, p.fqn, "clone") for p in group]
        flat = sim.alloc(Component.PARAM, elements * self._e, what="flat parameters")
        for block in [*clones, *(originals[p.fqn] for p in group)]:
            sim.free(block)
        clone = sim.alloc(Component.TEMP, flat.nbytes, what="clone of the flat parameters")
        sim.alloc(Component.MASTER_WEIGHT, elements * FP32, what="flat fp32 parameters")
        sim.free(clone)

    def _copy(self, sim: Simulation, group: list[TensorSlot]) -> None:
        """`FP16_UnfusedOptimizer.__init__`."""
        for param in group:
            clone = sim.alloc(Component.TEMP, param.numel * self._e, param.fqn, "clone")
            sim.alloc(Component.MASTER_WEIGHT, param.numel * FP32, param.fqn, "fp32 parameter")
            sim.free(clone)

    def _step_with_zeros(self, sim: Simulation) -> None:
        """`initialize_optimizer_states`: a step with gradients of zero, so that the states exist."""
        params = [p for group in self._groups for p in group]
        zeros = []
        if self._is_fused:
            zeros = [sim.alloc(Component.GRAD, sum(p.numel for p in g) * FP32, what="zero gradient") for g in self._groups]
        else:
            zeros += [sim.alloc(Component.GRAD, p.numel * self._e, p.fqn, "zero gradient") for p in params]
            zeros += [sim.alloc(Component.GRAD, p.numel * FP32, p.fqn, "zero gradient") for p in params]
        self._run_optimizer(sim)
        for block in zeros:
            sim.free(block)

    def _events(self, sim: Simulation) -> StepEvents:
        if self._is_fused:
            tensors = [
                OptimizerTensor((sum(p.numel for p in group),), "float32", number) for number, group in enumerate(self._groups)
            ]
        else:
            tensors = [OptimizerTensor(p.shape, "float32", number) for number, group in enumerate(self._groups) for p in group]
        return self._adam.rule(sim).step(tensors)

    def _names(self) -> list[str]:
        return [p.fqn for group in self._groups for p in group]

    def _run_optimizer(self, sim: Simulation) -> None:
        events = self._events(sim)
        play(sim, events.later if self._steps else (*events.init, *events.first), Tier.GPU, *self._names())
        self._steps += 1

    # -- backward --------------------------------------------------------------------------------------------------------------

    def holds_grad(self, sim: Simulation, param: TensorSlot) -> bool:
        return param.fqn in self._grads

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        if block is not None and param.fqn in self._grads:
            sim.free(block)
        elif block is not None:
            self._grads[param.fqn] = block

    def end_of_micro_step(self, sim: Simulation, micro_batch: int) -> None:
        """At the boundary: `buffered_allreduce_fallback`, in the order of the model."""
        if micro_batch < sim.loop.grad_accum_steps - 1:
            return
        waiting: list[TensorSlot] = []
        elements = 0
        for param in (p for p in sim.trace.params if p.requires_grad):
            if param.fqn not in self._grads:
                self._grads[param.fqn] = sim.place(Component.GRAD, param.fqn, param.shape, param.dtype)
        for param in (p for p in sim.trace.params if p.requires_grad):
            waiting.append(param)
            elements += param.numel
            if elements > REDUCED_AT_ONCE:
                self._all_reduce(sim, waiting)
                waiting, elements = [], 0
        self._all_reduce(sim, waiting)

    def _all_reduce(self, sim: Simulation, params: list[TensorSlot]) -> None:
        if not params:
            return
        elements, comm = sum(p.numel for p in params), self.settings.communication_data_type or self._dtype
        made = []
        if len(params) > 1:
            made.append(sim.alloc(Component.COMM_BUFFER, elements * self._e, what="flat copy for all-reduce"))
        if comm != self._dtype:
            what = "copy in the communication's dtype"
            made.append(sim.alloc(Component.COMM_BUFFER, elements * ITEMSIZE[comm], what=what))
        sim.enqueue("all_reduce", elements * ITEMSIZE[comm])
        for block in made:
            sim.free(block)

    # -- the step ------------------------------------------------------------------------------------------------------------

    def step(self, sim: Simulation) -> None:
        made: list[Block] = []
        for group in self._groups:
            if self._is_fused:
                made.append(self._flat_gradient(sim, group))
            elif self._e != FP32:
                for param in group:
                    sim.run_temporary(param.numel * FP32, "gradient in fp32 for the norm")
                made += [sim.alloc(Component.GRAD, p.numel * FP32, p.fqn, "fp32 gradient") for p in group]
        self._run_optimizer(sim)
        for block in [*made, *self._grads.values()]:
            sim.free(block)
        self._grads.clear()

    def _flat_gradient(self, sim: Simulation, group: list[TensorSlot]) -> Block:
        """`FP16_Optimizer.step`: in fp32 one by one, then flat; those of the model go."""
        converted = [sim.alloc(Component.TEMP, p.numel * FP32, p.fqn, "gradient in fp32") for p in group]
        flat = sim.alloc(Component.GRAD, sum(p.numel for p in group) * FP32, what="flat fp32 gradients")
        for block in [*converted, *(self._grads.pop(p.fqn) for p in group if p.fqn in self._grads)]:
            sim.free(block)
        return flat
