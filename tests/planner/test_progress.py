"""The progress line: on a terminal, when work takes long, and nowhere else."""

from __future__ import annotations

import io
import time

import pytest
from memplan.planner.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def use_terminal(monkeypatch):
    """Makes stderr a terminal when called: pytest puts its own stderr in place after the fixtures."""

    def use() -> Terminal:
        monkeypatch.setenv("TERM", "xterm")
        made = Terminal()
        monkeypatch.setattr("sys.stderr", made)
        return made

    return use


def wait_for(text: str, stream: io.StringIO, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if text in stream.getvalue():
            return True
        time.sleep(0.02)
    return False


def test_long_work_is_named_on_a_terminal(use_terminal):
    terminal = use_terminal()
    with progress("recording [a] model", delay_s=0.01):
        assert wait_for("recording [a] model ...", terminal)


def test_the_text_can_change_while_the_work_goes_on(use_terminal):
    terminal = use_terminal()
    with progress("first", delay_s=0.01) as say:
        assert wait_for("first ...", terminal)
        say("second")
        assert wait_for("second ...", terminal)


def test_text_that_changes_before_the_line_is_shown_is_the_one_that_is_shown(use_terminal):
    terminal = use_terminal()
    with progress("first", delay_s=0.2) as say:
        say("second")
        assert wait_for("second ...", terminal)
    assert "first" not in terminal.getvalue()


def test_short_work_shows_nothing(use_terminal):
    terminal = use_terminal()
    with progress("recording", delay_s=60):
        pass
    assert terminal.getvalue() == ""


def test_nothing_is_written_to_a_pipe(monkeypatch):
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    with progress("recording", delay_s=0.0) as say:
        say("more")
        time.sleep(0.2)
    assert pipe.getvalue() == ""


def test_nothing_is_written_when_switched_off(use_terminal):
    terminal = use_terminal()
    with progress("recording", enabled=False, delay_s=0.0):
        time.sleep(0.2)
    assert terminal.getvalue() == ""


def test_an_error_of_the_work_ends_the_line_and_goes_on(use_terminal):
    terminal = use_terminal()

    def fail() -> None:
        with progress("recording", delay_s=0.01):
            assert wait_for("recording", terminal)
            raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        fail()
    before = terminal.getvalue()
    time.sleep(0.3)
    assert terminal.getvalue() == before
