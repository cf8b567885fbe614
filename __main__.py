"""The command line: wires the commands of each part, nothing else."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator, Sequence

from . import __version__
from .errors import CannotTell, UserError

os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # looking for them reads every installed package's metadata
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
    """Runs one command; returns 0 fits / done, 1 does not fit / mismatch, 2 could not tell.

    Without `argv` it is the program: it ends the process with that code.
    """
    with _rare_collections():
        code = _run(argv)
    if argv is None:
        _end(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    args = build_parser().parse_args(argv)
    try:
        code = int(args.run(args))
        print(end="", flush=True)
        return code
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


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Torch and transformers are a million objects that stay: looking through them for cycles is a tenth of a first answer."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)  # instead of 700, 10, 10
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _end(code: int) -> None:
    """Ends the process without taking torch apart, which costs as much as a cached answer; returns where somebody watches."""
    watched = sys.gettrace() or sys.getprofile() or sys.flags.inspect or threading.active_count() > 1
    if watched:
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
