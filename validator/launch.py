"""Runs a job in a process of its own and says what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

from ..files import write_whole
from .job import Job, Outcome, read_json

_LAST_WORDS = 2000  # characters of the worker's output that an outcome keeps


def run_isolated(job: Job, *, timeout_s: float | None = None) -> Outcome:
    """The outcome of `job` in a subprocess; that the worker is killed, crashes or takes longer than `timeout_s` is one too."""
    with tempfile.TemporaryDirectory(prefix="memplan-") as folder:
        job_file, outcome_file = Path(folder, "job.json"), Path(folder, "outcome.json")
        write_whole(job_file, json.dumps(job.to_json()))
        # -P: a file of the user's folder must not stand in for a module of torch's
        command = [sys.executable, "-P", "-m", f"{__package__}.worker", str(job_file), str(outcome_file)]
        with Path(folder, "output").open("w+b") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return Outcome(
                    reason=f"the run took longer than {timeout_s:g} s and was stopped (--timeout)", output=_tail(output)
                )
            finally:
                _end(process)
            words = _tail(output)
        if code == 0 and outcome_file.exists():
            found = Outcome.from_json(read_json(outcome_file))
            return Outcome(usage=found.usage, reason=found.reason, output=words)
        return Outcome(reason=_death(code, words), output=words)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the worker and what it started: it leads a process group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(output: BinaryIO) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _LAST_WORDS))
    return output.read().decode(errors="replace")


def _death(code: int, words: str) -> str:
    if code == -signal.SIGKILL:
        return "the run was killed (SIGKILL), which is what the system does to a process that takes too much memory"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return f"the run died of {name}"
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return f"the run ended with exit code {code}" + (f": {lines[-1][:300]}" if lines else "")
