"""Runs the program of a written folder and measures it: `python -m memplan.validator.plan_worker train.py [OPTION ...]`.

The program is not changed and need not know.  Phases are told apart by what every training loop does: the first module's
forward begins a step, `Tensor.backward` ends the forward pass, and the optimizer's `step` ends the step.  On a GPU torch's own
counters are read; on the CPU every storage that an op makes is counted as long as it lives, which leaves out kernels' scratch.

The environment says where the answer goes (`ANSWERS`); each rank writes one file there, whatever becomes of it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import MemplanError
from ..files import write_whole
from .job import Outcome
from .launch import says_where
from .loop import Running
from .measurement import STEPS, PhaseBytes, Usage
from .out_of_memory import explained
from .tensors import component_bytes
from .zero_held import Registry

ANSWERS = "MEMPLAN_ANSWERS"  # variable of the environment: the folder for the answers
ANSWER = "rank-{rank}.json"


class Phases:
    """Which phase of which step runs, told by hooks of torch; `begin` is called as each one begins."""

    def __init__(self, begin: Callable[[str, int], None], running: Running) -> None:
        self._begin, self._running = begin, running
        self.phase, self.iteration = "init", 0
        self._stepped_inside = False
        self._has_stepped = False
        self._clears: bool | None = None
        """Whether gradients are cleared after the step, which then ends with that; None: not known yet."""

    def _enter(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._begin(phase, self.iteration)

    @contextmanager
    def watching(self) -> Iterator[None]:
        import torch
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        handles = [
            register_module_forward_pre_hook(self._forward),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        backward, clear, clear_all = torch.Tensor.backward, torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad

        def cleared(original: Any) -> Any:
            def zero_grad(self_: Any, *args: Any, **kwargs: Any) -> None:
                original(self_, *args, **kwargs)
                if self.phase == "step" and self._has_stepped:
                    self._clears = True
                    self._enter("between")

            return zero_grad

        def watched(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self._enter("backward")
            result = backward(tensor, *args, **kwargs)
            if self._stepped_inside:  # gradients are released as they come
                self._stepped_inside = False
                self.iteration += 1
            self._enter("between")
            return result

        torch.Tensor.backward = watched  # type: ignore[method-assign, assignment]
        torch.optim.Optimizer.zero_grad = cleared(clear)  # type: ignore[method-assign]
        torch.nn.Module.zero_grad = cleared(clear_all)  # type: ignore[method-assign]
        try:
            yield
            self._enter("end")  # a run that failed stays in the phase in which it did
        finally:
            torch.Tensor.backward = backward  # type: ignore[method-assign]
            torch.optim.Optimizer.zero_grad = clear  # type: ignore[method-assign]
            torch.nn.Module.zero_grad = clear_all  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()

    def _forward(self, module: Any, args: Any) -> None:
        if self._running.module is None:
            self._running.module = module  # the outermost, in its wrapper
        if self.phase == "backward":  # a checkpointed block runs once more
            return
        if self._has_stepped:
            self._has_stepped = False
            self._clears = bool(self._clears)
            self.iteration += 1
        self._enter("forward")

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._running.optimizer = optimizer
        if self.phase == "backward":
            self._stepped_inside = True
        else:
            self._enter("step")

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.phase == "step":
            self._has_stepped = True
            if self._clears is False:
                self._enter("between")


class Storages(Registry):
    """Live storages whatever engine runs: FSDP keeps a storage and takes its memory away, and shards are DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self._grown: dict[int, tuple[int, Any]] = {}  # bytes since its birth, by storage

    def see(self, value: Any) -> None:
        local = getattr(value, "_local_tensor", None)
        super().see(value if local is None else local)

    @contextmanager
    def watching(self) -> Iterator[None]:
        import torch

        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, *args: Any) -> Any:
            before = storage.nbytes()
            result = resize(storage, *args)
            self._changed(storage, storage.nbytes() - before)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            with super().watching():
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _changed(self, storage: Any, delta_bytes: int) -> None:
        key = storage._cdata
        if key not in self._known:
            return

        def died(_: Any) -> None:
            self.live_bytes -= self._grown.pop(key)[0]

        grown, reference = self._grown.get(key) or (0, weakref.ref(storage, died))
        self._grown[key] = grown + delta_bytes, reference
        self.live_bytes += delta_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class HostMeter:
    """Live bytes on the CPU, phase by phase."""

    def __init__(self, running: Running) -> None:
        self.registry = Storages()
        self.where: tuple[str, int] | None = None
        self._running = running
        self._phases: dict[tuple[str, str], PhaseBytes] = {}
        self._components: dict[str, Mapping[str, int]] = {}

    def mark(self, phase: str, iteration: int) -> None:
        live, peak = self.registry.live_bytes, self.registry.peak_bytes
        if self.where is not None and self.where[0] in ("init", "forward", "backward", "step"):
            ended, at = self.where
            key = ended, STEPS[min(at, 1)]
            known = self._phases.get(key)
            peak = max(peak, known.peak_bytes if known else 0)
            self._phases[key] = PhaseBytes(phase=key[0], step=key[1], peak_bytes=peak, after_bytes=live)
            if self._running.module is not None:
                self._components[ended] = component_bytes(self._running.module, self._running.optimizer)
        self.registry.peak_bytes = live
        self.where = (phase, iteration)

    def usage(self) -> Usage:
        return Usage(counter="live", phases=tuple(self._phases.values()), components=self._components)


def measure(program: str, arguments: Sequence[str]) -> Usage:
    """Runs `program` as `__main__`, on a GPU where torch finds one."""
    import contextlib

    import torch

    from .cuda import Meter

    running = Running()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    meter: Any
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        meter, registry = Meter(running), contextlib.nullcontext()
    else:
        torch.set_num_threads(1)
        meter = HostMeter(running)
        registry = meter.registry.watching()
    phases = Phases(meter.mark, running)
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).resolve().parent)
    meter.mark("init", 0)
    with explained(running, lambda: meter.where, device), registry, phases.watching():
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"the program ended with {end.code}") from end
    usage: Usage = meter.usage()
    return usage


def main(arguments: Sequence[str]) -> int:
    from .worker import one_line

    says_where()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    program, *rest = arguments
    try:
        outcome = Outcome(usage=measure(program, rest))
    except MemplanError as error:
        outcome = Outcome(reason=str(error))
    except MemoryError:
        outcome = Outcome(reason="the run ran out of host memory (MemoryError)")
    except Exception as error:
        import traceback

        traceback.print_exc()
        outcome = Outcome(reason=f"the run raised {one_line(error)}")
    answer = Path(os.environ[ANSWERS], ANSWER.format(rank=os.environ.get("RANK", "0")))
    write_whole(answer, json.dumps({**outcome.to_json(), "at": time.time()}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if outcome.usage else 1)  # at once: a backend's threads may wait for ranks that are gone


if __name__ == "__main__":
    main(sys.argv[1:])
