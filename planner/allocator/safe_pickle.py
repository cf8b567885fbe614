"""Reads pickles of plain data only.  A pickle can name any function and have it called; here every name is refused."""

from __future__ import annotations

import io
import pickle
from typing import Any, NoReturn

from ...errors import UserError


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        shown = "".join(c if c.isprintable() else "?" for c in f"{module_name}.{global_name}")[:120]
        raise UserError(f"the pickle asks for the global {shown!r}, which could run code: it is refused",
                        "A memory snapshot holds plain data only; write one with torch.cuda.memory._dump_snapshot")  # fmt: skip

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise pickle.UnpicklingError("persistent ids are not plain data")


def load_plain(data: bytes) -> Any:
    """Dicts, lists, tuples, strings and numbers from a pickle.  Raises UserError for a global, ValueError for a broken file."""
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except UserError:
        raise
    except Exception as error:  # a malformed pickle can raise almost anything: each opcode fails in its own way
        raise ValueError(f"{type(error).__name__}: {error}") from error
