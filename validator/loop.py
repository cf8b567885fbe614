"""The training loop that `planner.loop.LoopFacts` describes, run for real.  It measures nothing: it calls `mark`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..planner.request import Request

# What opens a phase: (phase, iteration, micro batch).  "build" and "init" come once, "end" closes the last phase.
Mark = Callable[[str, int], None]
HOST = "host"
_GRAD_SCALE = 1.0  # 65536 is the default; with 1.0 no random model overflows fp16, and a skipped step would make no state


@dataclass
class Running:
    """The live objects, for whoever walks tensors at a mark."""

    module: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None


def run(request: Request, mark: Mark, *, device: str = "cpu", running: Running | None = None) -> None:
    """Builds the model and runs `request.loop.iterations` optimizer steps on `device`, calling `mark` as each phase begins.

    Raises UserError for what the request gets wrong.  User code may raise anything.
    """
    import torch

    from ..planner.optimizers.traced import make_optimizer
    from ..planner.trace.options import AUTOCAST_DTYPE
    from ..planner.trace.prepare import ready
    from ..planner.trace.source import trace_options

    running = running or Running()
    loop, trains = request.loop, request.mode == "train"
    torch.manual_seed(0)
    mark("build", 0)
    built = ready(request.model, trace_options(request, device), real=device == "cuda")
    module: Any = built.module
    running.module = module = module.to(device)
    gc.collect()
    mark("init", 0)
    optimizer: Any = None
    if trains:
        optimizer = make_optimizer(
            request.optimizer, request.optimizer_impl, [p for p in module.parameters() if p.requires_grad]
        )
    running.optimizer = optimizer
    scaler = torch.amp.GradScaler(device, init_scale=_GRAD_SCALE) if request.precision == "fp16-autocast" and trains else None
    mark(HOST, 0)  # the loader's memory is the host's, whatever the device
    host_batch = built.make_batch(
        request.micro_batch_size, request.seq_len, target_len=request.target_len, image_size=request.image_size
    )
    mark("init", 0)
    narrow = AUTOCAST_DTYPE.get(request.precision)
    held = _Held() if loop.keep_outputs else None
    if held is not None:
        module.register_forward_hook(held.take)
    batch: Mapping[str, Any] = {}
    loss: Any = None
    with _no_garbage_collection() as collect:
        for iteration in range(loop.iterations if trains else 1):
            if trains and loop.zero_grad == "before-forward":
                optimizer.zero_grad(set_to_none=loop.set_to_none)
            for micro_batch in range(loop.grad_accum_steps if trains else 1):
                mark("forward", iteration)
                batch = _to_device(host_batch, device)
                with (
                    torch.no_grad() if request.mode == "inference" else contextlib.nullcontext(),
                    torch.autocast(device, dtype=getattr(torch, narrow)) if narrow else contextlib.nullcontext(),
                ):
                    loss = built.step(module, batch)
                if not trains:
                    continue
                mark("backward", iteration)
                if loop.zero_grad == "before-backward" and micro_batch == 0:
                    optimizer.zero_grad(set_to_none=loop.set_to_none)
                if scaler is not None:
                    loss = scaler.scale(loss)
                loss.backward()
            if trains:
                mark("step", iteration)
                _step(module, optimizer, scaler, clip=loop.clip_grad_norm)
                if loop.zero_grad == "after-step":
                    optimizer.zero_grad(set_to_none=loop.set_to_none)
            collect()
        mark("end", loop.iterations - 1)


def _step(module: Any, optimizer: Any, scaler: Any, *, clip: bool) -> None:
    import torch

    if scaler is not None and clip:
        scaler.unscale_(optimizer)
    if clip:
        torch.nn.utils.clip_grad_norm_([p for p in module.parameters() if p.requires_grad], 1.0)
    if scaler is None:
        optimizer.step()
        return
    scaler.step(optimizer)
    scaler.update()


def _to_device(batch: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Copies of the batch's tensors, one a storage, as a loader's batch would arrive on the device."""
    import torch

    copies: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in copies:
            copy = torch.UntypedStorage(storage.nbytes(), device=device)  # type: ignore[no-untyped-call]
            copy.copy_(storage)
            copies[storage.data_ptr()] = copy
        empty = torch.empty(0, dtype=value.dtype, device=device)
        return empty.set_(copies[storage.data_ptr()], value.storage_offset(), value.size(), value.stride())

    return {name: copied(value) for name, value in batch.items()}


class _Held:
    """Keeps the last output of the model alive, as the variable of `outputs = model(**batch)` does."""

    def __init__(self) -> None:
        self.output: Any = None

    def take(self, module: Any, args: Any, output: Any) -> None:
        self.output = output


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[Callable[[], Any]]:
    """A collection in the middle of a step would free cycles at a place that means nothing; between steps it is asked for."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield gc.collect
    finally:
        if was_enabled:
            gc.enable()
