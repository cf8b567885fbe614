"""The text of a configuration file as data: JSON with comments, as DeepSpeed reads it, and YAML.

DeepSpeed parses its file with the hjson package (deepspeed/runtime/config.py, `DeepSpeedConfig.__init__`), which takes comments
(`#`, `//`, `/* */`) and trailing commas.  Those are taken here too; what else hjson knows (keys without quotes) is read where
that package is installed.  `Infinity` and `NaN` are numbers, as Python's json writes them.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import UserError

_LARGEST_FILE_BYTES = 10_000_000  # a configuration is a few kB: whatever is larger is another kind of file
_LONGEST_WITH_LINES = 100_000  # characters: reading lines out of more takes seconds
_YAML_NAMES = (".yaml", ".yml")


@dataclass(frozen=True)
class Text:
    """One file that was read.  `source` is the name to show; `plain`: it is JSON or YAML without extensions."""

    source: str
    data: Mapping[str, Any]
    plain: bool = True
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    """Path of a key -> its line, from 1; empty where it is not known."""


def read_file(path: str | os.PathLike[str], named_by: str = "") -> Text:
    """The mapping in the file; `named_by`: the file that names this one.

    Raises UserError for what is no file, no text, or not JSON or YAML (with line and column).
    """
    source = str(path)
    place = Path(path).expanduser()
    if not place.exists() and named_by:
        raise UserError(
            f"{named_by}: names {source}, and there is no such file",
            "It was looked for here and from the folder of that file upwards: correct the path",
        )
    if not place.exists():
        raise UserError(
            f"{source}: no such file", "Name a configuration file: axolotl.yml, llamafactory.yaml, ds_config.json ..."
        )
    if not place.is_file():
        raise UserError(f"{source}: is not a file", "Name the configuration file itself")
    try:
        if place.stat().st_size > _LARGEST_FILE_BYTES:
            raise UserError(f"{source}: {place.stat().st_size:,} bytes are no configuration", "Name a smaller file")
        text = place.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror}", "Check its permissions") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: is not text (byte {error.start} is not UTF-8)", "Name a JSON or YAML file") from error
    try:
        return parse_yaml(text, source) if place.suffix.lower() in _YAML_NAMES else parse_json(text, source)
    except RecursionError:
        raise UserError(f"{source}: is nested too deeply to be a configuration", "Name another file") from None


def parse_json(text: str, source: str) -> Text:
    """JSON, with comments and trailing commas, as a mapping.  Raises UserError with line and column."""
    if not text.strip():
        _object(None, source)
    try:
        return Text(source, _object(json.loads(text, object_pairs_hook=_no_duplicates), source), lines=_json_lines(text))
    except ValueError:  # not plain JSON, or a duplicate key: said below, with the comments gone
        pass
    try:
        data = json.loads(strip_extensions(text), object_pairs_hook=_no_duplicates)
    except _DuplicateKey as error:
        raise UserError(f"{source}: the key {error.key!r} is there twice", "DeepSpeed refuses that: keep one of them") from None
    except json.JSONDecodeError as error:
        data = _hjson(text, source)
        if data is None:
            where = f"line {error.lineno}, column {error.colno}"
            raise UserError(f"{source}: {where}: {error.msg[0].lower()}{error.msg[1:]}", "Correct the JSON there") from None
    return Text(source, _object(data, source), plain=False, lines=_json_lines(strip_extensions(text)))


def strip_extensions(text: str) -> str:
    """`text` with comments and trailing commas as blanks, so that lines and columns stay where they are."""
    out = list(text)
    last_comma: int | None = None  # of the tokens so far, where the last one is a comma behind a value
    before = ""  # the last token's last character
    at = 0
    while at < len(text):
        char = text[at]
        if char == '"':
            at, before, last_comma = _end_of_string(text, at), char, None
            continue
        end = _end_of_comment(text, at)
        if end is not None:
            out[at:end] = [c if c == "\n" else " " for c in text[at:end]]
            at = end
            continue
        if char in "}]" and last_comma is not None:
            out[last_comma] = " "
        if not char.isspace():
            last_comma = at if char == "," and before and before not in ",:{[" else None
            before = char
        at += 1
    return "".join(out)


def _end_of_string(text: str, start: int) -> int:
    at = start + 1
    while at < len(text) and text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return at + 1


def _end_of_comment(text: str, at: int) -> int | None:
    """Where the comment that begins at `at` ends; None: none begins there."""
    if text[at] == "#" or text.startswith("//", at):
        end = text.find("\n", at)
    elif text.startswith("/*", at):
        end = text.find("*/", at)
        end = end + 2 if end >= 0 else end
    else:
        return None
    return len(text) if end < 0 else end


class _DuplicateKey(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKey(key)
        found[key] = value
    return found


def _hjson(text: str, source: str) -> Any | None:
    """What the hjson package makes of it; None where it is not installed, or cannot read it either."""
    try:
        hjson = importlib.import_module("hjson")
    except ImportError:
        return None
    try:
        return hjson.loads(text, object_pairs_hook=_no_duplicates)
    except _DuplicateKey as error:
        raise UserError(f"{source}: the key {error.key!r} is there twice", "DeepSpeed refuses that: keep one of them") from None
    except (ValueError, OverflowError, IndexError):  # it runs off the end of an open comment
        return None


def parse_yaml(text: str, source: str) -> Text:
    """YAML as a mapping, with the line of each key.  Raises UserError for a key that is there twice, which YAML forbids."""
    yaml = importlib.import_module("yaml")  # a dependency of transformers; it ships no types
    lines: dict[tuple[str, ...], int] = {}
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _walk(node, (), lines, source, set())
        data = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UserError(f"{source}: {where}{error.problem or 'is not YAML'}", "Correct the YAML there") from error
    except (yaml.YAMLError, ValueError) as error:  # the second: a date that is none
        raise UserError(f"{source}: is not YAML: {error}", "Correct it") from error
    finally:
        if loader is not None:
            loader.dispose()
    return Text(source, _object(data, source), lines=lines)


def _json_lines(text: str) -> dict[tuple[str, ...], int]:
    """Path of a key -> its line.  JSON is YAML but for tabs between its tokens; {} where YAML cannot read it, or it is long."""
    if len(text) > _LONGEST_WITH_LINES:
        return {}
    yaml = importlib.import_module("yaml")
    lines: dict[tuple[str, ...], int] = {}
    try:
        _walk(yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader), (), lines, "", set())
    except (yaml.YAMLError, UserError, ValueError, RecursionError):
        return {}
    return lines


def _walk(node: Any, path: tuple[str, ...], lines: dict[tuple[str, ...], int], source: str, seen: set[int]) -> None:
    """Fills `lines` from the tree that YAML is parsed into.  An alias is the node that it names: looked at once."""
    if node is None or id(node) in seen or node.id == "scalar":
        return
    seen.add(id(node))
    if node.id == "sequence":
        for item in node.value:
            _walk(item, path, lines, source, seen)
        return
    here: dict[str, int] = {}
    for key, value in node.value:
        if key.id != "scalar":
            continue
        name, line = str(key.value), key.start_mark.line + 1
        if name in here and name != "<<":
            raise UserError(f"{source}: the key {name!r} is there twice, in lines {here[name]} and {line}", "Keep one of them")
        here[name] = line
        lines.setdefault((*path, name), line)
        _walk(value, (*path, name), lines, source, seen)


def _object(data: Any, source: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        raise UserError(f"{source}: holds {kind}, expected keys with values", "Name a configuration file")
    _must_be_words(data, source)
    return dict(data)


def _must_be_words(data: Any, source: str, seen: set[int] | None = None) -> None:
    """YAML also takes numbers, dates and truths as keys; no engine has such ones.  What aliases share is looked at once."""
    seen = set() if seen is None else seen
    if id(data) in seen or not isinstance(data, Mapping | list):
        return
    seen.add(id(data))
    for inner in data.values() if isinstance(data, Mapping) else data:
        _must_be_words(inner, source, seen)
    for key in data if isinstance(data, Mapping) else ():
        if not isinstance(key, str):
            raise UserError(f"{source}: the key {key!r} is a {type(key).__name__}, expected a word", "Write it in quotes")


def beside(path: str, source: str) -> Path:
    """A path that the file `source` names: from where memplan runs, as the engines look, else from that file's folder or one
    above it (examples name paths from the root of their repository)."""
    place = Path(path).expanduser()
    if place.exists():
        return place
    folder = Path(source).expanduser().resolve().parent
    return next((other / place for other in (folder, *folder.parents) if (other / place).is_file()), place)


def shown(value: Any) -> str:
    """A value as the file has it, short."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
