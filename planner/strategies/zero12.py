"""ZeRO stages 1 and 2 as DeepSpeed runs them: sharded optimizer (1), and gradients reduced into their partition (2).

Source: deepspeed 0.19.8, deepspeed/runtime/zero/stage_1_and_2.py, class `DeepSpeedZeroOptimizer`; methods are named below.
Per optimizer group, with L and ps = L / N of `flat`, e / g bytes of the model's and the accumulation's dtype, R elements of the
bucket:

    parameters   e * L            one flat tensor, all parameters are views of it
    masters      4 * ps           also in fp32 training
    states       rule(ps, fp32)   made by the first step
    bucket       e * R (x2 with overlap_comm), from the first gradient of a backward to its end; stage 1 keeps it between
                 micro steps
    gradients    e * (all elements of the parameters that touch the partition), g = e: backward to step
                 4 * ps, 16-bit model and g = 4 (stage 2): backward to step
    step         8 * (largest kept slice) for the norm; then g * ps flat (one slice: none) and 4 * ps, group by group

Left out: offload, `round_robin_gradients`, `parameter_alignment`, `contiguous_gradients: false`, `reduce_scatter: false`, and
scalars (norms, overflow flags, loss scales: under 200 bytes).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ...errors import UserError
from ..ledger import DEFAULT_STREAM, Component
from ..optimizers.rule import OptimizerTensor
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE, TensorSlot
from .base import RankClass, Strategy
from .flat import FlatGroup, flat_group, optimizer_groups

_FP32 = 4  # bytes; masters and their gradients
_FP64 = 8  # bytes; norms are taken in fp64 (deepspeed/runtime/zero/utils.py, `get_norm_dtype`)
_REDUCE_STREAM = 1  # `reduction_stream`, with overlap_comm


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """The keys of DeepSpeed's JSON that decide memory, with its defaults (deepspeed/runtime/zero/config.py)."""

    reduce_bucket_size: int = 500_000_000
    """Elements; a gradient that is larger goes alone."""
    overlap_comm: bool = False
    """Reduce on a stream of its own, with two buckets."""
    grad_accum_dtype: str | None = None
    """float32 | bfloat16 | float16 (`data_types.grad_accum_dtype`); None: the model's."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Names of the parameters of each optimizer group; (): one group of all."""


@dataclass
class _Bucket:
    """`IPGBucket`: gradients that wait for their reduction."""

    buffers: list[Block] = field(default_factory=list)
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (group, index in it)
    elements: int = 0
    oversized: Block | None = None  # the gradient that is larger than the bucket


class _Zero12(Strategy):
    """What both stages share; `partition_gradients` tells them apart, as upstream."""

    partition_gradients: bool

    def __init__(self, world_size: int, rank: int = 0, options: ZeroOptions | None = None) -> None:
        if not 0 <= rank < world_size:
            raise UserError(f"rank {rank}: expected 0 to {world_size - 1}", "Ranks count from 0")
        self.world_size = world_size
        self.rank = rank
        self.options = options or ZeroOptions()
        self._groups: list[FlatGroup] = []
        self._place: dict[str, tuple[int, int]] = {}  # fqn -> (group, index in it)
        self._bucket = _Bucket()
        self._grads: dict[str, Block] = {}  # `param.grad` where it is a tensor of its own
        self._built: Block | None = None  # `grads_in_partition` of this backward
        self._kept: Block | None = None  # the one that `averaged_gradients` and `all_grad_tensors` hold views of
        self._zeros: dict[int, list[Block]] = {}  # of each group, for parameters without gradient
        self._lingering: list[Block] = []  # oversized gradients that `param.grad` still holds
        self._compact: dict[int, Block] = {}  # `flat_partition` of each group, in fp32
        self._pads: dict[int, Block] = {}
        self._steps = 0
        self._micro_batch = 0

    # -- who is who ------------------------------------------------------------------------------------------------------

    def rank_classes(self, world_size: int) -> list[RankClass]:
        """Partitions straddle parameters differently on every rank: each is a class of its own."""
        return [RankClass(f"rank {rank}", rank, 1) for rank in range(world_size)]

    def _itemsize(self) -> int:
        return ITEMSIZE[self._dtype]

    def _accum_bytes(self) -> int:
        return ITEMSIZE[self.options.grad_accum_dtype or self._dtype]

    @property
    def _is_compact(self) -> bool:
        """`_use_compact_grad_partition_buffer`: a 16-bit model whose gradients are accumulated in fp32."""
        return self._accum_bytes() == _FP32 != self._itemsize()

    @property
    def _stream(self) -> int:
        return _REDUCE_STREAM if self.options.overlap_comm else DEFAULT_STREAM

    # -- initialisation: `__init__`, `initialize_optimizer_states` -------------------------------------------------------

    def at_init(self, sim: Simulation) -> None:
        grouped = optimizer_groups(sim.trace, self.options.groups)
        dtypes = {p.dtype for group in grouped for p in group}
        if len(dtypes) != 1:
            raise UserError(
                f"{self.name}: parameters of {len(dtypes)} dtypes ({', '.join(sorted(dtypes))}) cannot be flattened together",
                "DeepSpeed casts the whole model: choose precision bf16, fp16 or fp32",
            )
        (self._dtype,) = dtypes
        if self._is_compact and not self.partition_gradients:
            raise UserError(
                f"{self.name}: grad_accum_dtype float32 with a {self._dtype} model is another optimizer, not modelled",
                "Take stage 2, or leave grad_accum_dtype out",
            )
        originals: dict[str, Block] = {}
        for slot in sim.trace.params:
            originals[slot.fqn] = sim.place(Component.PARAM, slot.fqn, slot.shape, slot.dtype)
        for slot in sim.trace.buffers:
            sim.place(Component.BUFFER, slot.fqn, slot.shape, slot.dtype)
        for number, params in enumerate(grouped):
            group = flat_group(params, self.world_size, self.rank)
            self._groups.append(group)
            self._place |= {p.fqn: (number, index) for index, p in enumerate(params)}
            self._flatten(sim, group, originals)
            clone = sim.alloc(Component.TEMP, group.partition * self._itemsize(), what="clone of the partition")
            if self._itemsize() == _FP32:  # `.to(float32)` changes nothing: the clone is the master
                sim.free(clone)
            sim.alloc(Component.MASTER_WEIGHT, group.partition * _FP32, what=f"fp32 partition of group {number}")
            if self._itemsize() != _FP32:
                sim.free(clone)
        zeros = [sim.alloc(Component.GRAD, g.partition * _FP32, what="zero gradient") for g in self._groups]
        for block in zeros:  # only to create Adagrad's state
            sim.free(block)
        for number, group in enumerate(self._groups):
            rule = sim.optimizer.step([OptimizerTensor((group.partition,), "float32")])
            sim.run_optimizer(rule.init, [f"fp32 partition of group {number}"])

    def _flatten(self, sim: Simulation, group: FlatGroup, originals: dict[str, Block]) -> None:
        if len(group.params) == 1 and group.length == group.numel:
            return  # one tensor without padding is its own flat tensor
        e = self._itemsize()
        pad = group.length - group.numel
        padding = sim.alloc(Component.TEMP, pad * e, what="padding") if pad else None
        sim.alloc(Component.PARAM, group.length * e, what="flat parameters")
        if padding is not None:
            sim.free(padding)
        for param in group.params:
            sim.free(originals[param.fqn])

    # -- backward: `process_gradients`, `reduce_independent_p_g_buckets_and_remove_grads` ---------------------------------

    def holds_grad(self, sim: Simulation, param: TensorSlot) -> bool:
        return param.fqn in self._grads

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        if block is not None:
            if param.fqn in self._grads:  # stage 1, a later micro step: `.grad += new`
                sim.free(block)
            else:
                self._grads[param.fqn] = block
        self._set_up_bucket(sim)
        at_boundary = self._micro_batch == sim.loop.grad_accum_steps - 1
        if self.partition_gradients or (self.options.overlap_comm and at_boundary):
            self._into_bucket(sim, param)

    def _set_up_bucket(self, sim: Simulation) -> None:
        if not self._bucket.buffers:
            nbytes = self.options.reduce_bucket_size * self._itemsize()
            for _ in range(2 if self.options.overlap_comm else 1):
                self._bucket.buffers.append(sim.alloc(Component.COMM_BUFFER, nbytes, what="reduce bucket"))

    def _into_bucket(self, sim: Simulation, param: TensorSlot) -> None:
        bucket, limit = self._bucket, self.options.reduce_bucket_size
        if bucket.elements + param.numel > limit:
            self._reduce(sim)
        grad = self._grads.pop(param.fqn)
        if param.numel > limit:
            bucket.oversized = grad
        else:  # copied into the bucket; `param.grad` becomes a view of it
            sim.free(grad)
        bucket.elements += param.numel
        bucket.waiting.append(self._place[param.fqn])

    def _reduce(self, sim: Simulation) -> None:
        """`reduce_ipg_grads`: average, then keep what belongs to this rank."""
        bucket = self._bucket
        pending: deque[tuple[int, int | None]] = deque()  # slices of one all-reduce: elements, and the group that keeps it
        size = 0
        for elements, keeper in self._slices(sim):
            pending.append((elements, keeper))
            size += elements
            if size > self.options.reduce_bucket_size:
                self._all_reduce(sim, pending)
                size = 0
        self._all_reduce(sim, pending)
        if not self._is_compact and self._built is None and any(self._touches(*where) for where in bucket.waiting):
            total = sum(p.numel for group in self._groups for p, _ in group.kept())
            self._built = sim.alloc(
                Component.GRAD, total * self._itemsize(), what="gradients of the partition", stream=self._stream
            )
        if bucket.oversized is not None:
            (where,) = bucket.waiting
            replaced = self._touches(*where) and not self._is_compact  # `param.grad` is now a view of what is kept
            cleared = self.partition_gradients and not self._touches(*where)
            if replaced or cleared:
                sim.free(bucket.oversized)
            else:
                self._lingering.append(bucket.oversized)
        bucket.oversized = None
        bucket.waiting.clear()
        bucket.elements = 0

    def _touches(self, number: int, index: int) -> bool:
        return any(owner == self.rank for owner, _ in self._groups[number].partitions_of(index))

    def _slices(self, sim: Simulation) -> list[tuple[int, int | None]]:
        """`average_tensor`: the bucket cut by owner; neighbours of one owner are merged unless they go into fp32."""
        found: list[tuple[int, int | None]] = []
        last_owner = -1
        for number, index in self._bucket.waiting:
            for owner, elements in self._groups[number].partitions_of(index):
                keeper = number if self._is_compact and owner == self.rank else None
                if keeper is not None and number not in self._compact:
                    self._compact[number] = sim.alloc(
                        Component.GRAD, self._groups[number].partition * _FP32, what="fp32 gradients", stream=self._stream
                    )
                if keeper is None and owner == last_owner:
                    found[-1] = (found[-1][0] + elements, None)
                else:
                    found.append((elements, keeper))
                last_owner = owner
        return found

    def _all_reduce(self, sim: Simulation, slices: deque[tuple[int, int | None]]) -> None:
        """`allreduce_and_copy_with_multiple_ranks`: one slice is reduced in place, several in a flat copy."""
        if not slices:
            return
        nbytes = sum(elements for elements, _ in slices) * self._itemsize()
        flat = None
        if len(slices) > 1:
            flat = sim.alloc(Component.COMM_BUFFER, nbytes, what="flat copy for all-reduce", stream=self._stream)
        sim.enqueue("all_reduce", nbytes, self._stream)
        for elements, keeper in slices:
            if keeper is not None:
                upcast = sim.alloc(Component.TEMP, elements * _FP32, what="gradient in fp32", stream=self._stream)
                sim.free(upcast)
        if flat is not None:
            sim.free(flat)
        slices.clear()

    # -- end of a backward: `reduce_gradients`, `independent_gradient_partition_epilogue` ---------------------------------

    def end_of_micro_step(self, sim: Simulation, micro_batch: int) -> None:
        at_boundary = micro_batch == sim.loop.grad_accum_steps - 1
        self._micro_batch = 0 if at_boundary else micro_batch + 1
        if not self.partition_gradients:
            if not at_boundary:
                return  # gradients accumulate in `.grad`; the bucket stays
            if not self.options.overlap_comm:
                for group in self._groups:
                    for param in group.params:
                        if param.fqn in self._grads:
                            self._into_bucket(sim, param)
        self._reduce(sim)
        new, self._built = self._built, None
        if self._kept is None and not self._zeros:
            self._kept = new
            if not self._is_compact:
                self._zeros = self._without_gradient(sim)
        elif new is not None:  # added to what is there
            sim.free(new)
        if at_boundary:
            for number, group in enumerate(self._groups):
                if self._is_compact:
                    if number not in self._compact:
                        self._compact[number] = sim.alloc(Component.GRAD, group.partition * _FP32, what="fp32 gradients")
                elif group.padding:
                    self._pads[number] = sim.alloc(Component.GRAD, group.padding * self._itemsize(), what="padding")
        for block in [*self._bucket.buffers, *self._lingering]:
            sim.free(block)
        self._bucket.buffers.clear()
        self._lingering.clear()

    def _without_gradient(self, sim: Simulation) -> dict[int, list[Block]]:
        """`get_all_grad_tensors`: zeros for a parameter that the loss did not reach."""
        reached = {sim.trace.params[i].fqn for i in sim.trace.params_with_grad}
        return {
            number: [
                sim.place(Component.GRAD, param.fqn, param.shape, param.dtype)
                for param, _ in group.kept()
                if param.fqn not in reached
            ]
            for number, group in enumerate(self._groups)
        }

    # -- the step: `step`, `get_grad_norm_direct` --------------------------------------------------------------------------

    def step(self, sim: Simulation) -> None:
        for group in self._groups:
            for _, inside in group.kept():
                sim.run_temporary(inside * _FP64, "gradient in fp64 for the norm")
        for number, group in enumerate(self._groups):
            self._step_group(sim, number, group)
        sim.enqueue("all_gather", sum(g.length for g in self._groups) * self._itemsize())
        self._steps += 1

    def _step_group(self, sim: Simulation, number: int, group: FlatGroup) -> None:
        last = number == len(self._groups) - 1
        pad = self._pads.pop(number, None)
        own: list[Block] = []  # of this step, until it is over
        if self._is_compact:
            own.append(self._compact.pop(number))
        else:
            pieces = len(group.kept()) + bool(group.padding)
            flat = None
            if pieces > 1:
                flat = sim.alloc(Component.GRAD, group.partition * self._itemsize(), what="flat gradients")
            if self._itemsize() != _FP32:
                own.append(sim.alloc(Component.GRAD, group.partition * _FP32, what="fp32 gradients"))
                if flat is not None:
                    sim.free(flat)
            elif flat is not None:
                own.append(flat)
            # one fp32 piece is stepped where it lies: it goes after the step
            alias = pieces == 1 and self._itemsize() == _FP32
            going = self._zeros.pop(number, [])
            if pad is not None:
                going.append(pad)
            if last and self._kept is not None:
                going.append(self._kept)
                self._kept = None
            if alias:
                own += going
            else:
                for block in going:
                    sim.free(block)
        rule = sim.optimizer.step([OptimizerTensor((group.partition,), "float32")])
        sim.run_optimizer(rule.later if self._steps else rule.first, [f"fp32 partition of group {number}"])
        for block in own:
            sim.free(block)


class Zero1(_Zero12):
    """Stage 1: gradients are whole until the boundary; the optimizer is sharded."""

    name = "zero1"
    partition_gradients = False


class Zero2(_Zero12):
    """Stage 2: every backward reduces its gradients into the partitions."""

    name = "zero2"
    partition_gradients = True
