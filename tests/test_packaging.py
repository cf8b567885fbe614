"""What is in a built wheel, and whether the installed package is this one.

A sub-package that `pyproject.toml` does not name vanishes from the wheel in silence, and so does a data file.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import memplan
import pytest

ROOT = Path(memplan.__file__).resolve().parent
PARTS = ("hardware", "models", "planner", "validator")


def settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def folders_of_code() -> set[str]:
    """The dotted names of every folder of the four parts that holds a Python file, and of the root."""
    found = {file.parent.relative_to(ROOT) for part in PARTS for file in (ROOT / part).rglob("*.py")}
    return {"memplan"} | {".".join(("memplan", *folder.parts)) for folder in found}


def shipped_files() -> set[str]:
    """The files that a wheel must hold, as paths below `memplan/`: all of the parts, and the root's own Python files."""
    inside = {file for part in PARTS for file in (ROOT / part).rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    return {str(file.relative_to(ROOT)) for file in inside | set(ROOT.glob("*.py")) | {ROOT / "py.typed"}}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree in a folder that is no Python name."""
    copy = tmp_path_factory.mktemp("clone") / "a-b"
    copy.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for part in PARTS:
        shutil.copytree(ROOT / part, copy / part, ignore=unwanted)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, copy)
    out = copy.parent / "out"
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("*.whl"))


def test_every_folder_of_code_is_listed_as_a_package():
    assert set(settings()["packages"]) == folders_of_code()


def test_a_wheel_from_a_folder_with_another_name_holds_every_module_and_data_file(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("memplan/")}

    assert names == {f"memplan/{file}" for file in shipped_files()}


def test_a_wheel_carries_the_licence_and_the_command(wheel):
    archive = zipfile.ZipFile(wheel)
    info = f"memplan-{memplan.__version__}.dist-info"

    assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    assert "memplan = memplan.__main__:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_the_unpacked_wheel_reads_its_own_catalogue(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "import memplan; from memplan.hardware import catalogue as c; print(memplan.__file__, c.device('t4').total_bytes)"

    answer = run_python(code, cwd=tmp_path, path=tmp_path / "site").split()

    assert answer[0].startswith(str(tmp_path))
    assert int(answer[1]) > 14 * 2**30


def test_the_installed_package_is_this_tree_wherever_python_starts(tmp_path):
    (tmp_path / "models").mkdir()  # a user's own folder must not take the place of ours
    (tmp_path / "models" / "__init__.py").write_text("raise RuntimeError('the wrong models')")

    answer = run_python("import memplan, memplan.models; print(memplan.__file__)", cwd=tmp_path)

    assert Path(answer.strip()).resolve().parent == ROOT


def test_the_installed_version_is_the_one_in_the_code():
    assert importlib.metadata.version("memplan") == memplan.__version__


def test_tests_and_demo_share_one_version_of_torch():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]

    assert [line for line in lines if line.startswith("torch==")], "the tests must not install whichever torch is newest"


def run_python(code: str, cwd: Path, path: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
