"""Runs jobs in processes of their own and says what became of each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..files import write_whole
from .job import Job, Outcome, read_json

_LAST_WORDS = 2000  # characters of the worker's output that an outcome keeps
_LOOK_S = 0.05  # between two looks at the processes
GRACE_S = 10.0  # for the others, when one has failed: long enough to notice it themselves
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')  # as `faulthandler` writes it, innermost first


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What became of one process."""

    reason: str = ""
    """Why it did not end well, in one line; "" where it did."""
    output: str = ""
    """The end of what it printed."""
    order: int = 0
    """How many had failed before it did: 0 for the one where the trouble began."""


def run_isolated(job: Job, *, timeout_s: float | None = None) -> Outcome:
    """The outcome of `job` in a subprocess; that the worker is killed, crashes or takes longer than `timeout_s` is one too."""
    with tempfile.TemporaryDirectory(prefix="memplan-") as folder:
        job_file, outcome_file = Path(folder, "job.json"), Path(folder, "outcome.json")
        write_whole(job_file, json.dumps(job.to_json()))
        # -P: a file of the user's folder must not stand in for a module of torch's
        command = [sys.executable, "-P", "-m", f"{__package__}.worker", str(job_file), str(outcome_file)]
        ended = run_together([command], timeout_s=timeout_s)[0]
        if not ended.reason and outcome_file.exists():
            found = Outcome.from_json(read_json(outcome_file))
            return Outcome(usage=found.usage, reason=found.reason, output=ended.output)
        return Outcome(reason=ended.reason or _death(0, ended.output), output=ended.output)


def run_together(
    commands: Sequence[Sequence[str]],
    *,
    environments: Sequence[Mapping[str, str]] | None = None,
    folder: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
) -> list[Ended]:
    """Starts all commands at once and waits for them; none is left running, nor what it started.

    When one fails, the others have `grace_s` seconds.  `environments`: what each process has beside this one's environment.
    `folder`: where they start.  `timeout_s`: for all together; None waits.
    """
    with contextlib.ExitStack() as stack:
        outputs: list[BinaryIO] = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        started = [
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=folder,
                env={**os.environ, **(environments[i] if environments else {})},
            )
            for i, (command, output) in enumerate(zip(commands, outputs, strict=True))
        ]
        try:
            failed, stopped = _wait(started, timeout_s, grace_s)
        finally:
            for process in started:
                _end(process)
        found = []
        for number, (process, output) in enumerate(zip(started, outputs, strict=True)):
            words = _tail(output)
            reason = ""
            if number in stopped:
                reason = f"{stopped[number]}{_where(words)}"
            elif number in failed:
                reason = _death(process.returncode, words)
            order = failed.index(number) if number in failed else len(failed)
            found.append(Ended(reason=reason, output=words, order=order))
        return found


def _wait(
    started: Sequence[subprocess.Popen[bytes]], timeout_s: float | None, grace_s: float
) -> tuple[list[int], dict[int, str]]:
    """(numbers of those that failed, in order; why each of the others has to be stopped)."""
    began = time.monotonic()
    failed: list[int] = []
    deadline = None if timeout_s is None else began + timeout_s
    why = "" if timeout_s is None else f"the run took longer than {timeout_s:g} s and was stopped (--timeout)"
    while True:
        running = []
        for number, process in enumerate(started):
            code = process.poll()
            if code is None:
                running.append(number)
            elif code and number not in failed:
                failed.append(number)
        if not running:
            return failed, {}
        if failed and not why.startswith("stopped"):
            deadline = min(deadline or float("inf"), time.monotonic() + grace_s)
            why = "stopped, because another process of the run had failed"
        if deadline is not None and time.monotonic() >= deadline:
            for number in running:
                _ask_where(started[number])
            return failed, dict.fromkeys(running, why)
        if len(started) == 1:  # a process alone is waited for without looks
            with contextlib.suppress(subprocess.TimeoutExpired):
                started[0].wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        else:
            time.sleep(_LOOK_S)


def says_where() -> None:
    """For a worker: SIGUSR1 makes it print where it is, so that a process that hangs can be asked."""
    import faulthandler

    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=False)


def _ask_where(process: subprocess.Popen[bytes]) -> None:
    """Only workers that have called `says_where` answer; another process ends, which is what is next anyway."""
    if hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            process.send_signal(signal.SIGUSR1)
        time.sleep(4 * _LOOK_S)


def _where(words: str) -> str:
    """ "; it was in forward (model.py:12)": the innermost frame that a worker printed last, of no library if there is one."""
    _, found, stack = words.rpartition("most recent call first")
    frames = _FRAME.findall(stack) if found else []
    if not frames:
        return ""
    own = [frame for frame in frames if "site-packages" not in frame[0] and os.sep + "python3" not in frame[0]]
    path, line, name = (own or frames)[0]
    return f"; it was in {name} ({os.path.basename(path)}:{line})"


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
