"""A cache on disk, by content: what cost seconds to find out is read back in milliseconds, without torch.

A cache never decides an answer: a file that cannot be read is made again, and a disk that cannot be written costs one line of
warning.  Files are written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..files import write_whole

_TRACER = ("planner/trace/*.py", "planner/optimizers/*.py", "models/*.py")
_ALL = ("*.py", "planner/**/*.py", "planner/data/*", "models/**/*.py", "hardware/**/*.py", "hardware/data/*")
_warned: set[str] = set()


def folder() -> Path:
    """`$MEMPLAN_CACHE`, else `$XDG_CACHE_HOME/memplan`, else `~/.cache/memplan`."""
    chosen = os.environ.get("MEMPLAN_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "memplan"


def key(kind: str, *parts: Any) -> str:
    """The name of a trace's entry: `kind` and a hash of everything that decides its content, the tracer's code included."""
    return _name(kind, [*parts, _code_fingerprint(_TRACER)])


def answer_key(kind: str, *parts: Any) -> str:
    """The same for what is worked out from traces: all of this program's code and data decides it."""
    return _name(kind, [*parts, _code_fingerprint(_ALL)])


def _name(kind: str, parts: list[Any]) -> str:
    text = json.dumps([kind, *parts, library_versions()], sort_keys=True, default=str)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def get(name: str) -> bytes | None:
    try:
        return (folder() / name).read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return None


def put(name: str, data: bytes) -> None:
    try:
        home = folder()
        home.mkdir(parents=True, exist_ok=True)
        write_whole(home / name, data)
    except (OSError, RuntimeError) as error:
        warn(f"the trace cache cannot be written ({error}); the answer is right, the next one will be as slow as this one")


def warn(text: str) -> None:
    """One line on stderr, once per text."""
    if text not in _warned:
        _warned.add(text)
        print(f"memplan: warning: {text}", file=sys.stderr)


@cache
def library_versions() -> dict[str, str]:
    """Versions of the libraries whose behaviour is recorded, read without importing them."""
    found = {}
    for name in ("torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


@cache
def _code_fingerprint(patterns: tuple[str, ...]) -> str:
    """A hash of this program's own files: entries of an older memplan are not taken for answers of this one."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        digest.update(path.read_bytes())
    return digest.hexdigest()
