"""One step of Llama-3.1-8B (bf16, AdamW, 1 x 2048) in one process: `replay`, `memplan` or `mem-tracker`; prints JSON.

CPU seconds are of this process and without imports, from the model's config to the peak.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers  # noqa: F401  # imported before the clock starts
from memplan.planner.api import make_request
from memplan.planner.predict import ledger_of, replay_ledger
from memplan.planner.request import Request
from memplan.planner.trace.source import TraceSource

SIZES = {"hidden_size": "64", "intermediate_size": "64", "num_attention_heads": "4", "num_key_value_heads": "2"}
TINY = {"num_hidden_layers": "1", **SIZES}


def request(overrides: dict[str, str] | None = None) -> Request:
    options: dict[str, Any] = {"micro_batch_size": 1, "seq_len": 2048, "precision": "bf16", "optimizer": "adamw"}
    return make_request("meta-llama/Llama-3.1-8B", "a100-80gb", overrides=overrides, **options)


def replay() -> dict[str, Any]:
    """The events of the simulated run, through the allocator."""
    asked = request()
    ledger = ledger_of(asked, TraceSource().step(asked))
    began = time.perf_counter()
    played = replay_ledger(ledger, with_series=False)
    return {"events": played.num_events, "events_per_s": played.num_events / (time.perf_counter() - began)}


def memplan(asked: Request) -> int:
    """The peak, from a trace of the whole depth, two simulated steps and their replay; nothing comes from a cache."""
    ledger = ledger_of(asked, TraceSource(exact=True).step(asked))
    return replay_ledger(ledger, with_series=False).peak_allocated_bytes


def mem_tracker(asked: Request) -> int:
    """The peak, from torch's own tracker around one step."""
    from memplan.models import build
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        built = build(asked.model, dtype=torch.bfloat16)
        module = built.module
        module.config.use_cache = False
        optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
        batch = built.make_batch(asked.micro_batch_size, asked.seq_len)
        tracker = MemTracker()
        tracker.track_external(module, optimizer)
        with tracker:
            built.step(module, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def timed(predict: Callable[[Request], int]) -> dict[str, Any]:
    """CPU seconds of `predict`; a small model first, which imports what either way imports late."""
    predict(request(TINY))
    asked = request()
    began = time.process_time()
    peak = predict(asked)
    return {"cpu_s": time.process_time() - began, "peak_bytes": peak}


if __name__ == "__main__":
    ways = {"replay": replay, "memplan": lambda: timed(memplan), "mem-tracker": lambda: timed(mem_tracker)}
    print(json.dumps(ways[sys.argv[1]]()))
