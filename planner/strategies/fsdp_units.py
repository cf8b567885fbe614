"""What FSDP wraps: which modules are units of their own, and whose parameters they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...errors import UserError
from ..trace.steptrace import EventKind, Pass, StepTrace, TensorSlot
from .fsdp_settings import FsdpSettings

ROOT = ""
_MIN_BLOCKS = 2
_LISTS = ("ModuleList", "Sequential")


def units_of(trace: StepTrace, settings: FsdpSettings) -> dict[int, tuple[str, list[TensorSlot]]]:
    """{module index: (path, parameters)} of every unit that has parameters, the root included, in the model's order."""
    names = set(_wrapped(trace, settings))
    parts: dict[str, list[TensorSlot]] = {}
    for slot in trace.params:
        parts.setdefault(wrapped_by(slot.fqn, names), []).append(slot)
    return {index: (m.fqn, parts[m.fqn]) for index, m in enumerate(trace.modules) if m.fqn in parts}


def _wrapped(trace: StepTrace, settings: FsdpSettings) -> list[str]:
    if settings.auto_wrap_policy == "NO_WRAP":
        return []
    if settings.auto_wrap_policy == "SIZE_BASED_WRAP":
        return _by_size(trace, settings.min_num_params)
    classes = settings.transformer_layer_cls_to_wrap
    if not classes:
        return longest_list([(m.fqn, m.class_name) for m in trace.modules])
    known = {m.class_name for m in trace.modules}
    for name in classes:
        if name not in known:
            what = f"transformer_layer_cls_to_wrap: the model has no module of class {name}"
            raise UserError(what, "`memplan trace MODEL` lists its modules")
    return [m.fqn for m in trace.modules if m.class_name in classes and m.fqn != ROOT]


def _by_size(trace: StepTrace, least: int) -> list[str]:
    """`size_based_auto_wrap_policy`: from the inside out, a module that still has at least `least` parameters of its own."""
    left = {m.fqn: 0 for m in trace.modules}
    for slot in trace.params:
        path = slot.fqn.rpartition(".")[0]
        while True:
            if path in left:
                left[path] += slot.numel
            if not path:
                break
            path = path.rpartition(".")[0]
    found: list[str] = []
    for module in sorted(trace.modules, key=lambda m: depth(m.fqn)):
        if module.fqn == ROOT or module.class_name in _LISTS or left[module.fqn] < least:
            continue
        found.append(module.fqn)
        size, path = left[module.fqn], module.fqn
        while path:
            path = path.rpartition(".")[0]
            if path in left:
                left[path] -= size
    return found


def depth(fqn: str) -> int:
    """Sorts the innermost first and the root last, as modules are wrapped."""
    return -len(fqn.split(".")) if fqn else 0


def wrapped_by(fqn: str, units: Iterable[str]) -> str:
    """The innermost unit that holds a parameter; the root where there is none."""
    return max((b for b in units if fqn.startswith(f"{b}.")), key=len, default=ROOT)


def longest_list(modules: Sequence[tuple[str, str]]) -> list[str]:
    """The blocks of the longest list of modules of one class; the first of several."""
    children: dict[str, list[tuple[str, str]]] = {}
    for fqn, kind in modules:
        if fqn:
            children.setdefault(fqn.rpartition(".")[0], []).append((fqn, kind))
    best: list[str] = []
    for fqn, kind in modules:
        found = children.get(fqn, [])
        if kind in _LISTS and len(found) >= _MIN_BLOCKS and len({k for _, k in found}) == 1 and len(found) > len(best):
            best = [name for name, _ in found]
    return best


def times_entered(trace: StepTrace, fqn: str) -> int:
    """How often the forward of a module begins in one micro step."""
    return sum(
        kind is EventKind.ENTER and aux == Pass.FORWARD and trace.call_fqn(arg) == fqn for kind, arg, aux in trace.events()
    )
