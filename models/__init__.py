"""WHAT is trained: a reference becomes a `ModelSpec`, and a `ModelSpec` becomes a module with an example batch.

spec = load("meta-llama/Llama-3.1-8B")                 # stdlib only: no torch, no transformers
built = build(spec, dtype=torch.bfloat16)              # a module with random weights; nothing is downloaded
loss = built.step(built.module, built.make_batch(1, 2048))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["BuiltModel", "FactoryRef", "ModelSpec", "build", "check_sizes", "load"]

if TYPE_CHECKING:
    from .builder import build
    from .built import BuiltModel
    from .reference import load
    from .spec import FactoryRef, ModelSpec, check_sizes

_LAZY = {
    "BuiltModel": ".built",
    "FactoryRef": ".spec",
    "ModelSpec": ".spec",
    "build": ".builder",
    "check_sizes": ".spec",
    "load": ".reference",
}


def __getattr__(name: str) -> Any:  # the command line asks for `models.cli` alone: nothing else may load with it
    if name not in _LAZY:
        raise AttributeError(f"module 'memplan.models' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
