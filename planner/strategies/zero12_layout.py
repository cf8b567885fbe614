"""How ZeRO stages 1 and 2 lay out a model on one rank: flat parameters, masters, and who owns which gradient.

Source: deepspeed 0.19.8, deepspeed/runtime/zero/stage_1_and_2.py, `DeepSpeedZeroOptimizer.__init__`.  Formulas: `zero12`.
"""

from __future__ import annotations

import math

from ...errors import UserError
from ..ledger import DEFAULT_STREAM, Component, Tier
from ..optimizers.rule import StepEvents
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE, TensorSlot
from . import zero_muon
from .base import RankClass, Strategy
from .deepspeed_settings import DeepSpeedSettings
from .flat import FlatGroup, check_rank, flat_group, optimizer_groups, round_robin
from .zero12_offload import HostOptimizer
from .zero_host import Adam, play

_REDUCE_STREAM = 1  # `reduction_stream`, with overlap_comm


class Layout(Strategy):
    """What a rank of stage 1 or 2 holds between the passes; `partition_gradients` tells the stages apart, as upstream."""

    partition_gradients: bool

    def __init__(
        self,
        world_size: int,
        rank: int = 0,
        settings: DeepSpeedSettings | None = None,
        *,
        own_adam: bool = False,
        total_bytes: int | None = None,
    ) -> None:
        """`total_bytes`: of the GPU, as torch reports them; None: there is room for everything."""
        check_rank(rank, world_size)
        self.world_size = world_size
        self.rank = rank
        self.settings = settings or DeepSpeedSettings()
        self._overlap = self.settings.overlaps(2)
        self._adam = Adam(own_adam, self.settings)
        self._host: HostOptimizer | None = None
        self._room: float = math.inf if total_bytes is None else total_bytes  # bytes of the GPU that are free as it flattens
        self._groups: list[FlatGroup] = []
        self._ordered: list[list[TensorSlot]] = []  # of each group, as the optimizer was given them
        self._place: dict[str, tuple[int, int]] = {}  # fqn -> (group, index in it)

    # -- who is who ------------------------------------------------------------------------------------------------------

    def rank_classes(self, world_size: int) -> list[RankClass]:
        """Partitions straddle parameters differently on every rank: each is a class of its own."""
        return [RankClass(f"rank {rank}", rank, 1) for rank in range(world_size)]

    def _itemsize(self) -> int:
        return ITEMSIZE[self._dtype]

    @property
    def _offloads(self) -> bool:
        return self.settings.offload_optimizer is not None

    @property
    def _is_contiguous(self) -> bool:
        """Offload requires it."""
        return self.settings.contiguous_gradients or self._offloads

    @property
    def _is_compact(self) -> bool:
        """`_use_compact_grad_partition_buffer`: a 16-bit model whose gradients are accumulated in fp32."""
        return (self.settings.grad_accum_dtype or self._dtype) == "float32" != self._dtype

    @property
    def _uses_grad_accum(self) -> bool:
        """`use_grad_accum_attribute`: gradients wait in `param.grad_accum`."""
        return self._is_compact and not self.partition_gradients

    @property
    def _bucket_dtype(self) -> str:
        return "float32" if self._uses_grad_accum else self._dtype

    @property
    def _comm_dtype(self) -> str:
        return self.settings.communication_data_type or self._dtype

    @property
    def _stream(self) -> int:
        return _REDUCE_STREAM if self._overlap else DEFAULT_STREAM

    # -- initialisation: `__init__`, `initialize_optimizer_states` -------------------------------------------------------

    def at_init(self, sim: Simulation) -> None:
        grouped = optimizer_groups(sim.trace, self.settings.optimizer_groups)
        if self.settings.muon is not None:
            grouped = zero_muon.halves(grouped)
        dtypes = {p.dtype for group in grouped for p in group}
        if len(dtypes) != 1:
            raise UserError(
                f"{self.name}: parameters of {len(dtypes)} dtypes ({', '.join(sorted(dtypes))}) cannot be flattened together",
                "DeepSpeed would cast them, which is not modelled: use bf16-mixed or fp32",
            )
        (self._dtype,) = dtypes
        if self._offloads:
            assert self.settings.offload_optimizer is not None
            self._host = HostOptimizer(sim, self.settings.offload_optimizer.pin_memory, self._dtype, self._adam)
        originals: dict[str, Block] = {}
        for slot in sim.trace.params:
            originals[slot.fqn] = sim.place(Component.PARAM, slot.fqn, slot.shape, slot.dtype)
        for slot in sim.trace.buffers:
            self._room -= sim.place(Component.BUFFER, slot.fqn, slot.shape, slot.dtype).nbytes
        self._room -= sum(block.nbytes for block in originals.values())
        for number, params in enumerate(grouped):
            laid = round_robin(params, self.world_size) if self.settings.round_robin_gradients else params
            group = flat_group(laid, self.world_size, self.rank, aligned=self.settings.parameter_alignment)
            self._groups.append(group)
            self._ordered.append(params)
            self._place |= {p.fqn: (number, index) for index, p in enumerate(laid)}
            self._flatten(sim, group, originals)
            clone = sim.alloc(Component.TEMP, group.partition * self._itemsize(), what="clone of the partition")
            if self._host is not None:
                self._host.add_group(group, clone)
                continue
            if self._dtype == self._adam.dtype:  # `.to` changes nothing: the clone is the master
                sim.free(clone)
            size = group.partition * self._adam.itemsize
            self._room -= size
            sim.alloc(Component.MASTER_WEIGHT, size, what=f"fp32 partition of group {number}")
            if self._dtype != self._adam.dtype:
                sim.free(clone)
        if self._host is not None:
            self._host.finish_init(self._groups)
            return
        zeros = [sim.alloc(Component.GRAD, g.partition * self._adam.itemsize, what="zero gradient") for g in self._groups]
        for block in zeros:  # only to create Adagrad's state
            sim.free(block)
        for number in range(len(self._groups)):
            play(sim, self._events(sim, number).init, Tier.GPU, f"fp32 partition of group {number}")

    def _flatten(self, sim: Simulation, group: FlatGroup, originals: dict[str, Block]) -> None:
        if len(group.params) == 1 and group.length == group.numel:
            return  # one tensor without padding is its own flat tensor
        e = self._itemsize()
        if group.length * e > self._room:
            self._flatten_on_host(sim, group, originals)
            return
        pad = group.length - group.numel
        padding = sim.alloc(Component.TEMP, pad * e, what="padding") if pad else None
        sim.alloc(Component.PARAM, group.length * e, what="flat parameters")
        if padding is not None:
            sim.free(padding)
        for param in group.params:
            sim.free(originals[param.fqn])

    def _flatten_on_host(self, sim: Simulation, group: FlatGroup, originals: dict[str, Block]) -> None:
        """Where the flat tensor has no room beside the parameters: they go to the host, and come back as one."""
        e, tier = self._itemsize(), Tier.HOST_PAGEABLE
        moved = [sim.alloc(Component.OFFLOAD_BUFFER, p.numel * e, p.fqn, "parameter on its way", tier) for p in group.params]
        for param in group.params:
            sim.free(originals[param.fqn])
        flat = sim.alloc(Component.OFFLOAD_BUFFER, group.length * e, what="flat parameters on their way", tier=tier)
        for block in moved:
            sim.free(block)
        sim.alloc(Component.PARAM, group.length * e, what="flat parameters")
        sim.free(flat)

    def _is_muons(self, number: int) -> bool:
        """Whether Muon steps the group."""
        return self.settings.muon is not None and zero_muon.is_muon_group(self._groups[number].params)

    def _events(self, sim: Simulation, number: int) -> StepEvents:
        """Of the optimizer's step of one group.  Muon has its update already, and adds it in place."""
        return StepEvents((), ()) if self._is_muons(number) else self._adam.events(sim, self._groups[number].partition)

    def hints(self) -> list[str]:
        """Embeddings that DeepSpeed's Muon takes for weight matrices."""
        params = [p for group in self._groups for p in group.params] if self.settings.muon is not None else []
        taken = [p.fqn for p in params if zero_muon.is_muons(p) and zero_muon.is_embedding(p.fqn)]
        if not taken:
            return []
        return [
            f'DeepSpeed\'s Muon orthogonalises {", ".join(taken)}: it knows embeddings and heads by "embed" and "lm_head" in '
            "their names"
        ]

    @property
    def _last_holder(self) -> int | None:
        """The last group that steps on views of the gradients as they were kept."""
        holders = [n for n, group in enumerate(self._groups) if group.kept() and not self._is_muons(n)]
        return holders[-1] if holders else None

    def _touches(self, number: int, index: int) -> bool:
        return any(owner == self.rank for owner, _ in self._groups[number].partitions_of(index))
