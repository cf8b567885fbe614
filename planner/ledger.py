"""The ledger: every allocation and free of a run, in the order in which the host issues them.

One row an event, as numpy columns.  A row is an allocation (`delta_bytes` > 0) or a free (< 0) of one `block`; both rows of
a block carry the same component, tier and stream.

**Invariants** (tests hold them): every block is born once and dies at most once, after its birth, with the size it was born
with; the components of a tier sum to its live bytes after every row; live bytes are never negative.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from .trace.steptrace import Phase


class Component(enum.IntEnum):
    """What bytes are for.  These sum to the live bytes at every moment."""

    PARAM = 0
    BUFFER = 1
    GRAD = 2
    OPTIMIZER_STATE = 3
    MASTER_WEIGHT = 4
    ACTIVATION = 5
    TEMP = 6
    COMM_BUFFER = 7
    OFFLOAD_BUFFER = 8
    WORKSPACE = 9

    @property
    def label(self) -> str:
        return self.name.lower()


class Tier(enum.IntEnum):
    """Where bytes lie."""

    GPU = 0
    GPU_MANAGED = 1  # unified memory: outside torch's allocator, may spill to the host
    HOST_PINNED = 2
    HOST_PAGEABLE = 3
    NVME = 4


DEFAULT_STREAM = 0
_FREED = ("", "free")  # the label of every row in which a block dies


@dataclass(slots=True)
class _Closed:
    """Rows `start` to `stop`, whose blocks are `first` to `last`; `births`: those of the blocks, by the names in them."""

    number: int
    start: int
    stop: int
    first: int
    last: int
    names: tuple[str, ...]
    keys: list[Any]  # of the labels
    births: dict[tuple[str, ...], list[tuple[int, int, int, int, int]]] = field(default_factory=dict)


class LedgerBuilder:
    """Collects rows; `finish()` makes the ledger.

    A row is one number: the block that is born, or its complement (~block) where it dies; all else is known of its birth, or
    of the moment.
    """

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._births: list[tuple[int, int, int, int, int]] = []  # of each block: bytes, component, tier, stream, label
        self._labels: dict[Any, int] = {_FREED: 0}
        self._phases: list[tuple[int, int]] = [(0, int(Phase.INIT))]  # (row, from there on)
        self._iterations: list[tuple[int, int]] = [(0, 0)]
        self._closed: dict[Hashable, _Closed] = {}
        self._repeats: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def now_phase(self) -> int:
        return self._phases[-1][1]

    @now_phase.setter
    def now_phase(self, phase: int) -> None:
        self._phases.append((len(self._rows), phase))

    @property
    def now_iteration(self) -> int:
        return self._iterations[-1][1]

    @now_iteration.setter
    def now_iteration(self, iteration: int) -> None:
        self._iterations.append((len(self._rows), iteration))

    def alloc(self, nbytes: int, component: int, label: Any, tier: int = Tier.GPU, stream: int = DEFAULT_STREAM) -> int:
        """A new block of `nbytes`; `label` says what it is: a key that `finish` turns into (fqn, what)."""
        births, labels = self._births, self._labels
        block = len(births)
        births.append((nbytes, component, tier, stream, labels.setdefault(label, len(labels))))
        self._rows.append(block)
        return block

    def free(self, block: int) -> None:
        self._rows.append(~block)

    def nbytes(self, block: int) -> int:
        return self._births[block][0]

    def closed(self, key: Hashable, names: Sequence[str], make: Callable[[], None]) -> None:
        """Rows that leave nothing behind: what is born in them dies in them, before any other.

        `make` writes them the first time; the next time that a `key` comes, the same rows are written with new blocks, and
        with the names of now for those of then in their labels, which are then all of the form (name, what).
        """
        rows, births = self._rows, self._births
        start, first = len(rows), len(births)
        known = self._closed.get(key)
        if known is None:
            make()
            keys = list(self._labels)
            known = self._closed[key] = _Closed(len(self._closed), start, len(rows), first, len(births), tuple(names), keys)
            known.births[known.names] = births[first:]
        else:
            shift = first - known.first
            rows += [row + shift if row >= 0 else row - shift for row in rows[known.start : known.stop]]
            made = known.births.get(tuple(names))
            if made is None:
                made = known.births[tuple(names)] = self._renamed(known, names)
            births += made
        self._repeats.append((start, len(rows), known.number))

    def _renamed(self, known: _Closed, names: Sequence[str]) -> list[tuple[int, int, int, int, int]]:
        """The births of closed rows, under other names."""
        now, labels = dict(zip(known.names, names, strict=True)), self._labels
        found = []
        for *facts, label in known.births[known.names]:
            name, what = known.keys[label]
            found.append((*facts, labels.setdefault((now.get(name, name), what), len(labels))))
        return found  # type: ignore[return-value]  # the star loses the length

    def finish(self, describe: Callable[[Any], tuple[str, str]]) -> Ledger:
        births = np.fromiter(chain.from_iterable(self._births), np.int64, 5 * len(self._births)).reshape(-1, 5)
        rows = np.array(self._rows, np.int32)
        is_free = rows < 0
        block = np.where(is_free, ~rows, rows)
        facts = births[block]
        return Ledger(
            block=block,
            delta_bytes=np.where(is_free, -facts[:, 0], facts[:, 0]),
            component=facts[:, 1].astype(np.int8),
            tier=facts[:, 2].astype(np.int8),
            stream=facts[:, 3].astype(np.int16),
            phase=_spread(self._phases, len(rows)).astype(np.int8),
            iteration=_spread(self._iterations, len(rows)).astype(np.int16),
            label=np.where(is_free, 0, facts[:, 4]).astype(np.int32),
            labels=tuple(describe(key) for key in self._labels),
            repeats=tuple(self._repeats),
        )


def _spread(changes: list[tuple[int, int]], count: int) -> np.ndarray:
    """By row: the value of the last of the (row, value) at or before it."""
    starts, values = np.array(changes, np.int64).T
    return np.repeat(values, np.diff(starts, append=count))


@dataclass(frozen=True)
class Ledger:
    """The columns; all of one length.  `labels[label[i]]` is (module path, what) of row i."""

    block: np.ndarray
    delta_bytes: np.ndarray
    component: np.ndarray
    tier: np.ndarray
    stream: np.ndarray
    phase: np.ndarray
    iteration: np.ndarray
    label: np.ndarray
    labels: tuple[tuple[str, str], ...]
    repeats: tuple[tuple[int, int, int], ...] = ()
    """(start, stop, number) of row ranges, in order: what is born in one dies in it, and equal numbers are equal rows."""

    def __len__(self) -> int:
        return len(self.block)

    @cached_property
    def _rows_of_tier(self) -> dict[int, np.ndarray]:
        return {int(t): np.flatnonzero(self.tier == t) for t in np.flatnonzero(np.bincount(self.tier))}

    def rows(self, tier: Tier = Tier.GPU) -> np.ndarray:
        """Indices of the rows of one tier, in order."""
        return self._rows_of_tier.get(tier, np.empty(0, np.intp))

    def live_bytes(self, tier: Tier = Tier.GPU) -> np.ndarray:
        """Live bytes after each row of `rows(tier)`; sizes as asked for, without the allocator's rounding."""
        return np.cumsum(self.delta_bytes[self.rows(tier)])

    def peak_bytes(self, tier: Tier = Tier.GPU) -> int:
        live = self.live_bytes(tier)
        return int(live.max()) if len(live) else 0

    def components_after(self, row: int, tier: Tier = Tier.GPU) -> dict[str, int]:
        """Bytes live in each component after ledger row `row` (-1: before the first)."""
        rows = self.rows(tier)
        rows = rows[rows <= row]
        sums = np.bincount(self.component[rows], weights=self.delta_bytes[rows], minlength=len(Component))
        return {c.label: int(sums[c]) for c in Component if sums[c]}

    def live_blocks(self, row: int, tier: Tier = Tier.GPU) -> list[tuple[int, int, str, str]]:
        """(bytes, component, fqn, what) of every block live after `row`, largest first."""
        rows = self.rows(tier)
        rows = rows[rows <= row]
        born = rows[self.delta_bytes[rows] > 0]
        dead = set(self.block[rows[self.delta_bytes[rows] < 0]].tolist())
        alive = [r for r in born.tolist() if int(self.block[r]) not in dead]
        alive.sort(key=lambda r: -int(self.delta_bytes[r]))
        return [(int(self.delta_bytes[r]), int(self.component[r]), *self.labels[self.label[r]]) for r in alive]

    def check(self) -> None:
        """Raises AssertionError where an invariant of the module docstring does not hold."""
        born: dict[int, int] = {}
        dead: set[int] = set()
        for block, delta in zip(self.block.tolist(), self.delta_bytes.tolist(), strict=True):
            if block not in born:
                assert delta >= 0, f"block {block} is freed before it is born"
                born[block] = delta
            else:
                assert block not in dead, f"block {block} has more than one death"
                assert delta == -born[block], f"block {block} of {born[block]} bytes is freed with {delta}"
                dead.add(block)
        for tier in self._rows_of_tier:
            assert not len(self.rows(Tier(tier))) or self.live_bytes(Tier(tier)).min() >= 0
