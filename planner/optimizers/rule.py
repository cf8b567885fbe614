"""An optimizer, as memory: what `step()` allocates and frees, and what it keeps, for any list of tensors."""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..ledger import Tier
from ..trace.steptrace import ITEMSIZE

if TYPE_CHECKING:
    from ..trace.steptrace import StepTrace, TensorSlot


@dataclass(frozen=True, slots=True)
class OptimizerTensor:
    """One tensor that is stepped: a parameter, a shard of one, or a flat partition.

    `name` and `module_class` are for the few optimizers that treat parameters by what they are (embeddings at 32 bit, heads of
    a query weight); they take no part in comparisons, so that two tensors of one form are one entry of a cache.
    """

    shape: tuple[int, ...]
    dtype: str
    group: int = 0  # param_group: foreach kernels work group by group
    name: str = field(default="", compare=False)  # fqn, "" for a flat partition
    module_class: str = field(default="", compare=False)  # class of the module that owns it

    @classmethod
    def of(cls, trace: StepTrace, slot: TensorSlot, *, group: int = 0) -> OptimizerTensor:
        """A whole parameter of the model."""
        return cls(slot.shape, slot.dtype, group, slot.fqn, trace.modules[slot.module].class_name)

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
    DROP_GRAD = 3  # the optimizer sets `.grad` of `tensor` to None inside the step; no block of its own (slot -1, 0 bytes)


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One allocation or free inside `step()`.  `slot` names the block in the step; `tensor` is whose it is, or -1."""

    kind: StepKind
    slot: int
    nbytes: int
    tensor: int = -1
    tier: Tier = Tier.GPU


@dataclass(frozen=True, slots=True)
class StepEvents:
    """`init`: what the constructor makes.  `first`: the first step, which creates the state.  `later`: every other step; where
    these differ (a projector that is refreshed every so often), the dearest one."""

    first: tuple[StepEvent, ...]
    later: tuple[StepEvent, ...]
    init: tuple[StepEvent, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Bytes kept, in all tiers."""
        return sum(e.nbytes for e in (*self.init, *self.first) if e.kind is StepKind.STATE)

    def state_bytes_in(self, tier: Tier) -> int:
        return sum(e.nbytes for e in (*self.init, *self.first) if e.kind is StepKind.STATE and e.tier is tier)

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
    in_backward: bool = False  # it can only step inside backward, parameter by parameter (LOMO)
    steps_one: bool = True  # it can step one parameter without the others

    @abc.abstractmethod
    def step(self, tensors: Sequence[OptimizerTensor]) -> StepEvents:
        """What `step()` does to `tensors`, in order."""
