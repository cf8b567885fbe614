"""ZeRO stage 3 as DeepSpeed runs it: parameters, gradients and states are partitioned; modules gather what they use.

Source: deepspeed 0.19.8, deepspeed/runtime/zero: stage3.py (`DeepSpeedZeroOptimizer_Stage3`) and partition_parameters.py
(partitions); runtime/comm/coalesced_collectives.py (reduction).  Gathers are in `zero3_gather`.  With c(n) = ceil(n / N)
elements of a parameter on each rank, S the sum of c over a sub-group, e / g bytes of the model's and the accumulation's dtype,
R elements of the bucket:

    partitions   e * sum c(n)           masters  4 * sum c(n)          gradients  g * sum c(n), from the start
    states       rule(S, fp32) of each sub-group, made by the first step
    bucket       e * R, one, from the start; a gradient above R waits outside of it
    reduction    e * sum c(n) * N of the bucket's gradients (none for a single one that N divides); g != e: g * sum c(n)
    persistent   e * c(n) * N of every parameter of at most `stage3_param_persistence_threshold` elements, from the end of
                 the first step on, but not within a step
    step         8 * largest c(n) for the norm; then g * S flat (one parameter: none) and 4 * S, sub-group by sub-group
    recompute    the gathered weights of the recomputed block once more: the checkpoint saves views of them

Known limits: a module's biases are taken as saved by its recompute, also where its op does not save them (GPT-2's Conv1D).

Left out: offload, hpZ, quantised gathers, leaf modules, `zero.Init` (the whole model is on the device first), scalars.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import UserError
from ..ledger import DEFAULT_STREAM, Component, Tier
from ..optimizers.rule import OptimizerTensor
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE, Pass, TensorSlot
from .base import Strategy
from .flat import optimizer_groups
from .zero3_gather import GatherKnobs, ParamCoordinator
from .zero3_hooks import ModuleUse, module_use

_FP32 = 4  # bytes; masters and their gradients
_FP64 = 8  # bytes; norms are taken in fp64 (deepspeed/runtime/zero/utils.py, `get_norm_dtype`)
_REDUCE_STREAM = 1  # `reduce_and_partition_stream`, with overlap_comm


@dataclass(frozen=True, kw_only=True)
class Zero3Options:
    """The keys of DeepSpeed's JSON that decide memory, with DeepSpeed's defaults (deepspeed/runtime/zero/config.py)."""

    reduce_bucket_size: int = 500_000_000
    """Elements; a gradient that is larger is reduced outside the bucket."""
    overlap_comm: bool = True
    """Gather and reduce on streams of their own."""
    grad_accum_dtype: str | None = None
    """float32 | bfloat16 | float16 (`data_types.grad_accum_dtype`); None: the model's."""
    sub_group_size: int = 1_000_000_000
    """Elements of this rank's partitions that are stepped at once."""
    stage3_prefetch_bucket_size: int = 50_000_000
    """Elements gathered ahead after each module call; 0 disables."""
    stage3_max_live_parameters: int = 1_000_000_000
    """Elements above which nothing is gathered ahead."""
    stage3_max_reuse_distance: int = 1_000_000_000
    """Elements: a parameter that is used again within them is not released."""
    stage3_param_persistence_threshold: int = 100_000
    """Elements; smaller parameters stay gathered."""
    stage3_model_persistence_threshold: int = sys.maxsize
    """Elements of all persistent parameters together."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Names of the parameters of each optimizer group; (): one group of all."""


class Zero3(Strategy):
    """Stage 3.  Every rank's sizes are equal but for reductions' padding; `rank` decides nothing but that."""

    name = "zero3"

    def __init__(self, world_size: int, rank: int = 0, options: Zero3Options | None = None) -> None:
        if not 0 <= rank < world_size:
            raise UserError(f"rank {rank}: expected 0 to {world_size - 1}", "Ranks count from 0")
        self.world_size = world_size
        self.rank = rank
        self.options = options or Zero3Options()
        self._sub_groups: list[list[TensorSlot]] = []
        self._waiting: list[TensorSlot] = []
        self._elements = 0
        self._oversized: list[Block] = []
        self._use: ModuleUse | None = None
        self._coordinator: ParamCoordinator | None = None
        self._recomputed = 0  # modules left in recomputes of this micro step
        self._steps = 0

    def _part(self, param: TensorSlot) -> int:
        """c(n): elements of one rank's partition (`_partition_param`)."""
        return -(-param.numel // self.world_size)

    @property
    def _stream(self) -> int:
        return _REDUCE_STREAM if self.options.overlap_comm else DEFAULT_STREAM

    # -- initialisation ----------------------------------------------------------------------------------------------------

    def at_init(self, sim: Simulation) -> None:
        options, trace = self.options, sim.trace
        grouped = optimizer_groups(trace, options.groups)
        dtypes = {p.dtype for p in trace.params}
        if len(dtypes) != 1:
            raise UserError(
                f"{self.name}: parameters of {len(dtypes)} dtypes ({', '.join(sorted(dtypes))})",
                "DeepSpeed casts the whole model: choose precision bf16, fp16 or fp32",
            )
        (self._dtype,) = dtypes
        self._e = ITEMSIZE[self._dtype]
        self._g = ITEMSIZE[options.grad_accum_dtype or self._dtype]
        whole = {p.fqn: sim.place(Component.PARAM, p.fqn, p.shape, p.dtype) for p in trace.params}
        for slot in trace.buffers:
            sim.place(Component.BUFFER, slot.fqn, slot.shape, slot.dtype)
        parts: dict[str, Block] = {}
        for param in trace.params:
            parts[param.fqn] = sim.alloc(Component.PARAM, self._part(param) * self._e, param.fqn, "partition")
            sim.free(whole[param.fqn])
        for group in grouped:
            self._sub_groups += _cut(group, [self._part(p) for p in group], options.sub_group_size)
        self._defragment(sim, parts)
        self._masters(sim)
        largest = max(self._size(sub_group) for sub_group in self._sub_groups)
        sim.run_temporary(largest * _FP32, "zero gradient")
        for sub_group in self._sub_groups:
            rule = sim.optimizer.step([OptimizerTensor((self._size(sub_group),), "float32")])
            sim.run_optimizer(rule.init, ["fp32 partition"])
        sim.alloc(Component.COMM_BUFFER, options.reduce_bucket_size * self._e, what="reduce bucket")
        total = sum(self._size(sub_group) for sub_group in self._sub_groups)
        sim.alloc(Component.GRAD, total * self._g, what="gradient partitions")
        if self.world_size > 1:  # a parameter must be whole while its hook is made
            for sub_group in self._sub_groups:
                for param in sub_group:
                    sim.run_temporary(self._part(param) * self.world_size * self._e, "gathered for its hook")
        self._use = module_use(trace)
        self._coordinator = ParamCoordinator(
            trace.params,
            self._use.params,
            self.world_size,
            GatherKnobs(
                prefetch=options.stage3_prefetch_bucket_size,
                max_live=options.stage3_max_live_parameters,
                reuse_distance=options.stage3_max_reuse_distance,
                persistence=options.stage3_param_persistence_threshold,
                model_persistence=options.stage3_model_persistence_threshold,
                overlap=options.overlap_comm,
            ),
        )

    def _size(self, sub_group: list[TensorSlot]) -> int:
        return sum(self._part(p) for p in sub_group)

    def _defragment(self, sim: Simulation, parts: dict[str, Block]) -> None:
        """`defragment`: trainable partitions move through the host into one flat buffer."""
        names = [p.fqn for sub_group in self._sub_groups for p in sub_group]
        nbytes = sum(parts[name].nbytes for name in names)
        if sim.target == "cpu":  # the host's buffer is the device's
            sim.alloc(Component.PARAM, nbytes, what="flat partitions")
            for name in names:
                sim.free(parts[name])
            return
        host = sim.alloc(Component.OFFLOAD_BUFFER, nbytes, what="defragmentation", tier=Tier.HOST_PAGEABLE)
        for name in names:
            sim.free(parts[name])
        sim.alloc(Component.PARAM, nbytes, what="flat partitions")
        sim.free(host)

    def _masters(self, sim: Simulation) -> None:
        """`_create_fp32_partitions`: a converted copy and its clone; the copy lives until the next one exists."""
        converted: Block | None = None
        for sub_group in self._sub_groups:
            nbytes = self._size(sub_group) * _FP32
            if self._e != _FP32:
                previous, converted = converted, sim.alloc(Component.TEMP, nbytes, what="converted to fp32")
                if previous is not None:
                    sim.free(previous)
            sim.alloc(Component.MASTER_WEIGHT, nbytes, what="fp32 partition")
        if converted is not None:
            sim.free(converted)

    # -- modules -----------------------------------------------------------------------------------------------------------

    def before_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        assert self._coordinator is not None
        assert self._use is not None
        if kind is Pass.FORWARD and sim.trace.modules[module].fqn == "":
            self._coordinator.reset_step(sim)
            self._recomputed = 0
        if kind is Pass.BACKWARD and not self._use.has_output_grad[module]:
            return  # no output carries a gradient: its hook is not called
        self._coordinator.fetch(sim, module, forward=kind is not Pass.BACKWARD)

    def after_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        assert self._coordinator is not None
        assert self._use is not None
        if kind is Pass.RECOMPUTE:
            self._recomputed += 1
            if not self._use.cut_short[self._recomputed - 1]:
                self._coordinator.release_recomputed(sim, module)
            return
        if kind is Pass.BACKWARD:
            self._coordinator.backward_ran(sim, module)
        if kind is Pass.BACKWARD and not (self._use.has_input_grad[module] and self._use.has_output_grad[module]):
            return  # no input carries a gradient: released at the end of backward
        self._coordinator.release(sim, module, forward=kind is not Pass.BACKWARD)

    # -- gradients: `reduce_independent_p_g_buckets_and_remove_grads` -------------------------------------------------------

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        assert block is not None  # `.grad` never outlives its reduction
        assert self._coordinator is not None
        self._coordinator.grad_made(sim, param)
        limit = self.options.reduce_bucket_size
        if self._elements and self._elements + param.numel > limit:
            self._reduce(sim)
        if param.numel <= limit:
            sim.free(block)  # copied into the bucket
        else:
            self._oversized.append(block)
        self._waiting.append(param)
        self._elements += param.numel

    def _reduce(self, sim: Simulation) -> None:
        """`__avg_scatter_grads`, `reduce_scatter_coalesced`, `partition_grads`."""
        if not self._waiting:
            return
        parts = [self._part(p) for p in self._waiting]
        flat = None
        nbytes = sum(parts) * self.world_size * self._e
        if len(parts) > 1 or self._waiting[0].numel % self.world_size:
            pads = [sim.alloc(Component.TEMP, pad * self._e, what="padding", stream=self._stream) for pad in self._paddings()]
            flat = sim.alloc(Component.COMM_BUFFER, nbytes, what="flat copy for reduce-scatter", stream=self._stream)
            for pad in pads:
                sim.free(pad)
        sim.enqueue("reduce_scatter", nbytes, self._stream)
        converted = []
        if self._g != self._e:
            converted = [
                sim.alloc(Component.TEMP, inside * self._g, p.fqn, "gradient converted", stream=self._stream)
                for p in self._waiting
                if (inside := min(self._part(p), max(0, p.numel - self.rank * self._part(p))))
            ]
            if flat is not None:
                sim.free(flat)
                flat = None
        for block in [*converted, *self._oversized, *([flat] if flat is not None else [])]:
            sim.free(block)
        self._oversized.clear()
        self._waiting.clear()
        self._elements = 0

    def _paddings(self) -> Iterator[int]:
        """Elements missing in the last ranks' chunks, in the order of the interleaved copy."""
        for rank in range(self.world_size):
            for param in self._waiting:
                part = self._part(param)
                missing = part - min(part, max(0, param.numel - rank * part))
                if missing:
                    yield missing

    def end_of_micro_step(self, sim: Simulation, micro_batch: int) -> None:
        assert self._coordinator is not None
        self._reduce(sim)
        self._coordinator.end_of_backward(sim)

    # -- the step ------------------------------------------------------------------------------------------------------------

    def step(self, sim: Simulation) -> None:
        assert self._coordinator is not None
        self._coordinator.release_all(sim)
        for sub_group in self._sub_groups:
            for param in sub_group:
                sim.run_temporary(self._part(param) * _FP64, "gradient in fp64 for the norm")
        for sub_group in self._sub_groups:
            size = self._size(sub_group)
            gradient = None
            if len(sub_group) > 1:
                gradient = sim.alloc(Component.GRAD, size * self._g, what="flat gradients")
            if self._g != _FP32:
                flat, gradient = gradient, sim.alloc(Component.GRAD, size * _FP32, what="fp32 gradients")
                if flat is not None:
                    sim.free(flat)
            rule = sim.optimizer.step([OptimizerTensor((size,), "float32")])
            sim.run_optimizer(rule.later if self._steps else rule.first, ["fp32 partition"])
            if gradient is not None:
                sim.free(gradient)
        self._coordinator.gather_persistent(sim)
        self._steps += 1


def _cut(params: list[TensorSlot], sizes: list[int], limit: int) -> list[list[TensorSlot]]:
    """`_create_fp16_sub_groups`: a sub-group is closed by the parameter that brings it to `limit` elements."""
    if limit >= sum(sizes):
        return [params]
    found: list[list[TensorSlot]] = []
    open_group: list[TensorSlot] = []
    elements = 0
    for param, size in zip(params, sizes, strict=True):
        open_group.append(param)
        elements += size
        if elements >= limit or param is params[-1]:
            found.append(open_group)
            open_group, elements = [], 0
    return found
