"""A question as JSON data, back to a `Request`: what answers and plans carry can be asked again.

The inverse of `Request.as_data`.  Everything is checked as if a person had typed it; a key that this version does not know is
an error, since a knob that is ignored is a wrong answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..errors import UserError
from .loop import LoopFacts
from .request import Request

_NEXT = "Make the file again with this memplan"
# Said by `model` and `device`, or in words only.
_NOT_FIELDS = ("model", "device", "defaults", "loop")
_MODEL = ("model", "reference", "overrides", "task", "gpu", "gpu_total_bytes")


def request_of(data: Any, source: str, *, trust_remote_code: bool = False) -> Request:
    """The question that `Request.as_data` wrote.  `source`: the file, for messages.

    The model is read again, its config from where it was: a hub id, a path, a factory.  Whether a model's own code may run is
    for the caller to say, not for a file.
    Raises UserError for a key that is unknown or missing, a value of a wrong type, and a model or GPU that is not there.
    """
    from ..hardware.catalogue import resolve
    from ..models import load
    from .api import make_request

    if not isinstance(data, Mapping):
        raise UserError(f"{source}: the question is no object", _NEXT)
    hints = _hints(Request)
    known = {f.name for f in fields(Request)} - set(_NOT_FIELDS)
    for key in data:
        if key not in known and key not in _MODEL and key != "loop":
            raise UserError(
                f"{source}: question.{key}: is not known to this memplan", "Upgrade memplan, or make the file again"
            )
    for key in ("model", "gpu", "loop"):
        if key not in data:
            raise UserError(f"{source}: question.{key}: is missing", _NEXT)
    at = f"{source}: question"
    model = load(
        _typed(data.get("reference") or data["model"], str, f"{at}.reference"),
        task=_typed(data.get("task"), str | None, f"{at}.task"),
        overrides=_typed(data.get("overrides", {}), dict[str, str], f"{at}.overrides"),
        trust_remote_code=trust_remote_code,
    )
    options = {key: _typed(data[key], hints[key], f"{at}.{key}") for key in known if key in data}
    loop = _typed(data["loop"], LoopFacts, f"{at}.loop")
    options |= {f.name: getattr(loop, f.name) for f in fields(LoopFacts)}
    gpu = _typed(data["gpu"], str, f"{at}.gpu")
    total = _typed(data.get("gpu_total_bytes"), int | None, f"{at}.gpu_total_bytes")
    if total == resolve(gpu)[0].total_bytes:
        total = None  # the card as it is known
    return make_request(model, gpu, gpu_memory=total, **options)


def _hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, also of those that are imported for checking only."""
    from ..hardware.profile import Device
    from ..models import ModelSpec
    from .strategies.deepspeed_settings import DeepSpeedSettings
    from .strategies.fsdp_settings import FsdpSettings
    from .strategies.l2l import L2lSettings
    from .strategies.zo_settings import ZoSettings

    names = {c.__name__: c for c in (Device, ModelSpec, DeepSpeedSettings, FsdpSettings, L2lSettings, ZoSettings)}
    return get_type_hints(kind, localns=names)


def _typed(value: Any, kind: Any, at: str) -> Any:
    """`value` of JSON as `kind`: lists become tuples, objects dataclasses.  Raises UserError with the place."""
    origin, args = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(value, kind, at)
    if origin in (Union, UnionType):
        if value is None and type(None) in args:
            return None
        for option in args:
            if option is type(None):
                continue
            try:
                return _typed(value, option, at)
            except UserError:
                if len([a for a in args if a is not type(None)]) == 1:
                    raise
    elif origin is tuple:
        if isinstance(value, list | tuple):
            each = args[0] if len(args) == 2 and args[1] is Ellipsis else None
            parts = [each] * len(value) if each is not None else list(args)
            if len(parts) == len(value):
                return tuple(_typed(v, part, f"{at}[{i}]") for i, (v, part) in enumerate(zip(value, parts, strict=True)))
    elif origin is dict or origin is Mapping:
        if isinstance(value, Mapping):
            return {_typed(k, args[0], at): _typed(v, args[1], f"{at}.{k}") for k, v in value.items()}
    elif args and getattr(origin, "_name", str(origin)).endswith("Literal"):
        if value in args and type(value) in {type(a) for a in args}:
            return value
    elif kind is Any:
        return value
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    elif isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise UserError(f"{at}: {value!r} is not what belongs there ({_in_words(kind)})", _NEXT)


def _dataclass(value: Any, kind: Any, at: str) -> Any:
    if not isinstance(value, Mapping):
        raise UserError(f"{at}: {value!r}: expected an object", _NEXT)
    hints = _hints(kind)
    known = [f.name for f in fields(kind) if f.init]
    for key in value:
        if key not in known:
            raise UserError(f"{at}.{key}: is not known to this memplan", "Upgrade memplan, or make the file again")
    try:
        return kind(**{key: _typed(v, hints[key], f"{at}.{key}") for key, v in value.items()})
    except TypeError as error:
        raise UserError(f"{at}: {error}", _NEXT) from error


def _in_words(kind: Any) -> str:
    if get_args(kind):
        return str(kind).replace("typing.", "")
    return getattr(kind, "__name__", str(kind))
