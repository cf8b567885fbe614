"""What the zeroth-order strategies share: the arithmetic on parameters, and the walk over blocks that come from the host.

Time.  A pass over parameters is enqueued as `ARITHMETIC`, with the bytes that it reads and writes in device memory: it runs
where the ops run, between them.  A block's upload begins when the block before the last one has been computed, since the host
waits for that before it goes on; its computation waits for its own upload.

Models zo2/optimizer/mezo_sgd/{zo,zo2}.py and zo2/model/huggingface/opt/mezo_sgd/zo2.py (liangyuwang/zo2 at 4bca25c).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ...errors import UserError
from ..ledger import DEFAULT_STREAM, Component, Tier
from ..simulate import ARITHMETIC, HOST, Block, Simulation
from ..trace.block_segments import Piece, num_blocks
from ..trace.steptrace import ITEMSIZE, Pass, TensorSlot
from .base import Run, Segment
from .zo_settings import ZoSettings

_PERTURB_OPS, _UPDATE_OPS = 5, 7  # that the host launches for one parameter: empty, normal_, mul, mul, add_; two more
UPLOAD_STREAM, OFFLOAD_STREAM, GATHER_STREAM = 1, 2, 3
LOAD_STREAM = 4  # what is on the GPU before compute has a stream of its own; without overlap there is one stream


_PERTURB_PASSES = 8  # readings and writings of a parameter: z 1, c * z 2, times eps 2, in-place sum 3
_UPDATE_PASSES = 13  # z 1, g * z 2, wd * p 2, their sum 3, lr * sum 2, in-place difference 3


def perturb(sim: Simulation, params: Iterable[TensorSlot]) -> int:
    """`zo_perturb_parameters`: p += c * z * eps, in place, one parameter after the other.

    Live at once: z, c * z and c * z * eps, so 3 times the parameter; the last z stays until the next one is drawn.
    Returns its ticket; -1: nothing to do.
    """
    return _pass(sim, params, _perturb_one, _PERTURB_PASSES, _PERTURB_OPS)


def update(sim: Simulation, params: Iterable[TensorSlot]) -> int:
    """`zo_update`: p -= lr * (g * z + wd * p), in place.

    Live at once: z, both products and their sum, 4 times the parameter.  Returns its ticket; -1: nothing to do.
    """
    return _pass(sim, params, _update_one, _UPDATE_PASSES, _UPDATE_OPS)


def _pass(
    sim: Simulation,
    params: Iterable[TensorSlot],
    one: Callable[[Simulation, TensorSlot, Block | None], Block],
    passes: int,
    ops: int,
) -> int:
    """`one` takes a parameter and the last z, which it drops once it has drawn its own; returns that."""
    trained = [param for param in params if param.requires_grad]
    if not trained:
        return -1

    def walk() -> None:
        z: Block | None = None
        for param in trained:
            z = one(sim, param, z)
        if z is not None:
            sim.free(z)

    sizes = [param.nbytes for param in trained]
    sim.closed((one, *sizes), [param.fqn for param in trained], walk)
    nbytes = sum(sizes)
    return sim.enqueue(ARITHMETIC, passes * nbytes, ops=ops * len(trained)) if nbytes else -1


def _perturb_one(sim: Simulation, param: TensorSlot, old: Block | None) -> Block:
    z = _drawn(sim, param, old)
    scaled = _like(sim, param, "c * z")
    product = _like(sim, param, "c * z * eps")
    sim.free(scaled)
    sim.free(product)
    return z


def _update_one(sim: Simulation, param: TensorSlot, old: Block | None) -> Block:
    z = _drawn(sim, param, old)
    gradient = _like(sim, param, "g * z")
    decay = _like(sim, param, "weight decay")
    both = _like(sim, param, "g * z + wd * p")
    sim.free(gradient)
    sim.free(decay)
    sim.run_temporary(param.nbytes, "lr * (...)")
    sim.free(both)
    return z


def _drawn(sim: Simulation, param: TensorSlot, old: Block | None) -> Block:
    z = _like(sim, param, "perturbation z")
    if old is not None:
        sim.free(old)
    return z


def _like(sim: Simulation, param: TensorSlot, what: str) -> Block:
    return sim.alloc(Component.TEMP, param.nbytes, param.fqn, what)


class BlockWalk:
    """One model whose blocks live on the host and visit the GPU, two at a time."""

    def __init__(self, pieces: Sequence[Piece], settings: ZoSettings, *, lanes: int = 2, ways: int = 1) -> None:
        """`lanes`: perturbed forwards on this GPU.  `ways`: GPUs that share every upload (slicing); 1 shares none."""
        self._pieces = pieces
        self._settings = settings
        self._lanes = lanes
        self._ways = ways
        count = num_blocks(pieces)
        wanted = settings.offloading_blocks
        if wanted != "all" and wanted > count:
            raise UserError(f"--zo-offload-blocks {wanted}: the model has {count} blocks", "Leave it out for all of them")
        self._offloaded = range(count if wanted == "all" else wanted)
        self._last = count - 1
        self._slots: list[list[TensorSlot]] = []  # by block, in the order of named_parameters and buffers
        self._sizes: list[list[int]] = []  # of the same, bytes on the host
        self._on_gpu: dict[int, list[Block]] = {}
        self._on_host: dict[int, list[Block]] = {}
        self._bucketed: set[int] = set()  # blocks whose first parameters have been replaced
        self._arrived: dict[int, int] = {}  # block -> ticket of what its computation waits for
        self._computed: dict[int, int] = {}  # block -> ticket of the last work on it

    def hints(self, sim: Simulation) -> list[str]:
        """Parameters of two units: upstream draws noise for them, and updates them, once in each."""
        seen: dict[int, str] = {}
        found = []
        for piece in self._pieces:
            for param in piece.params:
                if param in seen and sim.trace.params[param].requires_grad:
                    found.append(
                        f"{seen[param]} and {piece.name} share {sim.trace.params[param].fqn}: ZO2 perturbs and updates it in "
                        "both, with other noise, so the run is not MeZO's. Untie it (tie_word_embeddings=false) or freeze it"
                    )
                seen.setdefault(param, piece.name)
        return found

    # -- before the first step -------------------------------------------------------------------------------------------

    def load(self, sim: Simulation) -> None:
        """The model is made on the host; embedding, head and the blocks that stay go to the GPU (`init_zo2_upload`)."""
        names = {piece.name: piece.block for piece in self._pieces if piece.block >= 0}
        everything = (*sim.trace.params, *sim.trace.buffers)
        component = [Component.PARAM] * len(sim.trace.params) + [Component.BUFFER] * len(sim.trace.buffers)
        home = [next((names[n] for n in _parents(slot.fqn) if n in names), -1) for slot in everything]
        self._slots = [[] for _ in range(self._last + 1)]
        for slot, block in zip(everything, home, strict=True):
            if block >= 0:
                self._slots[block].append(slot)
        self._sizes = [[self._host_bytes(slot) for slot in slots] for slots in self._slots]
        loaded = [self._host(sim, slot.nbytes, slot.fqn) for slot in everything]
        stream = LOAD_STREAM if self._settings.overlap else DEFAULT_STREAM
        for slot, kind, block, host in zip(everything, component, home, loaded, strict=True):
            if block in self._offloaded:
                self._on_host.setdefault(block, []).append(host)
            else:
                sim.place(kind, slot.fqn, slot.shape, slot.dtype, stream=stream)
                sim.free(host)
        if self._settings.amp:
            self._narrow_host(sim)
        if self._ways > 1:
            for block, held in self._on_host.items():
                self._on_host[block] = [self._host(sim, self._moved_bytes(block), "")]
                for gone in held:
                    sim.free(gone)

    def _narrow_host(self, sim: Simulation) -> None:
        """`init_zo2_amp` casts what stays on the host."""
        for block, held in self._on_host.items():
            for place, slot in enumerate(self._slots[block]):
                held[place], old = self._host(sim, self._host_bytes(slot), slot.fqn), held[place]
                sim.free(old)

    def _host(self, sim: Simulation, nbytes: int, fqn: str, tier: Tier = Tier.HOST_PAGEABLE) -> Block:
        return sim.alloc(Component.PARAM, nbytes, fqn, "host copy", tier)

    def _host_bytes(self, slot: TensorSlot) -> int:
        """Bytes of a block's tensor as the host keeps it."""
        return slot.numel * ITEMSIZE[self._dtype_on_host(slot)]

    def _dtype_on_host(self, slot: TensorSlot) -> str:
        return self._settings.host_dtype(slot.dtype) if slot.dtype == "float32" or not self._settings.amp else slot.dtype

    # -- a step ----------------------------------------------------------------------------------------------------------

    def run(self, sim: Simulation, micro_batch: int, *, with_update: bool) -> Iterator[Run]:
        """Both forwards, piece by piece.  Before block i runs it is uploaded, and then block i - 1 goes back, so that its copy
        and the next upload run beside the computation (`inner_zo_forward`)."""
        previous = -1
        for piece in self._pieces:
            if piece.block >= 0:
                self.upload(sim, piece.block)
                self.offload(sim, previous)
                previous = piece.block
            elif piece.is_unit and previous == self._last:
                self.offload(sim, previous)
                previous = -1
            if piece.block in self._arrived:
                sim.wait(self._arrived.pop(piece.block))
            params = [sim.trace.params[p] for p in piece.params]
            if with_update:
                update(sim, params)
            for lane in range(self._lanes):
                perturb(sim, params)  # +1 before the first forward, -2 before the second
                yield from _runs(piece, piece.body, micro_batch, lane)
            done = perturb(sim, params)  # back to where it was
            if piece.block >= 0:
                self._computed[piece.block] = done
            for lane in range(self._lanes):
                yield from _runs(piece, piece.drops, micro_batch, lane)
        self.offload(sim, previous)

    def evaluate(self, sim: Simulation, micro_batch: int) -> Iterator[Run]:
        """One forward, nothing perturbed: each block comes, runs and goes before the next (`add_zo2_eval_comm_hooks`)."""
        for piece in self._pieces:
            if piece.block >= 0:
                self.upload(sim, piece.block)
            if piece.block in self._arrived:
                sim.wait(self._arrived.pop(piece.block))
            events = (*piece.body, *piece.drops)
            if events:
                first, stop = min(start for start, _ in events), max(stop for _, stop in events)
                yield Run(Segment(piece.name or "glue", first, stop), Pass.FORWARD, micro_batch)
            if piece.block >= 0:
                self.offload(sim, piece.block, waits=True)

    # -- transfers -------------------------------------------------------------------------------------------------------

    def upload(self, sim: Simulation, block: int) -> None:
        """`task_upload`: the block gets GPU memory; its host memory is free once the copy is under way."""
        if block not in self._offloaded:
            return
        stream = UPLOAD_STREAM if self._settings.overlap else DEFAULT_STREAM
        slots, host = self._slots[block], self._on_host.pop(block)
        behind = self._computed.get(block - 2 if self._settings.overlap else block - 1, -1)
        self._arrived[block] = sim.enqueue("h2d", self._moved_bytes(block), stream, _known(behind), self._copies(block))
        if self._settings.bucket:
            self._on_gpu[block] = self._upload_bucket(sim, block, host, stream)
            return
        if self._ways > 1:
            self._on_gpu[block] = self._upload_slice(sim, block, host, stream)
            return
        made = []
        for slot, nbytes, held in zip(slots, self._sizes[block], host, strict=True):
            made.append(sim.alloc(Component.OFFLOAD_BUFFER, nbytes, slot.fqn, "uploaded", stream=stream))
            sim.free(held)
        if self._settings.amp:
            made = [self._widened(sim, slot, low, stream) for slot, low in zip(slots, made, strict=True)]
        self._on_gpu[block] = made

    def _moved_bytes(self, block: int) -> int:
        """What this process copies: the block, or its slice of the flat block."""
        total = sum(self._sizes[block])
        return total if self._ways == 1 else -(-total // (self._ways * self._itemsize(block))) * self._itemsize(block)

    def _copies(self, block: int) -> int:
        """What the host issues to move the block: memory and a copy for every tensor of it."""
        return 2 * (1 if self._settings.bucket or self._ways > 1 else len(self._slots[block]))

    def _itemsize(self, block: int) -> int:
        return ITEMSIZE[self._dtype_on_host(self._slots[block][0])]

    def _upload_slice(self, sim: Simulation, block: int, host: Sequence[Block], stream: int) -> list[Block]:
        """The slice is copied to its place in the flat block and gathered from there; the tensors are views of it."""
        total = self._moved_bytes(block) * self._ways
        flat = sim.alloc(Component.OFFLOAD_BUFFER, total, what="gathered block", stream=stream)
        for held in host:
            sim.free(held)
        self._arrived[block] = sim.enqueue("all_gather", total, GATHER_STREAM, (self._arrived[block],), ranks=self._ways)
        if not self._settings.amp:
            return [flat]
        wide = [sim.alloc(Component.OFFLOAD_BUFFER, s.nbytes, s.fqn, "decompressed", stream=stream) for s in self._slots[block]]
        sim.free(flat)
        return wide

    def _widened(self, sim: Simulation, slot: TensorSlot, low: Block, stream: int) -> Block:
        """`amp_decompress_impl`: one tensor after the other becomes fp32."""
        wide = sim.alloc(Component.OFFLOAD_BUFFER, slot.nbytes, slot.fqn, "decompressed", stream=stream)
        sim.free(low)
        return wide

    def _upload_bucket(self, sim: Simulation, block: int, host: Sequence[Block], stream: int) -> list[Block]:
        """The host's tensors are joined in pageable memory, even where they were pinned, and copied as one."""
        slots, total = self._slots[block], self._moved_bytes(block)
        joined = self._host(sim, total, "")
        flat = sim.alloc(Component.OFFLOAD_BUFFER, total, what="uploaded bucket", stream=stream)
        sim.free(joined)
        for held in host:  # the first ones stay: the optimizer's param_groups refer to the parameters that the bucket replaced
            if block in self._bucketed:
                sim.free(held)
        self._bucketed.add(block)
        if not self._settings.amp:
            return [flat]
        wide = [sim.alloc(Component.OFFLOAD_BUFFER, s.nbytes, s.fqn, "decompressed", stream=stream) for s in slots]
        sim.free(flat)
        return wide

    def offload(self, sim: Simulation, block: int, *, waits: bool = False) -> None:
        """`task_offload`: a copy of the block on the host; its GPU memory is free at once.  `waits`: compute waits for it."""
        if block not in self._offloaded:
            return
        stream = OFFLOAD_STREAM if self._settings.overlap else DEFAULT_STREAM
        slots, held = self._slots[block], self._on_gpu.pop(block)
        behind = _known(self._computed.get(block, -1))
        if behind:
            sim.wait(*behind, stream=HOST)  # `compute_stream.synchronize()`
        if self._settings.overlap and not waits:
            sim.enqueue("d2h", self._moved_bytes(block), stream, behind, self._copies(block))
        else:  # one stream: after the upload that was enqueued before it, and before whatever comes next
            before = (*behind, *self._arrived.values())
            sim.wait(sim.enqueue("d2h", self._moved_bytes(block), stream, before, self._copies(block)))
        if self._settings.amp:  # `amp_compress_impl`
            low = []
            for slot, wide in zip(slots, held, strict=True):
                low.append(sim.alloc(Component.OFFLOAD_BUFFER, self._host_bytes(slot), slot.fqn, "compressed", stream=stream))
                sim.free(wide)
            held = low
        if self._settings.bucket:
            total = self._moved_bytes(block)
            joined = sim.alloc(Component.OFFLOAD_BUFFER, total, what="bucket to offload", stream=stream)
            self._on_host[block] = [self._to_host(sim, total, "")]
            sim.free(joined)
        elif self._ways > 1:
            size = self._moved_bytes(block)
            own = (
                sim.alloc(Component.OFFLOAD_BUFFER, size, what="slice to offload", stream=stream)
                if self._settings.amp
                else None
            )
            self._on_host[block] = [self._to_host(sim, size, "")]
            if own is not None:
                sim.free(own)
        else:
            self._on_host[block] = [
                self._to_host(sim, nbytes, slot.fqn) for slot, nbytes in zip(slots, self._sizes[block], strict=True)
            ]
        for gone in held:
            sim.free(gone)

    def _to_host(self, sim: Simulation, nbytes: int, fqn: str) -> Block:
        """Asynchronous copies to the host land in pinned memory (ATen/native/TensorConversions.cpp, `pin_out`)."""
        return self._host(sim, nbytes, fqn, Tier.HOST_PINNED if self._settings.overlap else Tier.HOST_PAGEABLE)


def _known(ticket: int) -> tuple[int, ...]:
    return (ticket,) if ticket >= 0 else ()


def _runs(piece: Piece, ranges: Iterable[tuple[int, int]], micro_batch: int, lane: int) -> Iterator[Run]:
    for start, stop in ranges:
        yield Run(Segment(piece.name or "glue", start, stop), Pass.FORWARD, micro_batch, lane)


def _parents(fqn: str) -> Iterator[str]:
    parts = fqn.split(".")
    return (".".join(parts[:n]) for n in range(1, len(parts) + 1))
