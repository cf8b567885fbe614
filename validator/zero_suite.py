"""Runs the cases of `zero_cases` through the real DeepSpeed engine and through the prediction, and lays both side by side.

Model states, buckets and buffers must be equal to the byte at every mark; the peaks between the marks to 1 %.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..models import load
from ..planner.ledger import Component, Ledger, Tier
from ..planner.loop import LoopFacts
from ..planner.optimizers.traced import traced_rule
from ..planner.simulate import simulate
from ..planner.strategies.deepspeed_engine import cast, strategy_of
from ..planner.trace.options import TraceOptions
from ..planner.trace.steptrace import Phase, StepTrace
from ..planner.trace.tracer import trace_step
from .runtimes.deepspeed import EngineCase, Mark, run_cases
from .zero_cases import BATCH, CASES, MODELS, SEQ, ZeroCase
from .zero_held import HOST, PINNED
from .zero_published import compared, section

SCALARS_BYTES = 200  # norms, overflow flags, loss scales and scaled losses, which the strategies leave out
PEAK_TOLERANCE = 0.01
LIVE, PEAK, FILES = "all live", "peak", "nvme"  # beside the components
_PLACE = {Tier.GPU: "", Tier.HOST_PINNED: PINNED, Tier.HOST_PAGEABLE: HOST}
_STATES = (
    Component.PARAM, Component.BUFFER, Component.GRAD, Component.OPTIMIZER_STATE, Component.MASTER_WEIGHT,
    Component.COMM_BUFFER, Component.OFFLOAD_BUFFER,
)  # fmt: skip
_AT_ONCE = 12  # cases in one worker: one import of DeepSpeed serves them
_WORKERS = 2
# Of what DeepSpeed 0.19.8 takes and what changes bytes: a question with one of them is answered "cannot tell".
_NOT_PREDICTED = (
    "## What is not predicted",
    "",
    "The engine on the CPU cannot judge these, and what it cannot judge is not predicted:",
    "",
    "- `zero_quantized_weights`, `zero_quantized_nontrainable_weights`, `zero_quantized_gradients`: the quantizer needs CUDA;",
    "- `offload_optimizer.super_offload`: it asserts a GPU;",
    "- `stage3_module_granularity_threshold` above 0: the engine fails on the CPU. `leaf_module` says the same by names.",
    "- Muon at stage 0, and at stage 3 with its states on NVMe or partly on the GPU (`ratio`).",
    "",
    "Not modelled: a `grad_accum_dtype` that is neither the model's nor fp32; ZenFlow at stages 1 and 3, with `overlap_step`,",
    '`offload`, `overlap_comm` or an `update_interval` of "auto".',
    "Refused: 16-bit masters with an optimizer on NVMe, with which DeepSpeed 0.19.8 itself fails in its first step.",
    "",
    "Muon's updates are compiled on a GPU. The engine runs them here as they are written, and so they are predicted: their",
    "temporaries are an upper bound there. What Muon keeps does not depend on it.",
    "",
    "Of leaf modules: the order in which DeepSpeed waits for several gathers is that of a Python set, and the least favourable",
    "is taken. A leaf module whose inputs all come by keyword fails in DeepSpeed itself. With frozen weights and recompute at",
    "stage 3 the peak of the first backward of a small model was off by 5 %, that of later ones by 1 %.",
)
_PHASES = {Phase.INIT: "init", Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.STEP: "step"}


@dataclass(frozen=True)
class ZeroRow:
    """One number of one mark of one case."""

    case: str
    phase: str
    iteration: int
    what: str  # component with its place, or `LIVE`, `PEAK`, `FILES`
    predicted_bytes: int
    measured_bytes: int

    @property
    def ratio(self) -> float:
        return self.predicted_bytes / self.measured_bytes if self.measured_bytes else float(self.predicted_bytes == 0)

    @property
    def is_right(self) -> bool:
        error = abs(self.predicted_bytes - self.measured_bytes)
        if self.what == LIVE:
            return error <= SCALARS_BYTES
        if self.what == PEAK:
            return error <= max(SCALARS_BYTES, PEAK_TOLERANCE * self.measured_bytes)
        return error == 0


@dataclass(frozen=True)
class Predicted:
    """What the ledger says is live when a phase ends."""

    phase: str
    iteration: int
    held: dict[str, int]  # by component and place
    live_bytes: int  # of the GPU and the host together, as on a machine where they are one
    peak_bytes: int
    file_bytes: int


def run(cases: Sequence[ZeroCase], progress: Callable[[str], None] = lambda _: None) -> list[ZeroRow]:
    """All numbers of all cases.  Raises CannotTell when DeepSpeed is missing or refuses a case."""
    rows: list[ZeroRow] = []
    batches = [cases[start : start + _AT_ONCE] for start in range(0, len(cases), _AT_ONCE)]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(min(_WORKERS, os.cpu_count() or 1)) as workers:
        folder = Path(name)
        write_models(folder)
        measured = workers.map(lambda some: run_cases([engine_case(case, folder) for case in some]), batches)
        traces: dict[tuple[Any, ...], StepTrace] = {}
        for some, all_marks in zip(batches, measured, strict=True):
            for case, marks in zip(some, all_marks, strict=True):
                progress(f"{case.name}: judged")
                key = (case.model, case.precision, case.frozen, case.recompute, case.reentrant, case.adapter)
                if key not in traces:
                    traces[key] = trace_of(case, folder)
                rows += compare(case.name, predicted_marks(ledger_of(case, traces[key])), marks)
    return rows


def write_models(folder: Path) -> None:
    """One folder with a config.json for each model."""
    for model, config in MODELS.items():
        (folder / model).mkdir()
        (folder / model / "config.json").write_text(json.dumps(config))


def engine_case(case: ZeroCase, folder: Path) -> EngineCase:
    return EngineCase(
        reference=str(folder / case.model), config=case.config(), precision=case.precision, batch_size=BATCH, seq_len=SEQ,
        frozen=case.frozen, world_size=case.world_size, rank=case.rank, grad_accum_steps=case.grad_accum_steps,
        groups=case.settings.optimizer_groups, iterations=case.iterations, recompute=case.recompute, reentrant=case.reentrant,
        optimizer="config" if case.settings.muon else "deepspeed" if case.own_adam else "adamw",
        zero_init=case.settings.zero_init, adapter=None if case.adapter is None else asdict(case.adapter),
    )  # fmt: skip


def trace_of(case: ZeroCase, folder: Path) -> StepTrace:
    precision = case.precision if case.precision == "fp32" else f"{case.precision}-mixed"
    adapter = cast(case.adapter) if case.adapter is not None and case.precision != "fp32" else case.adapter
    options = TraceOptions(
        batch_size=BATCH, seq_len=SEQ, precision=precision, target="cpu", frozen=case.frozen, recompute=case.recompute,
        reentrant=case.reentrant, adapter=adapter,
    )  # fmt: skip
    return trace_step(load(str(folder / case.model)), options, with_graph=False)


def ledger_of(case: ZeroCase, trace: StepTrace) -> Ledger:
    strategy = strategy_of(case.stage, case.settings, trace, case.world_size, case.rank, own_adam=case.own_adam)
    return simulate(
        trace,
        strategy,
        optimizer=traced_rule("adamw", "for-loop", target="cpu"),
        loop=LoopFacts(grad_accum_steps=case.grad_accum_steps, iterations=case.iterations),
    )[0]


def predicted_marks(ledger: Ledger) -> list[Predicted]:
    """What is live where each phase of the ledger ends, and the highest since the end before."""
    ends = [*np.flatnonzero((np.diff(ledger.phase) != 0) | (np.diff(ledger.iteration) != 0)).tolist(), len(ledger) - 1]
    in_memory = np.cumsum(np.where(ledger.tier == Tier.NVME, 0, ledger.delta_bytes))
    found, before = [], 0
    for end in ends:
        first = max(0, before - 1)  # what is live when the phase begins counts
        held: dict[str, int] = {}
        for tier, place in _PLACE.items():
            sums = ledger.components_after(end, tier)
            held |= {place + c.label: sums[c.label] for c in _STATES if c.label in sums}
        found.append(
            Predicted(
                phase=_PHASES[Phase(int(ledger.phase[end]))],
                iteration=int(ledger.iteration[end]),
                held=held,
                live_bytes=int(in_memory[end]),
                peak_bytes=int(in_memory[first : end + 1].max()),
                file_bytes=sum(ledger.components_after(end, Tier.NVME).values()),
            )
        )
        before = end + 1
    return found


def compare(case: str, predicted: Sequence[Predicted], measured: Sequence[Mark]) -> list[ZeroRow]:
    """Mark by mark.  A phase in which nothing is allocated has no mark in a ledger: all is as it was.

    Raises ValueError where the prediction goes through another phase than the engine: nothing could be compared then.
    """
    rows: list[ZeroRow] = []
    ours, ahead = Predicted("", 0, {}, 0, 0, 0), list(predicted)
    for real in measured:
        if ahead and (ahead[0].phase, ahead[0].iteration) == (real.phase, real.iteration):
            ours = ahead.pop(0)
        else:
            ours = replace(ours, peak_bytes=ours.live_bytes)
        pairs = {what: (ours.held.get(what, 0), real.held.get(what, 0)) for what in sorted({*ours.held, *real.held})}
        pairs[LIVE] = ours.live_bytes, real.live_bytes
        pairs[PEAK] = ours.peak_bytes, real.peak_bytes
        if ours.file_bytes or real.file_bytes:
            pairs[FILES] = ours.file_bytes, real.file_bytes
        rows += [ZeroRow(case, real.phase, real.iteration, what, *pair) for what, pair in pairs.items()]
    if ahead:
        raise ValueError(f"{case}: the prediction goes through {ahead[0].phase} {ahead[0].iteration}, the engine does not")
    return rows


def render(rows: Sequence[ZeroRow], *, verbose: bool = False) -> str:
    """A line a case with its verdict; below it the numbers that are wrong, or all of them."""
    lines = [f"{'bytes':>14} {'predicted':>14} {'measured':>14} {'ratio':>7}  case, mark, component"]
    for case in dict.fromkeys(row.case for row in rows):
        own = [row for row in rows if row.case == case]
        wrong = [row for row in own if not row.is_right]
        peaks = [row.ratio for row in own if row.what == PEAK]
        verdict = "right" if not wrong else f"{len(wrong)} of {len(own)} WRONG"
        lines.append(f"{case}: {verdict}; {len(own)} numbers, peaks {min(peaks):.4f} to {max(peaks):.4f} of the measured ones")
        lines += [
            f"{row.predicted_bytes - row.measured_bytes:>+14,} {row.predicted_bytes:>14,} {row.measured_bytes:>14,} "
            f"{row.ratio:>7.4f}  {row.phase} {row.iteration}, {row.what}"
            for row in (own if verbose else wrong)
        ]
    wrong_cases = {row.case for row in rows if not row.is_right}
    lines.append(f"{len(rows)} numbers of {len({row.case for row in rows})} cases; cases with a wrong one: {len(wrong_cases)}")
    return "\n".join(lines)


def page(rows: Sequence[ZeroRow]) -> str:
    """The table as a Markdown page: a line a case, and below it the numbers that are wrong."""
    lines = [
        "# ZeRO, judged by the real DeepSpeed",
        "",
        "Written by `memplan validate --suite zero --write docs/zero.md`.  Each configuration is run by the real DeepSpeed",
        "engine on the CPU, one rank of the group; the bytes of every component are compared after initialisation and after",
        "every forward, backward and step: model states, buckets and buffers must be equal to the byte, peaks within 1 %.",
        "",
        "| configuration | numbers | right | peak, predicted / measured |",
        "|---|---:|---:|---:|",
    ]
    for case in dict.fromkeys(row.case for row in rows):
        own = [row for row in rows if row.case == case]
        peaks = [row.ratio for row in own if row.what == PEAK]
        right = sum(row.is_right for row in own)
        lines.append(f"| {case} | {len(own)} | {right} | {min(peaks):.4f} to {max(peaks):.4f} |")
    wrong = [row for row in rows if not row.is_right]
    lines += ["", f"{len(rows):,} numbers of {len({row.case for row in rows})} configurations, {len(wrong)} not right."]
    lines += [
        f"- {r.case}, {r.phase} {r.iteration}, {r.what}: predicted {r.predicted_bytes:,}, measured {r.measured_bytes:,}"
        for r in wrong
    ]
    lines += ["", *_NOT_PREDICTED]
    if {row.case for row in rows} >= {case.name for case in CASES}:
        lines += ["", *section(compared())]
    return "\n".join(lines) + "\n"
