"""Results of ops on meta tensors, fast: each op runs once for one form of arguments; after that only its outputs are made.

For what runs the same few ops on hundreds of tensors, as an optimizer does.  Where anything is out of the ordinary (a view, a
tensor that is not on meta, an argument that cannot be hashed) the op itself runs.
"""

from __future__ import annotations

from typing import Any

import torch

_UNKNOWN = object()


class MetaResults:
    """Answers ops in place of calling them."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}  # op and form of its arguments -> what to make

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func(*args, **kwargs)` returns: the same tensors where it writes in place, new ones of the same form else."""
        if func._schema.name.startswith("aten::_foreach_"):
            size = _list_size(args, kwargs)
            if size > 1:
                results = [self._single(func, [a[i : i + 1] if isinstance(a, list) else a for a in args]) for i in range(size)]
                return None if results[0] is None else [result[0] for result in results]
        return self._one(func, args, kwargs)

    def _single(self, func: Any, args: list[Any]) -> Any:
        return self._one(func, args, {})

    def _one(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = _form((func, *args, *kwargs.items()))
        if key is None:
            return func(*args, **kwargs)
        how = self._known.get(key)
        if how is None:
            out = func(*args, **kwargs)
            unchanged = _form((func, *args, *kwargs.items())) == key
            self._known[key] = _recipe(out, _tensors(args, kwargs)) if unchanged else _UNKNOWN
            return out
        return func(*args, **kwargs) if how is _UNKNOWN else _make(how, _tensors(args, kwargs))


def _list_size(args: Any, kwargs: Any) -> int:
    """How many tensors a foreach op goes through one by one; 0 where its arguments do not say so plainly."""
    sizes = {len(a) for a in args if isinstance(a, (list, tuple))}
    plain = not kwargs and not any(isinstance(a, (torch.Tensor, tuple)) for a in args)
    return sizes.pop() if plain and len(sizes) == 1 else 0


def _form(value: Any) -> Any:
    """What decides the outputs' form, hashable; None where that cannot be said."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            return None
        return value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
    if isinstance(value, (list, tuple)):
        forms = tuple([_form(v) for v in value])
        return None if None in forms else (type(value), forms)
    try:
        hash(value)
    except TypeError:
        return None
    return type(value), value  # 1, 1.0 and True are equal


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [v for v in value if isinstance(v, torch.Tensor)]
    return found


def _recipe(out: Any, given: list[torch.Tensor]) -> Any:
    """How to make `out` again from arguments of the same form: an argument's index, a new tensor's form, or a list of these."""
    if out is None:
        return ("none",)
    if isinstance(out, (list, tuple)):
        parts = [_recipe(o, given) for o in out]
        storages = {o.untyped_storage()._cdata for o in out if isinstance(o, torch.Tensor)}
        return _UNKNOWN if _UNKNOWN in parts or len(storages) < len(out) else ("list", type(out), parts)
    if not isinstance(out, torch.Tensor) or not out.is_meta:
        return _UNKNOWN
    for index, tensor in enumerate(given):
        if out is tensor:
            return ("argument", index)
    if any(out.untyped_storage()._cdata == t.untyped_storage()._cdata for t in given):
        return _UNKNOWN  # a view
    form = (tuple(out.shape), out.stride(), out.dtype)
    made = _make(("new", *form), [])
    return ("new", *form) if made.untyped_storage().nbytes() == out.untyped_storage().nbytes() else _UNKNOWN


def _make(how: Any, given: list[torch.Tensor]) -> Any:
    kind = how[0]
    if kind == "new":
        return torch.empty_strided(how[1], how[2], dtype=how[3], device="meta")
    if kind == "argument":
        return given[how[1]]
    if kind == "none":
        return None
    return how[1](_make(part, given) for part in how[2])
