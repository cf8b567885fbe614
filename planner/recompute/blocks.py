"""What recompute costs and saves, block by block, read from two traces: of nothing recomputed, and of every block.

A block's *calls* are its ops in the order of its forward, named as `policy` names them.  What backward runs again of a block is
in the second trace; what a block holds for backward is in both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...errors import CannotTell
from ...hardware.profile import Device
from ..timeline.roofline import OpTable
from ..trace.steptrace import EventKind, Pass, Phase, Role, StepTrace
from .policy import ATTENTION, Op

_MIN_BLOCKS = 2
_LISTS = ("ModuleList", "Sequential")
_ATTENTION = "memplan.attention"


@dataclass(frozen=True, slots=True)
class Call:
    """One op of a block: what its results take if they are kept, and what it takes to run it again."""

    op: Op
    nbytes: int
    seconds: float
    can_be_kept: bool


@dataclass(frozen=True, slots=True)
class Block:
    """`saved_bytes`: what a block that is recomputed whole holds less than one that is not, from forward to backward."""

    saved_bytes: int
    calls: tuple[Call, ...]
    """Those that backward runs again."""

    @property
    def seconds(self) -> float:
        """Of recomputing all of it."""
        return sum(call.seconds for call in self.calls)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for blocks that are alike."""
        return self.saved_bytes, tuple((c.op, c.nbytes, c.seconds) for c in self.calls)


def list_path(trace: StepTrace) -> str:
    """The path of the list of blocks that recompute wraps: the longest of equal modules, as `prepare.block_list` finds it."""
    classes = {m.fqn: m.class_name for m in trace.modules}
    best, most = "", 0
    for fqn, name in classes.items():
        if name not in _LISTS:
            continue
        count = 0
        while f"{fqn}.{count}" in classes:
            count += 1
        if count >= max(_MIN_BLOCKS, most + 1) and len({classes[f"{fqn}.{i}"] for i in range(count)}) == 1:
            best, most = fqn, count
    if not best:
        raise CannotTell(f"{trace.name} has no list of equal blocks, so there is nothing to choose from. Use --recompute none")
    return best


def block_of(path: str) -> re.Pattern[str]:
    """Matches the fqn of the blocks of a list, and what lies in them; group 1 is the number."""
    return re.compile(re.escape(path) + r"\.(\d+)(?:\.|$)")


def blocks_of(plain: StepTrace, full: StepTrace, device: Device) -> tuple[Block, ...]:
    """The blocks of `plain`, a trace without recompute; `full` is the same step with every block recomputed.

    Raises CannotTell where a block runs more than once in forward, or recomputes what it did not do in forward.
    """
    path = list_path(plain)
    ours, theirs = _runs(plain, path), _runs(full, path)
    seconds = OpTable(plain).seconds(device)
    params = {p.storage for p in plain.params}
    found = []
    for number in sorted(ours):
        again = theirs.get(number)
        if again is None or not again.recomputed:
            raise CannotTell(f"{plain.name}: {path}.{number} is not recomputed where all blocks should be")
        calls = {call.op: call for call in _calls(plain, ours[number], seconds, params)}
        rerun = [calls[op] for op in _named(full, again.recomputed) if op in calls]
        found.append(Block(max(ours[number].held_bytes - again.held_bytes, 0), tuple(rerun)))
    return tuple(found)


@dataclass(slots=True)
class _Run:
    """What a block did: its ops in forward and in recompute, and what of its forward backward found alive."""

    forward: list[int]
    recomputed: list[int]
    held_bytes: int = 0


def _runs(trace: StepTrace, path: str) -> dict[int, _Run]:
    pattern = block_of(path)
    owner = [int(m[1]) if (m := pattern.match(module.fqn)) else -1 for module in trace.modules]
    of_call = np.array(owner, np.int64)[trace.call_module] if len(trace.call_module) else np.zeros(0, np.int64)
    runs: dict[int, _Run] = {}
    maker: dict[int, int] = {}
    now, backward = -1, False
    for kind, arg, _ in trace.events():
        if kind is EventKind.PHASE:
            backward = backward or arg == Phase.BACKWARD
        elif kind is EventKind.OP:
            now = int(of_call[trace.op_call[arg]]) if trace.op_call[arg] >= 0 else -1
            if now >= 0:
                run = runs.setdefault(now, _Run([], []))
                if not backward:
                    run.forward.append(arg)
                elif trace.op_pass[arg] == Pass.RECOMPUTE:
                    run.recomputed.append(arg)
        elif kind is EventKind.ALLOC and now >= 0 and not backward:
            maker[arg] = now
        elif kind is EventKind.FREE and backward and arg in maker:
            runs[maker.pop(arg)].held_bytes += int(trace.storage_bytes[arg])
    if list(runs) != sorted(runs):
        raise CannotTell(f"{trace.name}: the blocks of {path} do not run in their order, so what they keep is not modelled")
    return runs


def _named(trace: StepTrace, ops: list[int]) -> Iterator[Op]:
    """The calls of ops that follow each other in one run of a block."""
    count: Counter[str] = Counter()
    for op in ops:
        name = trace.signatures[int(trace.op_signature[op])].op.rpartition(".")[0]
        name = ATTENTION if name == _ATTENTION else name
        yield name, count[name]
        count[name] += 1


def _calls(trace: StepTrace, run: _Run, seconds: np.ndarray, params: set[int]) -> Iterator[Call]:
    starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
    signatures = trace.op_signature.tolist()
    made: dict[int, list[int]] = {}
    changed = set()
    for op in run.forward:
        made[op] = []
        if trace.signatures[signatures[op]].op.rpartition(".")[0].endswith("_"):
            changed.add(inputs[starts[op]])  # torch refuses to keep what is written to later
    first, last = (run.forward[0], run.forward[-1]) if run.forward else (0, -1)
    for storage in np.flatnonzero((trace.storage_op >= first) & (trace.storage_op <= last)).tolist():
        made.get(int(trace.storage_op[storage]), []).append(storage)
    for op, name in zip(run.forward, _named(trace, run.forward), strict=True):
        nbytes = sum(int(trace.storage_bytes[s]) for s in made[op])
        casts_weight = name[0] == "aten._to_copy" and inputs[starts[op]] in params
        inside = all(trace.storage_role[s] != Role.GRAD for s in made[op])
        good = nbytes > 0 and not casts_weight and inside and not changed.intersection(made[op])
        yield Call(name, nbytes, float(seconds[signatures[op]]), good)
