"""What the worker is told and what it answers, as JSON: a request, how to measure, and one of three outcomes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .measurement import Usage

if TYPE_CHECKING:
    from ..planner.request import Request


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to measure."""

    request: Request
    device: Literal["cpu", "cuda"] = "cpu"
    outputs: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    """The ops of the trace and what they return (`cpu.leaf_outputs`); for the CPU only."""
    threads: int | None = 1
    """Of torch on the CPU; None leaves torch's own choice.  Some CPU kernels allocate scratch per thread."""
    snapshot: str | None = None
    """Where the memory history goes (CUDA only)."""

    def to_json(self) -> dict[str, Any]:
        request = self.request
        own = {f.name: getattr(request, f.name) for f in fields(request) if f.name not in ("model", "device", "loop")}
        return {
            "model": _plain(asdict(request.model)),
            "gpu": request.device.model_dump(mode="json"),
            "loop": asdict(request.loop),
            "request": _plain(own),
            "device": self.device,
            "outputs": dict(self.outputs),
            "threads": self.threads,
            "snapshot": self.snapshot,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        from ..hardware.profile import Device
        from ..models import ModelSpec
        from ..models.spec import FactoryRef
        from ..planner.loop import LoopFacts
        from ..planner.question import _hints, _typed
        from ..planner.request import Request

        model = dict(data["model"])
        model["notes"] = tuple(model["notes"])
        model["folder"] = Path(model["folder"]) if model["folder"] else None
        if model["factory"]:
            model["factory"] = FactoryRef(**{**model["factory"], "path": Path(model["factory"]["path"])})
        hints = _hints(Request)
        own = {name: _typed(value, hints[name], name) for name, value in data["request"].items()}
        parts: dict[str, Any] = {
            "model": ModelSpec(**model),
            "device": Device.model_validate(data["gpu"]),
            "loop": LoopFacts(**data["loop"]),
        }
        how = {name: data[name] for name in ("device", "outputs", "threads", "snapshot")}
        return cls(request=Request(**{**parts, **own}), **how)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run: `usage`, or the one-line `reason` for which there is none."""

    usage: Usage | None = None
    reason: str = ""
    output: str = ""
    """What the run printed, for whoever looks for the cause."""

    def to_json(self) -> dict[str, Any]:
        return {"usage": self.usage.to_json() if self.usage else None, "reason": self.reason}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        return cls(usage=Usage.from_json(data["usage"]) if data["usage"] else None, reason=data["reason"])


def read_json(path: str | os.PathLike[str]) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
