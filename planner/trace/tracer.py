"""Traces one micro step of a model under FakeTensorMode: no weights, no data, no GPU."""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from ...errors import CannotTell, UserError
from ...models import ModelSpec, build
from .. import cache
from . import cuda
from .depth import Stack, find_stacks
from .options import AUTOCAST_DTYPE, PARAM_DTYPE, TraceOptions
from .recorder import Recorder
from .shadow import Shadows
from .steptrace import Phase, StepTrace

def trace_step(spec: ModelSpec, options: TraceOptions, *, depth: Mapping[str, int] | None = None, with_graph: bool = True) -> StepTrace:
    """Records one micro step of `spec`.

    `depth` cuts lists of blocks: path of a ModuleList or Sequential -> how many of its first blocks are kept.
    `with_graph=False` leaves `graph` None.

    **Raises:** UserError where the model or the batch cannot be made; CannotTell where the step depends on values that a
    trace does not have (data-dependent control flow), with the op and the module.
    """
    if options.precision not in PARAM_DTYPE:
        raise UserError(f"precision {options.precision!r} cannot be traced", f"Known: {', '.join(PARAM_DTYPE)}")
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with _quiet():
        with fake_mode:
            built = build(spec, dtype=getattr(torch, PARAM_DTYPE[options.precision]), attention=options.attention)
            module = built.module
            for path, blocks in (depth or {}).items():
                del module.get_submodule(path)[blocks:]  # type: ignore[attr-defined]
            assumptions = [*built.notes, *prepare(module, options)]
        with _no_garbage_collection(), _transformers_sees_real_masks(), cuda.as_cuda(options.target == "cuda", options.sdpa) as choices:
            return _record(spec, options, fake_mode, built, choices, assumptions, with_graph)


def prepare(module: torch.nn.Module, options: TraceOptions) -> list[str]:
    """Puts a fresh module into the state that `options` asks for; a real run does the same.  Returns what was assumed."""
    said: list[str] = []
    for prefix in options.frozen:
        hit = [p for name, p in module.named_parameters() if name.startswith(prefix)]
        if not hit:
            raise UserError(f"--freeze {prefix}: no parameter begins with that", "`memplan trace MODEL --params` lists them")
        for param in hit:
            param.requires_grad_(False)
    module.train(options.mode != "inference")
    cached = [c for c in _configs(module) if getattr(c, "use_cache", None)]
    if cached and not options.use_cache:
        for config in cached:
            config.use_cache = False
        said.append("the model builds no key-value cache (use_cache=False, as transformers' Trainer sets)")
    if options.recompute == "full":
        if not getattr(module, "supports_gradient_checkpointing", False):
            raise UserError(
                f"{type(module).__name__} has no activation checkpointing of its own", "Use --recompute none for this model"
            )
        module.gradient_checkpointing_enable({"use_reentrant": options.reentrant})  # type: ignore[operator]
        if options.reentrant:
            module.enable_input_require_grads()  # type: ignore[operator]
        said.append("activation checkpointing is the model's own, " + ("reentrant" if options.reentrant else "non-reentrant"))
    return said


def _configs(module: torch.nn.Module) -> list[Any]:
    """The config objects of a transformers model: its own and those of its parts (text, vision ...)."""
    own = getattr(module, "config", None)
    parts = [getattr(child, "config", None) for child in module.modules()]
    return list({id(c): c for c in (own, *parts) if c is not None}.values())


def _record(
    spec: ModelSpec,
    options: TraceOptions,
    fake_mode: FakeTensorMode,
    built: Any,
    choices: cuda.Choices,
    assumptions: list[str],
    with_graph: bool,
) -> StepTrace:
    module = built.module
    batch = _batch(built, options, fake_mode)
    recorder = Recorder(module, fake_mode, storage_bytes=choices.storage_bytes, with_graph=with_graph)
    dtype = AUTOCAST_DTYPE.get(options.precision)
    autocast = torch.autocast("cpu", dtype=getattr(torch, dtype)) if dtype else contextlib.nullcontext()
    grad = torch.no_grad() if options.mode == "inference" else contextlib.nullcontext()
    try:
        with recorder:
            recorder.begin([t for t in batch.values() if isinstance(t, torch.Tensor)])
            with grad, autocast:
                loss = built.step(module, batch)
            if options.mode == "train":
                if not loss.requires_grad:
                    raise UserError(f"{spec.name}: the loss depends on no trainable parameter", "Unfreeze some parameters")
                if options.precision == "fp16-autocast":
                    loss = loss * 65536.0  # GradScaler.scale
                recorder.enter_phase(Phase.BACKWARD)
                loss.backward()
            kept = recorder.storages(loss)
            return recorder.finish(
                name=spec.name,
                options=options.as_data(),
                versions=dict(cache.library_versions()),
                loss=kept[0] if kept else -1,
                assumptions=[*assumptions, *choices.assumptions],
            )
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        where = recorder.where() or "the model"
        raise CannotTell(f"{spec.name}: {where} decides by the values of a tensor ({error.func}), which no trace knows") from error
    except (UserError, CannotTell, KeyboardInterrupt):
        raise
    except UnsupportedOperatorException as error:
        raise CannotTell(f"{spec.name}: the op {error.func} has no fake implementation, so its memory is not known") from error
    except Exception as error:
        where = recorder.where() or "the step"
        line = " ".join(str(error).split())[:300]
        raise UserError(f"{spec.name}: {where} raised {type(error).__name__}: {line}", "--debug shows the traceback") from error


def _batch(built: Any, options: TraceOptions, fake_mode: FakeTensorMode) -> dict[str, Any]:
    """The batch as fake tensors that remember small integer values."""
    real = built.make_batch(options.batch_size, options.seq_len, target_len=options.target_len, image_size=options.image_size)
    return {k: _fake_input(v, fake_mode) for k, v in real.items()}


def _fake_input(value: Any, fake_mode: FakeTensorMode) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    fake = fake_mode.from_tensor(value)
    if not value.is_floating_point():
        Shadows.give(fake, value)
    return fake


def stacks_of(spec: ModelSpec, options: TraceOptions) -> list[Stack]:
    """The lists of equal blocks in the model, which a shallow trace may cut."""
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True):
        built = build(spec, dtype=getattr(torch, PARAM_DTYPE[options.precision]), attention=options.attention)
        prepare(built.module, options)
        return find_stacks(built.module)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection in the middle of a step would free reference cycles at a place that means nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _transformers_sees_real_masks() -> Iterator[None]:
    """transformers takes another mask path for fake tensors (`is_tracing`), which allocates more and picks other kernels.

    The values that the eager path would read are known here (see `shadow`), so it may read them.
    """
    try:
        from transformers import masking_utils
    except ImportError:  # transformers is not needed for a user's own module
        yield
        return
    original = masking_utils.is_tracing
    masking_utils.is_tracing = lambda tensor=None: False
    try:
        yield
    finally:
        masking_utils.is_tracing = original


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of a model that is only traced would mislead; errors still come."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        level = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(level)
