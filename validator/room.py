"""Whether this machine's memory holds a run, and which smaller one it would hold.  Asked before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..errors import MemplanError, UserError
from ..units import gib

if TYPE_CHECKING:
    from ..models import ModelSpec
    from ..planner.request import Request

# What the process needs beside its tensors.  Measured: 48 small Llama layers, whose tensors peak at 0.04 GiB, took 0.73 GiB
# resident with all imports and the profiler's 45,608 events (torch 2.13, CPU build).
RESERVE_BYTES = 1 << 30
_MARGIN = 1.1  # kernel scratch, and the allocator of the C library, which does not return every free
_SHORTEST_SEQ = 8
_SHORT_SEQ = 128
_LAYERS = "num_hidden_layers"

PeakOf = Callable[["Request"], int]


def available_bytes() -> int | None:
    """RAM that a new process can take without swapping; None where the system does not say."""
    from ..hardware.detect import machine

    return machine().ram_available_bytes


def needed_bytes(peak_bytes: int) -> int:
    """RAM for a run whose live bytes peak at `peak_bytes`."""
    return int(peak_bytes * _MARGIN) + RESERVE_BYTES


def check_room(request: Request, peak_bytes: int, peak_of: PeakOf, available: int | None) -> None:
    """Raises UserError with sizes that fit when the run does not."""
    if available is None or needed_bytes(peak_bytes) <= available:
        return
    fits = [option for choices in _single_changes(request) if (option := _largest(choices, peak_of, available))]
    if not fits:
        fits = [option for choices in _joint_changes(request) if (option := _largest(choices, peak_of, available))][:1]
    hint = f"This would fit: {', or '.join(fits)}" if fits else "Choose a smaller model, or a machine with more memory"
    raise UserError(
        f"{request.model.name}: a real run needs about {gib(needed_bytes(peak_bytes))} of memory (predicted peak "
        f"{gib(peak_bytes)}), and {gib(available)} are available here",
        hint,
    )


Choice = tuple[str, Callable[[], "Request"]]


def _single_changes(request: Request) -> Iterator[list[Choice]]:
    """Lists of choices, each from the smallest run to the largest."""
    yield [(f"--micro-batch {n}", partial(request.but, micro_batch_size=n)) for n in _halves(request.micro_batch_size, 1)]
    if request.model.task != "image-classification":
        yield [(f"--seq {n}", partial(request.but, seq_len=n)) for n in _halves(request.seq_len, _SHORTEST_SEQ)]
    yield _fewer_layers(request)


def _joint_changes(request: Request) -> Iterator[list[Choice]]:
    """For when no single change is enough: layers, on one short sequence, and then in 16 bits."""
    short = request.but(micro_batch_size=1, seq_len=min(request.seq_len, _SHORT_SEQ))
    for option, small in (("", short), (" --precision bf16", short.but(precision="bf16"))):
        words = f" --micro-batch 1 --seq {small.seq_len}{option}"
        yield [(f"{layers}{words}", make) for layers, make in _fewer_layers(small)]


def _fewer_layers(request: Request) -> list[Choice]:
    layers = _num_layers(request.model)
    return [(f"--set {_LAYERS}={n}", partial(_with_layers, request, n)) for n in _halves(layers, 1)] if layers else []


def _halves(size: int, least: int) -> list[int]:
    """size / 2, size / 4 ... down to `least`, smallest first."""
    found = []
    while size // 2 >= least:
        size //= 2
        found.append(size)
    return found[::-1]


def _largest(choices: list[Choice], peak_of: PeakOf, available: int) -> str | None:
    """The last of the choices that fits: the first that does not ends the search."""
    best = None
    for option, make in choices:
        try:
            if needed_bytes(peak_of(make())) > available:
                return best
        except MemplanError:  # a size that this model cannot have
            continue
        best = option
    return best


def _num_layers(model: ModelSpec) -> int | None:
    from ..models.overrides import standard

    layers = standard(model.config or {}, _LAYERS)
    return layers if isinstance(layers, int) else None


def _with_layers(request: Request, layers: int) -> Request:
    from ..models.overrides import apply

    model = request.model
    config = apply(model.config or {}, {_LAYERS: str(layers)}, model.name)
    return replace(request, model=replace(model, config=config, num_params=None))
