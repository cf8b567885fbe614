"""A worker of `pool`: reads one job a line and answers each with one line, until its input ends.

Jobs: {"suite": "zoo", "name": ...} runs one architecture for real; {"suite": "types", "name": ...} traces one model type.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from typing import Any

from ..errors import MemplanError
from .worker import one_line


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """What became of a job; every failure is an answer with its reason."""
    try:
        if job["suite"] == "zoo":
            from .zoo import find, measured

            return measured(find(job["name"]))
        from .model_types import traced

        return traced(job["name"])
    except MemplanError as error:
        return {"reason": str(error)}
    except Exception as error:
        return {"reason": f"raised {one_line(error)}"}


def main() -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own chatter
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a default config that names a checkpoint must not fetch it
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a model prints must not stand between the answers
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    for line in sys.stdin:
        out.write(json.dumps(answer(json.loads(line))) + "\n")
        out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
