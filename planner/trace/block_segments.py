"""Cuts a forward-only trace into the units that a block-wise schedule handles one after the other: embedding, blocks, head.

A *unit* is one call of a module: every block of the model's list of blocks, and outside of it every outermost module that
contains no block and reads parameters (`embed_tokens`, the final norm, `lm_head`).  What the model computes between units
(masks, additions, the shift of the logits, the loss) is *glue*.  Pieces follow each other as traced and cover the trace.

A block-wise schedule runs every piece for several *lanes* (the two perturbed forwards) before it goes on, so what a piece was
given stays referenced until all its lanes are through.  Hence `body`, which a lane runs by itself, and `drops`: the frees of
what is older than the piece, which come after the last lane.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ...errors import CannotTell
from .steptrace import EventKind, StepTrace

Range = tuple[int, int]  # events [start, stop)

_COPIES = ("aten.clone", "aten.constant_pad_nd", "aten.slice")  # by which labels and logits are shifted, before the loss itself
_OTHER_LIST_SHARE = 0.1  # another list of blocks with more of the parameters than this is no mere part of the embedding
_NUMBERED = re.compile(r"(?:(.*)\.)?(\d+)")


@dataclass(frozen=True, slots=True)
class Piece:
    """A unit, or the glue between two."""

    name: str  # fqn of the unit's module; "" for glue
    block: int  # number of the block; -1 for any other piece
    params: tuple[int, ...]  # indices of the parameters that the unit reads, in the order of the model's parameters
    body: tuple[Range, ...]
    drops: tuple[Range, ...]

    @property
    def is_unit(self) -> bool:
        return bool(self.name)


def cut_blocks(trace: StepTrace) -> tuple[Piece, ...]:
    """The pieces of a forward trace, in order.

    **Raises** CannotTell where the trace has a backward, where there is no single list of blocks that are called once each and
    one after the other, or where a parameter is used outside every unit.
    """
    if trace.options["mode"] == "train":
        raise CannotTell(f"{trace.name}: a block-wise forward schedule needs a trace without a backward")
    path = block_path(trace)
    calls = _unit_calls(trace, path)
    kinds, args = trace.event_kind.tolist(), trace.event_arg.tolist()
    bounds = [0]
    names, blocks = [""], [-1]
    for enter, leave, fqn in calls:
        if enter > bounds[-1]:
            bounds.append(enter)
        else:  # two units without a glue between them: the empty glue goes
            names.pop()
            blocks.pop()
        number = _NUMBERED.fullmatch(fqn)
        names += [fqn, ""]
        blocks += [int(number[2]) if number and (number[1] or "") == path else -1, -1]
        bounds.append(leave + 1)
    tail = _start_of_loss(trace, bounds[-1])
    if bounds[-1] < tail < len(kinds):
        bounds.append(tail)
        names.append("")
        blocks.append(-1)
    bounds.append(len(kinds))
    born = {arg: index for index, (kind, arg) in enumerate(zip(kinds, args, strict=True)) if kind == EventKind.ALLOC}
    used = params_read(trace, pairwise(bounds))
    pieces = []
    for place, (name, block) in enumerate(zip(names, blocks, strict=True)):
        start, stop = bounds[place], bounds[place + 1]
        drops = [i for i in range(start, stop) if kinds[i] == EventKind.FREE and born.get(args[i], -1) < start]
        params = tuple(sorted(used[place])) if name else ()
        if not name and used[place]:
            lost = trace.params[min(used[place])].fqn
            raise CannotTell(f"{trace.name}: {lost} is used outside the embedding, the blocks of {path} and the head")
        pieces.append(Piece(name, block, params, _between(start, stop, drops), _joined(drops)))
    return tuple(pieces)


def num_blocks(pieces: Sequence[Piece]) -> int:
    return 1 + max(piece.block for piece in pieces)


def block_path(trace: StepTrace, instead: str = "--method mezo, which needs none") -> str:
    """The path of the model's list of blocks, such as `model.layers`.

    Raises CannotTell where there is none, or several; `instead`: what to use then.
    """
    weight: dict[str, int] = defaultdict(int)
    lists: dict[str, set[int]] = defaultdict(set)
    called = {int(m) for m in trace.call_module.tolist()}
    for index in called:
        match = _NUMBERED.fullmatch(trace.modules[index].fqn)
        if match:
            lists[match[1] or ""].add(int(match[2]))
    outer = {
        path: numbers
        for path, numbers in lists.items()
        if len(numbers) > 1 and not any(path != p and re.match(_inside(p), path) for p in lists)
    }
    for param in trace.params:
        for path in outer:
            if re.match(_inside(path), param.fqn):
                weight[path] += param.numel
    if not weight:
        raise CannotTell(
            f"{trace.name}: no list of blocks is called in its forward, and a block-wise schedule moves such blocks. "
            f"Use {instead}"
        )
    best = max(weight, key=lambda p: weight[p])
    total = sum(p.numel for p in trace.params)
    others = [p for p in weight if p != best and weight[p] > _OTHER_LIST_SHARE * total]
    if others:
        raise CannotTell(
            f"{trace.name} has several lists of blocks ({best}, {', '.join(others)}); only models with one are modelled. "
            f"Use {instead}"
        )
    return best


def _inside(path: str) -> str:
    """Pattern of what lies in a block of the list."""
    return (re.escape(path) + r"\." if path else "") + r"\d+(\.|$)"


def _unit_calls(trace: StepTrace, path: str) -> list[tuple[int, int, str]]:
    """(ENTER, LEAVE, fqn) of every unit, in order."""
    pattern = re.compile((re.escape(path) + r"\." if path else "") + r"\d+")
    holds_blocks = {""}  # modules that are no unit since blocks lie in them
    for module in trace.modules:
        if pattern.fullmatch(module.fqn):
            parts = module.fqn.split(".")
            holds_blocks.update(".".join(parts[:n]) for n in range(len(parts)))
    reads = _reads_params(trace)
    units: list[tuple[int, int, str]] = []
    inside = -1  # the call of the unit that is open
    for index, (kind, arg, _) in enumerate(trace.events()):
        if kind is EventKind.ENTER and inside < 0:
            fqn = trace.call_fqn(arg)
            if fqn not in holds_blocks and reads[arg]:
                inside, start = arg, index
        elif kind is EventKind.LEAVE and arg == inside:
            units.append((start, index, trace.call_fqn(arg)))
            inside = -1
    names = [fqn for _, _, fqn in units]
    twice = next((fqn for fqn in names if names.count(fqn) > 1), None)
    if twice:
        raise CannotTell(f"{trace.name}: {twice} is called more than once in a forward, which a block-wise schedule cannot do")
    order = [int(fqn.rpartition(".")[2]) for fqn in names if pattern.fullmatch(fqn)]
    places = [i for i, fqn in enumerate(names) if pattern.fullmatch(fqn)]
    if order != list(range(len(order))) or places != list(range(places[0], places[0] + len(places))):
        raise CannotTell(f"{trace.name}: the blocks of {path} are not called one after the other")
    return units


def _reads_params(trace: StepTrace) -> list[bool]:
    """By call: whether an op in it, or in a call inside it, reads a parameter."""
    storages = np.array([p.storage for p in trace.params], np.int64)
    of_op = np.repeat(np.arange(trace.num_ops), np.diff(trace.op_input_start))
    ops = np.flatnonzero(np.bincount(of_op[np.isin(trace.op_inputs, storages)]))
    parents = trace.call_parent.tolist()
    found = [False] * len(parents)
    for call in trace.op_call[ops].tolist():
        while call >= 0 and not found[call]:
            found[call] = True
            call = parents[call]
    return found


def params_read(trace: StepTrace, ranges: Iterable[Range]) -> list[set[int]]:
    """By range of events: the indices of the parameters that its ops read."""
    param_of = {p.storage: i for i, p in enumerate(trace.params)}
    starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
    found = []
    for start, stop in ranges:
        ops = trace.event_arg[start:stop][trace.event_kind[start:stop] == EventKind.OP].tolist()
        found.append({param_of[s] for op in ops for s in inputs[starts[op] : starts[op + 1]] if s in param_of})
    return found


def _start_of_loss(trace: StepTrace, start: int) -> int:
    """The event at which the loss function itself begins: labels and logits have been shifted for both lanes before it."""
    kinds, args = trace.event_kind.tolist(), trace.event_arg.tolist()
    for index in range(start, len(kinds)):
        if kinds[index] == EventKind.OP:
            op = trace.signatures[int(trace.op_signature[args[index]])].op
            if op.rpartition(".")[0] not in _COPIES:
                return index
    return len(kinds)


def _between(start: int, stop: int, holes: Sequence[int]) -> tuple[Range, ...]:
    edges = [start - 1, *holes, stop]
    return tuple((a + 1, b) for a, b in pairwise(edges) if a + 1 < b)


def _joined(events: Sequence[int]) -> tuple[Range, ...]:
    joined: list[Range] = []
    for event in events:
        if joined and joined[-1][1] == event:
            joined[-1] = (joined[-1][0], event + 1)
        else:
            joined.append((event, event + 1))
    return tuple(joined)


def without_cast_cache(trace: StepTrace) -> StepTrace:
    """The trace as autocast runs it without its cache: a parameter's cast dies with the op that uses it, not with the region.

    A zeroth-order forward must not reuse casts, since the parameters change between its two passes.
    """
    casts = _casts_of_params(trace)
    if not casts:
        return trace
    last: dict[int, int] = {}
    starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
    events = list(zip(trace.event_kind.tolist(), trace.event_arg.tolist(), trace.event_aux.tolist(), strict=True))
    for index, (kind, arg, _) in enumerate(events):
        if kind == EventKind.OP:
            last.update(dict.fromkeys(casts.intersection(inputs[starts[arg] : starts[arg + 1]]), index))
    after: dict[int, list[int]] = defaultdict(list)
    for storage, index in last.items():
        after[index].append(storage)
    written: list[tuple[int, int, int]] = []
    due: list[int] = []
    for index, event in enumerate(events):
        if due and event[0] != EventKind.ALLOC:  # behind the results of the op
            written += [(int(EventKind.FREE), storage, 0) for storage in due]
            due = []
        if event[0] == EventKind.FREE and event[1] in last:
            continue
        written.append(event)
        due += after.get(index, ())
    written += [(int(EventKind.FREE), storage, 0) for storage in due]
    kinds, args, auxs = (np.array(column) for column in zip(*written, strict=True))
    return replace(
        trace, event_kind=kinds.astype(np.int8), event_arg=args.astype(np.int32), event_aux=auxs.astype(np.int32), graph=None
    )


def _casts_of_params(trace: StepTrace) -> set[int]:
    """Storages that `_to_copy` made of a parameter."""
    params = {p.storage for p in trace.params}
    starts, inputs, signatures = trace.op_input_start.tolist(), trace.op_inputs.tolist(), trace.op_signature.tolist()
    copies = {i for i, s in enumerate(trace.signatures) if s.op.startswith("aten._to_copy")}
    return {
        storage
        for storage, op in enumerate(trace.storage_op.tolist())
        if op >= 0 and signatures[op] in copies and params.intersection(inputs[starts[op] : starts[op + 1]])
    }
