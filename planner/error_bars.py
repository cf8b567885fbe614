"""How far off predictions like this one have been: from published measurements, and from this machine's own validations.

`data/errors.json` is made by `memplan accuracy FILE --errors ...`; validations on real GPUs keep a file of the same form beside
their records.  Own figures come first where there are enough.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import data_home
from ..models.adapters import ADAPTER_METHODS
from .strategies import RELAY, ZEROTH_ORDER

if TYPE_CHECKING:
    from .request import Request

FEWEST = 5  # rows that make a quantile worth saying
FIGURES = ("allocated", "reserved", "device")
FORMAT = 1
_ONE, _SEVERAL = "one", "several"


@dataclass(frozen=True, kw_only=True)
class ErrorBar:
    """Absolute relative errors of one figure over `num_rows` measured runs; 0.02 is two percent."""

    figure: str
    """allocated, reserved, or device: what nvidia-smi shows."""
    method: str
    """full, adapter or zeroth-order."""
    gpus: str
    """one or several."""
    num_rows: int
    median: float
    p90: float
    """The smallest error that nine in ten rows do not exceed."""
    own: bool = False
    """Of runs that were validated here, not of published ones."""


def kind_of(method: str, gpus: int) -> tuple[str, str]:
    """(method, gpus) of an `ErrorBar` that speaks for such a run."""
    kind = "adapter" if method in ADAPTER_METHODS else "zeroth-order" if method in ZEROTH_ORDER else "full"
    if method == RELAY:
        kind = RELAY  # of which no run has been published
    return kind, _ONE if gpus == 1 else _SEVERAL


def error_bars(request: Request) -> tuple[ErrorBar, ...]:
    """One for each figure that enough runs like `request` were measured for."""
    method, gpus = kind_of(request.method, request.gpus)
    found = []
    for figure in FIGURES:
        for bars in (own(), published()):
            match = [b for b in bars if (b.figure, b.method, b.gpus) == (figure, method, gpus) and b.num_rows >= FEWEST]
            if match:
                found.append(match[0])
                break
    return tuple(found)


def in_words(bars: Sequence[ErrorBar]) -> str:
    """A sentence for the report; "" where nothing is known."""
    name = {"allocated": "allocated", "reserved": "reserved", "device": "nvidia-smi"}
    parts: list[str] = []
    for bar in bars:
        whose = "runs validated here" if bar.own else "measured runs like this"
        first = not parts
        what = f"{name[bar.figure]} was off by" if first else f"{name[bar.figure]} by"
        half = f"{_percent(bar.median)} at the median" if first else _percent(bar.median)
        most = f"{_percent(bar.p90)} in nine of ten" if first else _percent(bar.p90)
        parts.append(f"{what} {half}, {most} ({bar.num_rows}{f' {whose}' if first or bar.own else ''})")
    return "; ".join(parts)


def _percent(share: float) -> str:
    return "0.1%" if share < 0.001 else f"{share:.1%}"


def published() -> tuple[ErrorBar, ...]:
    """Those that memplan ships."""
    return _read(Path(__file__).with_name("data") / "errors.json")


def own() -> tuple[ErrorBar, ...]:
    """Those of this machine; a file that cannot be read is none."""
    file = own_path()
    try:
        return _read(file) if file.is_file() else ()
    except (OSError, ValueError, TypeError, KeyError):
        return ()


def own_path() -> Path:
    """Where the figures of this machine's validations lie."""
    return data_home() / "errors.json"


def as_text(bars: Sequence[ErrorBar]) -> str:
    """What such a file holds."""
    return json.dumps({"format": FORMAT, "bars": [asdict(b) for b in bars]}, indent=1) + "\n"


@cache
def _parsed(text: str) -> tuple[ErrorBar, ...]:
    data: Any = json.loads(text)
    if data["format"] != FORMAT:
        raise ValueError("another format")
    return tuple(ErrorBar(**bar) for bar in data["bars"])


def _read(file: Path) -> tuple[ErrorBar, ...]:
    return _parsed(file.read_text(encoding="utf-8"))
