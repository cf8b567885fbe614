"""What a training strategy is: it places the model's tensors, orders the passes, and answers hooks as the trace is walked.

A strategy acts at three places (none of them knows of any other strategy):

1. `prepare(module)` changes what is traced; `trace_key()` names the change in the key of the cached trace.
2. `schedule(trace, micro_batch)` yields the runs of one micro step, in order.
3. The hooks allocate and free tagged blocks through the `Simulation` that they are given.

The trace owns activations and temporaries.  Parameters, master weights, gradients and optimizer state belong to the strategy,
which makes them with `sim.place` and drops them with `sim.free`.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..trace.steptrace import Pass, StepTrace, TensorSlot

if TYPE_CHECKING:
    from ..loop import LoopFacts
    from ..simulate import Block, Simulation


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of a trace's events: [start, stop)."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of a segment.  Runs of different `lane`s have activations of their own (a block that runs twice)."""

    segment: Segment
    kind: Pass = Pass.FORWARD
    micro_batch: int = 0
    lane: int = 0


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks whose events are equal: one ledger serves them all."""

    name: str
    rank: int  # the representative
    count: int


class Strategy(abc.ABC):
    """The interface; every hook does nothing by default, so a strategy writes only what its runtime does."""

    name: str

    def trace_key(self) -> str:
        """What `prepare` changes, for the key of a cached trace; "" for nothing."""
        return ""

    def prepare(self, module: Any) -> None:
        """Changes the module before it is traced (adapters, quantised weights, recompute, another loss)."""

    def rank_classes(self, world_size: int) -> list[RankClass]:
        return [RankClass("every rank", 0, world_size)]

    def trains(self, trace: StepTrace) -> bool:
        """Whether the loop takes optimizer steps; a zeroth-order strategy does so with a trace that has no backward."""
        return bool(trace.options["mode"] == "train")

    def batches_at_once(self, loop: LoopFacts) -> int:
        """Micro batches whose runs one `schedule` yields, in lanes 0, 1 ..: more than 1 where they take turns."""
        return 1

    def unmade(self, trace: StepTrace) -> frozenset[int]:
        """Storages of the trace that this runtime does not make."""
        return frozenset()

    def schedule(self, trace: StepTrace, micro_batch: int) -> Iterator[Run]:
        """The runs of one micro step; the traced order unless a strategy reorders."""
        yield Run(Segment("step", 0, len(trace.event_kind)), Pass.FORWARD, micro_batch)

    # -- hooks, in the order in which a run meets them -------------------------------------------------------------------

    @abc.abstractmethod
    def at_init(self, sim: Simulation) -> None:
        """The model is on its device, the optimizer exists."""

    def before_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        """A module is entered, also one that runs no op.  `module` indexes `sim.trace.modules`."""

    def after_module(self, sim: Simulation, module: int, kind: Pass) -> None:
        """A module is left."""

    def pack_saved(self, sim: Simulation, storage: int, block: Block) -> Block | None:
        """An activation has had its last use in forward.  Returns what is kept instead (`block`: no change)."""
        return block

    def unpack_saved(self, sim: Simulation, storage: int, kept: Block | None, nbytes: int) -> Block:
        """Backward needs the activation again.  Returns the block that holds it now."""
        assert kept is not None
        return kept

    @abc.abstractmethod
    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        """Autograd hands over the gradient of `param` in `block`; the strategy owns it from here.  None: it was added to the
        gradient that is already there."""

    def holds_grad(self, sim: Simulation, param: TensorSlot) -> bool:
        """Whether `param.grad` exists, so that autograd adds to it instead of handing over a new tensor."""
        return False

    def end_of_micro_step(self, sim: Simulation, micro_batch: int) -> None:
        """Forward and backward of one micro batch are done."""

    def end_of_backward(self, sim: Simulation) -> None:
        """The last backward before the optimizer step is done."""

    def step(self, sim: Simulation) -> None:
        """Gradient clipping and the optimizer step."""

    def zero_grad(self, sim: Simulation, set_to_none: bool) -> None:
        """The loop clears the gradients."""

    # -- after the run -----------------------------------------------------------------------------------------------------

    def hints(self) -> list[str]:
        """What the run showed that a person should know: a setting that works against its purpose, and its cure."""
        return []
