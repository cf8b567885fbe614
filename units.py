"""Bytes are ints everywhere in memplan; these are the only places where they become text or come from text."""

from __future__ import annotations

import re

from .errors import UserError

KiB, MiB, GiB = 2**10, 2**20, 2**30  # binary units, as torch and nvidia-smi mean them
_FACTORS = {"": 1, "b": 1, "k": KiB, "kib": KiB, "m": MiB, "mib": MiB, "g": GiB, "gib": GiB, "t": 2**40, "tib": 2**40,
            "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # fmt: skip


def gib(num_bytes: int, digits: int = 2) -> str:
    """`num_bytes` in GiB for people: "1.50 GiB"."""
    return f"{num_bytes / GiB:.{digits}f} GiB"


def human(num_bytes: int) -> str:
    """`num_bytes` in the largest binary unit that keeps the figure above one: "512 B", "8.1 MiB"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


_LEAST_WITHOUT_UNIT = 1 << 20  # nobody means 24 bytes of memory


def parse_bytes(text: str, what: str) -> int:
    """Reads "24GiB", "24 GB", "512M" or a plain count of bytes; `what` names the option in the error.

    K, M, G, T and KiB.. are powers of 1024; kB, MB, GB, TB are powers of 1000.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*", text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UserError(f"{what}: {text!r} is not a size", "Write for example 24GiB, 80GB or 512MiB")
    size = int(float(match.group(1)) * factor)
    if not match.group(2) and size < _LEAST_WITHOUT_UNIT:
        raise UserError(f"{what}: {text.strip()} bytes", f"Give a unit: {text.strip()}GiB")
    return size
