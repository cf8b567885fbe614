"""Runs what `--write` has left, exactly as it was written, and compares every rank with the prediction: `validate --plan`.

The folder's own launch command is started on a copy of its files, so that the folder stays as it is; each process runs
`plan_worker` around `train.py`.  On GPUs where there are enough, else on the CPU with the same engines.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CannotTell, UserError
from .api import resolve_device
from .compare import TOLERANCE, Comparison
from .engines import OWN_LOOP, run_engine
from .job import Outcome, read_json
from .launch import Ended, run_together
from .plan_worker import ANSWER, ANSWERS
from .ranks import GLOO_TOLERANCE, RankOutcome, of_all, predicted_of

if TYPE_CHECKING:
    from ..planner.engines.plan_file import PlanFile
    from ..planner.trace.source import TraceSource

PROGRAM = "train.py"
_TIMEOUT_S = 1800.0
_ON_CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_SAID = {
    "cpu": "{command} on the CPU: it proves what the written files make the engines allocate, not a GPU's kernels",
    "cuda": "{command} on this machine's GPUs",
}


def run_plan(
    path: str | os.PathLike[str],
    *,
    device: str = "auto",
    steps: int = 2,
    tolerance: float | None = None,
    timeout_s: float | None = None,
    traces: TraceSource | None = None,
) -> Comparison:
    """Predicts and runs the written configuration; `path`: a folder of `--write`, or its plan.json.

    A run that fails is an outcome.  Raises UserError for a file that is missing, changed, or of a newer version, CannotTell
    for a folder without a program.
    """
    from ..planner.engines.plan_file import read_written
    from ..planner.trace.source import TraceSource

    written = read_written(path)
    if written.request.method in OWN_LOOP:  # the methods' own programs are not installed: our runtime runs the question
        _check_files(written)
        return run_engine(written.request.but(iterations=steps), traces or TraceSource(), tolerance=tolerance)
    check(written)
    target = resolve_device(device, written.request.gpus)
    request = written.request.but(iterations=steps)
    request.check()
    trace = (traces or TraceSource()).step(request, **({"target": "cpu"} if target == "cpu" else {}))
    ours = [predicted_of(request.but(rank=rank), trace, target) for rank in range(request.gpus)]
    options = ["--steps", str(steps), "--random-weights"]
    outcomes = launch(written, target, options, timeout_s=timeout_s or _TIMEOUT_S)
    default = GLOO_TOLERANCE if target == "cpu" else TOLERANCE[target]
    said = _SAID[target].format(command=" ".join(written.launch))
    return of_all(request, ours, outcomes, target, default if tolerance is None else tolerance, said, trace.versions)


def check(written: PlanFile) -> None:
    """Raises UserError for a folder that is not as it was written, CannotTell for one that this machine cannot run."""
    if PROGRAM not in written.launch:
        raise CannotTell(f"{written.source}: the folder has no {PROGRAM} to run")
    _check_files(written)
    if written.request.nodes > 1:
        raise CannotTell(f"{written.source}: {written.request.nodes} machines: a real run has one. Plan it for one")


def _check_files(written: PlanFile) -> None:
    if changed := written.changed():
        raise UserError(
            f"{written.source}: {', '.join(changed)}: missing, or not as written, so that the prediction is of something else",
            "Write the folder again, or run its program yourself",
        )


def launch(written: PlanFile, device: str, options: Sequence[str], *, timeout_s: float | None) -> list[RankOutcome]:
    """What became of every rank of the folder's own command, with `options` for its program."""
    source = Path(written.source).parent
    with tempfile.TemporaryDirectory(prefix="memplan-") as name:
        place, answers = Path(name, "run"), Path(name, "answers")
        place.mkdir()
        answers.mkdir()
        for file in written.files:
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / file, place / file)
        environment = {**(_ON_CPU if device == "cpu" else {}), ANSWERS: str(answers)}
        if device == "cpu" and written.launch[0] == "python":
            environment["ACCELERATE_USE_CPU"] = "true"
        command = [*command_of(written.launch), *options]
        ended = run_together([command], environments=[environment], folder=place, timeout_s=timeout_s)[0]
        return _outcomes([answers / ANSWER.format(rank=rank) for rank in range(written.request.gpus)], ended)


def command_of(words: Sequence[str]) -> list[str]:
    """The written command, by this Python's own launchers, with the worker around the program."""
    at = list(words).index(PROGRAM)
    before, after = list(words[:at]), list(words[at + 1 :])
    starts = {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "accelerate": [sys.executable, "-m", "accelerate.commands.accelerate_cli"],
    }
    if before[0] not in starts:
        raise CannotTell(f"{' '.join(words)}: only python, torchrun and accelerate are known as launchers")
    return [*starts[before[0]], *before[1:], "-m", f"{__package__}.plan_worker", PROGRAM, *after]


def _outcomes(answers: Sequence[Path], ended: Ended) -> list[RankOutcome]:
    """Of each rank; one without an answer was stopped, or never began."""
    said = {number: read_json(file) for number, file in enumerate(answers) if file.exists()}
    failed = sorted((data["at"], number) for number, data in said.items() if data["reason"])
    order = {number: place for place, (_, number) in enumerate(failed)}
    found = []
    for number in range(len(answers)):
        if number in said:
            outcome = Outcome.from_json(said[number])
            found.append(RankOutcome(outcome.usage, outcome.reason, order.get(number, len(failed))))
        else:
            reason = "stopped, because another process of the run had failed" if failed else ended.reason
            found.append(RankOutcome(None, reason or "the run ended without a word", len(failed)))
    return found
