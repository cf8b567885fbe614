"""DeepSpeed's Muon at stage 3: gradients and momentums are gathered, orthogonalised by turns, and cut into parts again.

Source: deepspeed 0.19.8, deepspeed/runtime/zero/stage3.py: `_create_momentum_buffer`, `_apply_muon_to_accumulated_grads`,
`_muon_update_sub_group`, `_apply_muon_updates_cpu_offload`, `_partitioned_buffers_all_gather`.  With c(n) elements of a matrix
on each of N ranks, c bytes of the communication's dtype and g of the accumulation's:

    momentum    c * sum c(n) of Muon's sub-groups, from the start, where the optimizer is
    gathering   a pair of buffers (N + 1) * c * sum c(n), kept for the next step up to 256 MiB in all
    step        matrices of at most `reduce_bucket_size` elements in all at a time: c * N * sum c(n) of gradients and again of
                momentums, beside the gradients of the time before; every rank updates one matrix of N (see `zero_muon`).  Where
                these are not of one shape, 2 * c * (N + 1) elements of the largest
    offloaded   a whole sub-group at a time, in g: 2 * g * N * sum c(n); every rank updates every matrix
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from ..ledger import Component, Tier
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE, TensorSlot
from .zero_host import FP64
from .zero_muon import is_muon_group, update

_CACHED_BYTES = 256 << 20  # `_muon_allgather_max_cached_bytes`


class Muon3:
    """Muon's part of one rank's step.  `part(p)` is c(p); the dtypes: of communication, accumulation and masters."""

    def __init__(
        self,
        sim: Simulation,
        world_size: int,
        rank: int,
        *,
        method: str,
        bucket: int,
        part: Callable[[TensorSlot], int],
        dtypes: tuple[str, str, str],
    ) -> None:
        self._sim, self._world_size, self._rank = sim, world_size, rank
        self._method, self._bucket, self._part = method, bucket, part
        self._comm_dtype, self._accum_dtype, self._master_dtype = dtypes
        self._buffers: OrderedDict[tuple[int, str], tuple[Block, Block]] = OrderedDict()

    def make_momentum(self, params: Sequence[TensorSlot], tier: Tier) -> None:
        """Of one of Muon's sub-groups."""
        nbytes = sum(self._part(p) for p in params) * ITEMSIZE[self._comm_dtype]
        self._sim.alloc(Component.OPTIMIZER_STATE, nbytes, what="momentum", tier=tier)

    def orthogonalise(self, sub_groups: Sequence[Sequence[TensorSlot]]) -> None:
        """The gradients in the partitions become updates."""
        before: Block | None = None
        for params in (some for some in sub_groups if is_muon_group(some)):
            for chunk in self._chunks(params):
                grads = self._gather(chunk, self._comm_dtype, 1, "whole gradients")
                self._update(chunk)
                if before is not None:
                    self._sim.free(before)
                before = grads
        if before is not None:
            self._sim.free(before)

    def _chunks(self, params: Sequence[TensorSlot]) -> list[list[TensorSlot]]:
        found: list[list[TensorSlot]] = []
        for param in params:
            if found and sum(p.numel for p in found[-1]) + param.numel <= self._bucket:
                found[-1].append(param)
            else:
                found.append([param])
        return found

    def _gather(self, params: Sequence[TensorSlot], dtype: str, lists: int, what: str) -> Block | None:
        """`_partitioned_buffers_all_gather` of so many lists: what its results are views of; None: the partitions."""
        sim, e = self._sim, ITEMSIZE[dtype]
        local = lists * sum(self._part(p) for p in params) * e
        if self._world_size == 1:
            return None
        key, whole = (local, dtype), local * self._world_size
        pair, keeps = self._buffers.pop(key, None), True
        if pair is None:
            made = sim.alloc(Component.COMM_BUFFER, whole, what="Muon's gather")
            pair = (made, sim.alloc(Component.COMM_BUFFER, local, what="Muon's gather"))
            keeps = local + whole <= _CACHED_BYTES
            while keeps and self._buffers and self._cached_bytes() + local + whole > _CACHED_BYTES:
                self._free(self._buffers.popitem(last=False)[1])
        rearranged = sim.alloc(Component.TEMP, whole, what=what)
        sim.enqueue("all_gather", whole)
        if keeps:
            self._buffers[key] = pair
        else:
            self._free(pair)
        return rearranged

    def _cached_bytes(self) -> int:
        return sum(block.nbytes for pair in self._buffers.values() for block in pair)

    def _free(self, blocks: Sequence[Block | None]) -> None:
        for block in blocks:
            if block is not None:
                self._sim.free(block)

    def _update(self, params: Sequence[TensorSlot]) -> None:
        """`_muon_update_sub_group`."""
        sim, ranks, e = self._sim, self._world_size, ITEMSIZE[self._comm_dtype]
        clones: list[Block | None] = [sim.alloc(Component.TEMP, self._part(p) * e, p.fqn, "momentum copied") for p in params]
        clones.append(self._gather(params, self._comm_dtype, 1, "whole momentums"))
        names = _Names(sim)
        for start in range(0, len(params), ranks):
            turn = params[start : start + ranks]
            if self._rank < len(turn):
                names.bind("update", [update(sim, turn[self._rank], self._comm_dtype, self._method)])
            if len(turn) == ranks and len({p.shape for p in turn}) == 1:
                names.drop("gradient", "momentum", "gradients", "momentums")
            else:
                nbytes = max(p.numel for p in turn) * e
                last: dict[str, list[Block]] = {}  # of the loop over what was gathered, until it runs again
                for name, count in (("gradient", 1), ("momentum", 1), ("gradients", ranks), ("momentums", ranks)):
                    made = [sim.alloc(Component.COMM_BUFFER, nbytes, what=f"Muon's {name}") for _ in range(count)]
                    if name.endswith("s"):
                        last[f"gathered {name}"] = [made.pop()]
                    names.bind(name, made)
                for name, blocks in last.items():
                    names.bind(name, blocks)
            sim.enqueue("all_gather", 2 * sum(p.numel for p in turn) * e)
        for param in params:
            if (self._rank + 1) * self._part(param) > param.numel:
                nbytes = self._part(param) * ITEMSIZE[self._accum_dtype]
                names.bind("padded", [sim.alloc(Component.TEMP, nbytes, param.fqn, "padded momentum")])
            else:
                names.drop("padded")
        names.drop_all()
        self._free(clones)

    def orthogonalise_on_host(self, sub_groups: Sequence[Sequence[TensorSlot]]) -> list[Block]:
        """The same where the optimizer is on the host.  Norms of the updates, which wait for the end of the step."""
        sim, g, m = self._sim, ITEMSIZE[self._accum_dtype], ITEMSIZE[self._master_dtype]
        norms: list[Block] = []
        names = _Names(sim)
        for params in (some for some in sub_groups if is_muon_group(some)):
            names.drop("parts")
            if sim.target != "cpu":
                sizes = [self._part(p) * e for p in params for e in (m, ITEMSIZE[self._comm_dtype])]
                names.bind("parts", [sim.alloc(Component.TEMP, size, what="gradient or momentum") for size in sizes])
            sim.enqueue("h2d", sum(self._part(p) for p in params) * (m + ITEMSIZE[self._comm_dtype]))
            whole = self._gather(params, self._accum_dtype, 2, "whole gradients and momentums")
            names.bind("whole", [whole] if whole is not None else [])
            for param in params:
                part = self._part(param)
                names.bind("update", [update(sim, param, self._accum_dtype, self._method)])
                names.bind("local update", [sim.alloc(Component.TEMP, part * g, param.fqn, "update of the partition")])
                if self._accum_dtype != self._master_dtype:
                    sim.run_temporary(part * m, "update converted")
                names.bind("local momentum", [sim.alloc(Component.TEMP, part * g, param.fqn, "momentum of the partition")])
                if self._accum_dtype != self._comm_dtype:
                    sim.run_temporary(part * ITEMSIZE[self._comm_dtype], "momentum converted")
                sim.run_temporary(part * FP64, "update in fp64 for the norm")
                norms.append(sim.alloc(Component.TEMP, FP64, param.fqn, "norm of the update"))
                sim.enqueue("d2h", part * (m + ITEMSIZE[self._comm_dtype]))
        names.drop_all()
        return norms


class _Names:
    """Variables of a Python function, which hold their tensors until they are bound again."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._held: dict[str, list[Block]] = {}

    def bind(self, name: str, blocks: list[Block]) -> None:
        self.drop(name)
        self._held[name] = blocks

    def drop(self, *names: str) -> None:
        for name in names:
            for block in self._held.pop(name, []):
                self._sim.free(block)

    def drop_all(self) -> None:
        self.drop(*list(self._held))
