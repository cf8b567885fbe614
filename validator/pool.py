"""Runs many small jobs in worker processes that stay up, and outlives whatever one of them does.

A worker imports torch once and then reads one job a line (JSON) and answers it with one line.  One that dies or takes too
long costs its own job only: the answer is the reason, and a fresh worker takes the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .launch import _death, _tail

Job = Mapping[str, Any]
_JOBS_PER_WORKER = 100  # then a fresh one: what a model leaves behind in its process must not pile up


def answers(jobs: Sequence[Job], *, workers: int, timeout_s: float) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Each job with its answer, in the order in which they are done; {"reason": ...} where the worker gave none."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Job, dict[str, Any]]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    stopping = threading.Event()
    crew = [_Crew(waiting, done, timeout_s, stopping) for _ in range(max(1, min(workers, len(jobs))))]
    for member in crew:
        member.start()
    try:
        for _ in range(len(jobs)):
            yield done.get()
    finally:
        stopping.set()
        for member in crew:
            member.end_worker()
        for member in crew:
            member.join()


class _Crew(threading.Thread):
    """One worker process after another, fed from the queue."""

    def __init__(self, waiting: Any, done: Any, timeout_s: float, stopping: threading.Event) -> None:
        super().__init__(daemon=True)
        self._waiting, self._done, self._timeout_s, self._stopping = waiting, done, timeout_s, stopping
        self._worker: _Worker | None = None

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                job = self._waiting.get_nowait()
            except queue.Empty:
                break
            try:
                answer = self._answer(job)
            except OSError as error:
                answer = {"reason": f"the worker could not be started or reached: {error}"}
            self._done.put((job, answer))
        self.end_worker()

    def end_worker(self) -> None:
        worker = self._worker
        if worker is not None:
            worker.end()

    def _answer(self, job: Job) -> dict[str, Any]:
        if self._worker is None or not self._worker.able:
            self.end_worker()
            self._worker = _Worker()
        return self._worker.ask(job, self._timeout_s)


class _Worker:
    """A process that answers jobs (`suite_worker`); it leads a process group of its own."""

    def __init__(self) -> None:
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the worker
        # -P: a file of the user's folder must not stand in for a module of torch's
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}.suite_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            start_new_session=True,
        )
        self._left = _JOBS_PER_WORKER
        self._late = False

    @property
    def able(self) -> bool:
        return self._left > 0 and self._process.poll() is None

    def ask(self, job: Job, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._left -= 1
        line = b""
        timer = threading.Timer(timeout_s, self._too_late)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass  # it died; why, its exit code says
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self._process.wait()
        if self._late:
            return {"reason": f"took longer than {timeout_s:g} s and was stopped"}
        return {"reason": _death(code, _tail(self._words))}

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _too_late(self) -> None:
        self._late = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
