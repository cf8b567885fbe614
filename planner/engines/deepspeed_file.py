"""One ds_config.json while it is read: what it says, what there is to say about it, and the words for its mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from ...errors import UserError, did_you_mean
from . import deepspeed_schema as schema
from .imported import AUTO, Said
from .text import shown


class DeepSpeedFile:
    """One ds_config.json, what it says so far, and how its mistakes are worded."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.data, self.source = data, source
        self.said: dict[str, Said] = {}
        self.taken: dict[str, Said] = {}
        self.denied: dict[tuple[str, str], str] = {}
        self.notes: list[str] = []
        self.unmodelled: list[str] = []
        self.settings: dict[str, Any] = {}
        """Fields of `DeepSpeedSettings`."""
        self.hidden: tuple[str, ...] = ()
        """Keys of zero_optimization that follow the model's hidden size."""

    # -- messages --------------------------------------------------------------------------------------------------------

    def wrong(self, key: str, value: Any, allowed: str, next_step: str = "") -> UserError:
        return UserError(f"{self.source}: {key} is {shown(value)}: {allowed}", next_step or "Correct the file")

    def not_modelled(self, key: str, value: Any) -> None:
        self.unmodelled.append(f"{self.source}: {key} {shown(value)} changes memory, and is not modelled yet")

    def section(self, model: type[BaseModel], key: str, data: Any) -> Any:
        """`data` as `model`, without its "auto" values; raises UserError for the first value that DeepSpeed refuses."""
        if not isinstance(data, Mapping):
            raise self.wrong(key, data, "expected an object in braces")
        try:
            return model.model_validate({k: v for k, v in data.items() if v != AUTO})
        except ValidationError as error:
            raise self._invalid(model, key, error) from None

    def _invalid(self, model: type[BaseModel], key: str, error: ValidationError) -> UserError:
        first, *more = error.errors(include_url=False)
        path = [str(part) for part in first["loc"]]
        name = ".".join((key, *path))
        others = f" (and {len(more)} more)" if more else ""
        if first["type"] == "extra_forbidden":
            inner: type[BaseModel] = (
                schema.OffloadParamSection if path[0] == "offload_param" else schema.OffloadOptimizerSection
            )
            known = schema.known_keys(inner if len(path) > 1 else model)
            return UserError(f"{self.source}: {name} is no key of DeepSpeed 0.19{others}", did_you_mean(path[-1], known))
        expected = first["msg"][0].lower() + first["msg"][1:]
        return self.wrong(name, first["input"], expected + others)

    def positive(self, key: str) -> Any:
        """A whole number of 1 or more, "auto", or None where the key is not there."""
        value = self.data.get(key)
        if value is None or value == AUTO:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0 or value < 1:
            raise self.wrong(key, value, 'expected a whole number of 1 or more, or "auto"')
        return int(value)


def uses_auto(data: Any) -> bool:
    """Whether a value is "auto", so that DeepSpeed alone cannot read the file."""
    if isinstance(data, Mapping):
        return any(uses_auto(v) for k, v in data.items() if k not in ("zenflow", "pipeline", "data_types", "autotuning"))
    if isinstance(data, list):
        return any(map(uses_auto, data))
    return bool(data == AUTO)
