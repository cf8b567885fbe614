"""The same function over many arguments, in as many processes as there are cores, where starting them pays."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

_FEWEST = 24  # calls of a tenth of a second each: the start of the processes is no part to speak of

_work: tuple[Callable[..., Any], Sequence[tuple[Any, ...]]] | None = None  # of the parent, which its children find as it is


def at_once(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """`function(*a)` for each `a`, in order.  Results travel between processes, arguments do not: children are forks.

    One process where forks are not to be had: elsewhere than on Linux, whose other ways to start a process would import and
    read all again.
    """
    processes = min(os.cpu_count() or 1, len(arguments))
    if processes == 1 or len(arguments) < _FEWEST or sys.platform != "linux":
        return [function(*a) for a in arguments]
    global _work
    _work = function, arguments
    try:
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork")) as pool:
            return list(pool.map(_call, range(len(arguments)), chunksize=4))
    finally:
        _work = None


def _call(index: int) -> Any:
    assert _work is not None
    function, arguments = _work
    return function(*arguments[index])
