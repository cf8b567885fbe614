"""A line on a terminal that says what a long command is doing; silent everywhere else."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

DELAY_S = 1.0  # shorter work needs no line, and rich need not be imported for it


@contextlib.contextmanager
def progress(text: str, *, enabled: bool = True, delay_s: float = DELAY_S) -> Iterator[Callable[[str], None]]:
    """Shows `text` on stderr while the body runs, once it has taken `delay_s` seconds; gives a function that changes the text.

    Nothing is written where stderr is no terminal (a pipe, a log, a notebook) or `enabled` is False.
    """
    if not enabled or not sys.stderr.isatty():
        yield lambda _: None
        return
    line = _Line(text)
    timer = threading.Timer(delay_s, line.start)
    timer.daemon = True
    timer.start()
    try:
        yield line.say
    finally:
        timer.cancel()
        line.stop()


class _Line:
    """The line; `start` comes from the timer's thread, the rest from the caller's."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lock = threading.Lock()
        self._status: Any = None
        self._ended = False

    def start(self) -> None:
        from rich.console import Console

        with self._lock:
            if not self._ended:
                self._status = Console(stderr=True).status(_plain(self._text))
                self._status.start()

    def say(self, text: str) -> None:
        with self._lock:
            self._text = text
            if self._status is not None:
                self._status.update(_plain(text))

    def stop(self) -> None:
        with self._lock:
            self._ended = True
            if self._status is not None:
                self._status.stop()


def _plain(text: str) -> Any:
    """Text without markup: a model's name may hold brackets."""
    from rich.text import Text

    return Text(text + " ...")
