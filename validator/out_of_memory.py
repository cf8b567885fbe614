"""A run that finds no memory is an outcome: which allocation failed, in which phase, and what was live then."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ..errors import MemplanError
from ..units import human
from .tensors import component_bytes

if TYPE_CHECKING:
    from .loop import Running

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.,]+ ?\w+)")  # torch's words, of both allocators
_ON_THE_CPU = (
    "DefaultCPUAllocator: not enough memory",
    "DefaultCPUAllocator: can't allocate memory",
)  # c10/core/impl/alloc_cpu.cpp
_PARTS = {"param": "weights", "buffer": "buffers", "grad": "gradients", "optimizer_state": "optimizer state"}
_PASSES = {"forward": "the forward pass", "backward": "the backward pass", "step": "the optimizer step"}


class OutOfMemory(MemplanError):
    """A real run found no memory; the message is one line that explains it."""


@contextlib.contextmanager
def explained(running: Running, where: Callable[[], tuple[str, int] | None], device: str) -> Iterator[None]:
    """Turns the failed allocation of a run into an `OutOfMemory`.  `where`: (phase, iteration) that runs."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        live = _of_the_gpu() if device == "cuda" else {}
        parts = component_bytes(running.module, running.optimizer, device) if running.module is not None else {}
        raise OutOfMemory(in_words(str(error), where(), parts, live, device)) from error


def is_out_of_memory(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in _ON_THE_CPU)


def in_words(
    said: str, where: tuple[str, int] | None, parts: Mapping[str, int], live: Mapping[str, int], device: str = "cuda"
) -> str:
    """One line.  `said`: torch's own message; `parts`: bytes by component; `live`: "allocated" and "reserved" of the GPU."""
    asked = _ASKED.search(said)
    memory = "GPU" if device == "cuda" else "host"
    line = f"the run ran out of {memory} memory {place(where)}"
    line += f": it asked for {_readable(asked[1])}" if asked else f": {' '.join(said.split())[:200]}"
    if live:
        line += f" when {human(live['allocated'])} were allocated and {human(live['reserved'])} held by PyTorch"
    held = [f"{_PARTS.get(name, name)} {human(nbytes)}" for name, nbytes in parts.items() if nbytes]
    if held:
        line += f"; live: {', '.join(held)}"
        if live and (rest := live["allocated"] - sum(parts.values())) > 0:
            line += f", and {human(rest)} of activations, temporary tensors and buffers of the engine"
    return line


def _readable(size: str) -> str:
    """The allocator of the CPU says bytes."""
    number, _, unit = size.partition(" ")
    return human(int(number)) if unit == "bytes" and number.isdecimal() else size


def place(where: tuple[str, int] | None) -> str:
    """ "in the backward pass of step 2", for a (phase, iteration)."""
    if where is None:
        return "before the model was built"
    phase, iteration = where
    return f"in {_PASSES[phase]} of step {iteration + 1}" if phase in _PASSES else "while the model was made ready"


def _of_the_gpu() -> dict[str, int]:
    import torch

    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
