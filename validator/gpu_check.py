"""Predictions against one real GPU in a few minutes: `python -m memplan.validator.gpu_check`, or `make gpu-check`.

Every case of `gpu_cases` is predicted (in processes beside), then run for real: one worker holds the GPU and takes case after
case, starting over where one leaves memory behind.  Nothing is downloaded.  Rows are written as they come, one JSON object a
line: a `Comparison` with its case, time and versions.  An out-of-memory is a row; it agrees if it was predicted.

Exit code 0: every case that ran agrees, 1: one does not, 2: no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MemplanError, UserError
from ..units import gib
from .gpu_cases import CASES, Case

if TYPE_CHECKING:
    from ..planner.prediction import Verdict
    from ..planner.request import Request
    from .compare import Comparison
    from .job import Job, Outcome
    from .measurement import Usage

_BUDGET_S = 330.0
_LAST_WORDS = 300  # characters of a worker's output that a reason keeps
_WIDTHS = (28, 11, 11, 8, 11, 11, 8, 11, 11, 7)
_HEADS = ("", "allocated", "measured", "ratio", "reserved", "measured", "ratio", "device", "measured", "s")


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What memplan says about a case before it runs; `reason` where it cannot say."""

    usage: Usage | None = None
    verdict: Verdict | None = None
    device_peak_bytes: int = 0
    versions: dict[str, str] | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Events:
    """A recorded case, event by event."""

    num_predicted: int
    num_recorded: int
    num_equal: int
    allocated_ratio: float
    reserved_ratio: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case, both sides."""

    case: str
    comparison: Comparison
    verdict: str
    predicted_device_bytes: int
    out_of_memory: bool
    events: Events | None = None
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """The peaks agree, and so does the verdict: it ran out of memory where it was said not to fit, and nowhere else."""
        if self.out_of_memory:
            return self.verdict == "does_not_fit"
        return self.comparison.agrees and self.verdict != "does_not_fit"

    @property
    def measured_device_bytes(self) -> int | None:
        """What the driver counts for this process, or else for the whole card; None where nothing was measured."""
        measured = self.comparison.measured
        if measured is None:
            return None
        found: int | None = measured.detail.get("driver_used_bytes", measured.detail.get("card_used_bytes"))
        return found

    def to_json(self) -> dict[str, Any]:
        """A measurement row: the Comparison's keys, and these."""
        return {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "case": self.case,
            **self.comparison.to_json(),
            "outcome": "out_of_memory" if self.out_of_memory else self.comparison.to_json()["outcome"],
            "agrees": self.agrees,
            "verdict": self.verdict,
            "predicted_device_bytes": self.predicted_device_bytes,
            "measured_device_bytes": self.measured_device_bytes,
            "events": vars(self.events) if self.events else None,
            "seconds": round(self.seconds, 1),
        }


# -- predictions -------------------------------------------------------------------------------------------------------


def request_of(case: Case, gpu: str) -> Request:
    """The question that a case asks of `gpu`."""
    from ..planner.api import make_request

    return make_request(case.model, gpu, **case.options)


def forecast(request: Request) -> Forecast:
    """memplan's answer, as `fit` gives it; a failure is one too."""
    from ..planner.predict import predict
    from ..planner.trace.source import TraceSource
    from . import predicted

    traces = TraceSource(exact=True)
    try:
        answer = predict(request, traces)
        if answer.verdict == "unknown":
            return Forecast(reason=answer.reason)
        trace, usage = predicted.on_cuda(request, traces)
    except MemplanError as error:
        return Forecast(reason=str(error))
    return Forecast(usage=usage, verdict=answer.verdict, device_peak_bytes=answer.device_peak_bytes, versions=trace.versions)


@contextlib.contextmanager
def _processes() -> Iterator[ProcessPoolExecutor]:
    """Where predictions are made, beside the run on the GPU; what has not begun when it ends is dropped."""
    import multiprocessing

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")  # a forked process could not use torch's threads
    with ProcessPoolExecutor(max(1, min(8, cores - 1)), mp_context=context) as pool:
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# -- the worker --------------------------------------------------------------------------------------------------------


class Worker:
    """A process that holds the GPU and runs jobs, one line each (`run_worker`); started when first asked."""

    # -P: a file of the user's folder must not stand in for a module of torch's
    command: Sequence[str] = (sys.executable, "-P", "-m", f"{__package__}.gpu_check", "--worker")

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._words = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # lives as long as the worker

    def run(self, job: Job, timeout_s: float) -> tuple[Outcome, dict[str, str]]:
        """The outcome and the versions of what it ran with; a worker that dies or takes too long is an outcome."""
        from .job import Outcome

        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, text=True
            )
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(job.to_json()) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late = not timer.is_alive()
            timer.cancel()
        if line.endswith("\n"):
            answer = json.loads(line)
            return Outcome.from_json(answer["outcome"]), answer["versions"]
        code = process.wait()
        self._words.seek(0)
        said = " ".join(self._words.read().split())[-_LAST_WORDS:]
        return Outcome(reason=f"stopped after {timeout_s:.0f} s" if late else f"the run ended with code {code}: {said}"), {}

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._words.close()


def run_worker() -> int:
    """Reads jobs from standard input, one a line, and answers each with one line, until a job leaves memory behind."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    import torch

    from .job import Job
    from .worker import run_job

    for line in sys.stdin:
        job = Job.from_json(json.loads(line))
        with _without_initialisation():
            outcome = run_job(job)
        if outcome.usage is not None:
            free, total = torch.cuda.mem_get_info()
            detail = {**outcome.usage.detail, "card_used_bytes": total - free}
            outcome = replace(outcome, usage=replace(outcome.usage, detail=detail))
        clean = _clean_up()
        print(json.dumps({"outcome": outcome.to_json(), "versions": _versions()}), file=answers, flush=True)
        if not clean:
            return 0
    return 0


@contextlib.contextmanager
def _without_initialisation() -> Iterator[None]:
    """transformers' models are made with zeros for weights: random ones take a minute for 8 billion, and memory is the same."""
    from transformers import PreTrainedModel
    from transformers.initialization import no_init_weights

    def with_zeros(module: Any) -> None:
        for param in module.parameters():
            param.data.zero_()  # left as it is found it may be NaN, and a GradScaler then skips the step
        module.tie_weights()

    with no_init_weights():
        PreTrainedModel.init_weights = with_zeros  # type: ignore[method-assign]  # put back with the rest
        yield


def _clean_up() -> bool:
    """Gives all memory back, cuBLAS's workspaces too; False where something stays allocated."""
    import gc

    import torch

    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() == 0


def _versions() -> dict[str, str]:
    """What the run depends on and the prediction's own versions do not say."""
    import torch

    found = {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "sdpa_order": str(getattr(torch._C, "_get_sdp_priority_order", str)()),
        "driver": driver_version() or "unknown",
    }
    return found


def driver_version() -> str | None:
    """The NVIDIA driver's version; nvml.h: nvmlSystemGetDriverVersion."""
    import ctypes

    from ..hardware.detect import nvml

    library = nvml()
    if library is None or library.nvmlInit_v2() != 0:
        return None
    try:
        text = ctypes.create_string_buffer(80)  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
        return text.value.decode() if library.nvmlSystemGetDriverVersion(text, len(text)) == 0 else None
    finally:
        library.nvmlShutdown()


# -- one case ----------------------------------------------------------------------------------------------------------


def judge(
    case: Case, request: Request, expected: Forecast, outcome: Outcome, versions: dict[str, str], seconds: float
) -> Result:
    """Both sides of a case put together."""
    from .compare import TOLERANCE, Comparison, rows_of
    from .measurement import Usage

    ours = expected.usage or Usage(counter="allocated", phases=(), components={})
    theirs = outcome.usage
    comparison = Comparison(
        question=request.as_data(),
        device=request.device.name,
        tolerance=TOLERANCE["cuda"],
        predicted=ours,
        measured=theirs,
        rows=rows_of(ours, theirs) if theirs is not None and expected.usage is not None else (),
        reason=outcome.reason or expected.reason,
        notes=request.defaults,
        versions={**(expected.versions or {}), **versions},
    )
    return Result(
        case=case.name,
        comparison=comparison,
        verdict=str(expected.verdict or "unknown"),
        predicted_device_bytes=expected.device_peak_bytes,
        out_of_memory="OutOfMemoryError" in outcome.reason,
        seconds=seconds,
    )


def compare_events(path: Path, request: Request) -> Events:
    """The memory history of a whole run against its prediction, event by event."""
    from ..planner.against import against
    from ..planner.allocator.snapshot import read_snapshot
    from ..planner.trace.source import TraceSource

    found = against(read_snapshot(path), 0, request, TraceSource(exact=True), step="later")
    return Events(
        num_predicted=sum(e.num_predicted for e in found.events),
        num_recorded=sum(e.num_recorded for e in found.events),
        num_equal=sum(e.num_equal for e in found.events),
        allocated_ratio=found.whole.allocated_ratio,
        reserved_ratio=found.whole.reserved_ratio,
    )


# -- the command -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="print the predictions and run nothing")
    parser.add_argument("--gpu", default="auto", metavar="KEY", help="with --dry-run: the card (default: this machine's)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with TEXT in their name")
    budget = f"no case begins after so many seconds (default: {_BUDGET_S:.0f})"
    parser.add_argument("--budget", type=float, default=_BUDGET_S, metavar="S", help=budget)
    parser.add_argument("--out", default="measurements", metavar="FOLDER", help="where the rows go (default: measurements)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return run_worker()
    cases = [case for case in CASES if args.only in case.name]
    try:
        if not cases:
            raise UserError(f"--only {args.only!r}: no case has that in its name", f"Cases: {', '.join(c.name for c in CASES)}")
        if args.dry_run:
            return dry_run(cases, args.gpu)
        return check(cases, budget_s=args.budget, folder=Path(args.out))
    except MemplanError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2


def dry_run(cases: Sequence[Case], gpu: str) -> int:
    """Prints what is predicted for `gpu`, which need not be here; 1 where a case cannot be predicted."""
    requests = [request_of(case, gpu) for case in cases]
    print(f"predicted for {requests[0].device.name}\n{_line(_HEADS)}")
    failed = 0
    with _processes() as pool:
        for case, future in zip(cases, [pool.submit(forecast, request) for request in requests], strict=True):
            expected = future.result()
            if expected.usage is None:
                failed += 1
                print(f"{case.name:{_WIDTHS[0]}}  {expected.reason}")
                continue
            sizes = (expected.usage.peak_bytes, expected.usage.reserved_peak_bytes, expected.device_peak_bytes)
            cells = [text for size in sizes for text in (gib(size or 0), "", "")]
            print(_line([case.name, *cells[:8]]) + f"  {expected.verdict}", flush=True)
    return int(failed > 0)


def check(cases: Sequence[Case], *, budget_s: float, folder: Path) -> int:
    """Runs the cases on this machine's GPU; see the module for the exit code."""
    from ..files import write_whole
    from .api import resolve_device
    from .job import Job

    began = time.monotonic()
    if resolve_device("auto") != "cuda":
        raise UserError("torch can use no GPU on this machine", "Use --dry-run --gpu h200-141gb to see the predictions")
    requests = [request_of(case, "auto") for case in cases]
    name = requests[0].device.name
    folder.mkdir(parents=True, exist_ok=True)
    rows_file = folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}-{datetime.now(UTC):%Y-%m-%d}.jsonl"
    print(f"{name}: {len(cases)} cases, {budget_s:.0f} s\n{_line(_HEADS)}", flush=True)
    worker = Worker()
    results: list[Result] = []
    skipped: list[str] = []
    histories: dict[str, Future[Events]] = {}

    def write() -> None:
        write_whole(rows_file, "".join(json.dumps(r.to_json()) + "\n" for r in results))

    with tempfile.TemporaryDirectory(prefix="memplan-") as scratch, _processes() as pool:
        forecasts = [pool.submit(forecast, request) for request in requests]
        try:
            for case, request, future in zip(cases, requests, forecasts, strict=True):
                started = time.monotonic()
                left = budget_s - (started - began)
                if left <= 0:
                    skipped.append(case.name)
                    continue
                snapshot = Path(scratch, f"{case.name}.pickle")
                job = Job(request=request, device="cuda", snapshot=str(snapshot) if case.recorded else None)
                outcome, versions = worker.run(job, left)
                seconds = time.monotonic() - started
                results.append(judge(case, request, future.result(), outcome, versions, seconds))
                if snapshot.exists():
                    histories[case.name] = pool.submit(compare_events, snapshot, request)
                print(_shown(results[-1]), flush=True)
                write()
        finally:
            worker.end()
        print()
        for at, result in enumerate(results):
            if result.case in histories:
                try:
                    results[at] = replace(result, events=histories[result.case].result())
                    print(_shown_events(results[at]), flush=True)
                except MemplanError as error:
                    print(f"{result.case}: its memory history cannot be compared: {error}")
        write()
    wrong = [result.case for result in results if not result.agrees]
    print(f"{len(results) - len(wrong)} of {len(results)} agree within {_tolerance():.0%}; rows in {rows_file}")
    if wrong:
        print(f"do not agree: {', '.join(wrong)}")
    if skipped:
        print(f"no time left for: {', '.join(skipped)}")
    return int(bool(wrong))


def _tolerance() -> float:
    from .compare import TOLERANCE

    return TOLERANCE["cuda"]


def _line(cells: Sequence[str]) -> str:
    return "".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, _WIDTHS, strict=False))).rstrip()


def _shown(result: Result) -> str:
    comparison = result.comparison
    measured, ours = comparison.measured, comparison.predicted
    if measured is None or not comparison.rows:
        word = "agrees" if result.agrees else "DIFFERS"
        return f"{result.case:{_WIDTHS[0]}}  predicted: {result.verdict}; {comparison.reason}  {word}"
    pairs = ((ours.peak_bytes, measured.peak_bytes), (ours.reserved_peak_bytes or 0, measured.reserved_peak_bytes or 0))
    cells = [text for mine, real in pairs for text in (gib(mine), gib(real), f"{mine / real:.4f}" if real else "-")]
    device = result.measured_device_bytes
    cells += [gib(result.predicted_device_bytes), gib(device) if device is not None else "-", f"{result.seconds:.1f}"]
    return _line([result.case, *cells]) + ("" if result.agrees else "  DIFFERS")


def _shown_events(result: Result) -> str:
    e = result.events
    assert e is not None
    return (
        f"{result.case:{_WIDTHS[0]}}  of {e.num_recorded} recorded events {e.num_equal} are predicted in their order "
        f"({e.num_predicted} predicted); peak allocated {e.allocated_ratio:.5f}, reserved {e.reserved_ratio:.5f}"
    )


if __name__ == "__main__":
    sys.exit(main())
