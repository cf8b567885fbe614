"""Cuts a training step with recomputed blocks into what a layer-to-layer relay runs at a time.

The trace is one whose blocks are all checkpointed in the reentrant way: each runs forward without a graph, and in backward it
is run again with a graph of its own, which its backward uses up at once.  So the forward and the backward of a block are ranges
of the trace that share nothing but the block's input and the gradient of its output, and other micro batches fit between.

    front | block 0 forward | ... | block N-1 forward | tail, forward and backward | block N-1 backward | ... | front's backward
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ...errors import CannotTell
from .block_segments import Range, block_path, params_read
from .steptrace import EventKind, Pass, Phase, Role, StepTrace

_SEED_BYTES = 8  # the gradient of the loss, with which backward begins, is held to its end


@dataclass(frozen=True, slots=True)
class Layer:
    """A block of the relay, or what lies before or behind all blocks."""

    name: str
    params: tuple[int, ...]  # indices of the parameters that are its own, in the order of the model's
    forward: Range
    backward: Range


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter of the front that the tail uses as well, such as a head that is tied to the embedding."""

    param: int
    partial: int  # storage of the tail's part of the gradient
    total: int  # storage of the sum, which autograd makes in the front's backward; the same where it adds in place


@dataclass(frozen=True, slots=True)
class RelaySegments:
    """The pieces of a step, in the order in which one micro batch meets them."""

    front: Layer
    blocks: tuple[Layer, ...]
    tail: Layer
    tied: tuple[Tied, ...]

    @property
    def layers(self) -> tuple[Layer, ...]:
        return (self.front, *self.blocks, self.tail)


def cut_relay(trace: StepTrace) -> RelaySegments:
    """The segments of a training trace whose blocks are recomputed.

    **Raises** CannotTell where there is no single list of blocks that are called once each and one after the other, where a
    block shares a parameter with anything else, where more than its input carries a gradient out of it, or where blocks are of
    different shapes.
    """
    path = block_path(trace, "--method full")
    forward, backward = (_calls(trace, path, kind) for kind in (Pass.FORWARD, Pass.BACKWARD))
    count = len(forward)
    if [number for number, _, _ in forward] != list(range(count)) or [n for n, _, _ in backward] != list(range(count))[::-1]:
        raise CannotTell(f"{trace.name}: the blocks of {path} are not called one after the other, which a relay needs")
    kinds, args = trace.event_kind.tolist(), trace.event_arg.tolist()
    end = len(kinds)
    turn = next(i for i in range(end) if kinds[i] == EventKind.PHASE and args[i] == Phase.BACKWARD)
    starts = [0, *(enter for _, enter, _ in forward), forward[-1][2] + 1, turn, *(enter for _, enter, _ in backward)]
    bounds = list(pairwise([*starts, backward[-1][2] + 1, end]))
    forwards, backwards = bounds[: count + 2], bounds[count + 2 :][::-1]  # of front, blocks and tail
    names = ("front", *(f"{path}.{number}" for number in range(count)), "tail")
    used = [before | after for before, after in zip(params_read(trace, forwards), params_read(trace, backwards), strict=True)]
    shared = used[0] & used[-1]
    for number, mine in enumerate(used[1:-1]):
        others = set().union(*used[: number + 1], *used[number + 2 :])
        if both := mine & others:
            lost = trace.params[min(both)].fqn
            raise CannotTell(f"{trace.name}: {names[number + 1]} shares {lost} with another layer, which a relay cannot do")
    used[-1] -= shared
    tied = _tied(trace, shared, backwards[-1])
    _check_boundaries(trace, forwards, backwards, {one.partial for one in tied})
    layers = [
        Layer(name, tuple(sorted(mine)), before, after)
        for name, mine, before, after in zip(names, used, forwards, backwards, strict=True)
    ]
    return RelaySegments(layers[0], tuple(layers[1:-1]), layers[-1], tied)


def _calls(trace: StepTrace, path: str, kind: Pass) -> list[tuple[int, int, int]]:
    """(number of the block, ENTER, LEAVE) of the calls of the list's blocks in one pass, in order."""
    prefix = f"{path}." if path else ""
    entered: dict[int, int] = {}
    found = []
    for index, (event, arg, aux) in enumerate(trace.events()):
        if event not in (EventKind.ENTER, EventKind.LEAVE) or aux != kind:
            continue
        fqn = trace.call_fqn(arg)
        if not fqn.startswith(prefix) or not (number := fqn.removeprefix(prefix)).isdigit():
            continue
        if event is EventKind.ENTER:
            entered[arg] = index
        else:
            found.append((int(number), entered[arg], index))
    return found


def _check_boundaries(trace: StepTrace, forwards: list[Range], backwards: list[Range], waiting: set[int]) -> None:
    """Gradients go from a block to the one before it and no further, and nothing else is recomputed.

    `waiting`: gradients that may wait longer.  `forwards`, `backwards`: of front, blocks and tail.
    """
    kinds, args, auxs = trace.event_kind, trace.event_arg, trace.event_aux
    is_born, is_freed = kinds == EventKind.ALLOC, kinds == EventKind.FREE
    large = trace.storage_bytes > _SEED_BYTES
    for number in range(len(backwards) - 1, 0, -1):
        here, before = slice(*backwards[number]), slice(*backwards[number - 1])
        later = slice(before.stop, len(kinds))
        far = np.intersect1d(args[here][is_born[here]], args[later][is_freed[later]])
        if any(large[s] for s in far.tolist() if s not in waiting):
            raise CannotTell(
                f"{trace.name}: more than the input of a block carries a gradient (a bias that all blocks share, say), which a "
                "relay cannot stop between layers. Use --method full"
            )
    passed = {_largest(trace, forwards[i], backwards[i + 1]) for i in range(1, len(forwards) - 2)} - {0}
    if len(passed) > 1:
        raise CannotTell(f"{trace.name}: its blocks are stages of different shapes, which a relay is not modelled for")
    outside = (slice(*forwards[0]), slice(*forwards[-1]), slice(*backwards[-1]), slice(*backwards[0]))
    if any(((kinds[part] == EventKind.ENTER) & (auxs[part] == Pass.RECOMPUTE)).any() for part in outside):
        raise CannotTell(f"{trace.name} recomputes other modules than its blocks, which a relay does not. Use --method full")


def _largest(trace: StepTrace, made: Range, freed: Range) -> int:
    """Bytes of the largest storage that one range makes and another one frees; 0 for none."""
    kinds, args = trace.event_kind, trace.event_arg
    born = args[slice(*made)][kinds[slice(*made)] == EventKind.ALLOC]
    gone = args[slice(*freed)][kinds[slice(*freed)] == EventKind.FREE]
    return max((int(trace.storage_bytes[s]) for s in np.intersect1d(born, gone)), default=0)


def _tied(trace: StepTrace, shared: set[int], tail: Range) -> tuple[Tied, ...]:
    """How the gradients of shared parameters come about: the tail's part waits for the front's, and both are added."""
    kinds, args, auxs = trace.event_kind.tolist(), trace.event_arg.tolist(), trace.event_aux.tolist()
    in_tail = {args[i] for i in range(*tail) if kinds[i] == EventKind.ALLOC}
    starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
    found = []
    for index, kind in enumerate(kinds):
        if kind != EventKind.GRAD or args[index] not in shared:
            continue
        total = auxs[index]
        op = int(trace.storage_op[total])
        parts = {total} & in_tail or in_tail.intersection(inputs[starts[op] : starts[op + 1]])
        parts = {part for part in parts if trace.storage_bytes[part] == trace.storage_bytes[total]}
        if len(parts) != 1 or trace.storage_role[total] not in (Role.GRAD, Role.GRAD_COPY):
            fqn = trace.params[args[index]].fqn
            raise CannotTell(f"{trace.name}: how the two gradients of {fqn} are added is not followed")
        found.append(Tied(args[index], parts.pop(), total))
    return tuple(found)
