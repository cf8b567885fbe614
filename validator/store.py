"""What was validated, remembered: one SQLite file of records.

Each record is one transaction in write-ahead mode, so a process that is killed at any moment leaves all earlier records and
either all of the last one or nothing.  A place that cannot be written costs one line of warning, never the answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files import data_home, write_whole
from ..planner.error_bars import as_text, own_path

if TYPE_CHECKING:
    from .compare import Comparison

SCHEMA_VERSION = 1  # PRAGMA user_version of the file
_BUSY_S = 10.0  # how long a writer waits for another
_COLUMNS = "made, outcome, device, request, versions, predicted, measured, reason"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY,
    made TEXT NOT NULL,        -- UTC, ISO 8601
    outcome TEXT NOT NULL,     -- agrees, differs, could_not_run
    device TEXT NOT NULL,
    request TEXT NOT NULL,     -- JSON, as the next columns
    versions TEXT NOT NULL,
    predicted TEXT NOT NULL,
    measured TEXT,
    reason TEXT NOT NULL
)
"""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One validation that was run; `request`, `predicted` and `measured` as in `Comparison.to_json`."""

    made: str
    outcome: str
    device: str
    request: dict[str, Any]
    versions: dict[str, str]
    predicted: dict[str, Any]
    measured: dict[str, Any] | None
    reason: str


def default_path() -> Path:
    """`records.sqlite3` in `files.data_home`."""
    return data_home() / "records.sqlite3"


def remember(comparison: Comparison, path: str | os.PathLike[str] | None = None) -> str | None:
    """Adds a record; returns a one-line warning where it could not be kept.

    A run on a GPU also renews the error bars of later predictions (`planner.error_bars`).
    """
    place = Path(path) if path is not None else default_path()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _open(place) as connection:
            add(connection, comparison)
        if comparison.device != "cpu" and path is None:
            from .accuracy_errors import own_errors

            write_whole(own_path(), as_text(own_errors(records(place))))
    except (sqlite3.Error, OSError, UserError) as error:
        return f"the result was not recorded in {place}: {' '.join(str(error).split())}"
    return None


def add(connection: sqlite3.Connection, comparison: Comparison) -> None:
    """One record, one transaction."""
    data = comparison.to_json()
    row = (
        datetime.now(UTC).isoformat(timespec="seconds"),
        data["outcome"],
        data["device"],
        json.dumps(data["question"]),
        json.dumps(data["versions"]),
        json.dumps(data["predicted"]),
        json.dumps(data["measured"]) if data["measured"] is not None else None,
        data["reason"],
    )
    with connection:
        connection.execute(
            f"INSERT INTO records ({_COLUMNS}) VALUES ({','.join('?' * len(row))})",
            row,
        )


def records(path: str | os.PathLike[str] | None = None) -> list[Record]:
    """All records, oldest first; none where there is no file.  Raises UserError for a file that cannot be read."""
    place = Path(path) if path is not None else default_path()
    if not place.exists():
        return []
    try:
        with _open(place, create=False) as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM records ORDER BY id").fetchall()
    except sqlite3.Error as error:
        raise UserError(
            f"{place}: cannot be read as memplan's records: {error}", "Move it away, or name another with --store"
        ) from error
    return [
        Record(
            made=made,
            outcome=outcome,
            device=device,
            request=json.loads(request),
            versions=json.loads(versions),
            predicted=json.loads(predicted),
            measured=json.loads(measured) if measured else None,
            reason=reason,
        )
        for made, outcome, device, request, versions, predicted, measured, reason in rows
    ]


@contextlib.contextmanager
def _open(place: Path, *, create: bool = True) -> Iterator[sqlite3.Connection]:
    """A connection to a file of this schema.  Reading must work where writing is not allowed."""
    target, uri = (str(place), False) if create else (f"{place.resolve().as_uri()}?mode=ro", True)
    connection = sqlite3.connect(target, timeout=_BUSY_S, uri=uri)
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise UserError(
                f"{place} was written by a newer memplan (schema {version}, this one knows {SCHEMA_VERSION})", "Upgrade memplan"
            )
        if create:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            if version == 0:
                with connection:
                    connection.execute(_SCHEMA)
                    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        yield connection
    finally:
        connection.close()
