"""Packages that torch and transformers import on the way to a model, and that no trace needs: they load when they are used.

`FakeTensorMode` asks for `torch._dynamo.config` and gets the whole compiler with it (torch/_subclasses/fake_tensor.py);
transformers' losses ask for `scipy.optimize.linear_sum_assignment` (transformers/loss/loss_for_object_detection.py).  Together
they are a fifth of a first answer.  `delay` puts such a package into `sys.modules` unexecuted: its `__init__` runs, in the same
module object, as soon as anyone wants more of it than what is written down here.  So who compiles later finds all as it would
have been, and what is not foreseen costs time, not a failure.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_lock = threading.RLock()


def delay() -> None:
    """Delays the packages of this page that are installed and not loaded yet.  Call it before the first fake mode is made."""
    with _lock:
        if "torch" in sys.modules:
            _put("torch._dynamo", {"config", "_trace_wrapped_higher_order_op"}, _Compiler)
        _put("scipy.optimize", set(), _Assignment)


def is_loaded(name: str) -> bool:
    """Whether the package has run, not only been put in its place."""
    return name in sys.modules and name not in _delayed


def import_transformers() -> None:
    """Imports transformers and its list of models, which it makes by reading the source of every model: once, not twice.

    `transformers` and `transformers.models` ask for the list by a Path and by a str, and its cache takes these for two
    (transformers/utils/import_utils.py, create_import_structure_from_path).
    """
    import transformers.utils.import_utils as lists

    original = getattr(lists, "create_import_structure_from_path", None)
    if original is None or "transformers.models" in sys.modules:
        return

    def by_path(place: Any) -> Any:
        return original(Path(os.path.dirname(place) if os.path.isfile(place) else place))

    lists.create_import_structure_from_path = by_path  # type: ignore[assignment]  # without the original's cache
    try:
        importlib.import_module("transformers.models")
    finally:
        lists.create_import_structure_from_path = original


class _Late(ModuleType):
    """A package whose `__init__` has not run."""

    _memplan: _Package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # someone looks through sys.modules
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self._memplan.load()
        return getattr(self, name)


class _Package:
    """One delayed package: what it gives before it loads is what `provisional` says."""

    def __init__(self, module: _Late, loader: Loader, apart: set[str]) -> None:
        self.module = module
        self._loader = loader
        self.apart = apart  # submodules that stand alone
        self._given = self.provisional()
        module.__dict__.update(self._given, _memplan=self)

    def provisional(self) -> dict[str, Any]:
        raise NotImplementedError

    def settle(self) -> None:
        """After loading: what was asked of the provisional names is asked of the real ones."""

    def load(self) -> None:
        with _lock:
            module = self.module
            if _delayed.pop(module.__name__, None) is None:
                return  # it is loading, or has loaded
            if not _delayed:
                sys.meta_path.remove(_finder)
            for name in (*self._given, "_memplan"):
                module.__dict__.pop(name, None)
            module.__class__ = ModuleType  # type: ignore[assignment]  # it has no fields beside a module's
            try:
                self._loader.exec_module(module)
            except BaseException:
                sys.modules.pop(module.__name__, None)  # as the import system does
                raise
            self.settle()


class _Compiler(_Package):
    """torch._dynamo.  As long as it is not loaded nothing compiles, so its marks on functions can wait."""

    def provisional(self) -> dict[str, Any]:
        self._waiting: list[Callable[[], object]] = []
        return {
            "disable": self._disable,
            "assume_constant_result": functools.partial(self._mark, "assume_constant_result"),
            "allow_in_graph": functools.partial(self._mark, "allow_in_graph"),
            "graph_break": lambda *args, **kwargs: None,  # as it is outside of compiled code
        }

    def settle(self) -> None:
        for act in self._waiting:
            act()

    def _mark(self, name: str, function: Any) -> Any:
        if not isinstance(function, FunctionType) or self.module.__name__ not in _delayed:
            return getattr(self._loaded(), name)(function)
        self._waiting.append(lambda: getattr(self.module, name)(function))
        return function

    def _disable(self, fn: Any = None, recursive: bool = True, **how: Any) -> Any:
        if fn is None:
            return functools.partial(self._disable, recursive=recursive, **how)
        if not isinstance(fn, FunctionType) or self.module.__name__ not in _delayed:
            return self._loaded().disable(fn, recursive, **how)
        if how.get("wrapping") is False:  # torch/_compile.py: the caller keeps the answer on the function
            self._waiting.append(lambda: fn.__dict__.pop("__dynamo_disable", None))
            return fn
        chosen: list[Callable[..., Any]] = [fn]

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            return chosen[0](*args, **kwargs)

        def choose() -> None:
            chosen[0] = self.module.disable(fn, recursive, **how)

        self._waiting.append(choose)
        return call

    def _loaded(self) -> Any:
        self.load()
        return self.module


class _Assignment(_Package):
    """scipy.optimize, of which detection losses need one function."""

    def provisional(self) -> dict[str, Any]:
        def linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
            self.load()
            return self.module.linear_sum_assignment(*args, **kwargs)

        return {"linear_sum_assignment": linear_sum_assignment}


class _Finder(MetaPathFinder):
    """Loads a delayed package before any of its submodules, but those that stand alone: they import one another in circles."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        parent, _, leaf = name.rpartition(".")
        package = _delayed.get(parent)
        if package is None or leaf in package.apart:
            return None
        package.load()
        loaded = sys.modules.get(name)
        return None if loaded is None else ModuleSpec(name, _Loaded(loaded))


class _Loaded(Loader):
    """Gives back a module that was loaded while it was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


_finder = _Finder()
_delayed: dict[str, _Package] = {}


def _put(name: str, apart: set[str], kind: type[_Package]) -> None:
    if name in sys.modules:
        return
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:  # its parent is not installed
        return
    if spec is None or spec.loader is None or spec.submodule_search_locations is None or name in sys.modules:
        return
    module = _Late(name)
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, name
    module.__file__, module.__path__ = spec.origin, list(spec.submodule_search_locations)
    _delayed[name] = kind(module, spec.loader, apart)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    setattr(sys.modules[parent], leaf, module)
