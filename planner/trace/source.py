"""Where traces come from: a family in memory or on disk, else new probes, else a trace of that one point."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell, UserError
from .. import cache
from ..optimizers.methods import LAYERWISE
from ..recompute.policy import PREFIX
from ..strategies import prepared, traced_as
from .family import Domain, NoFamily, TraceFamily, domains, find_family
from .symbolic import Point

if TYPE_CHECKING:
    from ...models import ModelSpec
    from ..request import Request
    from .options import TraceOptions
    from .stacks import Stack
    from .steptrace import StepTrace
    from .tracer import FakeModel

_THRESHOLD_WORDS = ("window", "chunk")  # config keys that name a length at which a model takes another path


class TraceSource:
    """Answers `step(request)`; each distinct trace is made once.

    `exact=True` traces every point at full depth: slow, and what families are checked against.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self._exact = exact
        self._families: dict[Any, list[TraceFamily]] = {}
        self._refused: set[Any] = set()
        self._points: dict[Any, StepTrace] = {}
        self._models: dict[Any, tuple[FakeModel, list[Stack]]] = {}

    def step(self, request: Request, target: str = "cuda") -> StepTrace:
        """One micro step of the request's model, recorded for its GPU, as its strategy walks it."""
        return prepared(request, self._step(traced_as(request), target))

    def _step(self, request: Request, target: str) -> StepTrace:
        options = trace_options(request, target)
        if self._exact:
            return self._trace(request.model, options)
        if request.recompute.startswith(PREFIX):  # no shallow model stands for blocks that keep this and that
            return self._point(request.model, options)
        base = replace(options, batch_size=0, seq_len=0)
        point = (request.micro_batch_size, request.seq_len)
        family = self._family_of(request.model, base, point)
        if family is not None:
            with contextlib.suppress(ValueError):
                return family.at(*point)
        return self._point(request.model, options)

    def _family_of(self, spec: ModelSpec, base: TraceOptions, point: Point) -> TraceFamily | None:
        key = (spec.fingerprint, base)
        for family in self._families.setdefault(key, []):
            if point in family.domain:
                return family
        for domain in domains(point, thresholds(spec.config or {}), spec.max_seq_len):
            found = self._family(spec, base, domain, key, point)
            if found is not None:
                self._families[key].append(found)
                return found
        return None

    def _family(self, spec: ModelSpec, base: TraceOptions, domain: Domain, key: Any, point: Point) -> TraceFamily | None:
        if (key, domain) in self._refused:
            return None
        name = cache.key("family", spec.fingerprint, base.as_data(), repr(domain))
        stored = cache.get(name)
        if stored == b"none":
            return None
        if stored is not None:
            try:
                return TraceFamily.from_bytes(stored)
            except ValueError:
                pass  # made by a broken write or another format: made again
        from .depth import deepen
        from .stacks import NotPeriodic

        stacks, probe = self._shallow(spec, base)
        try:
            family = find_family(domain, probe, lambda trace: deepen(trace, stacks))
            if stacks and (spec.factory is not None or spec.trust_remote_code):
                self._prove(spec, base, family, point)
        except (NoFamily, NotPeriodic, IndexError, KeyError):  # the last two: a shape of stack that `deepen` does not know
            self._refused.add((key, domain))
            cache.put(name, b"none")
            return None
        except (CannotTell, UserError):  # a probe far out may fail where the point itself does not; if not, it says so itself
            self._refused.add((key, domain))
            return None
        cache.put(name, family.to_bytes())
        return family

    def _prove(self, spec: ModelSpec, base: TraceOptions, family: TraceFamily, point: Point) -> None:
        """Code that nobody knows may skip blocks, or treat one of them apart, where a shallow model cannot show it."""
        from .depth import same_structure

        full = self._trace(spec, replace(base, batch_size=point[0], seq_len=point[1]))
        if not same_structure(family.at(*point), full):
            raise NoFamily("the full model does not repeat its blocks as the shallow one does")

    def _point(self, spec: ModelSpec, options: TraceOptions) -> StepTrace:
        """A trace of one point that no family covers, at full depth."""
        key = (spec.fingerprint, options)
        if key not in self._points:
            from .steptrace import StepTrace

            name = cache.key("point", spec.fingerprint, options.as_data())
            stored = cache.get(name)
            if stored is not None:
                try:
                    self._points[key] = StepTrace.from_bytes(stored)
                    return self._points[key]
                except ValueError:
                    pass
            self._points[key] = self._trace(spec, options)
            cache.put(name, self._points[key].to_bytes())
        return self._points[key]

    def _shallow(self, spec: ModelSpec, base: TraceOptions) -> tuple[list[Stack], Callable[[int, int], StepTrace]]:
        """The stacks of the model, and what records its shallow form at (batch, seq)."""
        from .tracer import FakeModel

        key = (spec.fingerprint, base)
        if key not in self._models:
            model = FakeModel(spec, base)
            stacks = model.stacks()
            model.cut({s.path: s.shallow for s in stacks})
            self._models[key] = model, stacks
        model, stacks = self._models[key]

        def probe(batch: int, seq: int) -> StepTrace:
            if spec.factory is None:
                return model.record(batch, seq, with_graph=False)
            fresh = FakeModel(spec, base)  # a user's module may remember things from its last step
            fresh.cut({s.path: s.shallow for s in stacks})
            return fresh.record(batch, seq, with_graph=False)

        return stacks, probe

    @staticmethod
    def _trace(spec: ModelSpec, options: TraceOptions) -> StepTrace:
        from .tracer import trace_step

        return trace_step(spec, options, with_graph=False)


def thresholds(config: Mapping[str, Any]) -> list[int]:
    """Lengths at which a model of this config takes another path: its sliding windows and attention chunks."""
    found = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += thresholds(value)
        elif isinstance(value, int) and not isinstance(value, bool) and any(word in key for word in _THRESHOLD_WORDS):
            found.append(value)
    return found


def trace_options(request: Request, target: str = "cuda") -> TraceOptions:
    from .options import SdpaClass, TraceOptions

    return TraceOptions(
        batch_size=request.micro_batch_size,
        seq_len=request.seq_len,
        precision=request.precision,
        mode=request.mode,
        recompute=request.recompute,
        reentrant=request.reentrant,
        attention=request.attention,
        target=target,
        sdpa=SdpaClass.of(request.device.compute_capability),
        use_cache=request.use_cache,
        loss=request.loss,
        mlp_tiles=request.mlp_tiles,
        autocast_cache=not (
            request.strategy == "fsdp1" and (request.precision.endswith("-autocast") or request.adapter_settings is not None)
        ),
        target_len=request.target_len,
        image_size=request.image_size,
        frozen=request.frozen,
        adapter=request.adapter_settings,
        blockwise=request.method if request.method in LAYERWISE else "",
    )
