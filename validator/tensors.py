"""Bytes per component, by walking the storages that the model and the optimizer hold: each storage once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def component_bytes(module: Any, optimizer: Any, device: str = "cpu") -> dict[str, int]:
    """COMPONENTS -> bytes of the storages on `device`; a storage counts for the first component that holds it.

    A DTensor counts by the shard that lies here.
    """
    seen: set[int] = set()
    state = [v for values in optimizer.state.values() for v in _tensors(values)] if optimizer is not None else []
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    parts = (("param", module.parameters()), ("buffer", module.buffers()), ("grad", grads), ("optimizer_state", state))
    return {name: _bytes(tensors, seen, device) for name, tensors in parts}


def plain_tensor_bytes(module: Any, device: str = "cpu") -> int:
    """Bytes on `device` of what modules hold as plain attributes: neither parameter nor buffer, so `to` does not move it."""
    seen: set[int] = set()
    _bytes((*module.parameters(), *module.buffers()), seen, device)
    return _bytes((t for part in module.modules() for t in _tensors(list(vars(part).values()))), seen, device)


def _bytes(tensors: Iterable[Any], seen: set[int], device: str) -> int:
    total = 0
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage.device.type == device and storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total


def _tensors(value: Any) -> Iterable[Any]:
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
