"""`torch.autograd.graph.save_on_cpu(pin_memory=True)` around the forward pass: what autograd saves waits on the host.

    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = model(**batch).loss
    loss.backward()

A saved-tensor hook sees every tensor that a node of the graph saves, not every activation.  So

    - a tensor that several nodes save has a copy on the host for each of them;
    - weights are saved too (each Linear saves its own): the host holds a copy of them all, and backward brings each back as a
      new tensor beside the weight itself;
    - an activation leaves the GPU with its last use in forward.  In backward each node makes its copies on the GPU when it
      begins, and drops them when it is over.  (Python's own names may hold it a little longer; that is not seen.)

What a node saved is read off the trace: the forward's storages that its ops read in backward, each with the size of the tensor
that is read.  Which ops are one node: see `_Nodes`.
Copies run on the stream of the compute, so no block waits for another stream.
Source: torch/autograd/graph.py, `save_on_cpu` (2.13): `pack_to_cpu`, `unpack_from_cpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell
from ..ledger import Component, Tier
from ..simulate import ARITHMETIC
from ..trace.steptrace import EventKind, Pass, Phase, Role, StepTrace, TensorSlot
from .base import RankClass, Run, Segment, Strategy

if TYPE_CHECKING:
    from ..request import Request
    from ..simulate import Block, Simulation

OFFLOAD = "activation"  # what --offload calls it
_STAYS = (Role.PARAM, Role.BUFFER, Role.BATCH)  # storages that live through the step whether they are saved or not
_STRATEGIES = ("single", "release", "ddp")


@dataclass(frozen=True)
class Saved:
    """One tensor that one node saved."""

    storage: int
    nbytes: int


@dataclass
class _Stretch:
    """Events [start, stop) of the trace, what is brought back before them and what goes to the host after them."""

    start: int
    stop: int
    back: list[Saved] = field(default_factory=list)
    away: list[Saved] = field(default_factory=list)


class OffloadedActivations(Strategy):
    """`inner` with its saved tensors on the host; everything else is the inner strategy's."""

    def __init__(self, inner: Strategy) -> None:
        self.name = inner.name
        self._inner = inner
        self._sim: Simulation | None = None
        self._stretches: list[_Stretch] = []
        self._of: dict[int, list[Saved]] = {}  # activation -> its saves
        self._host: dict[int, list[Block]] = {}

    def at_init(self, sim: Simulation) -> None:
        self._sim = sim
        self._stretches = _stretches(sim.trace)
        for stretch in self._stretches:
            for saved in stretch.back:
                self._of.setdefault(saved.storage, []).append(saved)
        self._inner.at_init(sim)

    def schedule(self, trace: StepTrace, micro_batch: int) -> Iterator[Run]:
        for run in self._inner.schedule(trace, micro_batch):
            yield from self._split(run)

    def _split(self, run: Run) -> Iterator[Run]:
        def part(start: int, stop: int) -> Run:
            return Run(Segment(run.segment.name, start, stop), run.kind, run.micro_batch, run.lane)

        sim, position = self._sim, run.segment.start
        assert sim is not None, "the run has not been initialised"
        for stretch in self._stretches:
            if not run.segment.start <= stretch.start < run.segment.stop:
                continue
            if position < stretch.start:
                yield part(position, stretch.start)
            brought = [self._bring_back(sim, saved) for saved in stretch.back]
            yield part(stretch.start, stretch.stop)
            for block in brought:
                sim.free(block)
            for saved in stretch.back:
                self._drop(sim, saved.storage)
            for saved in stretch.away:
                self._take_away(sim, saved)
            position = stretch.stop
        if position < run.segment.stop:
            yield part(position, run.segment.stop)

    def _take_away(self, sim: Simulation, saved: Saved) -> None:
        block = sim.alloc(Component.ACTIVATION, saved.nbytes, what="saved on the host", tier=Tier.HOST_PINNED)
        self._host.setdefault(saved.storage, []).append(block)
        _copy(sim, "d2h", saved.nbytes)

    @staticmethod
    def _bring_back(sim: Simulation, saved: Saved) -> Block:
        _copy(sim, "h2d", saved.nbytes)
        return sim.alloc(Component.ACTIVATION, saved.nbytes, what="saved tensor, back on the GPU")

    def _drop(self, sim: Simulation, storage: int) -> None:
        """A node is over, and its copy on the host goes.  One copy of an activation is the trace's to free: `unpack_saved`."""
        copies = self._host.get(storage)
        if copies:
            sim.free(copies.pop())

    def pack_saved(self, sim: Simulation, storage: int, block: Block) -> Block | None:
        if storage not in self._of:
            return block  # no op of backward reads it: only its shape is needed
        for saved in self._of[storage]:
            self._take_away(sim, saved)
        sim.free(block)
        return None

    def unpack_saved(self, sim: Simulation, storage: int, kept: Block | None, nbytes: int) -> Block:
        """What the trace frees when the last node is over: the first of the copies on the host."""
        return self._host[storage].pop(0)

    # -- everything else is the inner strategy's ---------------------------------------------------------------------------

    def trace_key(self) -> str:
        return self._inner.trace_key()

    def prepare(self, module: Any) -> None:
        self._inner.prepare(module)

    def rank_classes(self, world_size: int) -> list[RankClass]:
        return self._inner.rank_classes(world_size)

    def trains(self, trace: StepTrace) -> bool:
        return self._inner.trains(trace)

    def before_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        self._inner.before_module(sim, module, kind)

    def after_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        self._inner.after_module(sim, module, kind)

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        self._inner.grad_ready(sim, param, block)

    def holds_grad(self, sim: Simulation, param: TensorSlot) -> bool:
        return self._inner.holds_grad(sim, param)

    def end_of_micro_step(self, sim: Simulation, micro_batch: int) -> None:
        self._inner.end_of_micro_step(sim, micro_batch)

    def end_of_backward(self, sim: Simulation) -> None:
        self._inner.end_of_backward(sim)

    def step(self, sim: Simulation) -> None:
        self._inner.step(sim)

    def zero_grad(self, sim: Simulation, set_to_none: bool) -> None:
        self._inner.zero_grad(sim, set_to_none)

    def hints(self) -> list[str]:
        return self._inner.hints()


def _copy(sim: Simulation, kind: str, nbytes: int) -> None:
    """A copy on the stream of the compute: after every op before it, and before every op that follows."""
    launched = sim.enqueue(ARITHMETIC, 0)  # no work: the place in the stream
    sim.wait(sim.enqueue(kind, nbytes, after=(launched,)))


def saved_tensors(trace: StepTrace) -> list[Saved]:
    """Every tensor that the hook sees, in the order in which backward asks for them."""
    return [saved for stretch in _stretches(trace) for saved in stretch.back]


class _Nodes:
    """Puts the ops of backward together to nodes.

    A node begins with an op that reads a saved tensor.  It goes on while its ops have met no gradient yet (pow makes the power
    of what it saved before it multiplies), and with the next op that reads a saved tensor beside the same gradient.
    """

    def __init__(self) -> None:
        self.found: list[_Stretch] = []
        self._gradients: set[int] = set()
        self._made: set[int] = set()  # by a node that has met no gradient yet

    def op(self, op: _Stretch, given: set[int], made: set[int]) -> None:
        """The next op: `given`, what it reads that forward did not make; `made`, its results."""
        if given & self._made:
            given = given - self._made
            self._grow(op)
        elif not op.back:
            return
        elif given & self._gradients:
            self._grow(op)
        else:
            self.found.append(op)
            self._made = set()
        self._gradients = given
        self._made = set() if given else self._made | made

    def _grow(self, op: _Stretch) -> None:
        self.found[-1].stop = op.stop
        self.found[-1].back += op.back


def _stretches(trace: StepTrace) -> list[_Stretch]:
    """Where saved tensors go and come back, in the order of the trace."""
    kinds, args = trace.event_kind.tolist(), trace.event_arg.tolist()
    starts, inputs, signatures = trace.op_input_start.tolist(), trace.op_inputs.tolist(), trace.op_signature.tolist()
    role = trace.storage_role.tolist()
    stays = {storage for storage, r in enumerate(role) if r in _STAYS}
    forward: set[int] = set()  # storages that forward made
    reads: dict[int, list[tuple[int, int]]] = {}  # of what stays: the ops of forward that read it, as events
    nodes = _Nodes()
    backward = False
    for event, (kind, arg) in enumerate(zip(kinds, args, strict=True)):
        if kind == EventKind.PHASE:
            backward = arg == Phase.BACKWARD
        elif kind == EventKind.ALLOC and not backward:
            forward.add(arg)
        elif kind == EventKind.OP:
            storages = inputs[starts[arg] : starts[arg + 1]]
            stop = event + 1
            while stop < len(kinds) and kinds[stop] == EventKind.ALLOC:  # an op and what it makes are not torn apart
                stop += 1
            if not backward:
                for storage in storages:
                    if storage in stays:
                        reads.setdefault(storage, []).append((event, stop))
                continue
            infos = trace.signatures[signatures[arg]].inputs
            found = [
                Saved(storage, info.nbytes)
                for storage, info in zip(storages, infos, strict=True)
                if (storage in forward or storage in stays) and storage != trace.loss_storage and info.nbytes
            ]
            given = {storage for storage in storages if storage not in forward and storage not in stays}
            nodes.op(_Stretch(event, stop, back=found), given, set(args[event + 1 : stop]))
    saving: dict[tuple[int, int], _Stretch] = {}
    seen: dict[int, int] = {}
    for node in reversed(nodes.found):  # backward asks last for what was saved first
        for saved in node.back:
            if saved.storage in stays and saved.storage in reads:
                number = seen[saved.storage] = seen.get(saved.storage, -1) + 1
                where = reads[saved.storage][min(number, len(reads[saved.storage]) - 1)]
                saving.setdefault(where, _Stretch(*where)).away.append(saved)
    return sorted((*saving.values(), *nodes.found), key=lambda stretch: stretch.start)


def check(request: Request) -> None:
    """Raises CannotTell for what it is not modelled with."""
    if request.strategy not in _STRATEGIES or not request.has_backward:
        raise CannotTell(
            f"--offload {OFFLOAD} with --strategy {request.strategy}, --method {request.method} and --mode {request.mode}"
            f" is not modelled yet. Use --strategy {' or '.join(_STRATEGIES)} and train"
        )
    if request.recompute != "none":
        raise CannotTell(
            f"--offload {OFFLOAD} with --recompute {request.recompute} is not modelled: checkpoints have hooks of their own."
            " Leave one of them out"
        )


def said(request: Request) -> list[str]:
    return ["forward runs in save_on_cpu(pin_memory=True): every saved tensor, weights too, is copied to the host and back"]
