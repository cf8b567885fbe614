"""The process in which the step runs: `python -m memplan.validator.worker JOB.json OUTCOME.json`.

A process of its own, because the run may be killed for its memory, hang, or crash in a user's code, and because what the
parent has allocated must not be measured.  It writes an outcome whatever happens, short of being killed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from ..errors import MemplanError
from ..files import write_whole
from .job import Job, Outcome, read_json
from .launch import says_where
from .out_of_memory import is_out_of_memory


def run_job(job: Job) -> Outcome:
    """Measures; every failure of the run is an outcome with its reason."""
    try:
        if job.device == "cuda":
            from . import cuda

            return Outcome(usage=cuda.measure(job.request, snapshot=job.snapshot))
        from . import cpu

        return Outcome(usage=cpu.measure(job.request, job.outputs, threads=job.threads))
    except MemplanError as error:
        return Outcome(reason=str(error))
    except MemoryError:
        return Outcome(reason="the run ran out of host memory (MemoryError)")
    except Exception as error:
        return Outcome(reason=f"the run raised {one_line(error)}")


def one_line(error: BaseException) -> str:
    """The kind of the error and what it says."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    if is_out_of_memory(error):
        kind = "OutOfMemoryError"
    return f"{kind}: {text[:300]}" if text else kind


def main(argv: Sequence[str]) -> int:
    job_file, outcome_file = argv
    says_where()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own chatter
    job = Job.from_json(read_json(job_file))
    if job.request.alloc_conf:  # read when torch is imported; the second name is the one before torch 2.9
        os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = job.request.alloc_conf
    outcome = run_job(job)
    write_whole(outcome_file, json.dumps(outcome.to_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
