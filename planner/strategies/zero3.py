"""ZeRO stage 3 as DeepSpeed runs it: parameters, gradients and states are partitioned; modules gather what they use.

Source: deepspeed 0.19.8, deepspeed/runtime/zero: stage3.py (`DeepSpeedZeroOptimizer_Stage3`) and partition_parameters.py
(partitions); runtime/comm/coalesced_collectives.py (reduction).  Gathers are in `zero3_gather`.  With c(n) = ceil(n / N)
elements of a parameter on each rank, S the sum of c over a sub-group, e / g bytes of the model's and the accumulation's dtype,
R elements of the bucket:

    partitions   e * sum c(n)           masters  4 * sum c(n)          gradients  g * sum c(n), from the start
    states       rule(S, fp32) of each sub-group, made by the first step; all four as `zero3_store` places them
    bucket       c * R, one, from the start; a gradient above R waits outside of it, and so do all where they are not to be
                 contiguous
    reduction    e * sum c(n) * N of the bucket's gradients (none for a single one that N divides); g != e: g * sum c(n)
    persistent   e * c(n) * N of every parameter of at most `stage3_param_persistence_threshold` elements, from the end of
                 the first step on, but not within a step
    step         8 * largest c(n) for the norm; then g * S flat (one parameter: none) and 4 * S, sub-group by sub-group
    fp16         a search for infinities before the step: (g + 1) * sum c(n), where the gradients are
    recompute    the gathered weights of the recomputed block once more: the checkpoint saves views of them
    frozen       the input of a Linear whose weight is frozen: DeepSpeed's linear saves it, torch's does not
    4 bits       packed weights are partitioned in their own dtype and gathered beside the others; what a product needs again
                 in backward is held whole by the graph of the loss, past the backward, whatever a checkpoint drops
    leaf         a leaf module is gathered with all that is inside of it; its gradients wait until its whole backward has run

Known limits: with frozen weights and recompute DeepSpeed ties what the recompute gathers to the module whose backward has begun
last, which is not followed: of a small model the first backward was off by 5 %, later ones by 1 %.  A reentrant recompute is
taken for one that is not: of small models the peak of backward was predicted 6 to 41 % too high.  A module's biases are taken
as saved by its recompute, also where its op does not save them (GPT-2's Conv1D).

Muon is in `zero3_muon`.

Left out: quantised gathers, scalars.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import UserError
from ..ledger import DEFAULT_STREAM, Component, Tier
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE, Pass, TensorSlot
from .base import Strategy
from .deepspeed_settings import DeepSpeedSettings
from .flat import check_rank, optimizer_groups
from .zero3_gather import GatherKnobs, ParamCoordinator
from .zero3_hooks import (
    KeptInputs,
    ModuleUse,
    inside_of,
    is_packed,
    kept_by_products,
    kept_inputs,
    leaf_modules,
    module_use,
    recomputed_modules,
    saved_as_views,
    with_children,
)
from .zero3_muon import Muon3
from .zero3_store import Store
from .zero_host import FP64, Adam, host_tier
from .zero_muon import halves

_NEARLY_WHOLE = 0.9  # of the parameters
_MANY = 0.1  # of the parameters
_WORTH_A_HINT = 10_000_000  # parameters
_REDUCE_STREAM = 1  # `reduce_and_partition_stream`, with overlap_comm


class Zero3(Strategy):
    """Stage 3.  Every rank's sizes are equal but for reductions' padding; `rank` decides nothing but that."""

    name = "zero3"

    def __init__(
        self, world_size: int, rank: int = 0, settings: DeepSpeedSettings | None = None, *, own_adam: bool = False
    ) -> None:
        check_rank(rank, world_size)
        self.world_size = world_size
        self.rank = rank
        self.settings = settings or DeepSpeedSettings()
        self._overlap = self.settings.overlaps(3)
        self._adam = Adam(own_adam, self.settings)
        self._stored: Store | None = None
        self._waiting: list[TensorSlot] = []
        self._elements = 0
        self._oversized: list[Block] = []
        self._use: ModuleUse | None = None
        self._coordinator: ParamCoordinator | None = None
        self._leaf_of: dict[int, int] = {}  # module -> the leaf module that it is, or is a part of
        self._of_leaf: dict[int, dict[str, Block]] = {}  # gradients of leaf modules whose backward runs
        self._recomputes: frozenset[int] = frozenset()
        self._kept_inputs = KeptInputs({}, {})
        self._inputs: dict[int, Block] = {}  # by storage of the trace
        self._module_events = 0  # of this micro step
        self._recomputed = 0  # modules left in recomputes of this micro step
        self._micro_batch = 0

    def _part(self, param: TensorSlot) -> int:
        """c(n): elements of one rank's partition (`_partition_param`)."""
        return -(-param.numel // self.world_size)

    @property
    def _stream(self) -> int:
        return _REDUCE_STREAM if self._overlap else DEFAULT_STREAM

    @property
    def _accum_dtype(self) -> str:
        return self.settings.grad_accum_dtype or self._dtype

    @property
    def _comm_dtype(self) -> str:
        return self.settings.communication_data_type or self._dtype

    # -- initialisation ----------------------------------------------------------------------------------------------------

    def at_init(self, sim: Simulation) -> None:
        settings, trace = self.settings, sim.trace
        grouped = optimizer_groups(trace, settings.optimizer_groups)
        if settings.muon is not None:
            grouped = halves(grouped, have_shapes=not settings.zero_init)
        dtypes = {p.dtype for p in trace.params if not is_packed(trace, p)}
        if len(dtypes) != 1:
            raise UserError(
                f"{self.name}: parameters of {len(dtypes)} dtypes ({', '.join(sorted(dtypes))})",
                "DeepSpeed would cast them, which is not modelled: use bf16-mixed or fp32",
            )
        (self._dtype,) = dtypes
        self._e = ITEMSIZE[self._dtype]
        self._g = ITEMSIZE[self._accum_dtype]
        self._c = ITEMSIZE[self._comm_dtype]
        whole = {}
        if not settings.zero_init:  # the buffers for NVMe are made beside it
            whole = {p.fqn: sim.place(Component.PARAM, p.fqn, p.shape, p.dtype) for p in trace.params}
        store = self._stored = Store(sim, settings, grouped, self.world_size, self._dtype, self._adam)
        if settings.muon is not None:
            store.muon = Muon3(
                sim, self.world_size, self.rank, method=settings.muon, bucket=settings.reduce_bucket_size, part=self._part,
                dtypes=(self._comm_dtype, self._accum_dtype, self._adam.dtype),
            )  # fmt: skip
        self._use = module_use(trace)
        leaves = leaf_modules(trace, settings.leaf_module)
        self._leaf_of = inside_of(trace, leaves)
        self._recomputes = recomputed_modules(trace)
        if settings.memory_efficient_linear:
            self._kept_inputs = kept_inputs(trace)
        direct, deep = self._use.params, with_children(trace, self._use.params)
        self._coordinator = ParamCoordinator(
            trace.params,
            [deep[m] if self._leaf_of.get(m) == m else params for m, params in enumerate(direct)],
            self.world_size,
            GatherKnobs(
                prefetch=1 if settings.stage3_allgather_sequential else settings.stage3_prefetch_bucket_size,
                max_live=settings.stage3_max_live_parameters,
                reuse_distance=settings.stage3_max_reuse_distance,
                persistence=settings.stage3_param_persistence_threshold,
                model_persistence=settings.stage3_model_persistence_threshold,
                overlap=self._overlap,
                secondary=settings.zero_hpz_partition_size,
                from_host=store.offloads_params,
                sequential=settings.stage3_allgather_sequential,
                all_reduce=settings.stage3_use_all_reduce_for_fetch_params,
            ),
            direct=direct,
            deep=deep,
            leaves=leaves,
            views=saved_as_views(trace, self._leaf_of, memory_efficient_linear=settings.memory_efficient_linear),
            in_graph=kept_by_products(trace),
        )
        store.make(self._partition_all(sim, store, whole))
        if settings.contiguous_gradients:
            sim.alloc(Component.COMM_BUFFER, settings.reduce_bucket_size * self._c, what="reduce bucket")
        store.make_gradients()
        if self.world_size > 1:  # a parameter must be whole while its hook is made
            for param in (p for sub_group in store.sub_groups for p in sub_group):
                self._coordinator.gather_once(sim, param)

    def _partition_all(self, sim: Simulation, store: Store, whole: dict[str, Block]) -> dict[str, Block]:
        """`zero.Init` of the whole model, or within it module by module; and the buffers."""
        trace, coordinator = sim.trace, self._coordinator
        assert coordinator is not None
        persistent = coordinator.persistent()
        parts: dict[str, Block] = {}
        if self.settings.zero_init:
            for module in dict.fromkeys(p.module for p in trace.params):
                own = [p for p in trace.params if p.module == module]
                whole |= {p.fqn: sim.place(Component.PARAM, p.fqn, p.shape, p.dtype) for p in own}
                for param in own:
                    coordinator.partition_secondary(sim, param)
                    parts[param.fqn] = store.partition(param, whole[param.fqn], persists=param.fqn in persistent)
        for slot in trace.buffers:
            sim.place(Component.BUFFER, slot.fqn, slot.shape, slot.dtype)
        if not self.settings.zero_init:
            for param in trace.params:
                coordinator.partition_secondary(sim, param)
                parts[param.fqn] = store.partition(param, whole[param.fqn], persists=param.fqn in persistent)
        return parts

    # -- modules -----------------------------------------------------------------------------------------------------------

    def before_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        assert self._coordinator is not None
        assert self._use is not None
        if kind is Pass.FORWARD and sim.trace.modules[module].fqn == "":
            self._coordinator.reset_step(sim)
            self._recomputed = self._module_events = 0
        self._keep_inputs(sim)
        if self._leaf_of.get(module, module) != module:
            return  # part of a leaf module: it has no hooks
        if kind is Pass.BACKWARD and not self._use.has_output_grad[module]:
            return  # no output carries a gradient: its hook is not called
        self._coordinator.fetch(sim, module, forward=kind is not Pass.BACKWARD)

    def after_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        assert self._coordinator is not None
        assert self._use is not None
        self._keep_inputs(sim)
        if kind is Pass.BACKWARD:
            self._drop_inputs(sim, module)
        is_inside = self._leaf_of.get(module, module) != module  # of a leaf module: it has no hooks
        if kind is Pass.RECOMPUTE:
            self._recomputed += 1
            if not is_inside and not self._use.cut_short[self._recomputed - 1]:
                self._coordinator.release_recomputed(sim, module)
            return
        if is_inside:
            return
        if kind is Pass.BACKWARD:
            self._reduce_leaf(sim, module)
            self._coordinator.backward_ran(sim, module)
        if kind is Pass.BACKWARD and not (self._use.has_input_grad[module] and self._use.has_output_grad[module]):
            return  # no input carries a gradient: released at the end of backward
        if kind is Pass.FORWARD:
            self._coordinator.leave_in_graph(module)
        saves = kind is Pass.FORWARD and module not in self._recomputes
        self._coordinator.release(sim, module, forward=kind is not Pass.BACKWARD, saves=saves)

    def _keep_inputs(self, sim: Simulation) -> None:
        """What the trace has freed since the last module event, and DeepSpeed's linear has saved."""
        for storage in self._kept_inputs.at.get(self._module_events, ()):
            nbytes = int(sim.trace.storage_bytes[storage])
            self._inputs[storage] = sim.alloc(Component.ACTIVATION, nbytes, what="input that a frozen Linear saves")
        self._module_events += 1

    def _drop_inputs(self, sim: Simulation, module: int) -> None:
        for storage in self._kept_inputs.done_by.get(module, ()):
            if (block := self._inputs.pop(storage, None)) is not None:
                sim.free(block)

    # -- gradients: `reduce_independent_p_g_buckets_and_remove_grads` -------------------------------------------------------

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        assert block is not None  # `.grad` never outlives its reduction
        assert self._coordinator is not None
        self._coordinator.grad_made(sim, param)
        if (leaf := self._leaf_of.get(param.module)) is not None:  # it waits for the others of its leaf module
            self._of_leaf.setdefault(leaf, {})[param.fqn] = block
            return
        self._take(sim, param, block)

    def _reduce_leaf(self, sim: Simulation, module: int) -> None:
        """`reduce_leaf_module_grads`: all gradients of a leaf module, once its backward is done; zeros for missing ones."""
        assert self._stored is not None
        made = self._of_leaf.pop(module, None)
        if made is None:
            return
        for param in (p for sub_group in self._stored.sub_groups for p in sub_group):
            if self._leaf_of.get(param.module) == module:
                block = made.get(param.fqn) or sim.alloc(Component.GRAD, param.numel * self._e, param.fqn, "zero gradient")
                self._take(sim, param, block)

    def _take(self, sim: Simulation, param: TensorSlot, block: Block) -> None:
        limit = self.settings.reduce_bucket_size
        if self._elements and self._elements + param.numel > limit:
            self._reduce(sim)
        if self.settings.contiguous_gradients and param.numel <= limit:
            sim.free(block)  # copied into the bucket
        else:
            self._oversized.append(block)
        self._waiting.append(param)
        self._elements += param.numel

    def _reduce(self, sim: Simulation) -> None:
        """`__avg_scatter_grads`, `reduce_scatter_coalesced`, `partition_grads`."""
        if not self._waiting:
            return
        assert self._stored is not None
        held = self._average(sim)
        for param in self._waiting:
            if inside := self._inside(param):
                self._stored.keep_gradient(param, inside, at_boundary=self._micro_batch == sim.loop.grad_accum_steps - 1)
        for block in self._oversized:
            sim.free(block)
        self._stored.swap_out_gradients()
        for block in held:
            sim.free(block)
        self._oversized.clear()
        self._waiting.clear()
        self._elements = 0

    def _inside(self, param: TensorSlot) -> int:
        """Elements of this rank's partition that the parameter has."""
        return min(self._part(param), max(0, param.numel - self.rank * self._part(param)))

    def _average(self, sim: Simulation) -> list[Block]:
        """Reduces what waits; what holds its result."""
        elements = sum(p.numel for p in self._waiting)
        if self.settings.contiguous_gradients and not self.settings.reduce_scatter and not self._oversized:
            return self._all_reduce(sim, elements)
        parts = [self._part(p) for p in self._waiting]
        copies = []
        if self._c != self._e or (self.settings.communication_data_type or self._dtype) != self._dtype:
            copies = [
                sim.alloc(
                    Component.COMM_BUFFER, p.numel * self._c, p.fqn, "copy in the communication's dtype", stream=self._stream
                )
                for p in self._waiting
            ]
        flat = None
        nbytes = sum(parts) * self.world_size * self._c
        if len(parts) > 1 or self._waiting[0].numel % self.world_size:
            pads = [sim.alloc(Component.TEMP, pad * self._c, what="padding", stream=self._stream) for pad in self._paddings()]
            flat = sim.alloc(Component.COMM_BUFFER, nbytes, what="flat copy for reduce-scatter", stream=self._stream)
            for pad in pads:
                sim.free(pad)
        sim.enqueue("reduce_scatter", nbytes, self._stream)
        held = [flat] if flat is not None else copies
        if self._accum_dtype == self._comm_dtype:
            if flat is not None:
                for block in copies:
                    sim.free(block)
            return held
        converted = [
            sim.alloc(Component.TEMP, inside * self._g, p.fqn, "gradient converted", stream=self._stream)
            for p in self._waiting
            if (inside := self._inside(p))
        ]
        for block in [*copies, *([flat] if flat is not None else [])]:
            sim.free(block)
        return converted

    def _all_reduce(self, sim: Simulation, elements: int) -> list[Block]:
        """`__avg_scatter_contiguous_grads`: the bucket as it lies, without reduce-scatter; then a copy of it, scaled by 1."""
        nbytes = elements * self._c
        held = []
        sim.enqueue("all_reduce", nbytes, self._stream)
        if self.world_size > 1:
            held.append(sim.alloc(Component.TEMP, nbytes, what="gradients scaled", stream=self._stream))
        if self._accum_dtype != self._comm_dtype:
            held.append(sim.alloc(Component.TEMP, elements * self._g, what="gradients converted", stream=self._stream))
            for block in held[:-1]:
                sim.free(block)
            del held[:-1]
        held += [
            sim.alloc(Component.TEMP, self._part(p) * self._g, p.fqn, "padded gradient", stream=self._stream)
            for p in self._waiting
            if self._inside(p) != self._part(p)
        ]
        return held

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
        for leaf in list(self._of_leaf):
            self._reduce_leaf(sim, leaf)
        self._reduce(sim)
        self._coordinator.end_of_backward(sim)
        self._micro_batch = (micro_batch + 1) % sim.loop.grad_accum_steps

    # -- the step ------------------------------------------------------------------------------------------------------------

    def step(self, sim: Simulation) -> None:
        assert self._coordinator is not None
        assert self._stored is not None
        self._coordinator.release_all(sim)
        params = [p for sub_group in self._stored.sub_groups for p in sub_group]
        if self._dtype == "float16":  # `has_overflow`: isinf makes the magnitudes, then a mask of them
            tier = host_tier(self._stored.pins) if self._stored.offloads_optimizer else Tier.GPU
            total = sum(self._part(p) for p in params)
            hidden = []
            if sim.target != "cpu":  # a CPU trace leaves out what lives inside one op
                hidden.append(sim.alloc(Component.TEMP, total * self._g, what="magnitudes of gradients", tier=tier))
            hidden.append(sim.alloc(Component.TEMP, total, what="mask of infinities", tier=tier))
            for block in reversed(hidden):
                sim.free(block)
        self._stored.orthogonalise()
        if not self._stored.offloads_optimizer:
            for param in params:
                sim.run_temporary(self._part(param) * FP64, "gradient in fp64 for the norm")
        self._stored.step()
        self._coordinator.gather_persistent(sim)

    # -- after the run -----------------------------------------------------------------------------------------------------

    def hints(self) -> list[str]:
        """What keeps the model whole: DeepSpeed's default knobs below 1e9 parameters, and views that autograd saves."""
        if self._coordinator is None or self.world_size == 1:
            return []
        if (held := self._coordinator.bytes_in_graph) >= _WORTH_A_HINT:
            return [
                f"ZeRO-3 cannot release {held / 1e9:,.2f} GB of 4-bit weights after forward: bitsandbytes keeps them in the "
                "graph of the loss, and every GPU holds them whole from forward on. --strategy zero2 holds no more of them, "
                "and fsdp2 keeps them in parts"
            ]
        total, most, viewed = (getattr(self._coordinator, name) for name in ("num_elements", "most_live", "most_viewed"))
        if viewed >= max(_WORTH_A_HINT, _MANY * total):
            return [
                f"ZeRO-3 cannot release {viewed / 1e6:,.0f} of {total / 1e6:,.0f} million parameters after forward: autograd "
                "saves views of them (experts in grouped matrix products), and they stay whole until backward. "
                "--recompute full frees them"
            ]
        if most < _NEARLY_WHOLE * total or total < _WORTH_A_HINT:
            return []
        whole = f"{most / 1e6:,.0f} of {total / 1e6:,.0f} million parameters are whole on every GPU at once"
        return [
            f"ZeRO-3 gathers the whole model: {whole}. To keep them in parts set both stage3_max_live_parameters "
            "(30000000, say) and stage3_max_reuse_distance (0)"
        ]
