"""`python -m memplan.validator.runtimes.zo zo_run.json`, or the same under torchrun."""

from __future__ import annotations

import argparse
import os
import sys

from ....errors import CannotTell, UserError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="memplan.validator.runtimes.zo", description="Trains as a zo_run.json says.")
    parser.add_argument("file", metavar="zo_run.json")
    parser.add_argument("--steps", type=int, metavar="N", default=100, help="default: 100")
    parser.add_argument("--data", metavar="FILE", help="a text file, or .jsonl with a key text (default: made-up tokens)")
    parser.add_argument("--random-weights", action="store_true", help="load nothing: weights as a new model has them")
    parser.add_argument("--save", metavar="FOLDER", help="where the trained model goes")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: the GPU where there is one")
    args = parser.parse_args(argv)
    try:
        from .train import Training, train

        how = Training(steps=args.steps, data=args.data, random_weights=args.random_weights, save=args.save, device=args.device)
        train(args.file, how, say=lambda line: print(line, flush=True))
    except (UserError, CannotTell) as error:
        if os.environ.get("RANK", "0") == "0":  # all processes say the same
            print(f"memplan: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
