"""How many configurations of Llama-3.1-8B on 8 GPUs are bounded, and how many simulated in full, a second; prints JSON.

The traces are made before the clock starts.  Bounded: each configuration of the widest space (any method, any number of samples
a step up to 1024) gets the lower bounds of its bytes and seconds.  Simulated: one configuration of each placement, its memory
simulated, replayed and timed.
"""

from __future__ import annotations

import json
import time
from typing import Any

from memplan.errors import CannotTell
from memplan.planner.api import make_request
from memplan.planner.request import Request
from memplan.planner.search.bounds import Bounds
from memplan.planner.search.search import judge, row_of
from memplan.planner.search.space import ANY, Wanted, candidates, levels
from memplan.planner.trace.source import TraceSource

WANTED = Wanted(global_batch_size=1024, methods=(ANY,))
ENOUGH_S = 1.0


def configurations() -> list[Request]:
    base = make_request("meta-llama/Llama-3.1-8B", "h100-80gb", gpus=8, precision="fp32", micro_batch_size=1, seq_len=4096)
    return [request for level in levels(WANTED) for request in candidates({8: base}, WANTED, level, {})]


def bounded(asked: list[Request], bounds: Bounds) -> tuple[int, float]:
    """(how many, seconds).  The space is bounded anew until a second is over."""
    count, began = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < ENOUGH_S:
        for request in asked:
            bounds.floor_bytes(request)
            bounds.floor_s(request)
        count += len(asked)
    return count, seconds


def simulated(asked: list[Request], traces: TraceSource) -> tuple[int, float]:
    """(how many, seconds), with the traces known."""
    known = []
    for request in asked:
        try:
            traces.step(request)
            known.append(request)
        except CannotTell:
            continue
    began = time.perf_counter()
    for request in known:
        judge(request, traces)
    return len(known), time.perf_counter() - began


def rates() -> dict[str, Any]:
    traces = TraceSource()
    space = configurations()
    bounds = Bounds(traces)
    small = [request for request in space if request.micro_batch_size == 1]
    for request in small:
        bounds.look(request)
    one_of_each = list({row_of(request): request for request in small}.values())
    num_bounded, bound_s = bounded(space, bounds)
    num_simulated, simulated_s = simulated(one_of_each, traces)
    return {
        "space": len(space),
        "bounded_per_s": num_bounded / bound_s,
        "simulated": num_simulated,
        "simulated_per_s": num_simulated / simulated_s,
    }


if __name__ == "__main__":
    print(json.dumps(rates()))
