"""Runs a user's factory: imports it in its own surroundings, calls it, and turns what goes wrong into one clear line."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import MemplanError, UserError, did_you_mean
from .sources import local_sources, package_root, uses_relative_imports
from .spec import FactoryRef

#: What is already loaded: file -> (content of it and its local imports, module).  A second build must not run it twice:
#: registering a custom op or a class a second time is an error.
_loaded: dict[Path, tuple[tuple[bytes, ...], ModuleType]] = {}
_OURS = Path(__file__).parent.resolve()


def call(ref: FactoryRef) -> Any:
    """What the user's function returns.  Prints of the user's code go to stderr, so that `--json` stays JSON."""
    function = _function(ref)
    with _user_code(f"{ref}", ref), contextlib.redirect_stdout(sys.stderr):
        return function(**ref.kwargs)


def guard(what: str, ref: FactoryRef, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of the user's with its exceptions reported like the factory's own."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        with _user_code(what, ref):
            return function(*args, **kwargs)

    return guarded


def _function(ref: FactoryRef) -> Callable[..., Any]:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    importing = f"importing {ref.module or ref.path}"
    # the module outlives a trace: what it makes on import must be real for the next caller
    with _user_code(importing, ref), contextlib.redirect_stdout(sys.stderr), unset_fake_temporarily():
        module = _module(ref)
    found = getattr(module, ref.function, None)
    if found is None:
        functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UserError(f"model: {ref.path} has no function {ref.function!r}", did_you_mean(ref.function, functions)
                        or f"Define {ref.function}(**kwargs) there; it returns the module")  # fmt: skip
    if not callable(found):
        raise UserError(f"model: {ref} is a {type(found).__name__}, not a function", "Name a function that returns the module")
    function: Callable[..., Any] = found
    return function


def _module(ref: FactoryRef) -> ModuleType:
    content = tuple(file.read_bytes() for file in local_sources(ref.path, ref.module))
    known = _loaded.get(ref.path)
    if known is not None and known[0] == content:
        return known[1]
    root, dotted = package_root(ref.path)
    first: list[Path] = []
    if ref.module is not None:
        root, dotted = _root_of(ref.path, ref.module), ref.module
    elif not (
        "." in dotted and uses_relative_imports(ref.path)
    ):  # a script: its own folder comes first, as in `python file.py`
        dotted, first = ref.path.stem, [ref.path.parent]
    _put_first([*first, root])
    _forget([*first, root])
    module = importlib.import_module(dotted) if not first else _run_script(ref.path, dotted)
    _loaded[ref.path] = (content, module)
    return module


def _root_of(file: Path, module: str) -> Path:
    depth = module.count(".") + (file.stem == "__init__")
    return file.parents[depth]


def _run_script(file: Path, name: str) -> ModuleType:
    if name in sys.modules or name in sys.stdlib_module_names or not name.isidentifier():
        name = f"_memplan_user_{abs(hash(file))}_{file.stem.replace('-', '_')}"  # `random.py` must not become `random`
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _put_first(folders: list[Path]) -> None:
    for folder in reversed(folders):
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def _forget(folders: list[Path]) -> None:
    """Drops loaded modules whose name the user's folders claim too: another project's `models`, or an older text of the same.

    The standard library, installed packages and memplan stay: code that runs holds on to them.
    """
    installed = [Path(p).resolve() for p in {sysconfig.get_paths()[k] for k in ("purelib", "platlib", "stdlib")}]
    claimed = {p.stem for folder in folders for p in folder.glob("*.py")}
    claimed |= {p.name for folder in folders for p in folder.iterdir() if p.is_dir() and p.name.isidentifier()}
    claimed -= {"memplan", "__main__", "conftest"} | set(sys.stdlib_module_names)
    doomed = []  # deleted after the loop: a namespace package below one that is gone cannot say where it lies
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if top not in claimed:
            continue
        try:
            places = [getattr(module, "__file__", None), *list(getattr(module, "__path__", []))]
        except KeyError:  # a namespace package whose parent is gone already
            places = []
        if any(Path(p).resolve().is_relative_to(i) for p in places if p for i in installed):
            continue
        doomed.append(name)
    for name in doomed:
        del sys.modules[name]


@contextlib.contextmanager
def _user_code(what: str, ref: FactoryRef) -> Iterator[None]:
    try:
        yield
    except MemplanError:
        raise
    except (Exception, SystemExit) as error:
        if type(error).__name__ == "OutOfMemoryError" or type(error).__module__.startswith("torch._subclasses"):
            raise  # a full GPU, and an op that wants values from a fake tensor: the caller's business, not the user's mistake
        raise UserError(f"{what} raised {type(error).__name__}: {_first_line(error)} (at {_place(error, ref)})",
                        _advice(error, ref.kwargs, ref)) from error  # fmt: skip


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or "no message"


def _place(error: BaseException, ref: FactoryRef) -> str:
    """file:line of the innermost frame in the user's own files; a syntax error names its own line."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    local = {str(file) for file in local_sources(ref.path, ref.module)}
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if frame.filename in local or str(Path(frame.filename).resolve()) in local:
            return f"{frame.filename}:{frame.lineno}"
    outside = [f for f in frames if not Path(f.filename).resolve().is_relative_to(_OURS)]
    return f"{outside[-1].filename}:{outside[-1].lineno}" if outside else str(ref.path)


def _advice(error: BaseException, kwargs: Mapping[str, Any], ref: FactoryRef) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"Install {error.name}, or put it beside {ref.path.name}"
    if isinstance(error, TypeError) and "argument" in str(error) and f"{ref.function}(" in str(error):
        given = ", ".join(kwargs) or "none"
        return f"Keyword arguments come from --set NAME=VALUE (given: {given})"
    return "Mend the factory; --debug shows the whole traceback"
