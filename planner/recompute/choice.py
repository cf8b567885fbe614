"""A question that leaves the recompute policy to memplan (`--recompute selective`), with the policy chosen.

Apart from `selective`, which most questions never need.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import CannotTell
from .policy import is_selective

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.source import TraceSource


def resolved(request: Request, traces: TraceSource) -> Request:
    """The question itself; with its best policy, and a note that says so, where it asks for `selective`.

    Raises as `selective.resolve` does.
    """
    if not is_selective(request.recompute):
        return request
    from .selective import resolve

    selected = resolve(request, traces)
    return replace(selected.request, defaults=(*request.defaults, *selected.notes))


def chosen(request: Request, traces: TraceSource) -> Request:
    """As `resolved`; the question itself where that cannot tell, which the prediction then says."""
    try:
        return resolved(request, traces)
    except CannotTell:
        return request
