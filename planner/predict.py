"""From a question to an answer: trace, simulate, replay, judge."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import CannotTell
from ..units import gib
from .allocator.config import AllocConf
from .allocator.replay import ReplayResult
from .allocator.replay import replay as replay_stream
from .error_bars import error_bars
from .host_memory import host_reserved_peak_bytes, pinned_reserved_bytes
from .kernels import Kernels
from .ledger import Ledger, Tier
from .loading import host_bytes, loading_peak
from .optimizers.traced import names, traced_rule
from .prediction import Failure, HostNeeds, Moment, Prediction, Verdict
from .simulate import simulate
from .strategies import RELAY, make_strategy, outside, said_of
from .strategies.zo_evaluation import with_evaluation
from .trace.steptrace import Phase

if TYPE_CHECKING:
    from .optimizers.rule import OptimizerRule
    from .request import Request
    from .simulate import WorkLog
    from .strategies.base import Strategy
    from .timeline.step_time import StepTime
    from .trace.source import TraceSource
    from .trace.steptrace import StepTrace

# Below this share of the card the answer is `tight`: the 90th percentile error of allocated peaks that is aimed at (2 %).
ERROR_BAND = 0.02
_STEP_NAMES = ("first step", "later steps")


def predict(request: Request, traces: TraceSource) -> Prediction:
    """The answer to `request`, without maxima and remedies (see `advice`).  A question that cannot be answered is `unknown`."""
    return predict_with_ledger(request, traces)[0]


def predict_with_ledger(request: Request, traces: TraceSource) -> tuple[Prediction, Ledger | None]:
    """The answer, and the ledger that it was read from; None where there is no answer."""
    from .recompute.choice import resolved

    try:
        request.check()
        request = resolved(request, traces)
        trace = traces.step(request)
        run = simulated(request, trace)
    except CannotTell as error:
        return unknown(request, str(error)), None
    return with_evaluation(answer(request, trace, run), request, traces), run.ledger


def answer(request: Request, trace: StepTrace, run: Simulated) -> Prediction:
    """The answer that a simulated run gives."""
    ledger = run.ledger
    conf = AllocConf.parse(request.alloc_conf)
    device = request.device
    free = replay_ledger(ledger, conf)
    limited = (
        free
        if free.peak_reserved_bytes <= device.usable_bytes
        else replay_ledger(ledger, conf, limit_bytes=device.usable_bytes, with_series=False)
    )
    headroom = device.usable_bytes - free.peak_reserved_bytes
    verdict, reason, failure = _judge(ledger, free, limited, headroom, device.usable_bytes)
    host = host_needs(ledger, request.gpus // request.nodes)
    lacks, missing = _missing_on_the_host(request, host)
    if missing and verdict is not Verdict.DOES_NOT_FIT:
        verdict, reason, host = Verdict.DOES_NOT_FIT, missing, replace(host, missing_bytes=lacks)
    peak = _moment(ledger, free, free.peak_allocated_event)
    load, short = _load(request, trace, device.usable_bytes)
    if short and verdict is not Verdict.DOES_NOT_FIT:
        verdict, reason, headroom = Verdict.DOES_NOT_FIT, short, device.usable_bytes - load["load"].allocated_bytes
    time, no_time = _time(request, trace, run)
    return Prediction(
        verdict=verdict,
        reason=reason,
        question=request.as_data(),
        gpu=device.name,
        num_params=trace.num_params,
        num_trainable_params=sum(p.numel for p in trace.params if p.requires_grad),
        total_bytes=device.total_bytes,
        context_bytes=device.context_bytes,
        usable_bytes=device.usable_bytes,
        allocated_peak_bytes=free.peak_allocated_bytes,
        reserved_peak_bytes=free.peak_reserved_bytes,
        device_peak_bytes=free.peak_reserved_bytes + device.context_bytes,
        headroom_bytes=headroom,
        fragmentation_bytes=free.peak_reserved_bytes - int(ledger.live_bytes()[free.peak_reserved_event]),
        peak=peak,
        phases={**load, **_phases(ledger, free)},
        host=host,
        failure=failure,
        num_alloc_retries=limited.num_alloc_retries,
        flops_per_step=trace.flops * (request.loop.grad_accum_steps if request.has_backward else request.num_forwards),
        time=time,
        error_bars=error_bars(request),
        hints=(*run.strategy.hints(), *_host_of_loading(request, trace)),
        assumptions=(*_assumptions(request, trace), *(time.assumptions if time else no_time)),
        versions=trace.versions,
    )


def _load(request: Request, trace: StepTrace, usable: int) -> tuple[dict[str, Moment], str]:
    """(the moment of loading that is worth knowing, as a phase; why it is too much, or "")."""
    peak = loading_peak(request, trace)
    if peak is None:
        return {}, ""
    moment = Moment(
        allocated_bytes=peak.nbytes,
        requested_bytes=peak.nbytes,
        phase="load",
        fqn=peak.fqn,
        what=peak.what,
        step=_STEP_NAMES[0],
        components={"param": peak.nbytes},
    )
    if peak.nbytes <= usable:
        return {"load": moment}, ""
    short = f"{gib(peak.nbytes)} of {gib(usable)} are asked for while the checkpoint is loaded ({peak.what})"
    return {"load": moment}, short


def _host_of_loading(request: Request, trace: StepTrace) -> list[str]:
    """What the host cannot hold while the model is made there."""
    ranks = request.gpus // request.nodes
    own = host_bytes(request, trace)
    if request.host_ram_bytes is None or own * ranks <= request.host_ram_bytes:
        return []
    who = f"each of {ranks} processes" if ranks > 1 else "the process"
    return [
        f"from_pretrained makes the model on the host first: {gib(own)} for {who}, {gib(own * ranks)} on a machine that has "
        f"{gib(request.host_ram_bytes)}. Load it with device_map, which goes to the GPU tensor by tensor"
    ]


def _time(request: Request, trace: StepTrace, run: Simulated) -> tuple[StepTime | None, list[str]]:
    """(time of a step, why there is none)."""
    from .timeline.step_time import step_time

    try:
        return step_time(request, trace, run.ledger, run.work), []
    except CannotTell as error:
        return None, [f"no step time: {error}"]


def unknown(request: Request, reason: str) -> Prediction:
    device = request.device
    return Prediction(
        verdict=Verdict.UNKNOWN,
        reason=reason,
        question=request.as_data(),
        gpu=device.name,
        total_bytes=device.total_bytes,
        context_bytes=device.context_bytes,
        usable_bytes=device.usable_bytes,
        assumptions=request.defaults,
    )


@dataclass(frozen=True)
class Simulated:
    """A run as it was simulated: its memory, the work that takes time, and the strategy as it was left."""

    ledger: Ledger
    work: WorkLog
    strategy: Strategy


def simulated(request: Request, trace: StepTrace) -> Simulated:
    """The run that `request` asks about."""
    target = str(trace.options["target"])
    kernels = Kernels.for_device(request.device, trace.versions["torch"]) if target == "cuda" else Kernels.none()
    optimizer = optimizer_of(request, target) if request.has_backward else None
    strategy = make_strategy(request, trace)
    ledger, work = simulate(trace, strategy, optimizer=optimizer, loop=request.loop, kernels=kernels)
    return Simulated(ledger, work, strategy)


def ledger_of(request: Request, trace: StepTrace) -> Ledger:
    """The ledger of the run that `request` asks about."""
    return simulated(request, trace).ledger


def optimizer_of(request: Request, target: str) -> OptimizerRule:
    """The rule of the request's optimizer.  Raises UserError for one that does not exist."""
    if request.method == RELAY:
        target = "cpu"  # where it steps
    if request.optimizer in names():  # torch's own: the others are not even imported then
        return traced_rule(request.optimizer, optimizer_impl(request), target=target)
    from .optimizers.catalogue import optimizer_rule

    return optimizer_rule(request.optimizer, optimizer_impl(request), target=target)


def _optimizer_in_words(request: Request, target: str) -> str:
    rule = optimizer_of(request, target)
    if request.optimizer in names():
        return f"torch.optim {rule.name}, {rule.impl} implementation"
    from .optimizers.catalogue import entry_of

    entry = entry_of(request.optimizer.partition(":")[0])
    return f"{entry.name} of {entry.library} {entry.version}: {entry.summary}"


def _is_deepspeeds_own(request: Request) -> bool:
    """Whether the engine steps with an Adam of its own (ops/adam)."""
    own = request.optimizer_impl == "default" and request.optimizer in ("adam", "adamw")
    return own and request.strategy.startswith("zero")


def optimizer_impl(request: Request) -> str:
    """The optimizer's implementation: DeepSpeed's own Adam is a fused one (ops/adam/fused_adam.py)."""
    return "fused" if _is_deepspeeds_own(request) else request.optimizer_impl


def replay_ledger(
    ledger: Ledger, conf: AllocConf | None = None, *, limit_bytes: int | None = None, with_series: bool = True
) -> ReplayResult:
    """The GPU rows of a ledger through PyTorch's caching allocator; event i is the i-th row of `ledger.rows()`."""
    rows = ledger.rows()
    delta = ledger.delta_bytes[rows]
    block = ledger.block[rows]
    first = np.empty(int(block.max(initial=-1)) + 1, np.intp)
    first[block[::-1]] = np.arange(len(block))[::-1]  # of what is assigned twice the last stays
    is_free = np.ones(len(block), np.int8)
    is_free[first[block]] = 0
    repeats = np.array(ledger.repeats, np.intp).reshape(-1, 3)
    repeats[:, :2] = np.searchsorted(rows, repeats[:, :2])
    return replay_stream(
        is_free.tolist(),
        np.abs(delta).tolist(),
        block.tolist(),
        ledger.stream[rows].tolist() if ledger.stream[rows].any() else None,
        repeats=[(start, stop, number) for start, stop, number in repeats.tolist()],
        conf=conf or AllocConf(),
        limit_bytes=limit_bytes,
        with_series=with_series,
    )


def _judge(
    ledger: Ledger, free: ReplayResult, limited: ReplayResult, headroom: int, usable: int
) -> tuple[Verdict, str, Failure | None]:
    if limited.failure is not None:
        failure = _failure(ledger, limited)
        where = f"{failure.phase} of {failure.fqn}" if failure.fqn else failure.phase
        return (
            Verdict.DOES_NOT_FIT,
            f"{where} ({failure.step}) asks for {gib(failure.requested_bytes)} when {gib(failure.allocated_bytes)} of "
            f"{gib(usable)} are in use",
            failure,
        )
    if limited.num_alloc_retries:
        return Verdict.TIGHT, "it fits only after the allocator returns its cached blocks, which costs time", None
    if headroom < ERROR_BAND * usable:
        return Verdict.TIGHT, f"the headroom of {gib(headroom)} is within the prediction's own error", None
    return Verdict.FITS, f"{gib(headroom)} of {gib(usable)} stay free", None


def host_needs(ledger: Ledger, ranks: int) -> HostNeeds:
    """What one rank, and one machine with `ranks` of them, needs beside the GPU."""
    taken = pinned_reserved_bytes(ledger)
    nvme = ledger.peak_bytes(Tier.NVME)
    return HostNeeds(
        pinned_bytes=ledger.peak_bytes(Tier.HOST_PINNED),
        pinned_reserved_bytes=int(taken[-1]) if len(taken) else 0,
        pageable_bytes=ledger.peak_bytes(Tier.HOST_PAGEABLE),
        nvme_bytes=nvme,
        node_bytes=host_reserved_peak_bytes(ledger) * ranks,
        node_nvme_bytes=nvme * ranks,
    )


def _missing_on_the_host(request: Request, host: HostNeeds) -> tuple[int, str]:
    """How much the machine itself lacks, and why that is so; (0, "") where it has enough."""
    ram, nvme = request.host_ram_bytes, request.nvme_bytes
    if ram is not None and host.node_bytes > ram:
        pinned = host.pinned_reserved_bytes * (request.gpus // request.nodes)
        return host.node_bytes - ram, (
            f"the GPU has room, but each machine needs {gib(host.node_bytes)} of host memory ({gib(pinned)} of it pinned) "
            f"and has {gib(ram)}"
        )
    if nvme is not None and host.node_nvme_bytes > nvme:
        why = f"the GPU has room, but each machine needs {gib(host.node_nvme_bytes)} on NVMe and has {gib(nvme)}"
        return host.node_nvme_bytes - nvme, why
    return 0, ""


def _failure(ledger: Ledger, limited: ReplayResult) -> Failure:
    assert limited.failure is not None
    failed = limited.failure
    row = int(ledger.rows()[failed.event])
    fqn, what = ledger.labels[ledger.label[row]]
    return Failure(
        phase=Phase(ledger.phase[row]).name.lower(),
        fqn=fqn,
        what=what,
        requested_bytes=failed.requested_bytes,
        allocated_bytes=failed.allocated_bytes,
        reserved_bytes=failed.reserved_bytes,
        step=_step_name(ledger, row),
    )


def _moment(ledger: Ledger, played: ReplayResult, event: int) -> Moment:
    row = int(ledger.rows()[event])
    fqn, what = ledger.labels[ledger.label[row]]
    components = ledger.components_after(row)
    return Moment(
        allocated_bytes=played.allocated_series[event],
        requested_bytes=sum(components.values()),
        phase=Phase(ledger.phase[row]).name.lower(),
        fqn=fqn,
        what=what,
        step=_step_name(ledger, row),
        components=components,
    )


def _step_name(ledger: Ledger, row: int) -> str:
    return _STEP_NAMES[min(int(ledger.iteration[row]), 1)]


def _phases(ledger: Ledger, free: ReplayResult) -> dict[str, Moment]:
    """The peak of each phase, over all steps.  What is live when a phase begins counts, as it does for torch's peak counter."""
    allocated = np.array(free.allocated_series)
    phase = ledger.phase[ledger.rows()]
    found = {}
    for p in Phase:
        events = np.flatnonzero(phase == p)
        if not len(events):
            continue
        name = p.name.lower()
        highest = int(events[allocated[events].argmax()])
        starts = events[(events > 0) & (phase[events - 1] != p)] - 1  # the event before each stretch
        if len(starts) and allocated[starts].max() > allocated[highest]:
            before = _moment(ledger, free, int(starts[allocated[starts].argmax()]))
            found[name] = replace(before, phase=name, fqn="", what="its start")
        else:
            found[name] = _moment(ledger, free, highest)
    return found


def _assumptions(request: Request, trace: StepTrace) -> list[str]:
    said = [*request.defaults, *trace.assumptions, *said_of(request)]
    if request.has_backward:
        is_its_muon = request.optimizer == "muon" and request.strategy.startswith("zero")
        if not _is_deepspeeds_own(request) and not is_its_muon:  # its strategy names it
            said.append(_optimizer_in_words(request, str(trace.options["target"])))
        said += request.loop.assumptions()
    if request.strategy in ("zero2", "zero3"):
        from .engines.estimator import estimator, in_words

        if (own := estimator(request, trace)) is not None:
            said.append(in_words(own))
    device = request.device
    said.append(
        f"{device.name}: torch reports {gib(device.total_bytes)} ({device.total_status}); "
        f"{gib(device.context_bytes)} go to the CUDA context and its kernels"
        + (" and to NCCL" if request.gpus > 1 else "")
        + "; nothing else runs on the card"
    )
    if nccl := outside.said(request):
        said.append(nccl)
    if request.offload and request.host_ram_bytes is None:
        said.append("each machine has the host memory that this needs (--host-ram not given)")
    if any(s.op.startswith("aten.convolution") for s in trace.signatures):
        said.append("cuDNN's convolution workspaces are not counted: their sizes are not published")
    return said
