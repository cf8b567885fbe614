"""memplan: will this training run fit, where does every byte go, and what should change if it does not?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

__all__ = ["__version__", "fits", "max_batch", "max_seq", "min_gpus", "plan", "trace", "validate"]

if TYPE_CHECKING:
    from .planner.api import fits, trace
    from .planner.inverse import max_batch, max_seq, min_gpus
    from .planner.search.api import plan
    from .validator.api import validate

_LAZY = {
    "fits": ".planner.api",
    "trace": ".planner.api",
    "max_batch": ".planner.inverse",
    "max_seq": ".planner.inverse",
    "min_gpus": ".planner.inverse",
    "plan": ".planner.search.api",
    "validate": ".validator.api",
}


def __getattr__(name: str) -> Any:  # importing memplan must cost nothing: the parts load when they are used
    if name not in _LAZY:
        raise AttributeError(f"module 'memplan' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
