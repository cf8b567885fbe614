"""Walks a StepTrace under a strategy and writes the ledger.

The core knows no strategy: it turns the trace's events into blocks, expands abstract kernels for the GPU at hand
(`planner.kernels`), and calls the strategy's hooks.  Everything else on the device is the strategy's doing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .kernels import Hidden, Kernels
from .ledger import DEFAULT_STREAM, Component, Ledger, LedgerBuilder, Tier
from .loop import LoopFacts
from .optimizers.rule import OptimizerRule, StepEvent, StepKind
from .trace.steptrace import ITEMSIZE, EventKind, Pass, Phase, Role, StepTrace

if TYPE_CHECKING:
    from .strategies.base import Run, Strategy

_COMPONENT: dict[int, Component] = {
    Role.BATCH: Component.ACTIVATION,
    Role.ACTIVATION: Component.ACTIVATION,
    Role.TEMP: Component.TEMP,
    Role.GRAD: Component.GRAD,
    Role.GRAD_COPY: Component.GRAD,
}


class Block(NamedTuple):
    """A live block of the ledger."""

    id: int
    nbytes: int


_GONE = Block(-1, 0)

# The kinds of events as plain numbers: every event of a run is compared with them.
_OP, _ALLOC, _FREE = int(EventKind.OP), int(EventKind.ALLOC), int(EventKind.FREE)
_ENTER, _LEAVE = int(EventKind.ENTER), int(EventKind.LEAVE)
_GRAD, _PHASE = int(EventKind.GRAD), int(EventKind.PHASE)


ARITHMETIC = "arithmetic"  # a pass over parameters that a strategy runs between the ops, in bytes that it reads and writes
WAIT = "wait"  # the kind of Work that is no work: its stream waits for other work
HOST = -1  # as the stream of a WAIT: the host itself waits (torch.cuda.Stream.synchronize), and issues nothing meanwhile


@dataclass(frozen=True, slots=True)
class Work:
    """Something that takes time on a stream, enqueued when `ledger_row` rows had been written."""

    kind: str  # "h2d", "d2h", "all_gather", "reduce_scatter", "all_reduce", "host_step", "nvme_read", "nvme_write", WAIT
    stream: int
    nbytes: int
    ledger_row: int
    run: int = -1  # index in `WorkLog.runs` of the run that was last begun; -1: none yet
    event: int = 0  # of the trace: enqueued before that event of the run; its `segment.stop` when the run was over
    phase: int = int(Phase.INIT)
    iteration: int = 0
    after: tuple[int, ...] = ()  # tickets: indices of the work that must be over before
    ops: int = 1  # what the host launches for it, one by one
    ranks: int = 0  # that take part in a collective; 0: all
    stride: int = 1  # between them: 1 for neighbours, the GPUs of a node for one of every node


@dataclass(frozen=True, slots=True)
class Ran:
    """A run as it was executed."""

    run: Run
    iteration: int


class WorkLog(list[Work]):
    """What takes time, in the order of issue.  Compute is not enqueued: it is the ops of `runs`, between the work."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[Ran] = []

    def without(self, micro_step: int) -> WorkLog:
        """The log of a loop that lacks this micro step, one between the first and the last."""
        kept = WorkLog()
        numbers = {-1: -1}
        for number, ran in enumerate(self.runs):
            if ran.run.micro_batch != micro_step:
                numbers[number] = len(kept.runs)
                kept.runs.append(ran)
        tickets: dict[int, int] = {}
        for ticket, work in enumerate(self):
            if work.run in numbers:
                tickets[ticket] = len(kept)
                after = tuple(tickets[t] for t in work.after if t in tickets)
                kept.append(replace(work, run=numbers[work.run], after=after))
        return kept


class Simulation:
    """What a strategy sees: the trace, the loop, and the means to make and drop blocks."""

    def __init__(
        self,
        trace: StepTrace,
        strategy: Strategy,
        optimizer: OptimizerRule | None,
        loop: LoopFacts,
        kernels: Kernels,
        rank: int = 0,
    ) -> None:
        self.trace = trace
        self.loop = loop
        self.rank = rank
        self.lane = 0  # of the run that is executed now
        self.work = WorkLog()
        self._event = 0  # of the trace: where the run is when a hook is called
        self._strategy = strategy
        self._optimizer = optimizer
        self._kernels = kernels
        self._ledger = LedgerBuilder()
        self._blocks: dict[tuple[int, int], Block] = {}  # (lane, storage) -> live block of the trace
        self._packed: dict[tuple[int, int], tuple[Block | None, int]] = {}
        self._workspaces: dict[Any, Block] = {}
        self._program = _Program(trace, strategy)
        self._batch: list[Block] = []
        self._held: list[Block] = []  # outputs of the last forward, where the loop holds them
        self._leftover: list[Block] = []  # the loss and what else the step leaves
        self._old: list[Block] = []  # both, of the micro step before: gone when the next forward has returned

    # -- what a strategy uses --------------------------------------------------------------------------------------------

    @property
    def target(self) -> str:
        return str(self.trace.options["target"])

    @property
    def trains(self) -> bool:
        """Whether the loop steps; zeroth-order training steps without a backward."""
        return self._strategy.trains(self.trace)

    @property
    def optimizer(self) -> OptimizerRule:
        assert self._optimizer is not None, "a strategy that steps needs an optimizer rule"
        return self._optimizer

    def place(
        self,
        component: Component,
        fqn: str,
        shape: Sequence[int],
        dtype: str,
        tier: Tier = Tier.GPU,
        stream: int = DEFAULT_STREAM,
    ) -> Block:
        """A named tensor of the run: parameter, shard, master weight, state, gradient."""
        numel = 1
        for size in shape:
            numel *= size
        return self.alloc(component, numel * ITEMSIZE[dtype], fqn, component.label, tier, stream)

    def alloc(
        self,
        component: Component,
        nbytes: int,
        fqn: str = "",
        what: str = "",
        tier: Tier = Tier.GPU,
        stream: int = DEFAULT_STREAM,
    ) -> Block:
        return Block(self._ledger.alloc(nbytes, component, (fqn, what), tier, stream), nbytes)

    def free(self, block: Block) -> None:
        self._ledger.free(block.id)

    def closed(self, key: Hashable, names: Sequence[str], make: Callable[[], None]) -> None:
        """Rows that leave nothing behind, see `LedgerBuilder.closed`: `make` is called the first time that `key` comes.

        It drops all that it makes, enqueues no work, and depends on nothing but `key`, except for names of blocks.
        """
        self._ledger.closed(key, names, make)

    def enqueue(
        self,
        kind: str,
        nbytes: int,
        stream: int = DEFAULT_STREAM,
        after: Sequence[int] = (),
        ops: int = 1,
        ranks: int = 0,
        stride: int = 1,
    ) -> int:
        """Work for the timeline; it takes no memory.  Returns a ticket, for `wait` and for the `after` of later work."""
        log, ledger = self.work, self._ledger
        run = len(log.runs) - 1
        phase, iteration = ledger.now_phase, ledger.now_iteration
        log.append(
            Work(kind, stream, nbytes, len(ledger), run, self._event, phase, iteration, tuple(after), ops, ranks, stride)
        )
        return len(log) - 1

    def wait(self, *tickets: int, stream: int = DEFAULT_STREAM) -> None:
        """What `stream` does from here on waits for the work with these tickets; stream 0 is where the ops run."""
        self.enqueue(WAIT, 0, stream, tickets)

    def run_optimizer(
        self,
        events: Iterable[StepEvent],
        names: Sequence[str],
        component: Component = Component.OPTIMIZER_STATE,
        drop_grad: Callable[[int], None] | None = None,
    ) -> None:
        """Plays the events of an optimizer rule; `names[i]` is the fqn of tensor i.  `drop_grad(i)`: its `.grad` goes here."""
        temporaries: dict[int, Block] = {}
        for event in events:
            if event.kind is StepKind.FREE:
                self.free(temporaries.pop(event.slot))
                continue
            if event.kind is StepKind.DROP_GRAD:
                if drop_grad is not None:
                    drop_grad(event.tensor)
                continue
            kept = event.kind is StepKind.STATE
            fqn = names[event.tensor] if event.tensor >= 0 else ""
            block = self.alloc(component if kept else Component.TEMP, event.nbytes, fqn, "optimizer step", event.tier)
            if not kept:
                temporaries[event.slot] = block
        for block in temporaries.values():
            self.free(block)

    def run_temporary(self, nbytes: int, what: str) -> None:
        """A block that is made and dropped at once."""
        self.free(self.alloc(Component.TEMP, nbytes, what=what))

    def begin(self, phase: Phase) -> None:
        """What follows belongs to this phase: for a strategy whose order is not that of the trace."""
        self._phase(phase)

    def take(self, lane: int, storage: int) -> Block | None:
        """A live block of the trace out of its hands; None: there is none."""
        return self._blocks.pop((lane, storage), None)

    def give(self, lane: int, storage: int, block: Block) -> None:
        """The trace goes on with `block` as this storage of that lane."""
        self._blocks[lane, storage] = block

    def drop_graphs(self) -> None:
        """What the graphs of these micro batches held goes, but for their losses: none of them is one with its loss."""
        kept = {*self.trace.batch_storages, self.trace.loss_storage}
        for key in [key for key in self._blocks if key[1] not in kept]:
            self.free(self._blocks.pop(key))

    def leave_to_graph(self, block: Block) -> None:
        """Nobody but the graph of this micro step's loss holds `block` from here: it goes with it, when the next loss is
        bound."""
        self._leftover.append(block)

    # -- the run ---------------------------------------------------------------------------------------------------------

    def run(self) -> Ledger:
        strategy, loop = self._strategy, self.loop
        self._phase(Phase.INIT)
        strategy.at_init(self)
        for iteration in range(loop.iterations if self.trains else 1):
            self._ledger.now_iteration = iteration
            if loop.zero_grad == "before-forward" and self.trains:
                strategy.zero_grad(self, loop.set_to_none)
            for micro_batch in range(0, loop.grad_accum_steps if self.trains else 1, strategy.batches_at_once(loop)):
                self._micro_step(micro_batch)
            if not self.trains:
                break
            strategy.end_of_backward(self)
            self._phase(Phase.STEP)
            strategy.step(self)
            if loop.zero_grad == "after-step":
                strategy.zero_grad(self, loop.set_to_none)
        return self._ledger.finish(self._describe)

    def _micro_step(self, micro_batch: int) -> None:
        self._phase(Phase.FORWARD)
        old = self._batch
        lanes = range(self._strategy.batches_at_once(self.loop))
        self._batch = [self._from_trace(lane, s, Role.BATCH) for lane in lanes for s in self.trace.batch_storages]
        self._drop(old)  # the loop variable is rebound after the new batch exists
        for run in self._strategy.schedule(self.trace, micro_batch):
            self._execute(run, micro_batch)
        if self._program.backward_is_missing:
            self._rebind()
        self._leftover += [block for key, block in self._blocks.items() if key[1] not in self.trace.batch_storages]
        self._blocks.clear()
        self._strategy.end_of_micro_step(self, micro_batch)

    def _execute(self, run: Run, micro_batch: int) -> None:
        program, strategy, lane = self._program, self._strategy, run.lane
        self.lane = lane
        kinds, args, auxs = program.kind, program.arg, program.aux
        blocks, roles, copied_grad, watches_saved = self._blocks, program.role, program.copied_grad, program.watches_saved
        hidden_of, free = program.hidden_of(self._kernels), self._ledger.free
        position, stop = run.segment.start, run.segment.stop
        self.work.runs.append(Ran(run, self._ledger.now_iteration))
        thread = int(self._ledger.now_phase == Phase.BACKWARD)
        while position < stop:
            kind, arg, aux = kinds[position], args[position], auxs[position]
            self._event = position
            position += 1
            if kind == _OP:
                hidden = hidden_of[arg]
                if watches_saved and position - 1 in program.unpack_at:
                    self._unpack(program.unpack_at[position - 1], lane)
                first = position
                while position < stop and kinds[position] == _ALLOC:
                    storage = args[position]
                    position += 1
                    param = copied_grad.get(storage)
                    if param is not None and (param < 0 or strategy.holds_grad(self, self.trace.params[param])):
                        continue  # autograd adds to .grad: no copy in the parameter's layout is made
                    nbytes = hidden.output_bytes.get(program.output[storage], -1) if hidden.output_bytes else -1
                    self._from_trace(lane, storage, roles[storage], nbytes)
                if hidden.workspace is not None and (thread, hidden.workspace[0]) not in self._workspaces:
                    key, nbytes = hidden.workspace
                    self._workspaces[thread, key] = self._new(Component.WORKSPACE, nbytes, arg)
                if hidden.transient:
                    self._run_hidden(hidden.transient, arg)
                if watches_saved and first - 1 in program.pack_at:
                    self._event = position
                    self._pack(program.pack_at[first - 1], lane)
            elif kind == _FREE:
                block = blocks.pop((lane, arg), None)
                if block is None:
                    continue
                if self.loop.keep_outputs and arg in program.outputs and roles[arg] != Role.BATCH:
                    self._held.append(block)
                else:
                    free(block.id)
            elif kind == _ALLOC:  # an ALLOC whose OP is in another segment
                self._from_trace(lane, arg, roles[arg])
            elif kind == _ENTER:
                if program.watches_modules:
                    strategy.before_module(self, program.module_of_call[arg], Pass(aux))
            elif kind == _LEAVE:
                if program.watches_modules:
                    strategy.after_module(self, program.module_of_call[arg], Pass(aux))
            elif kind == _GRAD:
                strategy.grad_ready(self, self.trace.params[arg], blocks.pop((lane, aux), None))
            elif kind == _PHASE:
                self._begin(Phase(arg), micro_batch)
                thread = int(arg == Phase.BACKWARD)
        self._event = stop

    def _begin(self, phase: Phase, micro_batch: int) -> None:
        if phase is Phase.BACKWARD:
            self._rebind()  # still forward: the loss is bound when the step has returned
        self._phase(phase)
        if phase is Phase.BACKWARD:
            if self.loop.zero_grad == "before-backward" and micro_batch == 0:
                self._strategy.zero_grad(self, self.loop.set_to_none)
        else:
            self._old, self._held, self._leftover = [*self._old, *self._held, *self._leftover], [], []

    def _rebind(self) -> None:
        """`outputs = model(...)` has returned: what the loop's variables held from the last micro step is gone now."""
        self._drop(self._old)
        self._old = []

    def _from_trace(self, lane: int, storage: int, role: int, nbytes: int = -1) -> Block:
        program = self._program
        nbytes = program.nbytes[storage] if nbytes < 0 else nbytes
        component = _COMPONENT[role]
        if component is Component.TEMP and self.loop.keep_outputs and storage in program.outputs:
            component = Component.ACTIVATION  # the loop holds it beyond the pass
        block = Block(self._ledger.alloc(nbytes, component, program.birth_op[storage]), nbytes)
        self._blocks[lane, storage] = block
        return block

    def _new(self, component: Component, nbytes: int, op: int) -> Block:
        return Block(self._ledger.alloc(nbytes, component, op), nbytes)

    def _run_hidden(self, program: tuple[int, ...], op: int) -> None:
        """The blocks of a kernel, as `Hidden.transient` writes them."""
        made: dict[int, Block] = {}
        for step in program:
            if step > 0:
                made[len(made) + 1] = self._new(Component.WORKSPACE, step, op)
            else:
                self.free(made[-step])
                made[-step] = _GONE
        self._drop(block for block in made.values() if block is not _GONE)

    def _pack(self, storages: Iterable[int], lane: int) -> None:
        for storage in storages:
            block = self._blocks.get((lane, storage))
            if block is None:
                continue
            kept = self._strategy.pack_saved(self, storage, block)
            if kept is not block:
                del self._blocks[lane, storage]
                self._packed[lane, storage] = (kept, block.nbytes)

    def _unpack(self, storages: Iterable[int], lane: int) -> None:
        for storage in storages:
            packed = self._packed.pop((lane, storage), None)
            if packed is not None:
                self._blocks[lane, storage] = self._strategy.unpack_saved(self, storage, *packed)

    def _drop(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.free(block)

    def _phase(self, phase: Phase) -> None:
        self._ledger.now_phase = int(phase)

    def _describe(self, key: Any) -> tuple[str, str]:
        """(module path, what) of a ledger label: an op of the trace, or what a strategy named."""
        if isinstance(key, tuple):
            return key
        if key < 0:
            return "", "input"
        return self.trace.call_fqn(int(self.trace.op_call[key])), self.trace.signatures[self.trace.op_signature[key]].op


class _Program:
    """A trace as plain lists, with what the walk looks up."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        from .strategies.base import Strategy as Base

        self._trace = trace
        self._hidden: list[Hidden] | None = None
        self.kind = trace.event_kind.tolist()
        self.arg = trace.event_arg.tolist()
        self.aux = trace.event_aux.tolist()
        self.nbytes = trace.storage_bytes.tolist()
        self.role = trace.storage_role.tolist()
        self.birth_op = trace.storage_op.tolist()
        self.output = trace.storage_output.tolist()
        self.outputs = frozenset(trace.output_storages)
        self.backward_is_missing = trace.options["mode"] != "train"
        self.module_of_call = trace.call_module.tolist()
        self.copied_grad = {
            aux: arg
            for kind, arg, aux in zip(self.kind, self.arg, self.aux, strict=True)
            if kind == EventKind.GRAD and self.role[aux] == Role.GRAD_COPY
        }
        self.copied_grad.update(dict.fromkeys(strategy.unmade(trace), -1))
        kind = type(strategy)
        self.watches_modules = kind.before_module is not Base.before_module or kind.after_module is not Base.after_module
        self.watches_saved = kind.pack_saved is not Base.pack_saved
        self.pack_at: dict[int, list[int]] = {}
        self.unpack_at: dict[int, list[int]] = {}
        if self.watches_saved:
            self._find_saved(trace)

    def hidden_of(self, kernels: Kernels) -> list[Hidden]:
        """By op: what its kernel makes beside its outputs."""
        if self._hidden is None:
            self._hidden = kernels.of_ops(self._trace)
        return self._hidden

    def _find_saved(self, trace: StepTrace) -> None:
        """For every activation: the event of its last use in forward and of its first use after it."""
        last: dict[int, int] = {}
        first: dict[int, int] = {}
        starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
        births: dict[int, int] = {}
        backward, op_event = False, 0
        for index, (kind, arg) in enumerate(zip(self.kind, self.arg, strict=True)):
            if kind == EventKind.PHASE:
                backward = arg == Phase.BACKWARD
            elif kind == EventKind.ALLOC and not backward:
                births[arg] = last[arg] = op_event
            elif kind == EventKind.OP:
                op_event = index
                for storage in inputs[starts[arg] : starts[arg + 1]]:
                    if storage in births:
                        (first if backward else last).setdefault(storage, index)
                        if not backward:
                            last[storage] = index
        for storage, index in first.items():
            if self.role[storage] == Role.ACTIVATION and storage != trace.loss_storage:  # backward reads its shape only
                self.pack_at.setdefault(last[storage], []).append(storage)
                self.unpack_at.setdefault(index, []).append(storage)


def simulate(
    trace: StepTrace,
    strategy: Strategy,
    *,
    optimizer: OptimizerRule | None = None,
    loop: LoopFacts | None = None,
    kernels: Kernels | None = None,
    rank: int = 0,
) -> tuple[Ledger, WorkLog]:
    """The ledger of a run: initialisation and `loop.iterations` optimizer steps; and the work that the strategy enqueued.

    `kernels` expands abstract ops for one GPU; None takes the trace as it is (the cpu target).
    """
    simulation = Simulation(trace, strategy, optimizer, loop or LoopFacts(), kernels or Kernels.none(), rank)
    return simulation.run(), simulation.work
