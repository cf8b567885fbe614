"""Several forward passes of one module, side by side: each stops at every unit, and the unit runs for all of them together.

ZO2 carries two streams of activations through the model, and perturbs a unit between its two runs.  Here each stream is the
model's own forward, untouched, in a thread of its own; the threads take turns, so that only one ever runs, and what lives at
any moment is what the model's code holds in two half-finished calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import Any

from .blocks import Unit

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
# Runs one unit for all streams: their inputs -> their outputs.
Handler = Callable[[Unit, list[Inputs]], list[Any]]
Context = Callable[[], AbstractContextManager[Any]]


class Lockstep:
    """Stands in front of the forward of every unit."""

    def __init__(self, units: Sequence[Unit], context: Context) -> None:
        """`context`: what a thread that runs a stream has to be in (modes and streams are a thread's own in torch)."""
        self._context = context
        self._handler: Handler | None = None
        self._units = units
        for unit in units:
            unit.module.forward = partial(self._called, unit)

    def remove(self) -> None:
        """Gives every module its own forward back."""
        for unit in self._units:
            unit.module.forward = unit.forward

    def run(self, forwards: Sequence[Callable[[], Any]], handler: Handler) -> list[Any]:
        """What the forwards return.  One stream runs in the calling thread, several in one each; an error ends them all."""
        self._handler = handler
        try:
            if len(forwards) == 1:
                return [forwards[0]()]
            return self._together([_Stream(forward, self._context) for forward in forwards], handler)
        finally:
            self._handler = None

    def _called(self, unit: Unit, *args: Any, **kwargs: Any) -> Any:
        thread = threading.current_thread()
        if isinstance(thread, _Stream):
            return thread.stop_at(unit, (args, kwargs))
        if self._handler is None:
            return unit.forward(*args, **kwargs)
        return self._handler(unit, [(args, kwargs)])[0]

    @staticmethod
    def _together(streams: list[_Stream], handler: Handler) -> list[Any]:
        try:
            for stream in streams:
                stream.start()
                stream.wait()
            while streams[0].unit is not None:
                unit = streams[0].unit
                others = {s.unit.name if s.unit else "the end" for s in streams if s.unit is not unit}
                if others:
                    raise RuntimeError(f"one stream is at {unit.name}, another at {others.pop()}")
                outputs = handler(unit, [stream.take() for stream in streams])
                for stream in streams:
                    stream.resume(outputs.pop(0))  # no name may hold an output: the stream decides how long it lives
                    stream.wait()
            return [stream.result for stream in streams]
        finally:
            for stream in streams:
                stream.end()


class _Ended(BaseException):
    """Unwinds a stream that is not needed any more."""


class _Stream(threading.Thread):
    """One forward pass that stops at every unit."""

    def __init__(self, forward: Callable[[], Any], context: Context) -> None:
        super().__init__(daemon=True)
        self._forward, self._context = forward, context
        self._here: SimpleQueue[None] = SimpleQueue()  # the stream has stopped
        self._go: SimpleQueue[list[Any] | None] = SimpleQueue()  # its unit's output, in a list of one; None ends it
        self._inputs: Inputs | None = None
        self._error: BaseException | None = None
        self.unit: Unit | None = None
        """Where it stands; None when it is through."""
        self.result: Any = None

    def run(self) -> None:
        try:
            with self._context():
                self.result = self._forward()
        except _Ended:
            pass
        except BaseException as error:
            self._error = error
        self.unit = None
        self._here.put(None)

    # -- in the stream's own thread ----------------------------------------------------------------------------------------

    def stop_at(self, unit: Unit, inputs: Inputs) -> Any:
        self.unit, self._inputs = unit, inputs
        self._here.put(None)
        answer = self._go.get()
        if answer is None:
            raise _Ended
        return answer.pop()

    # -- in the thread that leads ------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Until it stops; raises what it raised."""
        self._here.get()
        if self._error is not None:
            raise self._error

    def take(self) -> Inputs:
        inputs, self._inputs = self._inputs, None
        assert inputs is not None
        return inputs

    def resume(self, output: Any) -> None:
        self._go.put([output])

    def end(self) -> None:
        if self.is_alive():
            self._go.put(None)
            self.join()
