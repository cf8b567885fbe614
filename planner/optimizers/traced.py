"""Rules of torch's own optimizers: the real optimizer steps fake tensors, and its allocations are recorded.

Nothing about an optimizer is written down here but its name and the arguments that make it; state, temporaries and their
order come from `torch.optim` itself.  `foreach` is forced where CUDA would choose it: the default looks at the device
(torch/optim/optimizer.py, `_default_to_fused_or_foreach`), which is a fake CPU here.
"""

from __future__ import annotations

import functools
import json
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

from ...errors import CannotTell, UserError, did_you_mean
from ...models.late import delay
from .. import cache
from .rule import OptimizerRule, OptimizerTensor, StepEvent, StepEvents, StepKind

IMPLS = ("default", "foreach", "fused", "for-loop", "foreach-2.0")
# What torch before 2.1 did otherwise, which only published runs ask for.  `foreach-2.0`: the Adams' denominators were a second
# list beside the square roots that they are made of (pytorch/pytorch pull requests 104780 and 104898, July 2023).  Before 2.0
# foreach was no default (torch/optim/optimizer.py, `_default_to_fused_or_foreach`, is of 2.0).
_SECOND_LIST = ("adam", "adamw", "adamw-amsgrad")
_NO_LIST = ("sgd",)  # one `_foreach_add_` of the gradients, then as now
# name -> (class, arguments, default implementation on CUDA).  torch/optim/*.py: foreach wherever it exists, except Adafactor
# (`foreach=None` picks the single-tensor loop, torch/optim/_adafactor.py).
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "adamw": ("AdamW", {}, "foreach"),
    "adam": ("Adam", {}, "foreach"),
    "adamw-amsgrad": ("AdamW", {"amsgrad": True}, "foreach"),
    "sgd": ("SGD", {"lr": 0.1}, "foreach"),
    "sgd-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}, "foreach"),
    "adagrad": ("Adagrad", {}, "foreach"),
    "adadelta": ("Adadelta", {}, "foreach"),
    "adamax": ("Adamax", {}, "foreach"),
    "nadam": ("NAdam", {}, "foreach"),
    "radam": ("RAdam", {}, "foreach"),
    "rmsprop": ("RMSprop", {}, "foreach"),
    "rmsprop-momentum": ("RMSprop", {"momentum": 0.9}, "foreach"),
    "rprop": ("Rprop", {}, "foreach"),
    "asgd": ("ASGD", {}, "foreach"),
    "adafactor": ("Adafactor", {}, "for-loop"),
}
_FUSED = {"adamw", "adam", "adamw-amsgrad", "sgd", "sgd-momentum", "adagrad"}


def names() -> tuple[str, ...]:
    return tuple(_OPTIMIZERS)


def traced_rule(name: str, impl: str = "default", *, target: str = "cuda") -> TracedRule:
    """The rule of `torch.optim`'s optimizer `name`.

    `impl`: default (what torch picks on `target`), foreach, fused, for-loop.
    Raises UserError for an unknown name or an implementation that the optimizer lacks.
    """
    if name not in _OPTIMIZERS:
        raise UserError(f"--optimizer {name}: not known", did_you_mean(name, _OPTIMIZERS) or f"Known: {', '.join(_OPTIMIZERS)}")
    if impl not in IMPLS:
        raise UserError(f"--optimizer-impl {impl}: not known", f"Choose one of {', '.join(IMPLS)}")
    if impl == "fused" and name not in _FUSED:
        raise UserError(f"--optimizer-impl fused: torch has no fused {name}", "Use foreach or for-loop")
    if impl == "foreach-2.0" and name not in _SECOND_LIST:
        raise UserError(f"--optimizer-impl foreach-2.0: not known of {name}", "Use foreach or for-loop")
    if impl == "default":
        impl = _OPTIMIZERS[name][2] if target == "cuda" else "for-loop"
    return TracedRule(name, impl, target)


def impl_in(name: str, impl: str, torch_version: tuple[int, int] | None) -> str:
    """The implementation that torch of that version (None: today's) runs on CUDA where `impl` is asked for.

    Raises CannotTell for the foreach steps before 2.1 whose lists are not known.
    """
    if torch_version is None or torch_version >= (2, 1) or impl not in ("default", "foreach"):
        return impl
    if impl == "default":
        impl = _OPTIMIZERS[name][2] if torch_version >= (2, 0) else "for-loop"
    if impl != "foreach" or name in _NO_LIST:
        return impl
    if name not in _SECOND_LIST:
        raise CannotTell(f"the foreach step of {name} in torch {torch_version[0]}.{torch_version[1]} is not modelled")
    return "foreach-2.0"


class TracedRule(OptimizerRule):
    def __init__(self, name: str, impl: str, target: str = "cuda") -> None:
        self.name = name
        self.impl = impl
        self.target = target

    def step(self, tensors: Sequence[OptimizerTensor]) -> StepEvents:
        return _events(self.name, self.impl, self.target, tuple(tensors))


@functools.lru_cache(maxsize=32)
def _events(name: str, impl: str, target: str, tensors: tuple[OptimizerTensor, ...]) -> StepEvents:
    key = cache.key("optimizer", name, impl, target, [[t.shape, t.dtype, t.group] for t in tensors])
    stored = cache.get(key)
    if stored is not None:
        try:
            return _read(stored)
        except (ValueError, TypeError, KeyError):
            pass  # not of this format: made again
    events = _trace(name, impl, target, tensors)
    cache.put(key, _write(events))
    return events


def _write(events: StepEvents) -> bytes:
    rows = {
        part: [[int(e.kind), e.slot, e.nbytes, e.tensor] for e in getattr(events, part)] for part in ("init", "first", "later")
    }
    return zlib.compress(json.dumps(rows).encode(), 1)


def _read(data: bytes) -> StepEvents:
    try:
        rows = json.loads(zlib.decompress(data))
    except zlib.error as error:
        raise ValueError(str(error)) from error
    parts = {part: tuple(StepEvent(StepKind(k), slot, size, tensor) for k, slot, size, tensor in rows[part]) for part in rows}
    return StepEvents(**parts)


def _trace(name: str, impl: str, target: str, tensors: tuple[OptimizerTensor, ...]) -> StepEvents:
    import contextlib

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    delay()
    # meta tensors are the fastest that have no data; torch lets the fused kernels run on named devices only: fake CPU tensors
    device = "cpu" if impl == "fused" or target == "cpu" else "meta"
    fake = FakeTensorMode() if device == "cpu" else contextlib.nullcontext()
    if not tensors:
        return StepEvents((), ())
    with fake:
        params = [torch.nn.Parameter(torch.empty(t.shape, dtype=getattr(torch, t.dtype), device=device)) for t in tensors]
        groups: dict[int, list[Any]] = {}
        for tensor, param in zip(tensors, params, strict=True):
            groups.setdefault(tensor.group, []).append(param)
        optimizer = make_optimizer(name, impl.removesuffix("-2.0"), [{"params": g} for g in groups.values()])
        for param in params:
            param.grad = torch.empty_like(param)
        index = {id(p): i for i, p in enumerate(params)}
        made = [  # some constructors make the state already (Adagrad)
            (value.untyped_storage().nbytes(), index[id(param)])
            for param, state in optimizer.state.items()
            for value in state.values()
            if hasattr(value, "untyped_storage") and not _on_host(value, target, impl)
        ]
        init = tuple(StepEvent(StepKind.STATE, slot, nbytes, tensor) for slot, (nbytes, tensor) in enumerate(made))
        first = _record_step(optimizer, params, target, impl, value=1.5)
        later = _record_step(optimizer, params, target, impl, value=10.5)  # RAdam changes its path after five steps
    return StepEvents(first, later, init)


def make_optimizer(name: str, impl: str, params: Sequence[Any]) -> Any:
    """The torch.optim object called `name` over parameters or groups; impl "default" leaves the choice to torch.

    Raises UserError for an implementation that the installed torch does not have.
    """
    import torch

    if impl == "foreach-2.0":
        raise UserError("--optimizer-impl foreach-2.0: no installed torch runs it", "Use foreach, which is today's")

    class_name, arguments, _ = _OPTIMIZERS[name]
    how = {"default": {}, "fused": {"fused": True}}.get(impl, {"foreach": impl == "foreach"})
    return getattr(torch.optim, class_name)(params, **arguments, **how)


def _record_step(optimizer: Any, params: list[Any], target: str, impl: str, *, value: float) -> tuple[StepEvent, ...]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from ..trace.meta_results import MetaResults

    events: list[list[Any]] = []  # [kind, slot, nbytes, tensor]
    live: dict[int, Any] = {}
    known = {id(t.untyped_storage()) for t in _state_tensors(optimizer)}
    owner = {p.untyped_storage()._cdata: i for i, p in enumerate(params)}
    slots = iter(range(1 << 30))
    results = MetaResults()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:  # step counts and the like
                return value
            out = results.run(func, args, kwargs or {})
            tensor = _owner(args, owner)
            if impl == "foreach-2.0" and func is torch.ops.aten._foreach_add_.Scalar:
                self.copy(args[0])
            for result in out if isinstance(out, (list, tuple)) else (out,):
                if hasattr(result, "untyped_storage"):
                    self.see(result, tensor)
            return out

        def copy(self, changed: list[Any]) -> None:
            """Lists that live as long as those that are changed in place today."""
            for old in changed:
                if not _on_host(old, target, impl):
                    new = [torch.empty_like(old)]
                    self.see(new[0], -1)
                    weakref.finalize(old.untyped_storage(), new.clear)

        def see(self, tensor: Any, owning: int) -> None:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in live or key in owner or id(storage) in known:
                return
            slot, nbytes = next(slots), storage.nbytes()
            host = _on_host(tensor, target, impl)
            if not host:
                events.append([StepKind.TEMP, slot, nbytes, owning])

            def died(_: Any) -> None:
                del live[key]
                if not host:
                    events.append([StepKind.FREE, slot, 0, owning])

            live[key] = weakref.ref(storage, died)
            slot_of[key] = slot

    slot_of: dict[int, int] = {}
    for state in _state_tensors(optimizer):
        live[state.untyped_storage()._cdata] = None
    for param in params:
        owner[param.grad.untyped_storage()._cdata] = owner[param.untyped_storage()._cdata]
    with Watch():
        optimizer.step()
        kept = {slot_of.get(t.untyped_storage()._cdata) for t in _state_tensors(optimizer)}
        count = len(events)
    for event in events[:count]:
        if event[0] is StepKind.TEMP and event[1] in kept:
            event[0] = StepKind.STATE
    return tuple(StepEvent(*event) for event in events[:count])


def _on_host(tensor: Any, target: str, impl: str) -> bool:
    """Step counters stay on the host unless the optimizer is fused: torch made them there although the parameter is not."""
    return target == "cuda" and impl != "fused" and tensor.device.type == "cpu"


def _owner(args: Any, owner: dict[int, int]) -> int:
    for value in args:
        if hasattr(value, "untyped_storage"):
            found = owner.get(value.untyped_storage()._cdata)
            if found is not None:
                return found
    return -1


def _state_tensors(optimizer: Any) -> list[Any]:
    return [v for state in optimizer.state.values() for v in state.values() if hasattr(v, "untyped_storage")]
