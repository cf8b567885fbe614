"""How fast memplan answers on this machine: `make bench`.  Writes docs/benchmarks.md and benchmarks/latest.json.

Whole processes are measured from outside (wall time, CPU time and peak resident memory of the child), each with a cache folder
of its own.  The comparison with MemTracker is a ratio of CPU times in one run, so that it hardly depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = 3
GIB = 2**30
HEAD = ("", "best", "median", "CPU time", "target", "")
FIT_8B = ("fit", "meta-llama/Llama-3.1-8B", "--gpu", "rtx-4090", "--micro-batch", "1", "--seq", "2048")
FIT_405B = ("fit", "meta-llama/Llama-3.1-405B", "--gpu", "h200", "--micro-batch", "1", "--seq", "2048")
FIT_70B = (
    "fit", "meta-llama/Llama-3.1-70B", "--gpu", "h100-80gb", "--gpus", "64", "--nodes", "8", "--strategy", "fsdp2",
    "--recompute", "full",
)  # fmt: skip
FIT_ZO2 = (
    "fit", "facebook/opt-175b", "--gpu", "a100-80gb", "--method", "zo2", "--precision", "fp16", "--micro-batch", "1",
    "--seq", "2048",
)  # fmt: skip
STUDY = (
    "study", "bert-large-uncased", "--gpu", "v100-16gb", "--gpus", "4", "--strategies", "zero0,zero1,zero2,zero3",
    "--offload", "none,optimizer,optimizer+param",
)  # fmt: skip
PLAN_8B = ("plan", "meta-llama/Llama-3.1-8B", "--gpu", "h100-80gb", "--gpus", "8", "--seq", "4096", "--global-batch", "64")
PLAN_405B = ("plan", "meta-llama/Llama-3.1-405B", "--gpu", "h100-80gb", "--gpus", "64", "--nodes", "8", "--seq", "4096")


@dataclass(frozen=True)
class Child:
    """What one process took: seconds, and bytes of resident memory at most."""

    wall_s: float
    cpu_s: float
    rss_bytes: int
    output: str


@dataclass(frozen=True)
class Figure:
    """One line of the table.  `values`: of every run, in the order of the runs; `best` is the least disturbed of them."""

    what: str
    unit: str
    values: tuple[float, ...]
    target: float
    more_is_better: bool = False
    cpu_s: float | None = None
    """Of the run with the least, where a process is timed: it says whether the machine was busy."""

    @property
    def best(self) -> float:
        """For memory the largest: it is the one that has to fit."""
        return max(self.values) if self.more_is_better or self.unit == "GiB" else min(self.values)

    @property
    def met(self) -> bool:
        return self.best >= self.target if self.more_is_better else self.best <= self.target

    def cells(self) -> tuple[str, ...]:
        sign = ">=" if self.more_is_better else "<="
        shown = (_number(x, self.unit) for x in (self.best, statistics.median(self.values)))
        cpu = "" if self.cpu_s is None else _number(self.cpu_s, "s")
        return (self.what, *shown, cpu, f"{sign} {_number(self.target, self.unit)}", "met" if self.met else "MISSED")


def _number(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.1f} {unit}" if unit == "x" else f"{value:.2f} {unit}"


def run(arguments: Sequence[str], cache: Path, *, codes: Sequence[int] = (0,)) -> Child:
    """Runs Python with `arguments` and this cache folder.  Raises SystemExit for another exit code than `codes`."""
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        environment = {**os.environ, "MEMPLAN_CACHE": str(cache)}
        process = subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=output, env=environment, cwd=cache)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode not in codes:
        raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}:\n{text}")
    rss = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # getrusage(2): KiB on Linux, bytes on macOS
    return Child(wall_s, usage.ru_utime + usage.ru_stime, rss, text)


def memplan(arguments: Sequence[str], cache: Path) -> Child:
    return run(["-m", "memplan", *arguments], cache, codes=(0, 1))  # 1 says that it does not fit, which is an answer


def measure(say: Any) -> tuple[list[Figure], dict[str, Any]]:
    """Every figure, and the single values that the ratio is made of."""
    with tempfile.TemporaryDirectory(prefix="memplan-bench-") as folder:
        caches = [Path(folder, str(number)) for number in range(2 * RUNS)]
        for cache in caches:
            cache.mkdir()
        cold, cold_405b, known = caches[:RUNS], caches[RUNS:], caches[0]
        say("memplan --help")
        helps = [memplan(["--help"], known) for _ in range(RUNS)]
        say("Llama-3.1-8B, nothing cached")
        firsts = [memplan(FIT_8B, cache) for cache in cold]
        say("Llama-3.1-8B from the cache")
        verdicts = [memplan([*FIT_8B, "--no-advice"], known) for _ in range(RUNS)]
        wholes = [memplan(FIT_8B, known) for _ in range(RUNS)]
        say("Llama-3.1-405B, nothing cached")
        larges = [memplan(FIT_405B, cache) for cache in cold_405b]
        say("Llama-3.1-70B on 64 GPUs, OPT-175B by ZO2, and a study of BERT-Large, nothing cached")
        sharded = [memplan(FIT_70B, _empty(folder)) for _ in range(RUNS)]
        zo_caches = [_empty(folder) for _ in range(RUNS)]
        zeroth_order = [memplan(FIT_ZO2, cache) for cache in zo_caches]
        zo_verdicts = [memplan([*FIT_ZO2, "--no-advice"], zo_caches[0]) for _ in range(RUNS)]
        studies = [memplan(STUDY, _empty(folder)) for _ in range(RUNS)]
        say("plans for Llama-3.1-8B on 8 GPUs and 405B on 64")
        plans = [memplan(PLAN_8B, _empty(folder)) for _ in range(RUNS)]
        memplan(PLAN_8B, known)
        known_plans = [memplan(PLAN_8B, known) for _ in range(RUNS)]
        large_plans = [memplan(PLAN_405B, _empty(folder))]
        say("the search's rates")
        rates = [json.loads(run([str(Path(__file__).with_name("search_rate.py"))], known).output) for _ in range(RUNS)]
        say("one step of Llama-3.1-8B: the allocator, memplan's trace, MemTracker (half a minute)")
        script = str(Path(__file__).with_name("one_step.py"))
        replays = [json.loads(run([script, "replay"], known).output) for _ in range(RUNS)]
        empties = [_empty(folder) for _ in range(RUNS)]  # the optimizer's rule is cached, too
        ours = [json.loads(run([script, "memplan"], empty).output) for empty in empties]
        theirs = json.loads(run([script, "mem-tracker"], empties[0]).output)
    ratios = tuple(theirs["cpu_s"] / one["cpu_s"] for one in ours)
    figures = [
        _wall("`memplan --help`", helps, 0.3),
        _wall("Llama-3.1-8B, whole answer, nothing cached", firsts, 6.0),
        Figure("the same, peak resident memory", "GiB", tuple(c.rss_bytes / GIB for c in firsts), 1.0),
        _wall("Llama-3.1-8B, verdict from the cache (`--no-advice`)", verdicts, 0.5),
        _wall("Llama-3.1-8B, whole answer from the cache", wholes, 2.0),
        _wall("Llama-3.1-405B, whole answer, nothing cached", larges, 10.0),
        _wall("Llama-3.1-70B on 64 GPUs under FSDP2, whole answer, nothing cached", sharded, 8.0),
        _wall("OPT-175B by ZO2, whole answer, nothing cached", zeroth_order, 6.0),
        _wall("OPT-175B by ZO2, verdict from the cache (`--no-advice`)", zo_verdicts, 0.5),
        _wall("study of BERT-Large, 12 strategies, nothing cached", studies, 10.0),
        _wall("plan for Llama-3.1-8B on 8 GPUs, nothing cached", plans, 10.0),
        _wall("plan for Llama-3.1-8B on 8 GPUs, from the cache", known_plans, 3.0),
        _wall("plan for Llama-3.1-405B on 64 GPUs, nothing cached", large_plans, 20.0),
        Figure("configurations bounded", "/s", tuple(r["bounded_per_s"] for r in rates), 1000, more_is_better=True),
        Figure("configurations simulated in full", "/s", tuple(r["simulated_per_s"] for r in rates), 10, more_is_better=True),
        Figure("allocator replay", "events/s", tuple(r["events_per_s"] for r in replays), 100_000, more_is_better=True),
        Figure("MemTracker's CPU time over memplan's", "x", ratios, 10.0, more_is_better=True),
    ]
    return figures, {"memplan": ours, "mem_tracker": theirs, "replay_events": replays[0]["events"], "rates": rates}


def _empty(folder: str) -> Path:
    """A cache folder with nothing in it."""
    return Path(tempfile.mkdtemp(dir=folder))


def _wall(what: str, children: Sequence[Child], target_s: float) -> Figure:
    return Figure(what, "s", tuple(c.wall_s for c in children), target_s, cpu_s=min(c.cpu_s for c in children))


def surroundings() -> dict[str, Any]:
    """What the figures depend on beside memplan."""
    from memplan.hardware.detect import machine

    here = machine()
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": here.cpu_model,
        "cores": here.cpu_cores,
        "load_before": round(os.getloadavg()[0], 2),
        "loop_s": round(loop_s(), 2),
        "python": ".".join(map(str, sys.version_info[:3])),
        **{name: version(name) for name in ("memplan", "torch", "transformers")},
    }


def loop_s() -> float:
    """Seconds of ten million additions, the fastest of three: how fast the machine is today.  Virtual ones differ by day."""
    times = []
    for _ in range(3):
        began, total = time.perf_counter(), 0
        for number in range(10_000_000):
            total += number
        times.append(time.perf_counter() - began)
    return min(times)


def page(figures: Sequence[Figure], around: dict[str, Any], detail: dict[str, Any]) -> str:
    """docs/benchmarks.md."""
    rows = [HEAD, ("---",) * len(HEAD), *(figure.cells() for figure in figures)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    ours, theirs = min(one["cpu_s"] for one in detail["memplan"]), detail["mem_tracker"]["cpu_s"]
    return f"""# Benchmarks

Made by `make bench` on {around["made"][:10]}: {around["processor"]}, {around["cores"]} cores,
load {around["load_before"]} before the run, {around["loop_s"]} s for a loop of ten million additions;
Python {around["python"]}, torch {around["torch"]}, transformers {around["transformers"]},
memplan {around["memplan"]}. {RUNS} runs each, MemTracker once; all values are in
`benchmarks/latest.json`. "Best" is the run that other work on the machine disturbed least; for memory it is the largest.

{table}

- Times are of whole processes, from start to exit; "nothing cached" begins with an empty cache folder.
- The 8B question is `memplan {" ".join(FIT_8B)}`;
  it does not fit, so the whole answer holds remedies.
- The 405B question is `memplan {" ".join(FIT_405B)}`.
- The 70B question is `memplan {" ".join(FIT_70B)}`,
  that of OPT-175B `memplan {" ".join(FIT_ZO2)}`,
  the study `memplan {" ".join(STUDY)}`.
- The plans are `memplan {" ".join(PLAN_8B)}`
  and `memplan {" ".join(PLAN_405B)}` (one run).
- Configurations are those of Llama-3.1-8B on 8 GPUs, with their traces made ({detail["rates"][0]["space"]:,} bounded;
  {detail["rates"][0]["simulated"]} simulated, one of each placement, with gradients accumulated: `benchmarks/search_rate.py`).
- The replay plays the {detail["replay_events"]:,} events of two steps of Llama-3.1-8B through the caching allocator.
- MemTracker is `torch.distributed._tools.mem_tracker.MemTracker` under `FakeTensorMode` on a fake CPU, around forward,
  backward and AdamW of the same Llama-3.1-8B (bf16, 1 x 2048): {theirs:.1f} CPU seconds. memplan builds the model, records
  the step at full depth, and simulates and replays it: {ours:.2f}. Imports are left out of both.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit code 1 where a target is missed")
    args = parser.parse_args()
    around = surroundings()
    figures, detail = measure(lambda text: print(f"- {text}", file=sys.stderr, flush=True))
    rows = [HEAD, *(figure.cells() for figure in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip())
    results = [{**asdict(figure), "best": figure.best, "met": figure.met} for figure in figures]
    _write(ROOT / "benchmarks" / "latest.json", json.dumps({**around, "figures": results, **detail}, indent=1) + "\n")
    _write(ROOT / "docs" / "benchmarks.md", page(figures, around, detail))
    return int(args.check and not all(figure.met for figure in figures))


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


if __name__ == "__main__":
    sys.exit(main())
