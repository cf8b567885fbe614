"""Every rank of a run for real, each in a process of its own: over NCCL on this machine's GPUs, over gloo on its CPU.

Both go the same way; only the backend and what is read differ (torch.cuda's counters and the driver's figure, or the events of
the CPU's allocator).  A rank that dies ends the others; a rank that hangs is stopped with all of them and says where it was.

`python -m memplan.validator.ranks TASK.json OUTCOME.json RANK` is one rank.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CannotTell, MemplanError, UserError
from ..files import write_whole
from ..planner.strategies import ZEROTH_ORDER
from ..units import gib
from .compare import TOLERANCE, Comparison, rows_of
from .engines import TORCH, engine_case, predicted_on_cpu, torch_engine, usage_of_marks
from .job import Job, Outcome, read_json
from .launch import GRACE_S, Ended, run_together, says_where
from .measurement import DRIVER_USED, Usage
from .room import needed_bytes

if TYPE_CHECKING:
    from ..planner.request import Request
    from ..planner.trace.source import TraceSource
    from ..planner.trace.steptrace import StepTrace
    from .runtimes.torch_distributed import Backend, Parallel

_PROCESSES_PER_CORE = 4  # gloo ranks wait for each other; more only take turns
# gloo's threads keep a message now and then for a moment longer than the engine does; in a small model that is much.
GLOO_TOLERANCE = 0.05
_TIMEOUT_S = 1800.0  # where none is given: as long as torch's own groups wait for a message
_GLOO = (
    "{gpus} processes over gloo on the CPU: it proves what each rank allocates and when, not a GPU's kernels; gloo's threads "
    "may hold a message for a moment longer than NCCL does"
)
_NCCL = "{gpus} processes over NCCL, one a GPU"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all ranks are told."""

    backend: Backend
    world_size: int
    store: str
    """The file in which they meet."""
    job: dict[str, Any] | None = None
    """For torch's engines: `Job.to_json`, with `parallel`: see `_parallel_to_json`."""
    parallel: dict[str, Any] | None = None
    case: dict[str, Any] | None = None
    """For DeepSpeed: an `EngineCase`; each rank puts its own number in."""


def check(request: Request, device: str, gpus: Sequence[Any], cores: int) -> None:
    """Raises UserError or CannotTell where this machine cannot run all ranks of `request`.  `gpus`: that torch can use."""
    what = f"--strategy {request.strategy} --gpus {request.gpus}"
    if request.method in ZEROTH_ORDER or (request.strategy not in TORCH and not request.strategy.startswith("zero")):
        instead = "Use --device cpu" if device == "cuda" else "Leave --processes out"
        raise CannotTell(f"--method {request.method} {what}: only DDP, FSDP and DeepSpeed run in a process a rank. {instead}")
    if request.nodes > 1:
        raise CannotTell(f"{what} on --nodes {request.nodes}: a real run has one machine. Leave --nodes out")
    if device == "cuda" and len(gpus) < request.gpus:
        raise UserError(f"{what}: torch finds {len(gpus)} here", "Use --device cpu, where one process can be any rank")
    if device == "cpu" and request.gpus > _PROCESSES_PER_CORE * cores:
        raise UserError(
            f"{what} --processes: {request.gpus} processes on {cores} cores would only take turns",
            f"Use up to {_PROCESSES_PER_CORE * cores}, or leave --processes out: one process can be any rank",
        )


def run_ranks(
    request: Request,
    traces: TraceSource,
    device: str,
    *,
    tolerance: float | None = None,
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
) -> Comparison:
    """Predicts and runs every rank; the comparison is that of the most loaded one, or of `request.rank`, and has all of them.

    `device`: cpu or cuda.  A rank that fails is an outcome: the reason is that of the first.
    """
    from ..hardware.detect import gpus, machine

    cards = [gpu for gpu in gpus() if gpu.read_by == "torch"] if device == "cuda" else []
    check(request, device, cards, machine().cpu_cores)
    trace = traces.step(request, **({"target": "cpu"} if device == "cpu" else {}))
    ours = [predicted_of(request.but(rank=rank), trace, device) for rank in range(request.gpus)]
    if device == "cpu":
        _check_room(request, ours, machine().ram_available_bytes)
    outcomes = _outcomes(request, trace, device, timeout_s=timeout_s or _TIMEOUT_S, grace_s=grace_s)
    allowed = tolerance if tolerance is not None else GLOO_TOLERANCE if device == "cpu" else TOLERANCE[device]
    said = (_GLOO if device == "cpu" else _NCCL).format(gpus=request.gpus)
    return of_all(request, ours, outcomes, device, allowed, said, trace.versions)


def of_all(
    request: Request,
    ours: Sequence[Usage],
    outcomes: Sequence[RankOutcome],
    device: str,
    tolerance: float,
    said: str,
    versions: Mapping[str, str],
) -> Comparison:
    """The comparison of the most loaded rank, or of `request.rank`, with those of all; `said`: how they ran."""
    question = request.as_data()
    if device == "cpu":
        del question["gpu"]  # a CPU run asks nothing of one
    name = "cpu" if device == "cpu" else request.device.name
    ranks = tuple(
        Comparison(
            question=question, device=name, tolerance=tolerance, predicted=mine, measured=outcome.usage, reason=outcome.reason,
            rows=rows_of(mine, outcome.usage) if outcome.usage else (), rank=rank,
        )
        for rank, (mine, outcome) in enumerate(zip(ours, outcomes, strict=True))
    )  # fmt: skip
    shown = _shown(request, ours)
    reason = first_reason(outcomes)
    theirs = None if reason else _with_all(ranks[shown].measured, outcomes)
    return replace(
        ranks[shown],
        measured=theirs,
        rows=ranks[shown].rows if theirs else (),
        reason=reason,
        rank=shown if len(ranks) > 1 else None,
        ranks=ranks if len(ranks) > 1 else (),
        notes=(*request.defaults, said, *(theirs.notes if theirs else ())),
        versions=versions,
    )


def _with_all(shown: Usage | None, outcomes: Sequence[RankOutcome]) -> Usage | None:
    """The shown rank's figures with the whole run's of every rank, which is what a record keeps of them."""
    if shown is None:
        return None
    whole = [
        {
            "rank": rank,
            "peak_bytes": usage.peak_bytes,
            "reserved_peak_bytes": usage.reserved_peak_bytes,
            DRIVER_USED: usage.detail.get(DRIVER_USED),
        }
        for rank, usage in enumerate(outcome.usage for outcome in outcomes)
        if usage is not None
    ]
    return replace(shown, detail={**shown.detail, "ranks": whole})


def _check_room(request: Request, ours: Sequence[Usage], available: int | None) -> None:
    needed = sum(needed_bytes(mine.peak_bytes) for mine in ours)
    if available is not None and needed > available:
        raise UserError(
            f"{request.model.name}: {request.gpus} processes need about {gib(needed)} of memory, and {gib(available)} are "
            "available here",
            "Leave --processes out, where one process is one rank, or use fewer --gpus or a smaller model",
        )


def _shown(request: Request, ours: Sequence[Usage]) -> int:
    if request.rank is not None:
        return request.rank
    return max(range(len(ours)), key=lambda rank: (ours[rank].peak_bytes, -rank))


def predicted_of(request: Request, trace: StepTrace, device: str) -> Usage:
    """What the rank that `request` names will use on `device`."""
    if device == "cpu":
        return predicted_on_cpu(request, trace)
    from .predicted import usage_on_cuda

    return usage_on_cuda(request, trace)


@dataclass(frozen=True)
class RankOutcome:
    """What became of one rank; `order`: how many had failed before it did."""

    usage: Usage | None
    reason: str
    order: int


def first_reason(outcomes: Sequence[RankOutcome]) -> str:
    """ "rank 1 of 2: why", of the rank where the trouble began; "" where all ran."""
    failed = [(outcome.order, rank) for rank, outcome in enumerate(outcomes) if outcome.usage is None]
    if not failed:
        return ""
    _, rank = min(failed)
    return f"rank {rank} of {len(outcomes)}: {outcomes[rank].reason}" if len(outcomes) > 1 else outcomes[rank].reason


def _outcomes(request: Request, trace: StepTrace, device: str, *, timeout_s: float | None, grace_s: float) -> list[RankOutcome]:
    with tempfile.TemporaryDirectory(prefix="memplan-") as name:
        folder = Path(name)
        task = _task(request, trace, "gloo" if device == "cpu" else "nccl", folder)
        return run_task(task, folder, timeout_s=timeout_s, grace_s=grace_s)


def _task(request: Request, trace: StepTrace, backend: Backend, folder: Path) -> Task:
    common: dict[str, Any] = {"backend": backend, "world_size": request.gpus, "store": str(folder / "store")}
    if request.strategy not in TORCH:
        return Task(**common, case=asdict(engine_case(request, trace, folder)))
    from .cpu import leaf_outputs

    built, parallel = torch_engine(request, trace)
    job = Job(request=built, device="cuda" if backend == "nccl" else "cpu", outputs=leaf_outputs(trace))
    return Task(**common, job=job.to_json(), parallel=_parallel_to_json(parallel, request.gpus))


def run_task(task: Task, folder: Path, *, timeout_s: float | None, grace_s: float = GRACE_S) -> list[RankOutcome]:
    """What became of every rank.  `folder`: for the files of this run."""
    task_file = folder / "task.json"
    write_whole(task_file, json.dumps(asdict(task)))
    ranks = range(task.world_size)
    answers = [folder / f"outcome-{rank}.json" for rank in ranks]
    module = f"{__package__}.ranks"
    # -P: a file of the user's folder must not stand in for a module of torch's
    commands = [[sys.executable, "-P", "-m", module, str(task_file), str(answers[rank]), str(rank)] for rank in ranks]
    ended = run_together(
        commands, environments=[_environment(task, rank) for rank in ranks], timeout_s=timeout_s, grace_s=grace_s
    )
    return [_read(answer, end) for answer, end in zip(answers, ended, strict=True)]


def _environment(task: Task, rank: int) -> dict[str, str]:
    """As a launcher sets it; DeepSpeed reads it too."""
    found = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(task.world_size), "KINETO_LOG_LEVEL": "99"}
    if task.backend == "gloo":
        from .runtimes.deepspeed import ENVIRONMENT

        found |= ENVIRONMENT
    request = (task.job or {}).get("request", {})
    if conf := request.get("alloc_conf"):  # read when torch is imported; the second name is the one before torch 2.9
        found |= {"PYTORCH_ALLOC_CONF": conf, "PYTORCH_CUDA_ALLOC_CONF": conf}
    return found


def _read(answer: Path, ended: Ended) -> RankOutcome:
    if answer.exists():
        found = Outcome.from_json(read_json(answer))
        return RankOutcome(found.usage, found.reason, ended.order)
    return RankOutcome(None, ended.reason or "the run ended without a word", ended.order)


# -- torch's engines as JSON -----------------------------------------------------------------------------------------------


def _parallel_to_json(parallel: Parallel, gpus: int) -> dict[str, Any]:
    if parallel.world_size != gpus:
        raise CannotTell(
            f"{parallel.name} with {gpus // parallel.world_size} copies of the model is not run in processes yet. "
            "Leave --processes out"
        )
    return {"name": parallel.name, "world_size": parallel.world_size, "settings": asdict(parallel.settings)}


def _parallel_from_json(data: Mapping[str, Any], rank: int) -> Parallel:
    from ..planner.strategies.ddp import DdpSettings, DistributedDataParallel
    from ..planner.strategies.fsdp1 import FullySharded
    from ..planner.strategies.fsdp2 import Fsdp2Settings, FullyShard
    from ..planner.strategies.fsdp_settings import FsdpSettings

    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data["settings"].items()}
    world_size = data["world_size"]
    if data["name"] == DistributedDataParallel.name:
        return DistributedDataParallel(world_size, DdpSettings(**settings))
    if data["name"] == FullySharded.name:
        return FullySharded(world_size, FsdpSettings(**settings), rank=rank, from_host=True)
    return FullyShard(world_size, Fsdp2Settings(**settings), from_host=True)


# -- inside a rank ---------------------------------------------------------------------------------------------------------


def measure_rank(task: Task, rank: int) -> Usage:
    """This process's part of the run."""
    if task.case is not None:
        from .runtimes.deepspeed import EngineCase, import_once, run_here

        import_once()
        case = EngineCase(**{**task.case, "frozen": tuple(task.case["frozen"])})
        case = replace(case, rank=rank, backend=task.backend, store=task.store)
        return usage_of_marks(run_here(case)) if task.backend != "nccl" else _deepspeed_on_gpu(case)
    from .runtimes import torch_distributed

    assert task.job is not None
    assert task.parallel is not None
    job = Job.from_json(task.job)
    place = torch_distributed.Rank(
        rank=rank, world_size=task.world_size, backend=task.backend, store=task.store, local_rank=rank
    )
    return torch_distributed.measure(job.request, _parallel_from_json(task.parallel, rank), job.outputs, place=place)


def _deepspeed_on_gpu(case: Any) -> Usage:
    import torch

    from .cuda import Meter
    from .loop import Running
    from .out_of_memory import explained
    from .runtimes.deepspeed import run_here

    torch.cuda.set_device(case.rank)
    running = Running()
    meter = Meter(running)
    with explained(running, lambda: meter.where, "cuda"):
        run_here(case, meter=meter)
    return meter.usage()


def main(argv: Sequence[str]) -> int:
    task_file, answer, rank = argv
    says_where()
    from .worker import one_line

    try:
        outcome = Outcome(usage=measure_rank(Task(**read_json(task_file)), int(rank)))
    except MemplanError as error:
        outcome = Outcome(reason=str(error))
    except MemoryError:
        outcome = Outcome(reason="the run ran out of host memory (MemoryError)")
    except Exception as error:
        outcome = Outcome(reason=f"the run raised {one_line(error)}")
    write_whole(answer, json.dumps(outcome.to_json()))
    sys.stdout.flush()
    os._exit(0 if outcome.usage else 1)  # at once: a backend's threads may wait for ranks that are gone


if __name__ == "__main__":
    main(sys.argv[1:])
