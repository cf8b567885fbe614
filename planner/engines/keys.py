"""The keys of a training file: read one by one with a message for what they must not be, and the rest said by line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import UserError, did_you_mean
from .text import Text, shown

NOT_UNDERSTOOD = "NOT UNDERSTOOD"
_TRUE, _FALSE = ("true", "yes", "on", "y", "1"), ("false", "no", "off", "n", "0")


class Keys:
    """The keys of one block.  A key that is there without a value is as good as absent, as in every one of these formats."""

    def __init__(self, text: Text, data: Mapping[str, Any] | None = None, path: tuple[str, ...] = ()) -> None:
        self.text, self.path = text, path
        self.data = text.data if data is None else data
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; the key counts as read."""
        self._read.add(key)
        value = self.data.get(key)
        return default if value is None else value

    def name(self, key: str) -> str:
        return ".".join((*self.path, key))

    def at(self, key: str) -> str:
        """The file, and the line where it is known: "axolotl.yml: line 12"."""
        line = self.text.lines.get((*self.path, key))
        return f"{self.text.source}: line {line}" if line else self.text.source

    def wrong(self, key: str, expected: str, next_step: str = "Correct the file") -> UserError:
        return UserError(f"{self.at(key)}: {self.name(key)} is {shown(self.data.get(key))}: {expected}", next_step)

    def both(self, first: str, second: str, why: str) -> UserError:
        """Two keys that contradict each other, with the lines of both."""
        parts = [f"{self.name(key)} {shown(self.data.get(key))}{self._line(key)}" for key in (first, second)]
        return UserError(f"{self.text.source}: {' and '.join(parts)} do not go together: {why}", "Change one of them")

    def _line(self, key: str) -> str:
        line = self.text.lines.get((*self.path, key))
        return f" (line {line})" if line else ""

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        text = str(value).lower()
        if text not in (*_TRUE, *_FALSE):
            raise self.wrong(key, "expected true or false")
        return text in _TRUE

    def number(self, key: str, low: int = 1) -> int | None:
        """A whole number of `low` or more, also where it is written in quotes."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.wrong(key, f"expected a whole number of {low} or more")
        return value

    def real(self, key: str) -> float | None:
        """A number; YAML reads 1e-4, which has no point, as text."""
        value = self.get(key)
        if value is None:
            return None
        try:
            if not isinstance(value, bool):
                return float(value)
        except (TypeError, ValueError):
            pass
        raise self.wrong(key, "expected a number")

    def words(self, key: str) -> tuple[str, ...]:
        """Names as a list, or as one text with commas."""
        value = self.get(key, ())
        if isinstance(value, str):
            value = [word.strip() for word in value.split(",") if word.strip()]
        if not isinstance(value, list | tuple) or not all(isinstance(word, str) for word in value):
            raise self.wrong(key, "expected names")
        return tuple(value)

    def text_of(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and (not isinstance(value, str) or not value.strip()):
            raise self.wrong(key, "expected a name")
        return value

    def choice(self, key: str, known: Iterable[str]) -> str | None:
        value = self.get(key)
        if value is None:
            return None
        known = tuple(known)
        if str(value).lower() not in known:
            raise self.wrong(key, f"expected one of {', '.join(known)}", did_you_mean(str(value), known) or "Correct the file")
        return str(value).lower()

    def block(self, key: str) -> Keys:
        """The keys below `key`; none where it is absent."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, "expected keys with values")
        return Keys(self.text, value, (*self.path, key))

    def is_on(self, key: str) -> bool:
        """Whether the key says anything but no: a switch, a number above 0, a name, a block."""
        value = self.get(key)
        return not (value in (None, False, 0, "", [], {}) or str(value).lower() in ("false", "no", "off", "none"))

    def unmodelled(self, reasons: Mapping[str, str], off: Mapping[str, tuple[Any, ...]] | None = None) -> list[str]:
        """Why there is no answer: keys of `reasons` that are on.  `off`: further values that switch nothing on."""
        found = []
        for key, reason in reasons.items():
            if self.is_on(key) and self.get(key) not in (off or {}).get(key, ()):
                found.append(f"{self.at(key)}: {self.name(key)} {shown(self.get(key))}: {reason}, which is not modelled yet")
        return found

    def less(self, words: Mapping[str, str]) -> list[str]:
        """Notes on keys that are on and only save memory: what is counted without them is never too little."""
        return [
            f"{self.name(key)}: {what}; that saving is not counted, so the run needs less than is said here"
            for key, what in words.items()
            if self.is_on(key)
        ]

    def not_understood(self, silent: Iterable[str], whose: str) -> list[str]:
        """One note for each key that was not read and is not one of `silent`, which change no memory."""
        silent = frozenset(silent)
        known = silent | self._read
        notes = []
        for key, value in self.data.items():
            if key in known:
                continue
            line = self.text.lines.get((*self.path, key))
            where = f"line {line}: " if line else ""
            hint = did_you_mean(key, known)
            notes.append(
                f"{NOT_UNDERSTOOD}, and so not counted: {where}{self.name(key)} {shown(value)}: not a key of {whose} that "
                f"memplan knows. {hint}".strip()
            )
        return notes
