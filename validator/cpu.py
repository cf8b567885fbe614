"""Measures a real step on the CPU: every allocator event, exactly, through torch's profiler.

The profiler reports each allocation and free of torch's CPU allocator with its size as asked for, in order.  The model is built
inside the measured region too, so that everything it keeps is counted, whatever holds it.

Two things are told apart from the step's own memory, because a GPU run does not have them on the device:

* what lies on the **host** whatever the device: the loader's batch, the saved states of the CPU's random generator, tensors
  that a module holds as plain attributes (`module.to(device)` moves parameters and buffers only), and the numbers of Python
  code (`x * 0.5` makes a tensor of 8 bytes of the 0.5, which autograd may keep);
* **kernel scratch**: blocks that a CPU kernel makes and drops inside one op (oneDNN reorders the operands of a 16-bit matmul
  and of a convolution, for instance).  They are measured, named, and kept out of the live bytes; a GPU's kernels have their
  own, which `planner.kernels` knows.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .loop import HOST, Running, run
from .measurement import MOMENTS, PHASES, STEPS, PhaseBytes, Usage
from .tensors import component_bytes, plain_tensor_bytes

if TYPE_CHECKING:
    from ..planner.request import Request
    from ..planner.trace.steptrace import StepTrace

Outputs = Mapping[str, Sequence[Sequence[int]]]
_KERNELS = ("aten::", "bitsandbytes::")  # whose inner allocations are scratch: a 4-bit product is one op of the trace
_PREFIX = "memplan mark: "
_HOST_SPAN = "memplan host"
_NUMBER_BYTES = 8  # an int or a float


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """One allocation (`delta_bytes` > 0) or free of the CPU allocator."""

    time_ns: int
    delta_bytes: int
    address: int = 0
    """Of the block; 0 where it is not known."""


@dataclass(frozen=True, slots=True)
class MarkEvent:
    """A phase begins."""

    time_ns: int
    phase: str
    iteration: int


def measure(request: Request, outputs: Outputs, *, threads: int | None = 1) -> Usage:
    """Runs the steps of `request` on this machine's CPU.

    `outputs`: of the trace, see `leaf_outputs`.  `threads`: of torch; None leaves it as it is.  Some kernels allocate scratch
    per thread.
    """
    import torch

    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        recorded = record(request)
    finally:
        torch.set_num_threads(before)
    return usage(recorded.profile, recorded.components, outputs, constant_bytes=recorded.constant_bytes)


def leaf_outputs(trace: StepTrace) -> Outputs:
    """Every op of a trace by the profiler's name ("aten::mm"), with what its calls return: lists of new blocks, in bytes.

    These ops are leaves: what one of them makes and drops inside, no trace can see.
    """
    made: dict[int, list[int]] = {}
    for op, nbytes in zip(trace.storage_op.tolist(), trace.storage_bytes.tolist(), strict=True):
        if op >= 0 and nbytes:
            made.setdefault(op, []).append(nbytes)
    found: dict[str, set[tuple[int, ...]]] = {}
    for op, signature in enumerate(trace.op_signature.tolist()):
        name = "::".join(trace.signatures[signature].op.split(".")[:2])
        found.setdefault(name, set()).add(tuple(sorted(made.get(op, ()))))
    return {name: [list(call) for call in sorted(calls)] for name, calls in found.items()}


@dataclass(frozen=True)
class Span:
    """Something that ran from `start_ns` to `end_ns`."""

    start_ns: int
    end_ns: int
    name: str


@dataclass(frozen=True)
class Profile:
    """A profile's memory events, marks and spans, each in order of time."""

    events: tuple[MemoryEvent, ...]
    marks: tuple[MarkEvent, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Recorded:
    profile: Profile
    components: dict[str, dict[str, int]]
    constant_bytes: int = 0
    """Of tensors that the module holds as plain attributes since it was built."""


def record(request: Request) -> Recorded:
    """Runs the loop under the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, record_function

    gc.collect()  # nothing made before may die inside
    running = Running()
    components: dict[str, dict[str, int]] = {}
    constant_bytes = 0
    last: list[str] = []

    def mark(phase: str, iteration: int) -> None:
        nonlocal constant_bytes
        if last and last[-1] == "build" and running.module is not None:
            constant_bytes = plain_tensor_bytes(running.module)
        if last and last[-1] in MOMENTS and running.module is not None:
            components[last[-1]] = component_bytes(running.module, running.optimizer)
        with record_function(f"{_PREFIX}{phase} {iteration}"):
            pass
        last.append(phase)

    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, _random_state_on_host():
        run(request, mark, running=running)
    results = profiler.profiler.kineto_results
    profile = _with_addresses(parse(results.events()), results.experimental_event_tree())
    return Recorded(profile, components, constant_bytes)


def parse(kineto_events: Sequence[Any]) -> Profile:
    """Reads what kineto recorded: "[memory]" events carry a signed number of bytes, the others a duration."""
    memory, marks, spans = [], [], []
    for event in kineto_events:
        name = event.name()
        if name == "[memory]":
            if str(event.device_type()).endswith("CPU"):
                memory.append(MemoryEvent(event.start_ns(), event.nbytes()))
        elif name.startswith(_PREFIX):
            phase, iteration = name.removeprefix(_PREFIX).split()
            marks.append(MarkEvent(event.start_ns(), phase, int(iteration)))
        elif name.startswith(_KERNELS) or name == _HOST_SPAN:
            spans.append(Span(event.start_ns(), event.start_ns() + event.duration_ns(), name))
    memory.sort(key=lambda e: e.time_ns)
    marks.sort(key=lambda m: m.time_ns)
    spans.sort(key=lambda s: (s.start_ns, -s.end_ns))
    return Profile(tuple(memory), tuple(marks), tuple(spans))


def _with_addresses(profile: Profile, event_tree: Sequence[Any]) -> Profile:
    """The same with the blocks' addresses, which only the profiler's event tree has; without them where the two disagree."""
    found: list[tuple[int, int, int]] = []
    nodes = list(event_tree)
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.tag.name == "Allocation" and node.extra_fields.device.type == "cpu":
            found.append((node.start_time_ns, node.extra_fields.alloc_size, node.extra_fields.ptr))
    found.sort(key=lambda e: e[0])
    if [e[:2] for e in found] != [(e.time_ns, e.delta_bytes) for e in profile.events]:
        return profile
    return replace(profile, events=tuple(MemoryEvent(*e) for e in found))


def usage(profile: Profile, components: dict[str, dict[str, int]], outputs: Outputs, *, constant_bytes: int = 0) -> Usage:
    """Peaks per phase of the first step and of the later ones.  `outputs`: see `leaf_outputs`.

    `constant_bytes`: part of what the building of the model made, left out because it lies on the host.
    """
    host = _inside(profile, [s for s in profile.spans if s.name == _HOST_SPAN]) | _numbers(profile)
    scratch = _scratch(profile, outputs, host)
    found: dict[tuple[str, str], PhaseBytes] = {}
    with_scratch: dict[str, int] = {}
    live = raw = -constant_bytes
    position = raw_peak = 0
    raw_op = ""
    events, marks = profile.events, profile.marks
    while marks and position < len(events) and events[position].time_ns < marks[0].time_ns:
        position += 1
    for mark, following in itertools.pairwise(marks):
        peak, phase_raw = live, raw
        while position < len(events) and events[position].time_ns < following.time_ns:
            event = events[position]
            if mark.phase != HOST and position not in host:
                raw += event.delta_bytes
                if position not in scratch:
                    live += event.delta_bytes
                peak = max(peak, live)
                phase_raw = max(phase_raw, raw)
                if raw > raw_peak and mark.phase in PHASES:
                    raw_peak, raw_op = raw, scratch.get(position, "")
            position += 1
        if mark.phase not in MOMENTS:
            continue
        key = (mark.phase, STEPS[min(mark.iteration, 1)])
        known = found.get(key)
        found[key] = PhaseBytes(
            phase=key[0], step=key[1], peak_bytes=max(peak, known.peak_bytes if known else 0), after_bytes=live
        )
        with_scratch[" ".join(key)] = max(phase_raw, with_scratch.get(" ".join(key), 0))
    result = Usage(
        counter="live",
        phases=tuple(found.values()),
        components=components,
        detail={"peak_with_kernel_scratch_bytes": with_scratch},
    )
    if raw_peak > result.peak_bytes:
        where = f" in {raw_op}" if raw_op else ""
        note = f"with the scratch of CPU kernels the peak is {raw_peak:,} bytes{where}; a GPU's kernels have their own"
        result = replace(result, notes=(note,))
    return result


def _scratch(profile: Profile, outputs: Outputs, host: set[int]) -> dict[int, str]:
    """Indices of the events of blocks that one leaf op makes and drops, with the op's name.

    An op of which not all that a call returns outlives it was stopped early (the end of a recomputation): a block of such a
    size is then the result itself.  `host`: events that are not the op's own.
    """
    scratch: dict[int, str] = {}
    for span, inside in _groups(profile, _outermost([s for s in profile.spans if s.name in outputs])):
        alive: dict[tuple[int, int], list[int]] = {}
        pairs: list[tuple[int, int, int]] = []
        for index in inside:
            address, delta = profile.events[index].address, profile.events[index].delta_bytes
            if index in host:
                continue
            if delta > 0:
                alive.setdefault((address, delta), []).append(index)
            elif births := alive.get((address, -delta)):
                pairs.append((-delta, births.pop(), index))
        if not pairs:
            continue
        left = Counter(nbytes for (_, nbytes), births in alive.items() for _ in births)
        results = (
            set() if any(Counter(call) <= left for call in outputs[span.name]) else {n for c in outputs[span.name] for n in c}
        )
        for nbytes, birth, death in pairs:
            if nbytes not in results:
                scratch[birth] = scratch[death] = span.name
    return scratch


def _numbers(profile: Profile) -> set[int]:
    """Indices of the events of Python numbers that torch made into tensors.

    torch wraps a number before it enters an op (torch/csrc/autograd/python_arg_parser.cpp, `scalar_to_tensor`), so that its
    block is born outside of every op, where no other of its size can be; casts of it are born and die inside one op.
    """
    spans = _outermost([s for s in profile.spans if s.name != _HOST_SPAN])
    inside_of: dict[int, int] = {}
    for number, (_, inside) in enumerate(_groups(profile, spans)):
        inside_of |= dict.fromkeys(inside, number)
    found: set[int] = set()
    born: dict[tuple[int, int], list[int]] = {}
    for index, event in enumerate(profile.events):
        if 0 < event.delta_bytes <= _NUMBER_BYTES:
            born.setdefault((event.address, event.delta_bytes), []).append(index)
            if event.delta_bytes == _NUMBER_BYTES and index not in inside_of:
                found.add(index)
        elif births := born.get((event.address, -event.delta_bytes)):
            birth = births.pop()
            if birth in found or (birth in inside_of and inside_of[birth] == inside_of.get(index)):
                found |= {birth, index}
    return found


def _outermost(spans: Sequence[Span]) -> list[Span]:
    kept: list[Span] = []
    for span in spans:
        if not kept or span.start_ns >= kept[-1].end_ns:
            kept.append(span)
    return kept


def _inside(profile: Profile, spans: Sequence[Span]) -> set[int]:
    return {index for _, inside in _groups(profile, _outermost(spans)) for index in inside}


def _groups(profile: Profile, spans: Sequence[Span]) -> Iterator[tuple[Span, list[int]]]:
    """The indices of the memory events inside each span; spans do not overlap."""
    position, events = 0, profile.events
    for span in spans:
        while position < len(events) and events[position].time_ns < span.start_ns:
            position += 1
        inside = []
        while position < len(events) and events[position].time_ns <= span.end_ns:
            inside.append(position)
            position += 1
        yield span, inside


@contextlib.contextmanager
def _random_state_on_host() -> Iterator[None]:
    """Saved states of the CPU's generator (5,056 bytes for every checkpointed call) stay out of torch's allocator.

    In a GPU run they lie on the host as well; here the host and the device are one, so they are copied into numpy's memory.
    """
    import torch

    original = torch.random.get_rng_state

    def get_rng_state() -> Any:
        with torch.profiler.record_function(_HOST_SPAN):
            return torch.from_numpy(original().numpy().copy())

    torch.get_rng_state = torch.random.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = torch.random.get_rng_state = original
