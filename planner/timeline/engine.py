"""A discrete-event simulation of lanes (streams, copy engines, links, the host) that run tasks in order.

A *lane* runs its tasks one after another, in the order of issue, like a CUDA stream.  A task begins when its lane is free, all
tasks named in `after` are over, and the host is at most `queue` tasks ahead.  A lane may name a *link* that it shares: the
tasks that run on one link at a time get equal shares of it, so that two cards that upload through one PCIe switch take twice as
long.

Tasks come from an iterable and spans go out as an iterator: a run of any number of steps needs the memory of the tasks in
flight.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

# How many tasks the host may run ahead.  A bound for the memory of the simulation, wider than any prefetch of a strategy.
QUEUE = 1024


@dataclass(frozen=True, slots=True)
class Task:
    """Something that takes `seconds` on `lane`, alone on its link.  `key` names it for the `after` of later tasks."""

    key: int
    lane: str
    seconds: float
    name: str = ""
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """A task as it ran.  `critical` is the share of each lane in the longest chain of tasks that ends with this one."""

    key: int
    lane: str
    name: str
    start_s: float
    end_s: float
    critical: Mapping[str, float]


@dataclass(slots=True)
class _Running:
    task: Task
    waits_for: int  # unfinished tasks of `after`, and 1 for the lane's predecessor
    critical: dict[str, float] = field(default_factory=dict)  # of the task that was waited for last
    start: float = 0.0
    left: float = 0.0  # seconds of work, alone on the link
    since: float = 0.0  # when `left` was brought up to date
    version: int = 0  # of the planned end; an older one in the heap is void


class Engine:
    """Runs tasks; `links` maps a lane to the link that it shares with others (most lanes share none)."""

    def __init__(self, links: Mapping[str, str] | None = None, queue: int = QUEUE) -> None:
        self._links = dict(links or {})
        self._queue = queue

    def run(self, tasks: Iterable[Task]) -> Iterator[Span]:
        """The spans of `tasks`, in the order in which they end.

        Raises ValueError for a negative duration, for a key that is used twice while its task is unfinished, and for an
        `after` that names a task issued later.
        """
        return _Run(self._links, self._queue).spans(tasks)


class _Run:
    def __init__(self, links: Mapping[str, str], queue: int) -> None:
        self._links, self._queue = links, queue
        self._now = 0.0
        self._open: dict[int, _Running] = {}  # issued and not over
        self._followers: dict[int, list[int]] = {}  # key -> keys that wait for it
        self._tail: dict[str, int] = {}  # lane -> key of its last unfinished task
        self._lane_end: dict[str, dict[str, float]] = {}  # lane -> critical path of its last finished task
        self._on_link: dict[str, list[int]] = {}
        self._ends: list[tuple[float, int, int, int]] = []  # (time, order, key, version)
        self._order = 0
        self._seen_to = -1
        self._last: dict[str, float] = {}

    def spans(self, tasks: Iterable[Task]) -> Iterator[Span]:
        source = iter(tasks)
        more = True
        while True:
            while more and len(self._open) < self._queue:
                task = next(source, None)
                if task is None:
                    more = False
                else:
                    self._issue(task)
            if not self._open:
                return
            yield self._finish_next()

    def _issue(self, task: Task) -> None:
        if task.seconds < 0:
            raise ValueError(f"task {task.key} ({task.name}) takes {task.seconds} seconds")
        if task.key <= self._seen_to:
            raise ValueError(f"task {task.key} ({task.name}): keys must rise")
        self._seen_to = task.key
        running = _Running(task, 0, left=task.seconds)
        before = set(task.after)
        if any(key >= task.key for key in before):
            raise ValueError(f"task {task.key} ({task.name}) waits for a later one")
        tail = self._tail.get(task.lane)
        if tail is not None:
            before.add(tail)
        for key in before:
            if key in self._open:
                running.waits_for += 1
                self._followers.setdefault(key, []).append(task.key)
        running.critical = self._last  # what the host waited for, if nothing else holds the task up
        self._open[task.key] = running
        self._tail[task.lane] = task.key
        if not running.waits_for:
            self._start(running)

    def _start(self, running: _Running) -> None:
        task = running.task
        running.start = running.since = self._now
        link = self._links.get(task.lane)
        if link is None:
            self._plan(running, 1)
            return
        others = self._on_link.setdefault(link, [])
        self._settle(others)
        others.append(task.key)
        self._replan(others)

    def _settle(self, keys: list[int]) -> None:
        """Brings the work left of the tasks on one link up to date, before their number changes."""
        for key in keys:
            running = self._open[key]
            running.left = max(0.0, running.left - (self._now - running.since) / len(keys))
            running.since = self._now

    def _replan(self, keys: list[int]) -> None:
        for key in keys:
            self._plan(self._open[key], len(keys))

    def _plan(self, running: _Running, sharers: int) -> None:
        running.version += 1
        self._order += 1
        heapq.heappush(self._ends, (self._now + running.left * sharers, self._order, running.task.key, running.version))

    def _finish_next(self) -> Span:
        while True:
            time, _, key, version = heapq.heappop(self._ends)
            running = self._open.get(key)
            if running is not None and running.version == version:
                break
        self._now = time
        task = running.task
        link = self._links.get(task.lane)
        if link is not None:
            sharers = self._on_link[link]
            self._settle(sharers)
            sharers.remove(key)
            self._replan(sharers)
        del self._open[key]
        if self._tail.get(task.lane) == key:
            del self._tail[task.lane]
        critical = dict(running.critical)
        critical[task.lane] = critical.get(task.lane, 0.0) + time - running.start
        self._last = critical
        for follower in self._followers.pop(key, ()):
            waiting = self._open[follower]
            waiting.waits_for -= 1
            waiting.critical = critical
            if not waiting.waits_for:
                self._start(waiting)
        return Span(key, task.lane, task.name, running.start, time, critical)


@dataclass(frozen=True)
class Totals:
    """What a stretch of a simulation amounts to."""

    seconds: float
    busy_s: dict[str, float]
    """Per lane."""
    critical_s: dict[str, float]
    """Per lane, along the chain of tasks that decides the end; sums to `seconds`."""

    @property
    def bound_by(self) -> str:
        """The lane with the largest part of the critical path; "" when nothing ran."""
        return max(self.critical_s, key=lambda lane: self.critical_s[lane], default="")


def totals(spans: Iterable[Span]) -> Totals:
    """Adds up `spans`, from time 0 to the end of the last one."""
    busy: dict[str, float] = {}
    end, critical = 0.0, dict[str, float]()
    for span in spans:
        busy[span.lane] = busy.get(span.lane, 0.0) + span.end_s - span.start_s
        if span.end_s >= end:
            end, critical = span.end_s, dict(span.critical)
    return Totals(end, busy, critical)
