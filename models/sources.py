"""Which files a user's factory is made of: its own file and the local files that it imports, found without running them."""

from __future__ import annotations

import ast
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_INSTALLED = {Path(p).resolve() for p in (*site.getsitepackages(), *(sysconfig.get_paths()[k] for k in ("purelib", "platlib")))}


def uses_relative_imports(file: Path) -> bool:
    """True when `file` says `from . import ...`: it can only be imported as part of its package."""
    return any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in ast.walk(_parse(file)))


def package_root(file: Path) -> tuple[Path, str]:
    """The folder that must be on sys.path, and the dotted name, to import `file` inside its package."""
    parts, folder = [] if file.stem == "__init__" else [file.stem], file.parent
    # a folder such as `my-project` cannot be a package, whatever lies in it
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts)


def find_module(dotted: str) -> Path | None:
    """The source file of `dotted` on sys.path (the working folder first), without importing its parents."""
    for entry in (str(Path.cwd()), *sys.path):
        found = _module_file(Path(entry or "."), dotted)
        if found is not None:
            return found.resolve()
    return None


def local_sources(file: Path, module: str | None = None) -> list[Path]:
    """`file` and every file below its own folder (or package root) that it imports, transitively; sorted by path.

    An import is followed whether or not it is reached at run time (inside a function, under `if`), since a file too many only
    costs a fresh trace. Data files that the code opens are not seen.
    """
    file = file.resolve()
    root, dotted = package_root(file)
    if module is not None and module.count(".") > dotted.count("."):  # a namespace package: the name tells the root
        root = file.parents[module.count(".") + (file.stem == "__init__")]
    top = dotted.partition(".")[0] if root in _INSTALLED else None  # in site-packages only the factory's own package is local
    folders = [root] if file.parent == root else [file.parent, root]
    seen: set[Path] = set()
    waiting = [file]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in _imports(current):
            if top is not None and name.partition(".")[0] != top:
                continue
            for folder in folders:
                waiting.extend(path for path in _files_of(folder, name) if path not in seen)
    return sorted(seen)


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):  # the factory loader reports it with its line; here it imports nothing
        return ast.Module(body=[], type_ignores=[])


def _imports(file: Path) -> Iterator[str]:
    """Absolute dotted names that `file` may import; `from a import b` gives both `a` and `a.b`."""
    root_name = package_root(file)[1].split(".")
    package = root_name if file.stem == "__init__" else root_name[:-1]
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            if stem:
                yield stem
            yield from (f"{stem}.{alias.name}" if stem else alias.name for alias in node.names)


def _module_file(folder: Path, dotted: str) -> Path | None:
    stem = folder.joinpath(*dotted.split("."))
    for candidate in (stem / "__init__.py", stem.with_name(stem.name + ".py")):
        if candidate.is_file():
            return candidate
    return None


def _files_of(folder: Path, dotted: str) -> Iterator[Path]:
    """The file of `dotted` below `folder` and the `__init__.py` of each package above it."""
    parts = dotted.split(".")
    for depth in range(1, len(parts) + 1):
        found = _module_file(folder, ".".join(parts[:depth]))
        if found is not None:
            yield found.resolve()
