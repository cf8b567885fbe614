"""Writes down a step as the library's Python code runs it, so that a rule reads like the code that it stands for.

What makes optimizers hard to predict is not what they allocate but how long it stays: a local variable holds its tensor until
it is bound again, in a loop until the *next* parameter has made its own.  A `Tape` has names for that: `bind("update", ...)`
is `update = ...`, which makes the new block and only then lets go of the old one.
"""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

from ..ledger import Tier
from .rule import OptimizerRule, OptimizerTensor, StepEvent, StepEvents, StepKind

FP32 = 4  # bytes
_HALVES = ("bfloat16", "float16")


def is_half(tensor: OptimizerTensor) -> bool:
    """Whether the tensor is one of the 16-bit floating-point types, of which libraries make fp32 copies."""
    return tensor.dtype in _HALVES


def blocks_of(numel: int, size: int) -> int:
    """Groups of `size` elements that `numel` elements fill, the last one perhaps in part."""
    return -(-numel // size)


def in_order(tensors: Sequence[OptimizerTensor]) -> Iterator[tuple[int, OptimizerTensor]]:
    """(index, tensor) as `for group in param_groups: for p in group["params"]` meets them."""
    yield from sorted(enumerate(tensors), key=lambda pair: pair[1].group)


class Tape:
    """The events of one step.  `tensor` is the index of the parameter at hand; blocks of no bytes are left out."""

    def __init__(self) -> None:
        self.tensor = -1
        self._events: list[StepEvent] = []
        self._slots = itertools.count()
        self._bound: dict[str, int] = {}

    def state(self, nbytes: int, tier: Tier = Tier.GPU) -> None:
        """A block that the optimizer keeps."""
        if nbytes:
            self._events.append(StepEvent(StepKind.STATE, next(self._slots), nbytes, self.tensor, tier))

    def bind(self, name: str, nbytes: int) -> None:
        """`name = <a new tensor>`: what the name held before goes after the new tensor is there."""
        slot = self._make(nbytes)
        self.drop(name)
        if slot is not None:
            self._bound[name] = slot

    def rename(self, old: str, new: str) -> None:
        """The function returns `old`, and its caller binds the result to `new`."""
        slot = self._bound.pop(old, None)
        self.drop(new)
        if slot is not None:
            self._bound[new] = slot

    def drop(self, *names: str) -> None:
        """The names are bound to something that was there already, deleted, or their function returns."""
        for name in names:
            self._free(self._bound.pop(name, None))

    def flash(self, *sizes: int) -> None:
        """An expression's unnamed tensors: all alive together at its end, then gone."""
        for slot in [self._make(nbytes) for nbytes in sizes]:
            self._free(slot)

    def chain(self, name: str, *sizes: int) -> None:
        """`name = ((a op b) op c)`: each result outlives its operand by nothing; the last one is bound."""
        held: int | None = None
        for nbytes in sizes[:-1]:
            slot = self._make(nbytes)
            self._free(held)
            held = slot
        last = self._make(sizes[-1])
        self._free(held)
        self.drop(name)
        if last is not None:
            self._bound[name] = last

    def drop_grad(self) -> None:
        """`p.grad = None`."""
        self._events.append(StepEvent(StepKind.DROP_GRAD, -1, 0, self.tensor))

    def replay(self, events: Iterable[StepEvent], tensors: Sequence[int]) -> None:
        """Another rule's events in the middle of this one; `tensors[i]` is our index of its tensor i."""
        slots: dict[int, int] = {}
        for event in events:
            if event.kind in (StepKind.STATE, StepKind.TEMP):
                slots[event.slot] = next(self._slots)
            owner = tensors[event.tensor] if event.tensor >= 0 else -1
            self._events.append(StepEvent(event.kind, slots.get(event.slot, -1), event.nbytes, owner, event.tier))

    def done(self) -> tuple[StepEvent, ...]:
        """The step returns: every name goes."""
        self.drop(*list(self._bound))
        return tuple(self._events)

    def _make(self, nbytes: int) -> int | None:
        if not nbytes:
            return None
        slot = next(self._slots)
        self._events.append(StepEvent(StepKind.TEMP, slot, nbytes, self.tensor))
        return slot

    def _free(self, slot: int | None) -> None:
        if slot is not None:
            self._events.append(StepEvent(StepKind.FREE, slot, 0, self.tensor))


class DocumentedRule(OptimizerRule):
    """A rule that is written down from a library's source: subclasses are frozen dataclasses whose fields are its options.

    `play` runs one step on a tape; `build` is the constructor of the library's optimizer.
    """

    def step(self, tensors: Sequence[OptimizerTensor]) -> StepEvents:
        if not tensors:
            return StepEvents((), ())
        # names count here, though they take no part in comparisons of tensors
        return _played(self, tuple((t.shape, t.dtype, t.group, t.name, t.module_class) for t in tensors))

    def check(self, tensors: Sequence[OptimizerTensor]) -> None:
        """Raises UserError where the library itself would refuse these parameters."""

    def build(self, tape: Tape, tensors: Sequence[OptimizerTensor]) -> None:
        """What the constructor keeps."""

    @abc.abstractmethod
    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        """One step; `first` makes the state too."""


@functools.lru_cache(maxsize=4096)  # a strategy asks at init and at every step
def _played(rule: DocumentedRule, described: tuple[tuple[tuple[int, ...], str, int, str, str], ...]) -> StepEvents:
    tensors = [OptimizerTensor(*fields) for fields in described]
    rule.check(tensors)
    init, first, later = Tape(), Tape(), Tape()
    rule.build(init, tensors)
    rule.play(first, tensors, first=True)
    rule.play(later, tensors, first=False)
    return StepEvents(first.done(), later.done(), init.done())
