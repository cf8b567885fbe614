"""The lanes of a simulated run as a trace that Perfetto and chrome://tracing open; written as it is simulated.

The format is the Trace Event Format ("X" events with microseconds, "M" events that name the rows).  One row a lane, one process
a rank.  Nothing is held in memory, so that a run of any length can be written.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ...errors import UserError
from .engine import Engine, Span, Task

_MICRO = 1e6


def repeated(step: Callable[[int], Iterable[Task]], steps: int) -> Iterator[Task]:
    """The tasks of `steps` steps, one after the other; `step(first_key)` yields those of one step, keyed from `first_key`.

    A step's first tasks wait for the last task of the step before.
    """
    key, last = 0, -1
    for _ in range(steps):
        first = last
        for task in step(key):
            held = task.after if task.after or first < 0 else (first,)
            yield Task(task.key, task.lane, task.seconds, task.name, held)
            key, last = task.key + 1, task.key


def events(spans: Iterable[Span], rank: int = 0) -> Iterator[str]:
    """One JSON object an event, the name of a lane before its first span."""
    rows: dict[str, int] = {}
    for span in spans:
        if span.lane not in rows:
            rows[span.lane] = len(rows)
            name = {"name": "thread_name", "ph": "M", "pid": rank, "tid": rows[span.lane], "args": {"name": span.lane}}
            yield json.dumps(name)
        yield json.dumps(
            {
                "name": span.name,
                "ph": "X",
                "pid": rank,
                "tid": rows[span.lane],
                "ts": round(span.start_s * _MICRO, 3),
                "dur": round((span.end_s - span.start_s) * _MICRO, 3),
            }
        )


def write_trace(tasks: Iterable[Task], path: str | os.PathLike[str], engine: Engine | None = None, rank: int = 0) -> int:
    """Simulates `tasks` and writes their trace to `path`, whole or not at all; returns the number of events.

    Raises UserError where `path` cannot be written.
    """
    place = Path(path)
    count = 0
    try:
        handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write('{"traceEvents": [')
                for event in events((engine or Engine()).run(tasks), rank):
                    file.write(f"{',' if count else ''}\n{event}")
                    count += 1
                file.write("\n]}\n")
            os.chmod(temporary, 0o644)
            os.replace(temporary, place)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error.strerror}", "Choose a folder that can be written") from error
    return count
