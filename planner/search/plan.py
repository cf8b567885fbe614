"""The answer of a search: ranked configurations, what was refused, and the file plan.json that keeps it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ...errors import UserError
from ..optimizers.methods import METHODS, default_optimizer
from ..plan_format import FORMAT, check_format
from ..prediction import Verdict
from ..recompute.policy import PREFIX

_KIND = "memplan plan"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration, as it was simulated."""

    method: str
    strategy: str
    precision: str
    optimizer: str
    optimizer_impl: str
    recompute: str
    offload: tuple[str, ...]
    gpus: int
    nodes: int
    micro_batch_size: int
    grad_accum_steps: int
    alloc_conf: str = ""
    """PYTORCH_ALLOC_CONF that it needs; "" for none."""
    verdict: Verdict
    reserved_peak_bytes: int
    """The most that PyTorch would hold on a GPU without a limit."""
    headroom_bytes: int
    """Of what PyTorch can have, without `reserved_peak_bytes`; below 0 it fits because PyTorch empties its cache."""
    host_bytes: int
    """Host memory of one machine, all its ranks together."""
    nvme_bytes: int
    step_s: float | None = None
    """One optimizer step; None: the timeline cannot tell."""
    tokens_per_s: float | None = None
    """Of all GPUs together; samples where `Plan.counts_samples`."""
    bound_by: str = ""
    gives_up: tuple[str, ...] = ()
    why_not_more: str = ""
    """Why the next larger micro batch of this configuration was refused; "" where none was."""

    @property
    def fits(self) -> bool:
        return self.verdict in (Verdict.FITS, Verdict.TIGHT)

    @property
    def held_bytes(self) -> int:
        """The most that PyTorch holds on a GPU: no more than it can have."""
        return self.reserved_peak_bytes + min(self.headroom_bytes, 0)

    @property
    def name(self) -> str:
        """Short, for people: what differs from one candidate to the next."""
        parts = [self.strategy if self.method == "full" else self.method]
        if self.method not in ("full", "mezo", "zo2", "distzo2") and self.strategy != "single":
            parts.append(self.strategy)
        if self.offload:
            parts.append(f"offload {'+'.join(self.offload)}")
        parts.append(self.precision)
        if self.optimizer != (default_optimizer(self.method) if self.method in METHODS else "adamw"):
            parts.append(self.optimizer)
        if self.recompute != "none":
            parts.append("recompute selective" if self.recompute.startswith(PREFIX) else f"recompute {self.recompute}")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A configuration that was ruled out, and why.  `needs_bytes`: on a GPU, exact if it was `simulated`, else at least."""

    name: str
    micro_batch_size: int
    needs_bytes: int
    simulated: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which configuration to run.  `candidates` fit, best first; where there are none, `closest` and `would_fit` say more."""

    question: dict[str, Any]
    """What was asked, as JSON data: model, GPU, sizes, and the user's choices."""
    base: dict[str, Any]
    """`Request.as_data()` of the question without what is searched: what a row is read back with."""
    gpu: str
    usable_bytes: int
    """Of one GPU, for PyTorch."""
    global_batch_size: int
    seq_len: int
    objective: str
    candidates: tuple[Candidate, ...]
    refused: tuple[Refused, ...] = ()
    """The best of those that would have been ranked before the first candidate."""
    closest: Refused | None = None
    would_fit: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    counts_samples: bool = False
    num_considered: int = 0
    num_simulated: int = 0
    versions: dict[str, str] | None = None
    predicted: dict[str, Any] | None = None
    """`Prediction.to_json()` of the first row, in a folder that was written."""
    launch: tuple[str, ...] = ()
    """How the program in that folder is started, inside it."""
    files: dict[str, str] | None = None
    """{name: SHA-256} of its other files."""

    @property
    def fits(self) -> bool:
        return bool(self.candidates)

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys; sizes in bytes, times in seconds."""
        from ...version import __version__

        data = asdict(self)
        for candidate in data["candidates"]:
            candidate["verdict"] = candidate["verdict"].value
        return {"kind": _KIND, "format": FORMAT, "memplan": __version__, **data}

    def text(self) -> str:
        """What plan.json holds."""
        return json.dumps(self.to_json(), indent=2) + "\n"

    def __str__(self) -> str:
        from .table import render

        return render(self)

    def _repr_html_(self) -> str:
        from ..show.html import plan_html

        return plan_html(self)

    @classmethod
    def from_json(cls, data: Any, source: str = "plan.json") -> Plan:
        """The inverse of `to_json`.  Raises UserError for another kind of file, a newer format, and unknown or missing keys."""
        if not isinstance(data, Mapping) or data.get("kind") != _KIND:
            raise UserError(f"{source}: is no plan of memplan", "Name a plan.json that `memplan plan --write` has made")
        check_format(data, source, "memplan plan --write")
        rest = {key: value for key, value in data.items() if key not in ("kind", "format", "memplan")}
        try:
            rest["candidates"] = tuple(_made(Candidate, {**c, "verdict": Verdict(c["verdict"])}) for c in rest["candidates"])
            rest["refused"] = tuple(_made(Refused, r) for r in rest.get("refused", ()))
            rest["closest"] = _made(Refused, rest["closest"]) if rest.get("closest") else None
            plan: Plan = _made(cls, rest)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{source}: {error}", "Make the plan again with `memplan plan --write`") from error
        return plan


def _made(kind: Any, data: Mapping[str, Any]) -> Any:
    """A dataclass from JSON: lists become tuples; what it does not know is an error."""
    known = {f.name for f in fields(kind)}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ValueError(f"the key {unknown[0]!r} is not known")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a plan.json, or in a folder that holds one.  Raises UserError."""
    place = Path(path)
    if place.is_dir():
        place = place / "plan.json"
    try:
        data = json.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {str(place)!r}: {error.strerror}", "Name a plan.json") from error
    except ValueError as error:
        raise UserError(f"{place}: is not JSON: {error}", "Name a plan.json") from error
    return Plan.from_json(data, str(place))
