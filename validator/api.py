"""The validator from Python: `memplan.validate`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import CannotTell, UserError
from .compare import TOLERANCE, Comparison, rows_of

if TYPE_CHECKING:
    from ..models import ModelSpec
    from ..planner.request import Request
    from ..planner.trace.source import TraceSource

_HOW = ("timeout_s", "threads", "snapshot", "processes", "isolated", "traces")  # of `run`
DEVICES = ("auto", "cpu", "cuda")
# A CPU run asks nothing of a GPU's description; the request has a field for one all the same.
ANY_GPU = "a100-sxm-80gb"


def validate(
    model: str | ModelSpec | Callable[[], Any],
    *,
    device: str = "auto",
    steps: int = 2,
    tolerance: float | None = None,
    record: bool = True,
    store: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Comparison:
    """Runs the step for real, on this machine's GPU or CPU, and compares it with the prediction.

    **Main arguments.**  `model` and `options` as for `memplan.fits`, without `gpu`.  `device`: auto is the GPU where there is
    one.  `steps`: optimizer steps; the first creates the optimizer's state.  `tolerance`: of the peak, as a share; 0.001 on the
    CPU and 0.01 on a GPU unless given.

    **Other arguments.**  `record`, `store`: whether and where the result is remembered.  `timeout_s`, `threads`, `snapshot`,
    `processes`, `isolated`, `traces`: see `run`.

    **Returns** a Comparison; a run that failed is one too, with its reason.

    **Raises** UserError for input that cannot be used, CannotTell for what is not modelled.
    """
    how = {name: options.pop(name) for name in _HOW if name in options}
    target = resolve_device(device, options.get("gpus") or 1)
    comparison = run(request_for(model, target, steps=steps, **options), target, tolerance=tolerance, **how)
    if not record:
        return comparison
    from .store import remember

    warning = remember(comparison, store)
    return replace(comparison, notes=(*comparison.notes, warning)) if warning else comparison


def resolve_device(device: str, num_gpus: int = 1) -> str:
    """cpu or cuda.  auto takes the GPUs where there are at least `num_gpus`; torch must be able to use them."""
    if device not in DEVICES:
        raise UserError(f"--device {device!r} is not known", f"Choose one of {', '.join(DEVICES)}")
    if device == "cpu":
        return device
    from ..hardware.detect import gpus

    found = sum(gpu.read_by == "torch" for gpu in gpus())  # a driver alone is not enough
    if device == "cuda" and not found:
        raise UserError("--device cuda: torch can use no GPU on this machine", "Use --device cpu")
    return "cuda" if device == "cuda" or found >= num_gpus else "cpu"


def request_for(model: Any, device: str, *, steps: int = 2, **options: Any) -> Request:
    """The request that is predicted and run on `device` (cpu or cuda)."""
    from ..planner.api import make_request

    if steps < 1:
        raise UserError(f"--steps {steps}: must be at least 1", "Leave it out for 2")
    request = make_request(model, ANY_GPU if device == "cpu" else "auto", iterations=steps, **options)
    request.check()
    return request


def run(
    request: Request,
    device: str,
    *,
    tolerance: float | None = None,
    timeout_s: float | None = None,
    threads: int | None = 1,
    snapshot: str | None = None,
    processes: bool = False,
    isolated: bool = True,
    traces: TraceSource | None = None,
) -> Comparison:
    """Predicts, checks that there is room, runs, compares.

    `timeout_s`: a run that takes longer is stopped; None waits.  `threads`: of torch on the CPU, None for its own choice.
    `snapshot`: where the GPU's memory history is written.  `processes`: on the CPU each rank of a strategy runs in a process of
    its own, as on GPUs; else one process is one rank.  `isolated`: run in a process of its own; without it a crash of the
    run is a crash of the caller.  `traces`: where the trace comes from; a fresh `TraceSource` where it is left out.
    """
    from ..planner.trace.source import TraceSource
    from . import predicted
    from .cpu import leaf_outputs
    from .engines import has_engine, run_engine
    from .job import Job
    from .launch import run_isolated
    from .room import available_bytes, check_room
    from .worker import run_job

    if tolerance is not None and not 0 <= tolerance < 1:
        raise UserError(f"--tolerance {tolerance:g}: expected a share between 0 and 1", "Write for example 0.01 for 1 %")
    if device == "cpu" and snapshot is not None:
        raise UserError("--snapshot: only a GPU run has a memory history", "Leave it out, or use --device cuda")
    if request.attention == "flash_attention_2" and device == "cpu":
        raise CannotTell("flash_attention_2 runs on a GPU only. Use --attention sdpa for a run on the CPU")
    source = traces or TraceSource()
    if has_engine(request):
        if device == "cpu" and not processes:
            return run_engine(request, source, tolerance=tolerance)
        from .ranks import run_ranks

        if snapshot is not None:
            raise CannotTell("--snapshot with several processes is not written yet. Leave it out")
        return run_ranks(request, source, device, tolerance=tolerance, timeout_s=timeout_s)
    if processes:
        raise UserError(f"--processes: --strategy {request.strategy} is one process", "Leave it out, or name a --strategy")
    if device == "cpu":
        trace, ours = predicted.on_cpu(request, source)
        check_room(request, ours.peak_bytes, lambda other: predicted.on_cpu(other, source)[1].peak_bytes, available_bytes())
        job = Job(request=request, device="cpu", outputs=leaf_outputs(trace), threads=threads)
        said = "a CPU run takes the CPU's kernels: it proves what is recorded and how long it lives, not a GPU's kernels"
        notes = [*request.defaults, said]
    else:
        trace, ours = predicted.on_cuda(request, source)
        job = Job(request=request, device="cuda", snapshot=os.path.abspath(snapshot) if snapshot else None)
        notes = [*request.defaults]
    outcome = run_isolated(job, timeout_s=timeout_s) if isolated else run_job(job)
    theirs = outcome.usage
    question = request.as_data()
    if device == "cpu":
        del question["gpu"]  # a CPU run asks nothing of one
    return Comparison(
        question=question,
        device="cpu" if device == "cpu" else request.device.name,
        tolerance=TOLERANCE[device] if tolerance is None else tolerance,
        predicted=ours,
        measured=theirs,
        rows=rows_of(ours, theirs) if theirs else (),
        reason=outcome.reason,
        notes=(*notes, *(theirs.notes if theirs else ())),
        versions=trace.versions,
    )
