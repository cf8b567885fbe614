"""The tests keep their traces to themselves: nothing of the user's own cache is read, and nothing is left in it."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # workers inherit the folder, and share what is traced in it
    os.environ["MEMPLAN_CACHE"] = tempfile.mkdtemp(prefix="memplan-tests-")
    config.add_cleanup(lambda: shutil.rmtree(os.environ["MEMPLAN_CACHE"], ignore_errors=True))
