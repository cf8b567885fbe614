"""The tests keep their traces to themselves: nothing of the user's own cache is read, and nothing is left in it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # workers inherit the folder, and share what is traced in it
    os.environ["MEMPLAN_CACHE"] = tempfile.mkdtemp(prefix="memplan-tests-")
    config.add_cleanup(lambda: shutil.rmtree(os.environ["MEMPLAN_CACHE"], ignore_errors=True))


@pytest.fixture(autouse=True)
def _search_path_as_it_was() -> Iterator[None]:
    """A user's factory puts its folder on sys.path, which processes started later would inherit."""
    before = list(sys.path)
    yield
    sys.path[:] = before
