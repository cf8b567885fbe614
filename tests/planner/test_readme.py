"""The README tells the truth: its commands exist, its example runs, and it shows what the command prints."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import memplan
import pytest
from memplan.planner import cli

ROOT = Path(memplan.__file__).resolve().parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"^memplan ((?:fit|trace) .+)$", README, re.MULTILINE)))


def parse(command: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    cli.add_commands(parser.add_subparsers())
    return parser.parse_args(shlex.split(command))


def test_the_readme_shows_commands():
    assert len(COMMANDS) > 3


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_readme_is_understood(command):
    assert callable(parse(command).run)


def test_the_demo_of_the_makefile_is_the_command_of_the_readme():
    demo = re.search(r"memplan (fit [^;]+);", (ROOT / "Makefile").read_text(encoding="utf-8"))

    assert demo is not None
    assert demo[1] in COMMANDS


def test_folders_that_the_readme_names_exist():
    named = re.findall(r"^(\w+)/ +", README, re.MULTILINE)

    assert len(named) == 7
    assert [name for name in named if not (ROOT / name).is_dir()] == []


def test_the_answer_in_the_readme_has_the_verdict_and_table_that_the_demo_prints(capsys):
    args = parse("fit meta-llama/Llama-3.1-8B --gpu rtx-4090 --micro-batch 1 --seq 2048 --no-advice")
    args.run(args)

    printed = capsys.readouterr().out.split("\n\n")
    assert printed[0] in README  # the verdict and its reason
    assert printed[2].replace("#", "█") in README.replace("#", "█")  # the table
