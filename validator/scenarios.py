"""The questions that people ask most, what `memplan plan` answers, and whether runs that others published say the same.

A published run bears on a question when it trained the same model by the same method on as many GPUs of the same memory.  The
plan agrees where it fits and such a run ran, or where neither does.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..planner.prediction import Verdict
from ..planner.search.plan import Plan
from ..units import GiB, gib
from .accuracy_rows import Row

BEGIN, END = "<!-- scenarios -->", "<!-- /scenarios -->"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """`asked` in people's words, and the options of `memplan plan`.  `judges`: which published rows bear on it."""

    asked: str
    options: str
    models: tuple[str, ...] = ()
    """How the published rows call the model."""
    method: str = "full"
    memory_gib: float = 0.0
    gpus: int = 1

    def judges(self, row: Row) -> bool:
        """Whether a published run is one of this kind."""
        ours = any(name in row.model.ref for name in self.models)
        memory = row.hardware.gpu_memory_gib
        same = memory is not None and abs(memory - self.memory_gib) < 1.0 and row.hardware.num_gpus == self.gpus
        trained = row.workload.phase == "train" and row.model.truncated_layers is None
        return ours and same and trained and row.strategy.method == self.method


SCENARIOS = (
    Scenario(
        asked="Can I fully fine-tune Llama-3.1-8B on one 24 GB card?",
        options="meta-llama/Llama-3.1-8B --gpu rtx-4090 --host-ram 128GiB --seq 1024 --global-batch 8",
    ),
    Scenario(
        asked="QLoRA of a 70B model on two 24 GB cards?",
        options="meta-llama/Llama-2-70b-hf --gpu rtx-3090 --gpus 2 --method qlora --seq 1024 --global-batch 2",
        models=("Llama-2-70b",), method="qlora", memory_gib=24, gpus=2,
    ),
    Scenario(
        asked="A 13B model in full on four A100 40 GB?",
        options="meta-llama/Llama-2-13b-hf --gpu a100-40gb --gpus 4 --host-ram 1TiB --seq 2048 --global-batch 32",
    ),
    Scenario(
        asked="BERT-large on a 16 GB card, 32 samples of 512 tokens?",
        options="google-bert/bert-large-uncased --gpu v100-16gb --seq 512 --global-batch 32",
    ),
    Scenario(
        asked="OPT-175B on one 80 GB card, by whatever method?",
        options="facebook/opt-175b --gpu a100-80gb --host-ram 1TiB --method any --precision fp16 --seq 2048 --global-batch 1",
    ),
    Scenario(
        asked="Llama-3.1-405B in full on 64 H100?",
        options="meta-llama/Llama-3.1-405B --gpu h100-80gb --gpus 64 --nodes 8 --host-ram 2TiB --seq 4096 --global-batch 64",
    ),
    Scenario(
        asked="LoRA of a 7B model on a 16 GB card?",
        options="mistralai/Mistral-7B-v0.1 --gpu rtx-4080 --method lora,qlora --seq 1024 --global-batch 8",
    ),
    Scenario(
        asked="LoRA of Llama-2-7B on one A100 40 GB?",
        options="meta-llama/Llama-2-7b-hf --gpu a100-40gb --method lora --seq 1024 --global-batch 8",
        models=("Llama-2-7b",), method="lora", memory_gib=40,
    ),
    Scenario(
        asked="Llama-3.1-8B in full on eight H100?",
        options="meta-llama/Llama-3.1-8B --gpu h100-80gb --gpus 8 --seq 4096 --global-batch 64",
    ),
    Scenario(
        asked="Full fine-tuning of Llama-3-8B on two A100 80 GB?",
        options="meta-llama/Meta-Llama-3-8B --gpu a100-80gb --gpus 2 --precision bf16 --seq 4096 --global-batch 8",
        models=("Meta-Llama-3-8B",), memory_gib=80, gpus=2,
    ),
    Scenario(
        asked="A 1B model from scratch on an 8 GB card?",
        options="meta-llama/Llama-3.2-1B --gpu rtx-3060-12gb --gpu-memory 8GiB --host-ram 32GiB --seq 1024 --global-batch 8",
    ),
    Scenario(
        asked="ViT-L on a 16 GB T4, 64 images a step?",
        options="google/vit-large-patch16-224 --gpu t4 --global-batch 64",
    ),
    Scenario(
        asked="Whisper large-v3 on a 24 GB card?",
        options="openai/whisper-large-v3 --gpu rtx-4090 --global-batch 16",
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A scenario with its plan, and what published runs say: `agrees` is None where there is none."""

    scenario: Scenario
    plan: Plan
    published: str = ""
    agrees: bool | None = None


def answered(scenario: Scenario, rows: Sequence[Row] = ()) -> Answer:
    """Makes the plan of a scenario.  Raises UserError."""
    from ..planner.search.api import make_plan
    from ..planner.search.cli import add_commands, asked
    from ..planner.trace.source import TraceSource

    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    wanted, bases = asked(parser.parse_args(["plan", *shlex.split(scenario.options)]))
    plan = make_plan(bases, wanted, TraceSource(), top=1)
    said, ran = _published([row for row in rows if scenario.judges(row)])
    return Answer(scenario=scenario, plan=plan, published=said, agrees=None if ran is None else ran == plan.fits)


def _published(rows: Sequence[Row]) -> tuple[str, bool | None]:
    """(what they say, whether any of them ran)."""
    if not rows:
        return "", None
    ran = [row for row in rows if row.measured.metric != "oom"]
    sizes = sorted(row.measured.bytes for row in ran if row.measured.bytes is not None)
    sources = ", ".join(sorted({row.source.name for row in rows}))
    if not ran:
        return f"{sources}: {len(rows)} ran out of memory", False
    between = f", {sizes[0] / GiB:.1f} to {sizes[-1] / GiB:.1f} GiB" if sizes else ""
    return f"{sources}: {len(ran)} of {len(rows)} ran{between}", True


HEAD = ("question", "what to run", "micro batch", "peak of the GPU's GiB", "speed", "published runs")


def cells(answer: Answer) -> tuple[str, ...]:
    """One line of the table."""
    plan, best = answer.plan, answer.plan.best
    verdict = {None: "-", True: f"agree ({answer.published})", False: f"differ ({answer.published})"}[answer.agrees]
    if best is None:
        needs = f"closest needs {gib(plan.closest.needs_bytes)}" if plan.closest is not None else "nothing comes close"
        would = f"; it would fit with {plan.would_fit[0]}" if plan.would_fit else ""
        return answer.scenario.asked, f"no plan fits: {needs}{would}", "-", f"{plan.usable_bytes / GiB:.1f}", "-", verdict
    name = best.name + (f"; gives up: {', '.join(best.gives_up)}" if best.gives_up else "")
    memory = f"{best.held_bytes / GiB:.1f} of {plan.usable_bytes / GiB:.1f}"
    if best.verdict is Verdict.TIGHT:
        memory += " (only just)"
    if best.host_bytes >= GiB:
        memory += f", host {best.host_bytes / GiB:.0f}"
    unit = "samples" if plan.counts_samples else "tokens"
    speed = "?" if best.tokens_per_s is None else f"{_rounded(best.tokens_per_s)} {unit}/s"
    return answer.scenario.asked, name, f"{best.micro_batch_size} x {best.grad_accum_steps}", memory, speed, verdict


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def table(answers: Iterable[Answer]) -> str:
    """In Markdown."""
    rows = [HEAD, ("---",) * len(HEAD), *map(cells, answers)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def put_between(text: str, block: str) -> str:
    """`text` with what stands between the markers replaced.  Raises ValueError where they are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def page(answers: Sequence[Answer]) -> str:
    """The part of docs/plan.md between the markers: the table, and the command of each line."""
    lines = [f"- {a.scenario.asked} `memplan plan {a.scenario.options}`" for a in answers]
    return table(answers) + "\n\nThe commands:\n\n" + "\n".join(lines)


def write_between(path: Path, block: str) -> None:
    """Writes `block` between the markers of a file."""
    from ..files import write_for_user

    write_for_user(path, put_between(path.read_text(encoding="utf-8"), block))


def all_answers(rows: Sequence[Row], only: Sequence[int] | None = None, say: Callable[[str], Any] = print) -> list[Answer]:
    """Of every scenario, or of some (counted from 1)."""
    chosen = [s for number, s in enumerate(SCENARIOS, 1) if only is None or number in only]
    answers = []
    for scenario in chosen:
        say(scenario.asked)
        answers.append(answered(scenario, rows))
    return answers
