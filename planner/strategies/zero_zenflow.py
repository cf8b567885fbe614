"""ZenFlow of ZeRO stage 2: the columns with the largest gradients step on the GPU at once, the rest on the host later.

Source: deepspeed 0.19.8, runtime/zenflow/zenflow_stage_1_and_2.py (`ZenFlowZeroOptimizerSequential`) and engine.py,
ops/adam/zenflow_torch_adam.py (`ZenFlowSelectiveAdamW`).  Beside what `zero12` and `zero12_offload` say, with e bytes of the
model's dtype, a matrix of n elements, and S selected elements (of a matrix topk_ratio of its columns, at least one in each cut
of the partitions; all of a vector):

    flattening      e * (elements of all matrices) transposed copies, beside the parameters and the flat tensor
    indices         4 for every selected column, once more for a matrix that several ranks share; from the first selection on
    states          2 * e * S, and 4 of every parameter: from the first selective step on
    into the bucket e * n transposed copy of a gradient
    selection       e * (elements inside) absolute values, 4 * columns of the bucket
    selected        e * S of a bucket to be sent, e * S kept, at a boundary e * S of copied parameters until the step
    new selection   host: 4 * ps of the parameters, and e * ps of their copy where they are of 16 bits
"""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import CannotTell
from ..ledger import Component, Tier
from ..optimizers.rule import OptimizerTensor
from ..simulate import Block, Simulation
from ..trace.steptrace import TensorSlot
from .base import Pass
from .flat import FlatGroup
from .zero12 import Zero2
from .zero_host import play

_INDEX = 4  # bytes of a column's number, of a step count
_MATRIX = 2  # dimensions


@dataclass(frozen=True)
class _Selected:
    """Of one parameter."""

    columns: tuple[int, ...]  # of each cut; () for a vector
    cuts: tuple[int, ...]  # elements that are selected in each cut
    inside: int  # elements whose columns this rank ranks

    @property
    def elements(self) -> int:
        return sum(self.cuts)


def selected(param: TensorSlot, cuts: list[tuple[int, int]], rank: int, ratio: float) -> _Selected:
    """`update_selected_channels`: whole columns of each cut, which are whole only where the flat tensor is transposed."""
    if len(param.shape) != _MATRIX:
        return _Selected((), tuple(numel for _, numel in cuts), 0)
    rows = param.shape[0]
    offset, inside = 0, 0
    columns: list[int] = []
    for owner, numel in cuts:
        start = (offset - 1) // rows + 1 if offset else 0
        width = (offset + numel) // rows - start
        columns.append(max(1, int(width * ratio)) if width else 0)
        if owner == rank:
            inside += width * rows
        offset += numel
    return _Selected(tuple(columns), tuple(n * rows for n in columns), inside)


class ZenFlow2(Zero2):
    """Stage 2 with `zenflow`; the simulated iteration is one update interval, and the warm-up is over."""

    def at_init(self, sim: Simulation) -> None:
        assert self.settings.zenflow is not None
        self._zenflow = self.settings.zenflow
        self._total_micro_steps = 0  # `micro_step` of the backward that comes or runs
        self._in_backward = False
        self._indices: dict[str, list[Block]] = {}  # `selected_indices`, `partition_selected_indices`
        self._selected_grads: dict[str, Block] = {}
        self._copied: list[Block] = []  # `temp_selected_param`
        self._with_state: set[str] = set()
        for slot in sim.trace.params:
            if slot.requires_grad and len(slot.shape) > _MATRIX:
                raise CannotTell(
                    f"zero_optimization.zenflow with {slot.fqn} of {len(slot.shape)} dimensions is not modelled: matrices and "
                    "vectors are. Leave zenflow out"
                )
        super().at_init(sim)

    def _flatten(self, sim: Simulation, group: FlatGroup, originals: dict[str, Block]) -> None:
        matrices = [p for p in group.params if len(p.shape) == _MATRIX]
        copies = [sim.alloc(Component.TEMP, p.numel * self._itemsize(), p.fqn, "parameter transposed") for p in matrices]
        super()._flatten(sim, group, originals)
        for block in copies:
            sim.free(block)

    @property
    def _selects(self) -> bool:
        """`is_zenflow_select_boundary`, after the warm-up."""
        every = self._zenflow.select_interval if self._zenflow.select_strategy == "step" else 0
        return self._total_micro_steps == 0 or (every != 0 and self._total_micro_steps % every == 0)

    # -- backward --------------------------------------------------------------------------------------------------------

    def before_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        super().before_module(sim, module, kind)
        if kind is Pass.BACKWARD and not self._in_backward:
            self._in_backward = True
            if self._selects and self._total_micro_steps:
                self._sync(sim)

    def _sync(self, sim: Simulation) -> None:
        """`sync_fp32_param_from_gpu`: a blocking copy comes as it is, and is converted on the host."""
        for group in self._groups:
            e = self._itemsize()
            if e == self._adam.itemsize and sim.target == "cpu":
                continue  # `.to` changes nothing
            made = [
                sim.alloc(Component.TEMP, group.partition * self._adam.itemsize, what="parameters", tier=Tier.HOST_PAGEABLE)
            ]
            if e != self._adam.itemsize and sim.target != "cpu":
                made.append(sim.alloc(Component.TEMP, group.partition * e, what="parameters", tier=Tier.HOST_PAGEABLE))
            sim.enqueue("d2h", group.partition * e)
            for block in made:
                sim.free(block)

    def _into_bucket(self, sim: Simulation, param: TensorSlot) -> None:
        bucket, limit = self._bucket, self.settings.reduce_bucket_size
        if bucket.elements + param.numel > limit:
            self._reduce(sim)
        grad = self._grads.pop(param.fqn)
        if param.numel <= limit:
            if len(param.shape) == _MATRIX:
                sim.run_temporary(grad.nbytes, "gradient transposed")
            sim.free(grad)
        else:
            bucket.oversized = grad
        bucket.elements += param.numel
        bucket.waiting.append(self._place[param.fqn])

    def _average(self, sim: Simulation) -> None:
        waiting = [(number, index, self._groups[number].params[index]) for number, index in self._bucket.waiting]
        if self._bucket.oversized is not None and len(waiting[0][2].shape) == _MATRIX:
            copy = sim.alloc(Component.GRAD, self._bucket.oversized.nbytes, waiting[0][2].fqn, "gradient transposed")
            sim.free(self._bucket.oversized)
            self._bucket.oversized = copy
        super()._average(sim)
        found = {
            param.fqn: selected(param, self._groups[number].partitions_of(index), self.rank, self._zenflow.topk_ratio)
            for number, index, param in waiting
        }
        if self._selects:
            self._select(sim, found)
        self._process(sim, waiting, found)

    def _select(self, sim: Simulation, found: dict[str, _Selected]) -> None:
        """`update_selected_channels`."""
        buffer = sim.alloc(Component.COMM_BUFFER, _INDEX * sum(sum(s.columns) for s in found.values()), what="selected columns")
        for one in found.values():
            if one.inside:
                sim.run_temporary(one.inside * self._itemsize(), "absolute gradient")
        for fqn, one in found.items():
            if not one.columns:
                continue
            for block in self._indices.pop(fqn, []):
                sim.free(block)
            parts = [sim.alloc(Component.OPTIMIZER_STATE, n * _INDEX, fqn, "selected columns") for n in one.columns]
            if len(parts) > 1:
                parts.append(sim.alloc(Component.OPTIMIZER_STATE, sum(one.columns) * _INDEX, fqn, "selected columns"))
            self._indices[fqn] = parts
        sim.free(buffer)

    def _process(self, sim: Simulation, waiting: list[tuple[int, int, TensorSlot]], found: dict[str, _Selected]) -> None:
        """`_process_selected_fp32_groups_grad`."""
        e = self._itemsize()
        buffer = sim.alloc(Component.COMM_BUFFER, e * sum(s.elements for s in found.values()), what="selected gradients")
        for _, _, param in waiting:
            one = found[param.fqn]
            self._selected_grads[param.fqn] = sim.alloc(Component.GRAD, e * one.elements, param.fqn, "selected gradient")
            if len(one.cuts) > 1:  # the pieces, before they are one
                sim.run_temporary(e * one.elements, "pieces of the selected gradient")
        at_boundary = self._micro_batch == sim.loop.grad_accum_steps - 1
        if at_boundary:
            for _, _, param in waiting:
                nbytes = e * found[param.fqn].elements
                self._copied.append(sim.alloc(Component.TEMP, nbytes, param.fqn, "selected parameters"))
        else:
            for number in sorted({number for number, _, _ in waiting}):
                self._step_selected(sim, [(i, p) for n, i, p in waiting if n == number], number)
        sim.free(buffer)

    def end_of_micro_step(self, sim: Simulation, micro_batch: int) -> None:
        super().end_of_micro_step(sim, micro_batch)
        self._total_micro_steps += 1
        self._in_backward = False

    # -- the selective step ------------------------------------------------------------------------------------------------

    def _step_selected(self, sim: Simulation, params: list[tuple[int, TensorSlot]], number: int) -> None:
        """`group_step`, `_step_without_offload`: AdamW on copies of the selected columns."""
        e, group = self._itemsize(), self._groups[number]
        held: list[Block] = []
        tensors: list[OptimizerTensor] = []
        for index, param in params:
            one = selected(param, group.partitions_of(index), self.rank, self._zenflow.topk_ratio)
            if one.columns:
                held.append(sim.alloc(Component.TEMP, e * one.elements, param.fqn, "selected parameters"))
            if param.fqn not in self._with_state:
                self._with_state.add(param.fqn)
                for nbytes in (_INDEX, e * one.elements, e * one.elements):
                    sim.alloc(Component.OPTIMIZER_STATE, nbytes, param.fqn, "state of what is selected")
            tensors.append(OptimizerTensor((one.elements,), param.dtype))
        play(sim, sim.optimizer.step(tensors).later, Tier.GPU, *(p.fqn for _, p in params))
        for block in held:
            sim.free(block)
        for _, param in params:
            sim.free(self._selected_grads.pop(param.fqn))

    def step(self, sim: Simulation) -> None:
        super().step(sim)
        for number, group in enumerate(self._groups):
            with_grad = [(i, p) for i, p in enumerate(group.params) if p.fqn in self._selected_grads]
            if with_grad:
                self._step_selected(sim, with_grad, number)
        for block in self._copied:
            sim.free(block)
        self._copied.clear()
