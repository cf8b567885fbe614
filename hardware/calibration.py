"""What was measured on this machine, kept beside the data sheets: one JSON file a GPU, made by `memplan hardware calibrate`.

`--gpu auto` takes these figures instead of the catalogue's.  A file that cannot be read is an error that names it: figures that
somebody measured must not vanish in silence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from ..errors import UserError
from ..files import data_home, write_whole
from .profile import Device, Pcie, Record

FORMAT = 1
CPU = "cpu"


class Product(Record):
    """One matrix product [rows, inner] x [inner, columns] that was timed."""

    dtype: str
    rows: int
    inner: int
    columns: int
    seconds: float = Field(gt=0)

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns


class Calibration(Record):
    """Rates in bytes per second, times in seconds; None: could not be measured here."""

    format: int = FORMAT
    device: str  # the catalogue's key, or "cpu"
    name: str  # as the driver says it
    made: str  # the date, ISO
    versions: dict[str, str]
    total_bytes: int | None = None
    context_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    h2d_pageable_bytes_per_s: float | None = None
    host_copy_bytes_per_s: float | None = None
    cpu_adam_params_per_s: float | None = None
    launch_s: float | None = None
    products: tuple[Product, ...] = ()
    best_matmul_share: float | None = None  # of the data sheet's rate, fitted
    matmul_k_half: float | None = None  # elements, fitted
    fit_error: float | None = None  # median of the fitted times against the measured ones
    not_measured: dict[str, str] = Field(default_factory=dict)  # what, and why


def path_of(device: str) -> Path:
    """Where the figures of a GPU lie."""
    return data_home() / "hardware" / f"{device}.json"


def store(found: Calibration) -> Path:
    """Keeps `found`; returns its file.  Raises UserError where it cannot be written."""
    place = path_of(found.device)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, json.dumps(found.model_dump(mode="json"), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {str(place)!r}: {error.strerror}", "Set MEMPLAN_HOME to a folder of yours") from error
    return place


def stored(device: str) -> Calibration | None:
    """What was measured of a GPU on this machine; None for nothing.  Raises UserError for a file that is damaged."""
    place = path_of(device)
    if not place.is_file():
        return None
    try:
        data = json.loads(place.read_text(encoding="utf-8"))
        if isinstance(data, dict) and isinstance(data.get("format"), int) and data["format"] > FORMAT:
            raise UserError(f"{place}: was written by a newer memplan", "Upgrade memplan, or move the file away")
        return Calibration.model_validate(data)
    except (OSError, ValueError, ValidationError) as error:
        line = " ".join(str(error).split())[:160]
        raise UserError(
            f"{place}: is no calibration: {line}", "Move it away, or run `memplan hardware calibrate` again"
        ) from error


def applied(device: Device) -> Device:
    """`device` of this machine with what was measured of it."""
    found = stored(device.key)
    if found is None:
        return device
    said = f"measured; this machine, {found.made}"
    changes: dict[str, Any] = {}
    sources = dict(device.sources)
    if found.context_bytes is not None:
        changes["context_bytes"] = found.context_bytes
        sources["context_bytes"] = said
    if device.pcie is not None and found.h2d_bytes_per_s and found.d2h_bytes_per_s:
        link: Pcie = device.pcie
        rates = {"h2d_bytes_per_s": int(found.h2d_bytes_per_s), "d2h_bytes_per_s": int(found.d2h_bytes_per_s)}
        changes["pcie"] = link.model_copy(update=rates)
        sources["pcie"] = said
    if found.best_matmul_share is not None:
        changes["best_matmul_share"] = found.best_matmul_share
        sources["best_matmul_share"] = said
    return device.model_copy(update={**changes, "sources": sources})
