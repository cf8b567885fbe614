"""An optimizer, as memory: what `step()` allocates and frees, and what it keeps, for any list of tensors."""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from ..trace.steptrace import ITEMSIZE


@dataclass(frozen=True, slots=True)
class OptimizerTensor:
    """One tensor that is stepped: a parameter, a shard of one, or a flat partition."""

    shape: tuple[int, ...]
    dtype: str
    group: int = 0  # param_group: foreach kernels work group by group

    @property
    def numel(self) -> int:
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


class StepKind(enum.IntEnum):
    STATE = 0  # allocated and kept: optimizer state
    TEMP = 1  # allocated; freed by a later FREE
    FREE = 2


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One allocation or free inside `step()`.  `slot` names the block in the step; `tensor` is whose it is, or -1."""

    kind: StepKind
    slot: int
    nbytes: int
    tensor: int = -1


@dataclass(frozen=True, slots=True)
class StepEvents:
    """`init`: what the constructor makes.  `first`: the first step, which creates the state.  `later`: every other step."""

    first: tuple[StepEvent, ...]
    later: tuple[StepEvent, ...]
    init: tuple[StepEvent, ...] = ()

    @property
    def state_bytes(self) -> int:
        return sum(e.nbytes for e in (*self.init, *self.first) if e.kind is StepKind.STATE)

    @staticmethod
    def transient_bytes(events: Sequence[StepEvent]) -> int:
        """Peak of the temporaries of one step."""
        live = peak = 0
        sizes: dict[int, int] = {}
        for event in events:
            if event.kind is StepKind.TEMP:
                sizes[event.slot] = event.nbytes
                live += event.nbytes
            elif event.kind is StepKind.FREE:
                live -= sizes.pop(event.slot)
            peak = max(peak, live)
        return peak


class OptimizerRule(abc.ABC):
    """How one optimizer uses memory.  A rule works on any list of tensors: ZeRO steps flat partitions, FSDP steps shards."""

    name: str
    impl: str

    @abc.abstractmethod
    def step(self, tensors: Sequence[OptimizerTensor]) -> StepEvents:
        """What `step()` does to `tensors`, in order."""
