"""The catalogue: well-known models as data, so that a name is enough and no network is needed.

Each `*.json` here is one file of related models:

    {"about": "...", "models": [{
        "id": "org/name",              the id on the Hugging Face hub
        "aliases": ["name"],           other spellings; case never matters, and the part after the slash is one by itself
        "task": "causal-lm",           what it is usually trained for (tasks.py)
        "dtype": "bfloat16",           how the published weights are stored; left out: float32
        "config": {...},               config.json: model_type and the architecture's numbers; the rest is transformers' default
        "num_params": 123,             parameters of the class that the task builds, tied weights once; checked by building it
        "published": "6.7B",           what its makers say: an exact int, or a string; makers round or cut off, hence num_params
                                       must lie within one unit of its last digit (zeros at its end say nothing)
        "published_by": "..."}]}       where they say so
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of the catalogue; the fields are those of the data files."""

    id: str
    task: str
    config: dict[str, Any] = field(hash=False)
    num_params: int
    published: int | str
    published_by: str
    aliases: tuple[str, ...] = ()
    dtype: str = "float32"

    @property
    def names(self) -> tuple[str, ...]:
        """Every spelling that finds this entry, the id first."""
        return tuple(dict.fromkeys((self.id, self.id.rpartition("/")[2], *self.aliases)))


@cache
def groups() -> dict[str, tuple[Entry, ...]]:
    """File name without ending -> its entries, in the file's order."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        found[file.stem] = tuple(_entry(item, file) for item in content["models"])
    return found


@cache
def entries() -> tuple[Entry, ...]:
    """All entries, by file and then in the file's order."""
    return tuple(entry for group in groups().values() for entry in group)


@cache
def _by_name() -> Mapping[str, Entry]:
    return {name.lower(): entry for entry in reversed(entries()) for name in reversed(entry.names)}


def find(name: str) -> Entry | None:
    """The entry called `name` (id, last part of an id, or alias; case does not matter), or None."""
    return _by_name().get(name.strip().lower())


def names() -> list[str]:
    """Ids and aliases, for suggestions."""
    return [name for entry in entries() for name in entry.names]


def _entry(item: Mapping[str, Any], file: Path) -> Entry:
    fields = {**item, "aliases": tuple(item.get("aliases", ()))}
    try:
        return Entry(**fields)
    except TypeError as error:  # an unknown or a missing field: the data file is part of the program, so this is our bug
        raise ValueError(f"{file.name}: {item.get('id')}: {error}") from None
