"""Real values of small integer and bool tensors, beside their fake twins.

Models read a few values on the host: whether a mask is all ones, where the padding starts, how long the longest sample is.
Fake tensors have none, and raise.  So whatever is computed only from factory calls (arange, ones, full ...) and from the
batch is computed for real as well, as long as it stays small, and host reads are answered from there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from .fakes import fake_of

aten = torch.ops.aten
_MAX_NUMEL = 1 << 22  # elements; larger tensors lose their values: the host reads ids and short masks, not masks of S x S
_HOST_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
_DATA_SHAPED = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
_FACTORIES = {
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.ones.default,
    aten.zeros.default,
    aten.full.default,
    aten.scalar_tensor.default,
    aten.tril_indices.default,
    aten.triu_indices.default,
}


class Shadows:
    """The values known so far.  A value lives on the fake tensor that it belongs to, and dies with it."""

    UNKNOWN = object()

    @staticmethod
    def give(fake: torch.Tensor, real: torch.Tensor) -> None:
        """Says that `fake` holds the values of `real`."""
        fake._memplan_value = real  # type: ignore[attr-defined]

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op that needs values, when they are known; UNKNOWN when they are not or not needed."""
        if func in _HOST_READS:
            real = _real_arguments(args)
            if real is not None:
                with no_dispatch():
                    return func(*real, **kwargs)
        elif func in _DATA_SHAPED:
            real = _real_arguments(args)
            if real is not None:
                mode = args[0].fake_mode
                with no_dispatch():
                    result = func(*real, **kwargs)
                return _faked(mode, result)
        return self.UNKNOWN

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Computes the values of `out` when everything that it depends on is known."""
        mutable = func._schema.is_mutable
        if not args and func not in _FACTORIES:
            return
        if func not in _FACTORIES:
            known = False
            for value in args:
                if isinstance(value, torch.Tensor):
                    if not hasattr(value, "_memplan_value"):
                        if mutable and args and hasattr(args[0], "_memplan_value"):
                            del args[0]._memplan_value
                        return
                    known = True
                elif isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
                    if not all(v is None or hasattr(v, "_memplan_value") for v in value):
                        return
                    known = True
            if not known:
                return
        if not isinstance(out, torch.Tensor) or out.numel() > _MAX_NUMEL:
            return
        real = _real_arguments(args)
        if real is None or any(isinstance(v, torch.Tensor) for v in kwargs.values()):
            return
        with no_dispatch():
            try:
                if mutable:
                    func(*real, **kwargs)
                    self.give(out, real[0])
                else:
                    self.give(out, func(*real, **kwargs))
            except Exception:  # values are a help, never a reason to fail
                return


def _real_arguments(args: Any) -> list[Any] | None:
    real: list[Any] = []
    for value in args:
        if isinstance(value, torch.Tensor):
            shadow = getattr(value, "_memplan_value", None)
            if shadow is None:
                return None
            real.append(shadow)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            inner = _real_arguments([v for v in value if v is not None])
            if inner is None:
                return None
            items = iter(inner)
            real.append([None if v is None else next(items) for v in value])
        else:
            real.append(value)
    return real


def _faked(mode: Any, result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        fake = fake_of(mode, result)
        Shadows.give(fake, result)
        return fake
    return tuple(_faked(mode, r) for r in result)
