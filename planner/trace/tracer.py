"""Traces one micro step of a model under FakeTensorMode: no weights, no data, no GPU."""

from __future__ import annotations

import contextlib
import gc
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from ...errors import CannotTell, UserError
from ...models import BuiltModel, ModelSpec
from ...models.builder import casts_in_place
from ...models.late import delay, is_loaded
from .. import cache
from . import cuda
from .fakes import fake_of
from .options import AUTOCAST_DTYPE, PARAM_DTYPE, TraceOptions
from .prepare import ready
from .recorder import Recorder
from .shadow import Shadows
from .stacks import Stack, find_stacks
from .steptrace import Phase, StepTrace


def trace_step(
    spec: ModelSpec, options: TraceOptions, *, depth: Mapping[str, int] | None = None, with_graph: bool = True
) -> StepTrace:
    """Records one micro step of `spec`.

    `depth` cuts lists of blocks: path of a ModuleList or Sequential -> how many of its first blocks are kept.
    `with_graph=False` leaves `graph` None.

    **Raises:** UserError where the model or the batch cannot be made; CannotTell where the step depends on values that a
    trace does not have (data-dependent control flow), with the op and the module.
    """
    model = FakeModel(spec, options)
    model.cut(depth or {})
    return model.record(options.batch_size, options.seq_len, with_graph=with_graph)


def stacks_of(spec: ModelSpec, options: TraceOptions) -> list[Stack]:
    """The lists of equal blocks in the model, which a shallow trace may cut."""
    return FakeModel(spec, options).stacks()


_COMPILER = "torch._dynamo"


class FakeModel:
    """A model on the fake device, ready for its step: built once, recorded at as many sizes as are asked for."""

    def __init__(self, spec: ModelSpec, options: TraceOptions) -> None:
        """`options.batch_size` and `options.seq_len` do not matter here."""
        if options.precision not in PARAM_DTYPE:
            raise UserError(f"precision {options.precision!r} cannot be traced", f"Known: {', '.join(PARAM_DTYPE)}")
        self.spec = spec
        self.options = options
        delay()
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with _quiet(), self._fake_mode:
            self._built = ready(spec, options)

    def stacks(self) -> list[Stack]:
        """The lists of equal blocks that `cut` may shorten."""
        return find_stacks(self._built.module)

    def cut(self, depth: Mapping[str, int]) -> None:
        """Keeps the first blocks of each list: path -> how many."""
        for path, blocks in depth.items():
            stack: Any = self._built.module.get_submodule(path)
            del stack[blocks:]

    def record(self, batch_size: int, seq_len: int, *, with_graph: bool = True) -> StepTrace:
        options = replace(self.options, batch_size=batch_size, seq_len=seq_len)
        had_compiler = is_loaded(_COMPILER)
        trace = self._record(options, with_graph)
        if is_loaded(_COMPILER) and not had_compiler:
            # A step that makes a constant loads it, and the import keeps the frames that are open, with all that they hold:
            # this trace misses deaths, the next one does not.
            trace = self._record(options, with_graph)
        return trace

    def _record(self, options: TraceOptions, with_graph: bool) -> StepTrace:
        with (
            _quiet(),
            _no_garbage_collection(),
            _transformers_sees_real_masks(),
            casts_in_place(),
            _keeps_its_types(self._built.module, self._fake_mode),
            cuda.as_cuda(options.target == "cuda", options.sdpa) as choices,
        ):
            return _record(self.spec, options, self._fake_mode, self._built, choices, with_graph)


def _record(
    spec: ModelSpec,
    options: TraceOptions,
    fake_mode: FakeTensorMode,
    built: BuiltModel,
    choices: cuda.Choices,
    with_graph: bool,
) -> StepTrace:
    module = built.module
    batch = _batch(built, options, fake_mode)
    recorder = Recorder(module, fake_mode, storage_bytes=choices.storage_bytes, with_graph=with_graph)
    dtype = AUTOCAST_DTYPE.get(options.precision)
    autocast: Any = contextlib.nullcontext()
    if dtype:
        autocast = torch.autocast("cpu", dtype=getattr(torch, dtype), cache_enabled=options.autocast_cache)
    grad = torch.no_grad() if options.mode == "inference" else contextlib.nullcontext()
    try:
        with recorder, _casts_die_in_order(recorder):
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
                assumptions=[*built.notes, *choices.assumptions],
            )
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        where = recorder.where() or "the model"
        raise CannotTell(
            f"{spec.name}: {where} decides by the values of a tensor ({error.func}), which no trace knows"
        ) from error
    except (UserError, CannotTell, KeyboardInterrupt):
        raise
    except UnsupportedOperatorException as error:
        raise CannotTell(f"{spec.name}: the op {error.func} has no fake implementation, so its memory is not known") from error
    except Exception as error:
        where = recorder.where() or "the step"
        if "autocast::prioritize" in str(error):  # torch says no more than this, on a GPU too
            raise UserError(
                f"{spec.name}: {where} joins tensors of both 16-bit types under autocast, which torch refuses: GPTQ's products "
                f"are of float16, and the precision is {options.precision}",
                "Use --precision fp16-autocast or fp16",
            ) from error
        line = " ".join(str(error).split())[:300]
        raise UserError(f"{spec.name}: {where} raised {type(error).__name__}: {line}", "--debug shows the traceback") from error


def _batch(built: BuiltModel, options: TraceOptions, fake_mode: FakeTensorMode) -> dict[str, Any]:
    """The batch as fake tensors that remember small integer values."""
    real = built.make_batch(options.batch_size, options.seq_len, target_len=options.target_len, image_size=options.image_size)
    tensors = {id(v): v for v in real.values() if isinstance(v, torch.Tensor)}  # one that is given twice is one
    owners = Counter(_storage_key(v) for v in tensors.values())
    fakes = {key: _fake_input(v, fake_mode, alone=owners[_storage_key(v)] == 1) for key, v in tensors.items()}
    return {name: fakes.get(id(v), v) for name, v in real.items()}


def _storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share a storage; a layout without storages (sparse) shares none."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _fake_input(value: torch.Tensor, fake_mode: FakeTensorMode, *, alone: bool) -> torch.Tensor:
    fake = fake_of(fake_mode, value) if alone else fake_mode.from_tensor(value)
    if not value.is_floating_point():
        Shadows.give(fake, value)
    return fake


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
def _keeps_its_types(module: torch.nn.Module, fake_mode: FakeTensorMode) -> Iterator[None]:
    """Parameters that a step converts for good, as bitsandbytes does with biases, are again what they were when it is over.

    So every recording of a model is that of its first step, whatever was recorded before.
    """
    before = [(param, param.dtype, param.data) for param in module.parameters()]
    try:
        yield
    finally:
        with fake_mode:
            for param, dtype, data in before:
                if param.dtype != dtype:
                    param.data = data


@contextlib.contextmanager
def _casts_die_in_order(recorder: Recorder) -> Iterator[None]:
    """autocast's cache is a hash map by address: where its casts die together, their order differs from run to run."""
    clear = torch.clear_autocast_cache

    def clear_in_order() -> None:
        with recorder.frees_in_order():
            clear()

    torch.clear_autocast_cache = clear_in_order  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.clear_autocast_cache = clear  # type: ignore[assignment]


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
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(level)
