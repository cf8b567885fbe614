"""ZeRO stages 1 and 2 as DeepSpeed runs them: sharded optimizer (1), and gradients reduced into their partition (2).

Source: deepspeed 0.19.8, deepspeed/runtime/zero/stage_1_and_2.py, class `DeepSpeedZeroOptimizer`; methods are named below.
Per optimizer group, with L and ps = L / N of `flat`, e / g bytes of the model's and the accumulation's dtype, R elements of the
bucket:

    parameters   e * L            one flat tensor, all parameters are views of it; while it is made they are there twice, or on
                 the host where the GPU has no room for that
    masters      4 * ps           also in fp32 training
    states       rule(ps, fp32)   made by the first step
    bucket       e * R (x2 with overlap_comm), from the first gradient of a backward to its end; stage 1 keeps it between
                 micro steps
    gradients    e * (all elements of the parameters that touch the partition), g = e: backward to step
                 4 * ps, 16-bit model and g = 4 (stage 2): backward to step
    step         8 * (largest kept slice) for the norm; then g * ps flat (one slice: none) and 4 * ps, group by group

Stage 1 of a 16-bit model with g = 4 accumulates in `grad_accum`: 4 * P beside the bucket, which is of 4 * R bytes then (with
bf16 and nothing offloaded it is another optimizer, `zero_bf16`).  A communication dtype other than the bucket's costs a copy of
what is reduced.  Offload is in `zero12_offload`.

Muon is in `zero_muon`.

Left out: scalars (norms, overflow flags, loss scales: under 200 bytes).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..ledger import Component, Tier
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE, TensorSlot
from . import zero_muon
from .deepspeed_settings import DeepSpeedSettings
from .flat import FlatGroup
from .zero12_layout import Layout
from .zero12_offload import HostOptimizer
from .zero_host import FP32, FP64, play
from .zero_muon_host import HostMuon


@dataclass
class _Bucket:
    """`IPGBucket`: gradients that wait for their reduction."""

    buffers: list[Block] = field(default_factory=list)
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (group, index in it)
    elements: int = 0
    oversized: Block | None = None  # the gradient that is larger than the bucket


class _Zero12(Layout):
    """What both stages do with gradients, and their step."""

    def __init__(
        self,
        world_size: int,
        rank: int = 0,
        settings: DeepSpeedSettings | None = None,
        *,
        own_adam: bool = False,
        total_bytes: int | None = None,
    ) -> None:
        super().__init__(world_size, rank, settings, own_adam=own_adam, total_bytes=total_bytes)
        self._bucket = _Bucket()
        self._grads: dict[str, Block] = {}  # `param.grad` where it is a tensor of its own
        self._built: Block | None = None  # `grads_in_partition` of this backward
        self._kept: Block | None = None  # the one that `averaged_gradients` and `all_grad_tensors` hold views of
        self._zeros: dict[int, list[Block]] = {}  # of each group, for parameters without gradient
        self._lingering: dict[int, list[Block]] = {}  # of each group: oversized gradients that `param.grad` still holds
        self._compact: dict[int, Block] = {}  # `flat_partition` of each group, in fp32
        self._pads: dict[int, Block] = {}
        self._loose: dict[int, list[Block]] = {}  # of each group: gradients that are kept where autograd made them
        self._reduced: list[Block] = []  # gradients of other partitions whose reduction may still run
        self._host_muon: HostMuon | None = None
        self._momentum: set[int] = set()  # groups of Muon's that have theirs
        self._hanging: set[int] = set()  # groups whose `grad_accum` are views of the bucket still
        self._steps = 0
        self._micro_batch = 0

    # -- backward: `process_gradients`, `reduce_independent_p_g_buckets_and_remove_grads` ---------------------------------

    def holds_grad(self, sim: Simulation, param: TensorSlot) -> bool:
        return param.fqn in self._grads and not self._uses_grad_accum

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        hooked = self.partition_gradients or self._overlap or self._uses_grad_accum or self._is_contiguous
        if hooked:
            self._set_up_bucket(sim)
        if self._uses_grad_accum:
            assert block is not None
            converted = sim.alloc(Component.GRAD, param.numel * FP32, param.fqn, "gradient in fp32")
            if param.fqn in self._grads:  # `.grad_accum += new`
                sim.free(converted)
            else:
                self._grads[param.fqn] = converted
            sim.free(block)
        elif block is not None:
            if param.fqn in self._grads:  # stage 1, a later micro step: `.grad += new`
                sim.free(block)
            else:
                self._grads[param.fqn] = block
        at_boundary = self._micro_batch == sim.loop.grad_accum_steps - 1
        if self.partition_gradients or (self._overlap and at_boundary):
            self._into_bucket(sim, param)

    def _set_up_bucket(self, sim: Simulation) -> None:
        if self._is_contiguous and not self._bucket.buffers:
            nbytes = self.settings.reduce_bucket_size * ITEMSIZE[self._bucket_dtype]
            for _ in range(2 if self._overlap else 1):
                self._bucket.buffers.append(sim.alloc(Component.COMM_BUFFER, nbytes, what="reduce bucket"))

    def _into_bucket(self, sim: Simulation, param: TensorSlot) -> None:
        bucket, limit = self._bucket, self.settings.reduce_bucket_size
        if bucket.elements + param.numel > limit:
            self._reduce(sim)
        if self._is_contiguous:
            grad = self._grads.pop(param.fqn)
            if param.numel <= limit:  # copied into the bucket; `param.grad` becomes a view of it
                sim.free(grad)
            elif self._offloads:  # a copy that nobody else holds
                bucket.oversized = sim.alloc(Component.GRAD, grad.nbytes, param.fqn, "gradient copied")
                sim.free(grad)
            else:
                bucket.oversized = grad
        bucket.elements += param.numel
        bucket.waiting.append(self._place[param.fqn])

    def _reduce(self, sim: Simulation) -> None:
        """`reduce_ipg_grads`: average, then keep what belongs to this rank."""
        if not self._bucket.waiting:
            return
        if not self._is_contiguous:
            self._reduce_where_they_are(sim)
        else:
            self._average(sim)
            for number, index in self._bucket.waiting:
                self._keep(sim, number, index)
        self._bucket.oversized = None
        self._bucket.waiting.clear()
        self._bucket.elements = 0

    def _average(self, sim: Simulation) -> None:
        """`average_tensor`."""
        owned = self._slices(sim)
        slices = [(elements, keeper) for _, elements, keeper in owned]
        if not self.settings.reduce_scatter:  # one all-reduce of the bucket as it lies
            converted = self._convert(sim, self._bucket.elements)
            self._add_to_kept(sim, [elements for elements, keeper in slices if keeper is not None])
            if converted is not None:
                sim.free(converted)
            return
        if self.settings.use_multi_rank_bucket_allreduce:
            self._reduce_slices(sim, slices)
            return
        for rank in dict.fromkeys(owner for owner, *_ in owned):
            self._reduce_slices(sim, [(elements, keeper) for owner, elements, keeper in owned if owner == rank])

    def _reduce_slices(self, sim: Simulation, slices: list[tuple[int, int | None]]) -> None:
        """`allreduce_and_scatter`, or `allreduce_no_retain` to one rank."""
        pending: deque[tuple[int, int | None]] = deque()  # slices of one all-reduce: elements, and the group that keeps it
        size = 0
        for elements, keeper in slices:
            pending.append((elements, keeper))
            size += elements
            if size > self.settings.reduce_bucket_size:
                self._all_reduce(sim, pending)
                size = 0
        self._all_reduce(sim, pending)

    def _keep(self, sim: Simulation, number: int, index: int) -> None:
        """`copy_grads_in_partition`, or clears what belongs to other ranks."""
        param, oversized = self._groups[number].params[index], self._bucket.oversized
        touches = self._touches(number, index)
        at_boundary = self._micro_batch == sim.loop.grad_accum_steps - 1
        goes = self.partition_gradients and not touches
        if touches and self._host is not None:
            inside = sum(numel for owner, numel in self._groups[number].partitions_of(index) if owner == self.rank)
            if not self._is_compact and self.partition_gradients and sim.loop.grad_accum_steps > 1:
                self._host.accumulate(param, inside)
            if at_boundary:
                self._host.take(inside, "float32" if self._is_compact else self._dtype)
            goes = at_boundary
        elif touches and self._is_compact:
            goes = self._uses_grad_accum
        elif touches:
            if self._built is None:
                total = sum(p.numel for group in self._groups for p, _ in group.kept())
                self._built = sim.alloc(
                    Component.GRAD, total * self._itemsize(), what="gradients of the partition", stream=self._stream
                )
            goes = True  # `param.grad` is a view of what is kept
        if goes and oversized is not None:
            sim.free(oversized)
        elif oversized is not None:
            self._lingering.setdefault(number, []).append(oversized)
        if not goes and self._uses_grad_accum:
            self._hanging.add(number)

    def _reduce_where_they_are(self, sim: Simulation) -> None:
        """`buffered_reduce_fallback`: all waiting gradients in one flat copy; they stay tensors of their own.

        With overlap_comm those of other partitions go when the next reduction begins (`_clear_previous_reduced_grads`).
        """
        self._clear_reduced(sim)
        waiting = [(number, index, self._groups[number].params[index]) for number, index in self._bucket.waiting]
        flat = None
        if len(waiting) > 1:
            nbytes = sum(p.numel for *_, p in waiting) * ITEMSIZE[self._bucket_dtype]
            flat = sim.alloc(Component.COMM_BUFFER, nbytes, what="flat copy for all-reduce", stream=self._stream)
        converted = self._convert(sim, sum(p.numel for *_, p in waiting))
        if converted is not None and flat is not None:
            sim.free(flat)
            flat = converted
        elif converted is not None:
            flat = converted
        self._add_to_kept(sim, [elements for _, elements, keeper in self._slices(sim) if keeper is not None])
        if flat is not None:
            sim.free(flat)
        for number, index, param in waiting:
            if self.partition_gradients and not self._touches(number, index):
                self._reduced.append(self._grads.pop(param.fqn))
        if not self._overlap:
            self._clear_reduced(sim)

    def _clear_reduced(self, sim: Simulation) -> None:
        for block in self._reduced:
            sim.free(block)
        self._reduced.clear()

    def _slices(self, sim: Simulation) -> list[tuple[int, int, int | None]]:
        """`average_tensor`: the bucket cut by owner; neighbours of one owner are merged unless they go into fp32.

        (owner, elements, the group that keeps them) of each.
        """
        found: list[tuple[int, int, int | None]] = []
        last_owner, last_copies = -1, False
        for number, index in self._bucket.waiting:
            cuts = self._groups[number].partitions_of(index)
            # a matrix of Muon's that several ranks share goes whole to each of them
            copies = len(cuts) > 1 and self._is_muons(number)
            for owner, elements in cuts:
                keeper = number if self._is_compact and owner == self.rank else None
                if keeper is not None and number not in self._compact:
                    self._compact[number] = sim.alloc(
                        Component.GRAD, self._groups[number].partition * FP32, what="fp32 gradients", stream=self._stream
                    )
                if keeper is None and owner == last_owner and not copies and not last_copies:
                    found[-1] = (owner, found[-1][1] + elements, None)
                else:
                    found.append((owner, elements, keeper))
                last_owner, last_copies = owner, copies
        return found

    def _all_reduce(self, sim: Simulation, slices: deque[tuple[int, int | None]]) -> None:
        """`allreduce_and_copy_with_multiple_ranks`: one slice is reduced in place, several in a flat copy."""
        if not slices:
            return
        elements = sum(size for size, _ in slices)
        flat = None
        if len(slices) > 1:
            nbytes = elements * ITEMSIZE[self._bucket_dtype]
            flat = sim.alloc(Component.COMM_BUFFER, nbytes, what="flat copy for all-reduce", stream=self._stream)
        converted = self._convert(sim, elements)
        if converted is not None:
            if flat is not None:
                sim.free(flat)
            flat = converted
        self._add_to_kept(sim, [size for size, keeper in slices if keeper is not None])
        if flat is not None:
            sim.free(flat)
        slices.clear()

    def _convert(self, sim: Simulation, elements: int) -> Block | None:
        """All-reduces so many elements, in a copy where the communication's dtype is another one."""
        nbytes = elements * ITEMSIZE[self._comm_dtype]
        converted = None
        if self._comm_dtype != self._bucket_dtype:
            converted = sim.alloc(Component.COMM_BUFFER, nbytes, what="copy in the communication's dtype", stream=self._stream)
        sim.enqueue("all_reduce", nbytes, self._stream)
        return converted

    def _add_to_kept(self, sim: Simulation, sizes: list[int]) -> None:
        """`_add_to_grad_partition_buffer`."""
        if self._comm_dtype == "float32":
            return
        for elements in sizes:
            sim.free(sim.alloc(Component.TEMP, elements * FP32, what="gradient in fp32", stream=self._stream))

    # -- end of a backward: `reduce_gradients`, `independent_gradient_partition_epilogue` ---------------------------------

    def end_of_micro_step(self, sim: Simulation, micro_batch: int) -> None:
        at_boundary = micro_batch == sim.loop.grad_accum_steps - 1
        if not self.partition_gradients:
            if not at_boundary:
                self._micro_batch = micro_batch + 1
                return  # gradients accumulate in `.grad`; the bucket stays
            if not self._overlap:
                for param in (p for params in self._ordered for p in params if p.fqn in self._grads):
                    self._into_bucket(sim, param)
        self._reduce(sim)
        self._micro_batch = 0 if at_boundary else micro_batch + 1
        self._clear_reduced(sim)
        added: list[Block] = []
        if not self._is_contiguous:
            added += self._keep_where_they_are(sim)
        elif not self._offloads:
            added += self._accumulate_built(sim)
        if at_boundary and not self._offloads:
            for number, group in enumerate(self._groups):
                if self._is_muons(number):
                    added += self._orthogonalise(sim, number)
                if self._is_compact:
                    if number not in self._compact:
                        self._compact[number] = sim.alloc(Component.GRAD, group.partition * FP32, what="fp32 gradients")
                elif group.padding:
                    self._pads[number] = sim.alloc(Component.GRAD, group.padding * self._itemsize(), what="padding")
        if at_boundary and self._kept is not None and self._last_holder is None:  # all of it was Muon's
            sim.free(self._kept)
            self._kept = None
        for block in added:
            sim.free(block)
        if not self._hanging:  # else `grad_accum` holds on to them
            self._release_bucket(sim)

    def _release_bucket(self, sim: Simulation) -> None:
        for block in [*self._bucket.buffers, *(block for blocks in self._lingering.values() for block in blocks)]:
            sim.free(block)
        self._bucket.buffers.clear()
        self._lingering.clear()

    def _let_go(self, sim: Simulation, number: int) -> None:
        """The `grad_accum` of a group go; with the last group's the bucket that they are views of."""
        if number not in self._hanging:
            return
        self._hanging.discard(number)
        for block in self._lingering.pop(number, []):
            sim.free(block)
        if not self._hanging:
            self._release_bucket(sim)

    def _accumulate_built(self, sim: Simulation) -> list[Block]:
        """What is left over when it has been added to what is there."""
        new, self._built = self._built, None
        if self._kept is None and not self._zeros:
            self._kept = new
            if not self._is_compact:
                self._zeros = self._without_gradient(sim)
            return []
        return [] if new is None else [new]

    def _orthogonalise(self, sim: Simulation, number: int) -> list[Block]:
        """`get_flat_partition` of a group of Muon's: its updates take the place of its gradients.  What `.grad` still holds."""
        assert self.settings.muon is not None
        kept = [param for param, _ in self._groups[number].kept()]
        if kept and number not in self._momentum:
            self._momentum.add(number)
            for what in ("momentum", "next momentum"):
                nbytes = sum(param.numel for param in kept) * self._itemsize()
                sim.alloc(Component.OPTIMIZER_STATE, nbytes, what=what)
        going = self._loose.pop(number, [])
        self._loose[number] = [zero_muon.update(sim, param, self._dtype, self.settings.muon) for param in kept]
        for block in self._zeros.pop(number, []):
            sim.free(block)
        return going

    def _keep_where_they_are(self, sim: Simulation) -> list[Block]:
        """`all_grad_tensors` holds those of the first backward; the others go as `param.grad` is cleared."""
        first = not self._loose
        going: list[Block] = []
        for number, group in enumerate(self._groups):
            kept = {p.fqn for p, _ in group.kept()} if not self._is_compact else set()
            loose = self._loose.setdefault(number, [])
            for param in group.params:
                if (grad := self._grads.pop(param.fqn, None)) is not None:
                    if first and param.fqn in kept:
                        loose.append(grad)
                    else:
                        going.append(grad)
        if first and not self._is_compact:
            self._zeros = self._without_gradient(sim)
        return going

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
        if self._host is not None:
            self._step_on_host(sim, self._host)
        else:
            for group in self._groups if self.settings.compute_grad_norm else ():
                for _, inside in group.kept():
                    sim.run_temporary(inside * FP64, "gradient in fp64 for the norm")
            for number, group in enumerate(self._groups):
                self._step_group(sim, number, group)
        sim.enqueue("all_gather", sum(g.length for g in self._groups) * self._itemsize())
        self._steps += 1

    def _step_on_host(self, sim: Simulation, host: HostOptimizer) -> None:
        if self.settings.muon is not None and self._host_muon is None:
            self._host_muon = HostMuon(sim, self.world_size, self._adam.dtype, self.settings.muon)
        for number, group in enumerate(self._groups):
            if self._host_muon is not None and self._is_muons(number):
                self._host_muon.orthogonalise(number, group)
        for number, group in enumerate(self._groups):
            host.step_group(group, self._events(sim, number))
            if number in self._compact:
                sim.free(self._compact.pop(number))
        host.end_of_step()
        if self._host_muon is not None:
            self._host_muon.end_of_step()
        for number in list(self._hanging):  # `zero_grad`
            self._let_go(sim, number)

    def _step_group(self, sim: Simulation, number: int, group: FlatGroup) -> None:
        last = number == self._last_holder
        pad = self._pads.pop(number, None)
        own: list[Block] = []  # of this step, until it is over
        if self._is_compact:
            own.append(self._compact.pop(number))
            if self._adam.dtype != "float32":
                own.insert(0, sim.alloc(Component.GRAD, group.partition * self._adam.itemsize, what="gradients converted"))
                sim.free(own.pop())
            self._let_go(sim, number)  # `free_grad_in_param_list`
        else:
            pieces = len(group.kept()) + bool(group.padding)
            flat = None
            if pieces > 1:
                flat = sim.alloc(Component.GRAD, group.partition * self._itemsize(), what="flat gradients")
            if self._dtype != self._adam.dtype:
                own.append(sim.alloc(Component.GRAD, group.partition * self._adam.itemsize, what="fp32 gradients"))
                if flat is not None:
                    sim.free(flat)
            elif flat is not None:
                own.append(flat)
            # one piece of the master's dtype is stepped where it lies: it goes after the step
            alias = pieces == 1 and self._dtype == self._adam.dtype
            going = [*self._zeros.pop(number, []), *self._loose.pop(number, [])]
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
        events = self._events(sim, number)
        play(sim, events.later if self._steps else events.first, Tier.GPU, f"fp32 partition of group {number}")
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
