"""DeepSpeed's Muon at stages 1 and 2 with the optimizer on the host: whole gradients come back to the GPU to be orthogonalised.

Source: deepspeed 0.19.8, deepspeed/runtime/zero/stage_1_and_2.py, `_apply_muon_updates_cpu_offload` and
`_muon_all_gather_partitions`.  Masters of 4 bytes (with bf16 ones 2); every rank does the same work, whatever it owns:

    host, pageable    4 * ps momentum of each of Muon's groups
    GPU, kept         one pair of gather buffers a form of batch, at most 64 MiB each and 256 MiB in all
    GPU, step         4 * n of gradient and momentum of each matrix of a batch (32 MiB of each, or one matrix); then one update
                      after the other, see `zero_muon`
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ..ledger import Component, Tier
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE
from .flat import FlatGroup
from .zero_host import FP64
from .zero_muon import update

_BATCH_BYTES = 64 << 20  # `_muon_allgather_max_buffer_bytes`
_CACHED_BYTES = 256 << 20  # `_muon_allgather_max_cached_bytes`


class HostMuon:
    """Muon's part of the step of one rank.  `dtype`: of masters."""

    def __init__(self, sim: Simulation, world_size: int, dtype: str, method: str) -> None:
        self._sim, self._world_size, self._dtype, self._method = sim, world_size, dtype, method
        self._e = ITEMSIZE[dtype]
        self._has_momentum: set[int] = set()
        self._buffers: OrderedDict[tuple[int, int, int], tuple[Block, Block]] = OrderedDict()
        self._norms: list[Block] = []

    def orthogonalise(self, number: int, group: FlatGroup) -> None:
        """Before the norm: the updates of one group take the place of its gradients on the host."""
        sim = self._sim
        is_new = number not in self._has_momentum
        if is_new:
            self._has_momentum.add(number)
            nbytes = group.partition * self._e
            sim.alloc(Component.OPTIMIZER_STATE, nbytes, what="momentum", tier=Tier.HOST_PAGEABLE)
        for batch in self._batches(group):
            params = [group.params[index] for index in batch]
            made = self._gather(number, group, batch, buffers=1 if is_new else 2)
            if is_new:  # zeros, which need no gather
                made += [sim.alloc(Component.TEMP, p.numel * self._e, p.fqn, "whole momentum") for p in params]
            last: Block | None = None
            for index, param in zip(batch, params, strict=True):
                before, last = last, update(sim, param, self._dtype, self._method)
                if before is not None:
                    sim.free(before)
                inside = sum(size for owner, size in group.partitions_of(index) if owner == group.rank)
                if inside:
                    sim.enqueue("d2h", 2 * inside * self._e)
                    sim.run_temporary(inside * FP64, "update in fp64 for the norm")
                    self._norms.append(sim.alloc(Component.TEMP, FP64, param.fqn, "norm of the update"))
            for block in [*made, *([last] if last is not None else [])]:
                sim.free(block)

    def end_of_step(self) -> None:
        for norm in self._norms:
            self._sim.free(norm)
        self._norms.clear()

    def _batches(self, group: FlatGroup) -> Iterator[list[int]]:
        """`_muon_param_batches`."""
        batch: list[int] = []
        elements = 0
        for index, param in enumerate(group.params):
            if batch and elements + param.numel > max(1, _BATCH_BYTES // (2 * self._e)):
                yield batch
                batch, elements = [], 0
            batch.append(index)
            elements += param.numel
        if batch:
            yield batch

    def _gather(self, number: int, group: FlatGroup, batch: list[int], *, buffers: int) -> list[Block]:
        sim, ranks = self._sim, self._world_size
        names = ("whole gradient", "whole momentum")[:buffers]
        params = [group.params[index] for index in batch]
        made = [sim.alloc(Component.TEMP, p.numel * self._e, p.fqn, what) for what in names for p in params]
        owned = [0] * ranks
        for index in batch:
            for owner, size in group.partitions_of(index):
                owned[owner] += size
        sim.enqueue("h2d", owned[group.rank] * buffers * self._e)
        if ranks == 1:
            return made
        chunk = min(max(owned), max(1, _BATCH_BYTES // ((ranks + 1) * buffers * self._e)))
        key, own, whole = (number, chunk, buffers), chunk * buffers * self._e, chunk * buffers * ranks * self._e
        pair = self._buffers.pop(key, None)
        if pair is None:
            while self._buffers and self._cached_bytes() + own + whole > _CACHED_BYTES:
                for block in self._buffers.popitem(last=False)[1]:
                    sim.free(block)
            pair = (
                sim.alloc(Component.COMM_BUFFER, own, what="Muon's gather"),
                sim.alloc(Component.COMM_BUFFER, whole, what="Muon's gather"),
            )
        self._buffers[key] = pair
        for _ in range(-(-max(owned) // chunk)):
            sim.enqueue("all_gather", whole)
        return made

    def _cached_bytes(self) -> int:
        return sum(block.nbytes for pair in self._buffers.values() for block in pair)
