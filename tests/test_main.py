"""How the program starts and ends."""

from __future__ import annotations

import gc
import subprocess
import sys

from memplan.__main__ import main

START = (
    "import atexit, sys\natexit.register(print, 'bye')\nsys.argv = ['memplan', {words}]\nfrom memplan.__main__ import main\n"
)


def run(code: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout


def test_the_program_ends_with_its_handlers_run_and_its_output_written():
    code, output = run(START.format(words="'hardware', 'list'") + "main()\nprint('not reached')")
    assert code == 0
    assert "rtx-4090" in output
    assert output.endswith("bye\n")
    assert "not reached" not in output


def test_the_programs_exit_code_is_the_commands():
    code, output = run(START.format(words="'hardware', 'show', 'no-such-card'") + "main()")
    assert (code, output) == (2, "bye\n")


def test_a_profiler_outlives_the_command():
    code, output = run(START.format(words="'hardware', 'list'") + "sys.setprofile(lambda *a: None)\nmain()\nprint('reached')")
    assert code == 0
    assert output.endswith("reached\nbye\n")


def test_a_command_that_is_called_from_python_returns_and_leaves_the_collector_as_it_was(capsys):
    before = gc.get_threshold()
    assert main(["hardware", "list"]) == 0
    assert gc.get_threshold() == before
    assert "rtx-4090" in capsys.readouterr().out
