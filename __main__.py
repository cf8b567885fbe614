"""The command line: wires the commands of each part, nothing else."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import __version__
from .errors import CannotTell, UserError

EXIT_UNKNOWN = 2  # bad input or a missing part: no verdict


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # argparse prints the usage first: one line is kinder
        self.exit(EXIT_UNKNOWN, f"memplan: error: {message}. Try '{self.prog} --help'\n")


def build_parser() -> argparse.ArgumentParser:
    from .hardware import cli as hardware
    from .models import cli as models
    from .planner import cli as planner
    from .validator import cli as validator

    parser = _Parser(prog="memplan", description="Will this training run fit on my GPU, and where does every byte go?")
    parser.add_argument("--version", action="version", version=f"memplan {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for part in (planner, validator, models, hardware):
        part.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0 fits / done, 1 does not fit / mismatch, 2 could not tell."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (UserError, CannotTell) as error:
        if args.debug:
            raise
        print(f"memplan: error: {error}", file=sys.stderr)
        return EXIT_UNKNOWN
    except BrokenPipeError:  # the reader of a pipe went away (`memplan ... | head`): not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("memplan: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
