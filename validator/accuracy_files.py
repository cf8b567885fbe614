"""Text files, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..errors import UserError


def write_whole(path: Path, text: str) -> None:
    """Replaces `path` by a file with `text`.  Raises UserError where that is not possible."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)  # mkstemp's files are their owner's alone
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})", "Name a folder that exists and is yours") from None
