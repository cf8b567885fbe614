"""Validation by another engine than the plain loop: DDP, FSDP, DeepSpeed and zeroth-order training, on this machine's CPU.

torch's fake process group lets a single process be rank r of N: collectives return at once and move nothing, sizes are real.
Zeroth-order training on several GPUs runs as that many processes over gloo.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CannotTell
from ..planner.strategies import RELAY, ZEROTH_ORDER
from .compare import TOLERANCE, Comparison, Row, rows_of
from .measurement import COMPONENTS, STEPS, PhaseBytes, Usage

if TYPE_CHECKING:
    from ..planner.request import Request
    from ..planner.trace.source import TraceSource
    from ..planner.trace.steptrace import StepTrace
    from .runtimes.deepspeed import EngineCase, Mark
    from .runtimes.torch_distributed import Parallel
    from .zero_suite import Predicted

OWN_LOOP = (*ZEROTH_ORDER, RELAY)  # methods that train by a loop of their own, in `runtimes`
TORCH = ("ddp", "fsdp1", "fsdp2", "hsdp")
_FAKE = "one rank of {gpus} runs on the CPU in torch's fake process group"
_PROVES = "a CPU run proves what the engine allocates and when, not a GPU's kernels"


def has_engine(request: Request) -> bool:
    """Whether `request` runs by an engine of its own instead of the plain loop."""
    return request.strategy not in ("single", "release") or request.method in OWN_LOOP


def run_engine(request: Request, traces: TraceSource, *, tolerance: float | None = None) -> Comparison:
    """Predicts and runs the rank that the request names, or the most loaded one.  A run that fails is an outcome."""
    trace = traces.step(request, target="cpu")
    notes = [*request.defaults, _PROVES]
    reason, theirs = "", None
    if request.method in OWN_LOOP:
        judge = _relay if request.method == RELAY else _zeroth_order
    else:
        judge = _torch if request.strategy in TORCH else _deepspeed
        notes.append(_FAKE.format(gpus=request.gpus))
    ours = predicted_on_cpu(request, trace)
    try:
        with _quiet_stderr():
            theirs = judge(request, trace)
    except (RuntimeError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    question = request.as_data()
    del question["gpu"]  # a CPU run asks nothing of one
    return Comparison(
        question=question,
        device="cpu",
        tolerance=TOLERANCE["cpu"] if tolerance is None else tolerance,
        predicted=ours,
        measured=theirs,
        rows=(*rows_of(ours, theirs), *_places(ours, theirs)) if theirs else (),
        reason=reason,
        notes=tuple(notes),
        versions=trace.versions,
    )


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """torch's profiler and its engines talk there, also from C++; what matters comes as an exception."""
    sys.stderr.flush()
    before = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)


def predicted_on_cpu(request: Request, trace: StepTrace) -> Usage:
    """What a run on the CPU, where GPU and host are one, will use.  `trace`: of the CPU."""
    from ..planner.predict import host_needs, ledger_of
    from .predicted import usage_of

    ledger = ledger_of(request, trace)
    if request.strategy.startswith("zero"):
        from .zero_suite import predicted_marks

        return usage_of_marks(predicted_marks(ledger))
    usage = usage_of(ledger)
    if request.method not in OWN_LOOP:
        return usage
    needs = host_needs(ledger, 1)
    phases = tuple(_whole_step(usage, step) for step in STEPS if usage.phase("forward", step))
    host = {"host_pinned_bytes": needs.pinned_reserved_bytes, "host_pageable_bytes": needs.pageable_bytes}
    return replace(usage, phases=phases, components={}, detail=host)


def _whole_step(usage: Usage, step: str) -> PhaseBytes:
    """Zeroth-order training and a relay have no phases but the step itself."""
    parts = [p for name in ("forward", "backward", "step") if (p := usage.phase(name, step))]
    return PhaseBytes(
        phase="forward", step=step, peak_bytes=max(p.peak_bytes for p in parts), after_bytes=parts[-1].after_bytes
    )


def _places(ours: Usage, theirs: Usage) -> list[Row]:
    """Host memory where a plan puts tensors there: pinned as the allocator takes it."""
    return [
        Row(
            what=name.removesuffix("_bytes"),
            predicted_bytes=ours.detail.get(name, 0),
            measured_bytes=theirs.detail.get(name, 0),
        )
        for name in ("host_pinned_bytes", "host_pageable_bytes")
        if ours.detail.get(name)
    ]


def _torch(request: Request, trace: StepTrace) -> Usage:
    from .cpu import leaf_outputs
    from .runtimes import torch_distributed

    built, parallel = torch_engine(request, trace)
    rank = getattr(parallel, "rank", request.rank or 0)
    return torch_distributed.measure(built, parallel, leaf_outputs(trace), rank=rank)


def torch_engine(request: Request, trace: StepTrace) -> tuple[Request, Parallel]:
    """(what the model is built for, the settings of the engine around it)."""
    from ..planner.strategies import MIXED, make_strategy

    strategy = make_strategy(request, trace)
    # the engine casts by itself: the model is made as it is stored
    built = request.but(precision="fp32") if request.precision in MIXED else request
    if request.adapter_settings is not None:
        built = _as_loaded(request)
    return built, strategy  # type: ignore[return-value]


def _engine_adapter(request: Request) -> dict[str, Any] | None:
    from ..planner.strategies import traced_as

    settings = traced_as(request).adapter_settings
    return None if settings is None else asdict(settings)


def _as_loaded(request: Request) -> Request:
    """Before an engine has it: a base as it is stored, and adapters in fp32 unless they were asked for otherwise."""
    from ..planner.strategies import traced_as

    made, asked = traced_as(request).adapter_settings, request.adapter_settings
    assert made is not None
    assert asked is not None
    return request.but(
        precision=request.precision.removesuffix("-mixed"), adapter=replace(made, adapter_dtype=asked.adapter_dtype)
    )


def _zeroth_order(request: Request, trace: StepTrace) -> Usage:
    from ..planner.strategies.zo_settings import ZoSettings
    from .runtimes.zo.run import ZoRun, run_zo

    if request.mode != "train":
        raise CannotTell(f"--mode {request.mode} with --method {request.method}: what runs is training steps. Leave --mode out")
    run = ZoRun.asked(
        request.model,
        request.method,
        request.zo or ZoSettings(),
        precision=request.precision,
        micro_batch_size=request.micro_batch_size,
        seq_len=request.seq_len,
        steps=request.loop.iterations,
        attention=request.attention,
        loss=request.loss,
        frozen=request.frozen,
        adapter=request.adapter_settings,
    )
    return run_zo(run).ranks[request.rank or 0].usage()


def _relay(request: Request, trace: StepTrace) -> Usage:
    from ..planner.strategies.l2l import L2lSettings
    from .runtimes.l2l import L2lRun, run_l2l

    run = L2lRun(
        model=request.model,
        settings=request.l2l or L2lSettings(),
        precision=request.precision,
        optimizer=request.optimizer,
        optimizer_impl="for-loop" if request.optimizer_impl == "default" else request.optimizer_impl,
        micro_batch_size=request.micro_batch_size,
        seq_len=request.seq_len,
        grad_accum_steps=request.loop.grad_accum_steps,
        steps=request.loop.iterations,
        attention=request.attention,  # type: ignore[arg-type]
        loss=request.loss,
        frozen=request.frozen,
    )
    return run_l2l(run).usage()


def _deepspeed(request: Request, trace: StepTrace) -> Usage:
    """The real engine on this rank."""
    from .runtimes.deepspeed import run_cases

    with tempfile.TemporaryDirectory(prefix="memplan-") as folder:
        return usage_of_marks(run_cases([engine_case(request, trace, Path(folder))])[0])


def engine_case(request: Request, trace: StepTrace, folder: Path) -> EngineCase:
    """The engine's run of one rank; its model is made from a config in `folder`, so that of a user's own program is not.

    Raises CannotTell for what is not part of such a run.
    """
    from ..models import load
    from ..planner.engines.deepspeed_write import engine_config
    from ..planner.strategies import make_strategy
    from ..planner.strategies.deepspeed_engine import settings_of, steps_by_itself
    from .runtimes.deepspeed import EngineCase

    spec, settings = request.model, settings_of(request)
    if spec.config is None:
        raise CannotTell(f"{spec.name}: DeepSpeed is validated with transformers' models only")
    adapter = request.adapter_settings
    if adapter is not None and adapter.base_quant == "gptq":
        raise CannotTell("--base-quant gptq: its kernels run on a GPU only, and are not run here")
    if request.loop.clip_grad_norm or request.reentrant or request.loss != "model":
        raise CannotTell("--clip-grad-norm, --reentrant and --loss are not part of what is run under DeepSpeed. Leave them out")
    stage = int(request.strategy[-1])
    config = engine_config(settings, stage, request.precision)
    if request.precision == "fp16-mixed":
        config["fp16"]["loss_scale"] = 1  # values are garbage: a step that overflows would be skipped
    (folder / "config.json").write_text(json.dumps(spec.config), encoding="utf-8")
    if load(str(folder)).task != spec.task:
        raise CannotTell(f"--task {spec.task}: DeepSpeed is validated for the task that the config names. Leave it out")
    return EngineCase(
        reference=str(folder),
        config=config,
        precision=request.precision.removesuffix("-mixed"),
        batch_size=request.micro_batch_size,
        seq_len=request.seq_len,
        recompute=request.recompute,
        frozen=request.frozen,
        adapter=_engine_adapter(request),
        world_size=request.gpus,
        rank=getattr(make_strategy(request, trace), "rank", 0),
        grad_accum_steps=request.loop.grad_accum_steps,
        optimizer="deepspeed" if steps_by_itself(request, settings) else request.optimizer,
        optimizer_impl="for-loop" if request.optimizer_impl == "default" else request.optimizer_impl,
        groups=settings.optimizer_groups,
        zero_init=settings.zero_init,
        iterations=request.loop.iterations,
    )


def usage_of_marks(marks: Sequence[Mark | Predicted]) -> Usage:
    """GPU and host together, which are one memory here; components as they are after the last step's phases."""
    phases: dict[tuple[str, str], PhaseBytes] = {}
    components = {}
    for mark in marks:
        key = mark.phase, STEPS[min(mark.iteration, 1)]
        before = phases.get(key)
        peak = max(mark.peak_bytes, before.peak_bytes if before else 0)
        phases[key] = PhaseBytes(phase=key[0], step=key[1], peak_bytes=peak, after_bytes=mark.live_bytes)
        components[mark.phase] = {name: size for name, size in mark.held.items() if name in COMPONENTS}
    return Usage(counter="live", phases=tuple(phases.values()), components=components)
