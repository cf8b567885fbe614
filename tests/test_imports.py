"""Importing memplan is cheap, and its parts depend on one another in one direction only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import memplan
import pytest

ROOT = Path(memplan.__file__).resolve().parent
PARTS = ("hardware", "models", "planner", "validator")
HEAVY = ("torch", "transformers", "pydantic", "numpy", "scipy", "networkx", "deepspeed")
HELP_SECONDS = 0.3

whole_command_line = pytest.mark.skipif(
    not all((ROOT / part / "cli.py").exists() for part in PARTS), reason="a part has no command line"
)


def heavy_modules_after(code: str) -> list[str]:
    """The heavy packages that a fresh Python holds once it has run `code`."""
    loaded = f"*(name for name in {HEAVY!r} if name in sys.modules)"
    report = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('@', {loaded})"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.rpartition("@")[2].split()


def test_importing_memplan_imports_nothing_heavy():
    assert heavy_modules_after("import memplan, memplan.errors, memplan.units") == []


@whole_command_line
@pytest.mark.parametrize("words", [["--help"], ["hardware", "--help"], ["hardware", "list", "--help"], ["fit", "--help"]])
def test_help_imports_nothing_heavy(words):
    assert heavy_modules_after(f"from memplan.__main__ import main; main({words!r})") == []


def test_the_check_for_heavy_modules_can_fail():
    assert heavy_modules_after("import memplan.hardware.profile") == ["pydantic"]


def test_reading_the_catalogue_imports_no_torch():
    assert "torch" not in heavy_modules_after("from memplan.hardware import catalogue; catalogue.device('rtx-4090')")


@whole_command_line
def test_help_comes_at_once():
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "memplan", "--help"], check=True, capture_output=True, timeout=60)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < HELP_SECONDS  # the best of five: other tests run beside this one


def lint_imports(folder: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    command = [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports_command as c; c()", "--no-cache"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_parts_depend_on_one_another_in_one_direction_only():
    done = lint_imports(ROOT)

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_check_of_directions_can_fail(tmp_path):
    package = tmp_path / "path" / "memplan"
    for part in PARTS:
        shutil.copytree(ROOT / part, package / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "__main__.py", "errors.py", "files.py", "units.py", "version.py", "pyproject.toml"):
        shutil.copy(ROOT / name, package)
    (package / "hardware" / "upwards.py").write_text("from .. import planner\n")

    done = lint_imports(package, path=tmp_path / "path")

    assert done.returncode == 1
    assert "memplan.hardware.upwards -> memplan.planner" in done.stdout
