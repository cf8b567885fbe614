"""L2L: the layers relay each other on one GPU; each runs all micro batches of a step before the next one comes.

Models "Training Large Neural Networks with Constant Memory using a New Execution Algorithm" (arXiv 2002.05645).  No
code of it is public; `validator.runtimes.l2l` trains as the paper says, and what that leaves open is decided there as here:

* weights, gradients and the optimizer are on the host (its "eager param-server"), weights and gradients in pinned memory; with
  `--precision bf16-mixed` the optimizer steps fp32 masters in pageable memory, from fp32 copies of all gradients;
* what lies before the blocks (the embedding) comes first and stays to the end, since the graph of its outputs needs it;
* a block runs forward without a graph, and its inputs are stashed: on the GPU, or on the host (the variant of constant memory);
* what lies behind the blocks (norm, head, loss) runs forward and backward for one micro batch after the other;
* a block's backward runs it again first; the gradients of all micro batches are added up on the GPU and then sent home;
* with `overlap` the next layer is uploaded while one runs, and its gradients leave while the next runs: two of each are there.

Formula, with E the bytes of what lies before the blocks, B those of a block, H of the tail, k micro batches of A bytes at a
block's boundary, N blocks, T the transient of a block's backward for one micro batch, L that of head and loss; of weights and
gradients:

    E + k A (N + 1) + max(B + 2 H + L,  3 B + H + T,  4 B + T,  E + B)      overlapping
    E + k A (N + 1) + max(2 H + L,  2 B + T,  E)                            without overlap

and E once more from the tail on, where the head is tied to the embedding: its gradient stays until the embedding's is there.

A stash on the host leaves 3 k A of k A (N + 1) in forward, and k A + A in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from ...errors import CannotTell, UserError
from ..ledger import DEFAULT_STREAM, Component, Tier
from ..loop import LoopFacts
from ..optimizers.rule import OptimizerTensor, StepEvents
from ..simulate import ARITHMETIC, HOST, Block, Simulation
from ..trace.block_segments import without_cast_cache
from ..trace.relay_segments import Layer, Range, RelaySegments, cut_relay
from ..trace.steptrace import EventKind, Pass, Phase, Role, StepTrace, TensorSlot
from .base import Run, Segment, Strategy
from .zero_host import FP32, play

if TYPE_CHECKING:
    from ..request import Request

STASHES = ("gpu", "host")
_MASTER = "float32"
_UPLOAD_STREAM, _OFFLOAD_STREAM = 1, 2
_PRECISIONS = ("fp32", "bf16", "fp16", "bf16-autocast", "bf16-mixed")


@dataclass(frozen=True, kw_only=True)
class L2lSettings:
    """The knobs of a relay."""

    overlap: bool = True
    """Copies run beside compute, so that the GPU holds two layers."""
    stash: Literal["gpu", "host"] = "gpu"
    """Where the inputs of the blocks wait for backward."""

    def __post_init__(self) -> None:
        if self.stash not in STASHES:
            raise UserError(f"--l2l-stash {self.stash!r} is not known", f"Choose one of {', '.join(STASHES)}")


class L2l(Strategy):
    """One GPU, on which one layer after the other works on all micro batches."""

    name = "l2l"

    def __init__(self, segments: RelaySegments, settings: L2lSettings | None = None, *, has_masters: bool = False) -> None:
        """`segments`: the trace that will be walked, cut by `cut_relay`.  `has_masters`: the optimizer steps fp32 copies."""
        self._segments = segments
        self._settings = settings or L2lSettings()
        self._has_masters = has_masters
        blocks = segments.blocks
        self._order: list[Layer] = [segments.front, *blocks, segments.tail, *blocks[::-1], segments.front]
        self._on_gpu: dict[str, list[Block]] = {}  # by layer: its weights
        self._grads: dict[str, Block] = {}  # by parameter, on the GPU
        self._grads_at_home: dict[str, Block] = {}
        self._leaving: tuple[list[Block], int] | None = None  # gradients on their way home, and the ticket of the copy
        self._arrived: dict[str, int] = {}  # layer -> ticket of its upload
        self._computed = -1  # ticket: what the layer before has issued is over
        self._stashed: dict[tuple[str, int], tuple[Block, int]] = {}  # (layer, lane) -> host's copy and its ticket
        self._embedded: list[Block] = []  # by lane: the first block's inputs, beside their copies on the host
        self._sim: Simulation | None = None
        self._steps = 0

    # -- the shape of the step -------------------------------------------------------------------------------------------

    def batches_at_once(self, loop: LoopFacts) -> int:
        return loop.grad_accum_steps

    def unmade(self, trace: StepTrace) -> frozenset[int]:
        return frozenset(tied.total for tied in self._segments.tied if tied.total != tied.partial)

    def at_init(self, sim: Simulation) -> None:
        """The model is made on the host and pinned there tensor by tensor; its buffers go to the GPU."""
        self._sim = sim
        tensors = [(slot, Component.PARAM, self._host) for slot in sim.trace.params]
        tensors += [(slot, Component.BUFFER, Tier.GPU) for slot in sim.trace.buffers]
        made = [sim.place(kind, slot.fqn, slot.shape, slot.dtype, Tier.HOST_PAGEABLE) for slot, kind, _ in tensors]
        for (slot, kind, tier), pageable in zip(tensors, made, strict=True):
            sim.place(kind, slot.fqn, slot.shape, slot.dtype, tier)
            sim.free(pageable)
        if self._has_masters:
            for slot in self._trainable(sim):
                sim.place(Component.MASTER_WEIGHT, slot.fqn, slot.shape, _MASTER, Tier.HOST_PAGEABLE)
        play(sim, self._rule(sim).init, Tier.HOST_PAGEABLE, *self._names(sim))

    def schedule(self, trace: StepTrace, micro_batch: int) -> Iterator[Run]:
        assert self._sim is not None
        sim, lanes = self._sim, range(self._sim.loop.grad_accum_steps)
        front, blocks, tail = self._segments.front, self._segments.blocks, self._segments.tail
        inputs = _inputs(trace, blocks) if self._settings.stash == "host" else {}
        self._arrive(sim, 0)
        yield from _runs(front, front.forward, lanes)
        for place, block in enumerate(blocks, 1):
            self._arrive(sim, place)
            yield from self._forward(sim, block, inputs.get(block.name), lanes)
        self._arrive(sim, len(blocks) + 1)
        for lane in lanes:
            sim.begin(Phase.FORWARD)
            yield from _runs(tail, tail.forward, (lane,))
            sim.begin(Phase.BACKWARD)
            turn, stop = tail.backward
            yield from _runs(tail, (turn + (lane > 0), stop), (lane,))  # the event of the turn is one for all
            for tied in self._segments.tied:
                self.grad_ready(sim, trace.params[tied.param], sim.take(lane, tied.partial))
            if self._embedded:  # the model's forward returns
                sim.free(self._embedded.pop(0))
        self._send_grads(sim, tail)
        for place, block in enumerate(blocks[::-1], len(blocks) + 2):
            self._arrive(sim, place)
            for lane in lanes:
                if block.name in inputs:
                    self._fetch_stash(sim, block, inputs[block.name], lane)
                yield from _runs(block, block.backward, (lane,))
            self._send_grads(sim, block)
        self._arrive(sim, len(self._order) - 1)
        for lane in lanes:
            # whoever calls the front's backward holds the gradient that it hands over
            held = [one for s in _between(trace, blocks[0].backward, front.backward) if (one := sim.take(lane, s))]
            yield from _runs(front, front.backward, (lane,))
            for one in held:
                sim.free(one)
        self._send_grads(sim, front)
        self._drop_layers(sim, ())
        self._let_go(sim)
        sim.drop_graphs()

    def _forward(self, sim: Simulation, block: Layer, stashed: int | None, lanes: Sequence[int]) -> Iterator[Run]:
        """`stashed`: the storage that goes to the host; None: the stash is on the GPU."""
        kept = []
        for lane in lanes:
            yield from _runs(block, block.forward, (lane,))
            if stashed is not None and (hidden := sim.take(lane, stashed)) is not None:
                home = sim.alloc(Component.ACTIVATION, hidden.nbytes, block.name, "stashed input", self._host)
                sent = sim.enqueue("d2h", hidden.nbytes, DEFAULT_STREAM, (sim.enqueue(ARITHMETIC, 0),))
                sim.wait(sent)  # on the stream of compute, whose memory it reads
                self._stashed[block.name, lane] = home, sent
                kept.append(hidden)
        if block is self._segments.blocks[0]:  # a variable of the model's forward holds the embedding's output
            self._embedded = kept
            return
        for hidden in kept:  # the loop over blocks holds them until all micro batches are through the block
            sim.free(hidden)

    def _fetch_stash(self, sim: Simulation, block: Layer, stashed: int, lane: int) -> None:
        if (waiting := self._stashed.pop((block.name, lane), None)) is None:
            return
        home, sent = waiting
        hidden = sim.alloc(Component.ACTIVATION, home.nbytes, block.name, "stashed input")
        sim.wait(sim.enqueue("h2d", home.nbytes, DEFAULT_STREAM, (sent,)))
        sim.free(home)
        sim.give(lane, stashed, hidden)

    # -- weights ---------------------------------------------------------------------------------------------------------

    def _arrive(self, sim: Simulation, place: int) -> None:
        """The layer whose turn it is, and the next one: what is not wanted goes, what is missing comes."""
        layer = self._order[place]
        wanted = [self._segments.front, layer]
        if self._settings.overlap:
            wanted += self._order[place + 1 : place + 2]
        self._computed = sim.enqueue(ARITHMETIC, 0)
        self._drop_layers(sim, [one.name for one in wanted])
        for one in wanted:
            if one.name not in self._on_gpu:
                self._upload(sim, one)
        if (ticket := self._arrived.pop(layer.name, None)) is not None:
            sim.wait(ticket)

    def _upload(self, sim: Simulation, layer: Layer) -> None:
        stream = _UPLOAD_STREAM if self._settings.overlap else DEFAULT_STREAM
        slots = [sim.trace.params[p] for p in layer.params]
        nbytes = sum(slot.nbytes for slot in slots)
        if nbytes:
            # its memory may be that of a layer that has been computed only now
            self._arrived[layer.name] = sim.enqueue("h2d", nbytes, stream, (self._computed,), ops=2 * len(slots))
        self._on_gpu[layer.name] = [
            sim.alloc(Component.OFFLOAD_BUFFER, slot.nbytes, slot.fqn, "uploaded", stream=stream) for slot in slots
        ]

    def _drop_layers(self, sim: Simulation, wanted: Sequence[str]) -> None:
        for name in [name for name in self._on_gpu if name not in wanted]:
            for block in self._on_gpu.pop(name):
                sim.free(block)

    # -- gradients -------------------------------------------------------------------------------------------------------

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        if block is None:
            return
        if param.fqn in self._grads:
            sim.free(block)
        else:
            self._grads[param.fqn] = block

    def holds_grad(self, sim: Simulation, param: TensorSlot) -> bool:
        return param.fqn in self._grads

    def _send_grads(self, sim: Simulation, layer: Layer) -> None:
        """All micro batches have been through the layer: what they add up to goes home, while the next layer runs."""
        self._let_go(sim)
        names = [name for p in layer.params if (name := sim.trace.params[p].fqn) in self._grads]
        going = [self._grads.pop(name) for name in names]
        for name, block in zip(names, going, strict=True):
            self._grads_at_home[name] = sim.alloc(Component.GRAD, block.nbytes, name, "gradient", self._host)
        nbytes = sum(block.nbytes for block in going)
        if nbytes:
            done = sim.enqueue(ARITHMETIC, 0)
            stream = _OFFLOAD_STREAM if self._settings.overlap else DEFAULT_STREAM
            self._leaving = going, sim.enqueue("d2h", nbytes, stream, (done,), ops=2 * len(going))
        if not self._settings.overlap:
            self._let_go(sim)

    def _let_go(self, sim: Simulation) -> None:
        """The gradients that left last are at home."""
        if self._leaving is not None:
            blocks, ticket = self._leaving
            sim.wait(ticket, stream=HOST)
            for block in blocks:
                sim.free(block)
            self._leaving = None

    # -- the step, on the host -------------------------------------------------------------------------------------------

    def step(self, sim: Simulation) -> None:
        rule = self._rule(sim)
        elements = sum(p.numel for p in self._trainable(sim))
        sim.enqueue("host_step", elements * FP32)
        widened = []
        if self._has_masters:
            for slot in self._trainable(sim):
                widened.append(sim.place(Component.GRAD, slot.fqn, slot.shape, _MASTER, Tier.HOST_PAGEABLE))
                sim.free(self._grads_at_home.pop(slot.fqn))
        play(sim, rule.later if self._steps else rule.first, Tier.HOST_PAGEABLE, *self._names(sim))
        for block in widened:
            sim.free(block)
        self._steps += 1

    def zero_grad(self, sim: Simulation, set_to_none: bool) -> None:
        for block in self._grads_at_home.values():
            sim.free(block)
        self._grads_at_home.clear()

    # -- small parts -----------------------------------------------------------------------------------------------------

    @property
    def _host(self) -> Tier:
        return Tier.HOST_PINNED if self._settings.overlap else Tier.HOST_PAGEABLE

    def _trainable(self, sim: Simulation) -> list[TensorSlot]:
        return [sim.trace.params[i] for i in sorted(sim.trace.params_with_grad)]

    def _names(self, sim: Simulation) -> list[str]:
        return [p.fqn for p in self._trainable(sim)]

    def _rule(self, sim: Simulation) -> StepEvents:
        stepped = [OptimizerTensor.of(sim.trace, p) for p in self._trainable(sim)]
        if self._has_masters:
            stepped = [replace(tensor, dtype=_MASTER) for tensor in stepped]
        return sim.optimizer.step(stepped)


def _runs(layer: Layer, events: Range, lanes: Sequence[int]) -> Iterator[Run]:
    for lane in lanes:
        yield Run(Segment(layer.name, *events), Pass.FORWARD, 0, lane)


def _inputs(trace: StepTrace, blocks: Sequence[Layer]) -> dict[str, int]:
    """By block: the storage that comes in, which waits for its backward."""
    found = {block.name: _between(trace, (0, block.forward[0]), block.backward, Role.ACTIVATION) for block in blocks}
    first = blocks[0]
    if not found[first.name]:  # nothing before it trains, so that no backward drops it
        freed = trace.event_arg[trace.event_kind == EventKind.FREE]
        made = trace.event_arg[: first.forward[0]][trace.event_kind[: first.forward[0]] == EventKind.ALLOC]
        found[first.name] = np.setdiff1d(made, freed).tolist()
    nbytes = max((int(trace.storage_bytes[s]) for s in found[blocks[-1].name]), default=-1)
    inputs = {}
    for name, storages in found.items():  # the first block's masks and positions go with its backward as well
        same = [s for s in storages if int(trace.storage_bytes[s]) == nbytes]
        if not same:
            raise CannotTell(f"{trace.name}: what comes into {name} is not found in the trace, which a relay stashes")
        inputs[name] = same[0]
    return inputs


def _between(trace: StepTrace, made: Range, freed: Range, role: Role = Role.TEMP) -> list[int]:
    """Storages that one range of the trace makes and another one frees."""
    kinds, args = trace.event_kind, trace.event_arg
    born = args[slice(*made)][kinds[slice(*made)] == EventKind.ALLOC]
    gone = args[slice(*freed)][kinds[slice(*freed)] == EventKind.FREE]
    return [s for s in np.intersect1d(born, gone).tolist() if trace.storage_role[s] == role]


def check(request: Request) -> None:
    """Raises UserError or CannotTell for a request that a relay cannot be asked."""
    from ..optimizers.traced import names
    from . import SINGLE

    method = request.method
    if request.mode != "train":
        raise UserError(f"--method {method} with --mode {request.mode}: it is a way to train", "Leave --mode out")
    if request.strategy == "release":
        raise UserError(
            f"--method {method} with --grad-release: gradients are added up over the micro batches and stepped on the host",
            "Leave --grad-release out",
        )
    if request.strategy != SINGLE or request.gpus != 1:
        raise CannotTell(f"--method {method} on several GPUs is not modelled. Ask for one")
    if request.optimizer not in names():
        raise UserError(
            f"--method {method} with --optimizer {request.optimizer}: the optimizer steps on the host, with torch's own",
            f"Choose one of {', '.join(names())}",
        )
    if request.optimizer_impl == "foreach":
        raise UserError(f"--method {method} with --optimizer-impl foreach: it steps on the host", "Use for-loop or fused")
    if request.precision not in _PRECISIONS:
        raise CannotTell(
            f"--precision {request.precision} with --method {method} is not modelled. Use {' or '.join(_PRECISIONS)}"
        )
    if request.offload:
        raise UserError(f"--offload {'+'.join(request.offload)}: --method {method} has everything on the host", "Leave it out")
    if request.recompute not in ("none", "full"):
        raise UserError(f"--recompute {request.recompute}: --method {method} recomputes every block", "Leave --recompute out")
    loop = request.loop
    for asked, option in (
        (not loop.set_to_none, "--keep-grads"),
        (loop.clip_grad_norm, "--clip-grad-norm"),
        (loop.keep_outputs, "--keep-outputs"),
        (loop.zero_grad != "after-step", f"--zero-grad {loop.zero_grad}"),
        (request.use_cache, "--use-cache"),
    ):
        if asked:
            raise CannotTell(f"{option} with --method {method} is not modelled. Leave it out")


def traced_as(request: Request) -> Request:
    """The question whose trace is walked: every block recomputed, with a graph of its own."""
    return request.but(recompute="full", reentrant=True, precision=request.precision.removesuffix("-mixed"))


def prepared(trace: StepTrace) -> StepTrace:
    """The trace as a relay runs it: autocast is entered anew for every block and micro batch."""
    return without_cast_cache(trace)


def make(request: Request, trace: StepTrace) -> L2l:
    return L2l(cut_relay(trace), request.l2l, has_masters=request.precision.endswith("-mixed"))


def said(request: Request) -> list[str]:
    settings = request.l2l or L2lSettings()
    count = request.loop.grad_accum_steps
    found = [
        f"L2L: every layer runs {'the micro batch' if count == 1 else f'all {count} micro batches'} of a step before the next "
        "one comes; blocks are recomputed; weights, gradients and the optimizer are on the host",
        f"the inputs of all blocks wait on the {'GPU' if settings.stash == 'gpu' else 'host'} for backward",
        "the optimizer steps on the host as fast as DeepSpeed's CPU Adam does; torch's own is slower",
    ]
    if request.precision.endswith("-mixed"):
        found.append("fp32 masters and fp32 copies of all gradients are on the host, beside the 16-bit weights")
    if settings.overlap:
        found.append("copies run beside compute from pinned memory, so two layers and their gradients are on the GPU")
    else:
        found.append("copies do not overlap with compute, and the host's memory is pageable")
    return found
