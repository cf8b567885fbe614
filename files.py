"""Files are written whole or not at all: a reader sees the old content or the new one, whatever happens in between."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import UserError


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replaces `path` by a file with `content` (text as UTF-8), readable as the umask allows.

    Raises OSError where that is not possible; nothing is left behind then.
    """
    place = Path(path)
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}-")  # beside it: replacing is one step then
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's files are their owner's alone
        os.replace(temporary, place)
    except BaseException:
        os.unlink(temporary)
        raise


def write_for_user(path: str | os.PathLike[str], content: str | bytes) -> None:
    """As `write_whole`, for a path that the user named: raises UserError."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error.strerror}", "Choose a folder that can be written") from error


def data_home() -> Path:
    """Where memplan keeps what it has learnt: MEMPLAN_HOME, else XDG_DATA_HOME/memplan, else ~/.local/share/memplan."""
    home = os.environ.get("MEMPLAN_HOME")
    if home:
        return Path(home)
    data = os.environ.get("XDG_DATA_HOME")
    return Path(data if data else Path.home() / ".local" / "share", "memplan")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
