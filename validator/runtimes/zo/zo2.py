"""ZO2: zeroth-order SGD with the blocks on the host, at most two of them on the device (liangyuwang/zo2 0.1.1,
optimizer/mezo_sgd/zo2.py).

For block i the host: issues the upload of i, the offload of i-1, waits for the upload, and issues the computation of i: the
update with the *previous* step's gradient, then +1, forward, -2, forward, +1.  Hence one block while temporaries live, two
after an upload is issued.  The streams of activations carry what the model's own code holds; each computes its loss to the
end before the other does.

What zo2 gets wrong is done right here:
* a tied head takes the embedding's z and is updated once, not twice with two z;
* the learning rate of the step that measured a gradient reaches every unit;
* `flush` applies the last gradient, and `evaluate` flushes first;
* generators live where the parameters do and belong to this object;
* an upload waits for the offload whose memory it may take (`transfer.Streams`);
* a bucket leaves no stale copy of the blocks behind in the optimizer.
Buffers of blocks stay on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import UserError
from .blocks import Unit
from .lockstep import Inputs, Lockstep
from .measure import BOOKKEEPING
from .perturb import BOTH, FORWARD, Named, Schedule, Step, generator, perturb, projected_gradient, update
from .transfer import Place, Streams, Transfer, place_on_device

# The losses of this process's streams -> the losses at +eps and -eps of the whole batch, fp32 [2], the same on every rank.
Combine = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True)
class Pending:
    """A gradient that is measured and not yet applied."""

    step: Step
    grad: float


class Zo2:
    """The model is updated unit by unit during the next step; `flush` does it at once."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        place: Place,
        transfer: Transfer,
        *,
        context: Callable[[], AbstractContextManager[Any]],
        offloaded: Sequence[int] | None = None,
        schedule: Schedule = BOTH,
        combine: Combine | None = None,
    ) -> None:
        """`offloaded`: numbers of the blocks that live on the host; None is all.  `context`: what a forward pass runs in."""
        self._units, self._place, self._transfer = units, place, transfer
        self._context, self._schedule, self._combine = context, schedule, combine or _stacked
        self._blocks = [unit for unit in units if unit.block is not None]
        wanted = range(len(self._blocks)) if offloaded is None else offloaded
        wrong = [i for i in wanted if not 0 <= i < len(self._blocks)]
        if wrong:
            raise UserError(
                f"block {wrong[0]} cannot be offloaded: the model has blocks 0 to {len(self._blocks) - 1}", "Name those"
            )
        self._offloaded = frozenset(wanted)
        self._streams = Streams(place)
        self._pending: Pending | None = None
        self._at_host = set(self._offloaded)
        self._sources: list[torch.Generator] = []
        self._replay: torch.Generator | None = None
        self._tied_states: dict[int, list[Tensor]] = {}
        self._tied = {id(named.parameter) for unit in units for named in unit.tied}
        self._lockstep = Lockstep(units, self._in_thread)
        place.recorder.mark("init")
        self._place_model(module)

    @property
    def device(self) -> torch.device:
        return self._place.device

    def step(self, loss: Callable[[], Tensor], step: Step) -> tuple[tuple[float, float], float]:
        """The losses at +eps and -eps, and the projected gradient along z, which the next step or `flush` applies."""
        device = self._place.device
        # One generator for every time that a unit's z is drawn: all go through the same numbers, unit after unit.
        self._sources = [generator(step.seed, device) for action in self._schedule if action != FORWARD]
        self._replay = generator(self._pending.step.seed, device) if self._pending else None
        self._tied_states.clear()
        self._streams.synchronize()
        with torch.no_grad(), self._streams.computing():
            streams = [loss] * self._schedule.count(FORWARD)
            losses = self._lockstep.run([_detached(s, self._context) for s in streams], self._handler(step))
            self._finish()
            pair = self._combine(losses)
            del losses
        self._streams.synchronize()
        grad = projected_gradient(pair, step.eps)
        self._pending = Pending(step, grad)
        return (float(pair[0]), float(pair[1])), grad

    def evaluate(self, loss: Callable[[], Tensor]) -> float:
        """The loss of the parameters after the last update: one stream through the blocks, nothing perturbed."""
        self.flush()
        self._streams.synchronize()
        with torch.no_grad(), self._streams.computing():
            self._place.recorder.mark("eval")
            found = self._lockstep.run([_detached(loss, self._context)], self._evaluated)
        self._streams.synchronize()
        return float(found[0])

    def flush(self) -> None:
        """Applies the gradient that the last step measured."""
        if self._pending is None:
            return
        self._replay = generator(self._pending.step.seed, self._place.device)
        with torch.no_grad():
            for unit in self.visit():
                self._update(unit, kind="flush")
        self._pending = None

    def visit(self) -> Iterator[Unit]:
        """The units in order, each on the device while it is looked at; ops between belong to the computing stream."""
        self._streams.synchronize()
        for unit in self._units:
            with self._visiting(unit), self._streams.computing():
                yield unit
        self._streams.synchronize()

    def close(self) -> None:
        """Leaves the module as a plain one; its blocks stay where they are."""
        self._lockstep.remove()

    # -- one unit ----------------------------------------------------------------------------------------------------------

    def _handler(self, step: Step) -> Callable[[Unit, list[Inputs]], list[Any]]:
        def run(unit: Unit, inputs: list[Inputs]) -> list[Any]:
            self._arrive(unit)
            with self._streams.computing():
                self._update(unit)
                outputs = self._dual(unit, inputs, step.eps)
            self._place.recorder.mark("between", unit.name)
            return outputs

        return run

    def _update(self, unit: Unit, kind: str = "update") -> None:
        if self._pending is None or self._replay is None:
            return
        self._place.recorder.mark(kind, unit.name)
        update(unit.params, self._pending.grad, self._pending.step, self._replay)

    def _dual(self, unit: Unit, inputs: list[Inputs], eps: float) -> list[Any]:
        outputs: list[Any] = []
        perturbations = 0
        for action in self._schedule:
            if action == FORWARD:
                self._place.recorder.mark("forward", unit.name)
                args, kwargs = inputs[len(outputs)]
                with self._context():
                    outputs.append(unit.forward(*args, **kwargs))
            else:
                self._place.recorder.mark("perturb", unit.name)
                self._perturb(unit, int(action), eps, perturbations)
                perturbations += 1
        return outputs

    def _perturb(self, unit: Unit, scale: int, eps: float, number: int) -> None:
        """`number`: how many times this unit was perturbed in this step."""
        source = self._sources[number]
        if self._tied.isdisjoint(id(named.parameter) for named in unit.params):
            perturb(unit.params, scale, eps, source)
        else:
            for named in unit.params:
                if id(named.parameter) in self._tied:
                    with self._place.recorder.tier(BOOKKEEPING):
                        self._tied_states.setdefault(id(named.parameter), []).append(source.get_state())
                perturb([named], scale, eps, source)
        for named in unit.tied:
            perturb([named], scale, eps, self._source_of(named, number))

    def _source_of(self, named: Named, number: int) -> torch.Generator:
        """A generator that draws the z which this parameter had at its owner."""
        source = torch.Generator(device=self._place.device)
        source.set_state(self._tied_states[id(named.parameter)][number])
        return source

    # -- residency ---------------------------------------------------------------------------------------------------------

    def _place_model(self, module: nn.Module) -> None:
        home = {id(p) for i in self._offloaded for p in self._blocks[i].tensors()}
        place_on_device(self._place, [t for t in (*module.parameters(), *module.buffers()) if id(t) not in home])
        for number in sorted(self._offloaded):
            self._transfer.start(self._blocks[number])

    def _arrive(self, unit: Unit) -> None:
        """Brings the unit to the device, and sends the block before it home."""
        if unit.block is not None:
            self._upload(unit)
        for other in self._blocks:
            if other is not unit and other.block in self._offloaded and other.block not in self._at_host:
                self._offload(other)
        self._streams.wait_for_upload()

    def _finish(self) -> None:
        """Sends home what is still here; only where the blocks are the last units."""
        for block in self._blocks:
            if block.block in self._offloaded and block.block not in self._at_host:
                self._offload(block)

    @contextlib.contextmanager
    def _visiting(self, unit: Unit, kind: str = "flush") -> Iterator[None]:
        moved = unit.block in self._offloaded
        if moved:
            self._upload(unit, kind)
            self._streams.wait_for_upload()
        yield
        if moved:
            self._offload(unit, kind)

    def _upload(self, unit: Unit, kind: str = "upload") -> None:
        if unit.block not in self._at_host:
            return
        self._place.recorder.mark(kind, unit.name)
        self._at_host.discard(unit.block)
        with self._streams.uploading():
            self._transfer.upload(unit)

    def _offload(self, unit: Unit, kind: str = "offload") -> None:
        assert unit.block is not None
        self._place.recorder.mark(kind, unit.name)
        self._at_host.add(unit.block)
        with self._streams.offloading():
            self._transfer.offload(unit)

    def _evaluated(self, unit: Unit, inputs: list[Inputs]) -> list[Any]:
        """Each block comes, runs and goes before the next, as in zo2: nobody hides the copies of an evaluation."""
        args, kwargs = inputs.pop()
        with self._visiting(unit, "eval"), self._streams.computing(), self._context():
            outputs = [unit.forward(*args, **kwargs)]
        self._place.recorder.mark("eval", unit.name)
        return outputs

    @contextlib.contextmanager
    def _in_thread(self) -> Iterator[None]:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a new thread begins on the first GPU
        with self._place.recorder.thread(), torch.no_grad(), self._streams.computing():
            yield


def _detached(loss: Callable[[], Tensor], context: Callable[[], AbstractContextManager[Any]]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with context():
            return loss().detach()

    return run


def _stacked(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).float()
