"""A step predicted op by op, set against a recorded memory snapshot: how high it goes, and which events differ.

Both start from the recording's own start state, so what is compared is the step alone; a recording that began before the first
allocation is compared from there.  The events are aligned by action and size only (no address, no time), as a text comparison
aligns lines; a free of something that was there before the recording finds its block through that alignment.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UserError
from .alignment import aligned
from .allocator.caching import CachingAllocator
from .allocator.config import AllocConf
from .allocator.driver import DescendingDriver
from .allocator.replay import ALLOC, FREE, ReplayResult, replay
from .allocator.start_state import StartState, restore, walk_back
from .allocator.verify import RecordedDriver, Step, conf_from_events, find_limit, play_exact, split_steps
from .kernels import Kernels
from .ledger import Component, Ledger
from .trace.steptrace import Phase

if TYPE_CHECKING:
    from .allocator.snapshot import Snapshot
    from .request import Request
    from .trace.source import TraceSource

STEPS = ("first", "later")
PHASES = ("init", "forward", "backward", "step")
_FIRST_KEY = 2**62  # of the prediction's own blocks, numbered from here: above every address of a recording
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")  # of a block in its list: what happens in every block is told once
_INPUT = ("", "input")  # what the ledger calls a tensor of the batch


class Event(NamedTuple):
    """One event of a step.  `key` names its block: an address of the recording, or a number of the ledger."""

    action: int
    size: int
    key: int
    phase: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The highest values while a phase ran ("all": the whole step); bytes."""

    phase: str
    predicted_allocated_bytes: int
    measured_allocated_bytes: int
    predicted_reserved_bytes: int
    measured_reserved_bytes: int

    @property
    def allocated_ratio(self) -> float:
        return self.predicted_allocated_bytes / self.measured_allocated_bytes

    @property
    def reserved_ratio(self) -> float:
        return self.predicted_reserved_bytes / self.measured_reserved_bytes


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A run of events that only one side has, and how often the same run occurs; each event as a line of text."""

    phase: str
    count: int
    only_predicted: tuple[str, ...]
    only_recorded: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PhaseEvents:
    """How many events a phase has on each side, and how many of them are equal in order."""

    phase: str
    num_predicted: int
    num_recorded: int
    num_equal: int
    num_predicted_allocs: int
    num_recorded_allocs: int
    num_equal_allocs: int


@dataclass(frozen=True, kw_only=True)
class Against:
    """The outcome.  `peaks`: of the whole step first, then of each phase that both sides have."""

    step: str
    peaks: tuple[Peaks, ...]
    events: tuple[PhaseEvents, ...]
    differences: tuple[Difference, ...]
    num_unmatched_frees: int
    """Predicted frees of what the start state does not hold: the recorded loop had dropped it before."""

    @property
    def whole(self) -> Peaks:
        return self.peaks[0]

    def of(self, phase: str) -> Peaks:
        """The peaks of one phase.  Raises KeyError where a side does not have it."""
        found = next((peaks for peaks in self.peaks if peaks.phase == phase), None)
        if found is None:
            raise KeyError(phase)
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        data = asdict(self)
        for row, peaks in zip(data["peaks"], self.peaks, strict=True):
            row |= {"allocated_ratio": peaks.allocated_ratio, "reserved_ratio": peaks.reserved_ratio}
        return data


def against(snapshot: Snapshot, device: int, request: Request, traces: TraceSource, *, step: str = "first",
            torch_version: str | None = None, conf: AllocConf | None = None) -> Against:  # fmt: skip
    """Predicts one optimizer step of `request` and compares it with the events of `device`.

    step            "first": nothing has run before, the step makes optimizer state and workspaces; "later": they are there
    torch_version   of the recording, which decides what some kernels allocate; None: this machine's
    Raises UserError where the recording cannot be used, CannotTell for what is not modelled.
    """
    if step not in STEPS:
        raise UserError(f"--step {step}: not known", f"Choose one of {', '.join(STEPS)}")
    conf = conf or snapshot.conf or conf_from_events(snapshot)
    recorded = snapshot.traces[device]
    start = walk_back([segment for segment in snapshot.segments if segment.device == device], recorded, conf)
    steps = split_steps(recorded)
    limit = find_limit(steps, start, conf, None)
    real, real_allocated, real_reserved = _play_recording(steps, start, conf, limit)
    ours = predicted_events(request, traces, step=step, cold=not start.segments, torch_version=torch_version)
    pairs = aligned([(e.action, e.size) for e in ours], [(e.action, e.size) for e in real])
    real = _with_phases(ours, real, pairs)
    ours, num_unmatched = _resolve_frees(ours, real, pairs, start)
    played = _play(ours, steps, start, conf, limit)
    peaks = [_peaks("all", played.allocated_series, played.reserved_series, real_allocated, real_reserved)]
    events = []
    for phase in PHASES:
        mine = [i for i, event in enumerate(ours) if event.phase == phase]
        theirs = [i for i, event in enumerate(real) if event.phase == phase]
        if mine and theirs and mine[-1] < len(played.allocated_series):
            ours_then = [[series[i] for i in mine] for series in (played.allocated_series, played.reserved_series)]
            real_then = [[series[i] for i in theirs] for series in (real_allocated, real_reserved)]
            peaks.append(_peaks(phase, *ours_then, *real_then))
        equal = [ours[i] for i, j in pairs if ours[i].phase == phase and real[j].phase == phase]
        events.append(PhaseEvents(phase=phase, num_predicted=len(mine), num_recorded=len(theirs), num_equal=len(equal),
                                  num_predicted_allocs=sum(ours[i].action == ALLOC for i in mine),
                                  num_recorded_allocs=sum(real[i].action == ALLOC for i in theirs),
                                  num_equal_allocs=sum(e.action == ALLOC for e in equal)))  # fmt: skip
    return Against(step=step, peaks=tuple(peaks), events=tuple(e for e in events if e.num_predicted or e.num_recorded),
                   differences=tuple(_differences(ours, real, pairs)), num_unmatched_frees=num_unmatched)  # fmt: skip


def _peaks(phase: str, allocated: Sequence[int], reserved: Sequence[int], real_allocated: Sequence[int],
           real_reserved: Sequence[int]) -> Peaks:  # fmt: skip
    return Peaks(phase=phase, predicted_allocated_bytes=max(allocated), measured_allocated_bytes=max(real_allocated),
                 predicted_reserved_bytes=max(reserved), measured_reserved_bytes=max(real_reserved))  # fmt: skip


# -- the predicted side ------------------------------------------------------------------------------------------------


def predicted_events(
    request: Request, traces: TraceSource, *, step: str, cold: bool = False, torch_version: str | None = None
) -> list[Event]:
    """The GPU events of one optimizer step, without what is there before it: model and batch, for a later step also the rest.

    `cold`: the recording began before all that, so that it is part of what is compared, the first step included.
    """
    from .optimizers.traced import impl_in, traced_rule
    from .simulate import simulate
    from .strategies import make_strategy

    request.check()
    request = request.but(iterations=2 if step == "later" else 1)
    trace = traces.step(request)
    kernels = Kernels.for_device(request.device, torch_version or trace.versions["torch"])
    impl = impl_in(request.optimizer, request.optimizer_impl, kernels.torch_version)
    optimizer = traced_rule(request.optimizer, impl) if request.mode == "train" else None
    ledger, _ = simulate(trace, make_strategy(request, trace), optimizer=optimizer, loop=request.loop, kernels=kernels)
    return _events(ledger, whole=cold, with_workspaces=cold or step == "first")


def _events(ledger: Ledger, *, whole: bool, with_workspaces: bool) -> list[Event]:
    rows = ledger.rows()
    columns = (ledger.block, ledger.delta_bytes, ledger.phase, ledger.iteration, ledger.label, ledger.component)
    deaths = set(ledger.block[ledger.delta_bytes < 0].tolist())
    what: dict[int, str] = {}  # block -> what it is; a free is told by its birth
    skipped: set[int] = set()
    found = []
    last = int(ledger.iteration.max())
    for block, delta, phase, when, label, component in zip(*(column[rows].tolist() for column in columns), strict=True):
        action = FREE if block in what else ALLOC
        if action == ALLOC:
            path, op = ledger.labels[label]
            what[block] = f"{_INDEX.sub('*', path) or 'the loop'}: {op}"
            lasting_workspace = component == Component.WORKSPACE and block not in deaths
            if not delta or ((path, op) == _INPUT and not whole) or (lasting_workspace and not with_workspaces):
                skipped.add(block)
        if block not in skipped and (whole or (when == last and phase != Phase.INIT)):
            found.append(Event(action, abs(delta), _FIRST_KEY + block, Phase(phase).name.lower(), what[block]))
    return found


def _resolve_frees(ours: Sequence[Event], real: Sequence[Event], pairs: Sequence[tuple[int, int]],
                   start: StartState) -> tuple[list[Event], int]:  # fmt: skip
    """Frees of blocks from before the step get the address of the start block whose recorded free is aligned with them.

    Without such a block there is nothing to free: the size becomes 0, and is counted.
    """
    partner = dict(pairs)
    born: set[int] = set()
    found = []
    num_unmatched = 0
    for index, event in enumerate(ours):
        if event.action == ALLOC:
            born.add(event.key)
        elif event.key not in born:
            address = real[partner[index]].key if index in partner else -1
            known = address in start.blocks
            num_unmatched += not known
            event = event._replace(key=address) if known else event._replace(size=0)
        found.append(event)
    return found, num_unmatched


class _SameAddresses:
    """The driver of the recording, asked by another program: the n-th segment of a size lies where the n-th of it lay there.

    Where blocks lie decides which of several free ones is taken, and the addresses are the driver's own, not the program's.
    A place that is taken (the recording had given it back by then) is not given again; what was never asked there is invented.
    """

    def __init__(self, recorded: Sequence[Step], start: StartState) -> None:
        self._known: dict[tuple[int, int], deque[int]] = {}
        for step in recorded:
            for event in step.driver:
                if event.action == "segment_alloc":
                    self._known.setdefault((event.size, event.stream), deque()).append(event.address)
        self._taken = [(segment.address, segment.end) for segment in start.segments]
        self._invented = DescendingDriver()

    def allocate(self, size: int, stream: int) -> int | None:
        known = self._known.get((size, stream), deque())
        while known:
            address = known.popleft()
            if all(end <= address or address + size <= begin for begin, end in self._taken):
                self._taken.append((address, address + size))
                return address
        return self._invented.allocate(size, stream)

    def reserve(self, size: int, stream: int, is_small: bool) -> int:
        return self._invented.reserve(size, stream, is_small)


def _play(events: Sequence[Event], recorded: Sequence[Step], start: StartState, conf: AllocConf,
          limit: int | None) -> ReplayResult:  # fmt: skip
    state = restore(start, CachingAllocator(conf, limit, _SameAddresses(recorded, start)))
    streams = Counter(step.stream for step in recorded if step.action == "alloc")
    stream = streams.most_common(1)[0][0]  # where the recorded step ran
    nothing = -1  # an allocation of 0 bytes stands in for a free of what is not there: the series keep their length
    actions, sizes, keys = [], [], []
    for event in events:
        gone = event.action == FREE and event.size == 0
        actions.append(ALLOC if gone else event.action)
        sizes.append(event.size)
        keys.append(nothing if gone else event.key)
        nothing -= gone
    return replay(actions, sizes, keys, [stream] * len(events), with_series=True, state=state)


# -- the recorded side -------------------------------------------------------------------------------------------------


def _play_recording(steps: Sequence[Step], start: StartState, conf: AllocConf,
                    limit: int | None) -> tuple[list[Event], list[int], list[int]]:  # fmt: skip
    """The recording's events, and what was allocated and reserved after each: found by playing it with its real addresses."""
    driver = RecordedDriver()
    state = restore(start, CachingAllocator(conf, limit, driver))
    seen: list[Any] = []
    state.allocator.on_segment = seen.append
    events, allocated, reserved = [], [], []
    for step in steps:
        wrong = play_exact([step], state, driver, seen)
        if wrong:
            raise UserError(f"the recording cannot be followed: {wrong[0]}", "Try `memplan replay` without --against-trace")
        if step.action in ("alloc", "free_completed"):
            events.append(Event(ALLOC if step.action == "alloc" else FREE, step.size, step.address, "", ""))
            allocated.append(state.allocator.allocated_bytes)
            reserved.append(state.allocator.reserved_bytes)
    if not events:
        raise UserError("the recording has no allocation", "Call torch.cuda.memory._record_memory_history() before the step")
    return events, allocated, reserved


def _with_phases(ours: Sequence[Event], real: Sequence[Event], pairs: Sequence[tuple[int, int]]) -> list[Event]:
    """A recording names no phases: each lasts there until the last of its events that the prediction has too."""
    stretches: list[tuple[str, int]] = []  # phase, and where it ends in the recording
    partner = dict(pairs)
    for index, event in enumerate(ours):
        if not stretches or stretches[-1][0] != event.phase:
            stretches.append((event.phase, stretches[-1][1] if stretches else 0))
        if index in partner:
            stretches[-1] = event.phase, partner[index] + 1
    found = []
    number = 0
    for index, event in enumerate(real):
        while number + 1 < len(stretches) and index >= stretches[number][1]:
            number += 1
        found.append(event._replace(phase=stretches[number][0]))
    return found


# -- differences -------------------------------------------------------------------------------------------------------


def _differences(ours: Sequence[Event], real: Sequence[Event], pairs: Sequence[tuple[int, int]]) -> list[Difference]:
    """The runs between aligned events; equal runs of a phase are counted together."""
    found: Counter[tuple[str, tuple[str, ...], tuple[str, ...]]] = Counter()
    last_i = last_j = -1
    for i, j in [*pairs, (len(ours), len(real))]:
        mine, theirs = ours[last_i + 1 : i], real[last_j + 1 : j]
        if mine or theirs:
            phase = (mine or theirs)[0].phase
            found[phase, tuple(_line(e) for e in mine), tuple(_line(e) for e in theirs)] += 1
        last_i, last_j = i, j
    return [Difference(phase=phase, count=count, only_predicted=mine, only_recorded=theirs)
            for (phase, mine, theirs), count in found.items()]  # fmt: skip


def _line(event: Event) -> str:
    verb = "alloc" if event.action == ALLOC else "free"
    return f"{verb} {event.size:,}" + (f" ({event.what})" if event.what else "")
