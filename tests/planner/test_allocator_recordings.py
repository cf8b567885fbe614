"""The allocator against recordings of real runs on real GPUs (a folder beside the repository; skipped where it is absent)."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import pytest
from memplan.planner.allocator.snapshot import read_snapshot
from memplan.planner.allocator.verify import Comparison, compare

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "snapshots"
FILES = sorted(FOLDER.glob("trace_*.json.gz"))

pytestmark = pytest.mark.skipif(not FILES, reason="the recordings are not here")


@cache
def comparisons(path: Path, *, blind: bool) -> list[Comparison]:
    snapshot = read_snapshot(path)
    return [compare(snapshot, device, blind=blind) for device in snapshot.devices()]


@cache
def index() -> dict[tuple[str, int], dict[str, str]]:
    with open(FOLDER / "INDEX.tsv", newline="", encoding="utf-8") as file:
        return {(row["file"], int(row["device"])): row for row in csv.DictReader(file, delimiter="\t")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.split(".")[0])
def test_every_allocation_lands_on_its_real_address(path: Path) -> None:
    for result in comparisons(path, blind=False):
        assert result.differences == ()
        assert result.predicted == result.measured
        row = index().get((path.name, result.device))
        if row is not None:  # found by another program
            assert result.cold == row["start"].startswith("cold")
            assert result.predicted_peak_allocated_bytes == int(row["peak_allocated"])
            assert result.predicted.peak_reserved_bytes == int(row["peak_reserved"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.split(".")[0])
def test_sizes_and_order_alone_give_peak_reserved_within_half_a_percent(path: Path) -> None:
    for result in comparisons(path, blind=True):
        assert result.differences == ()
        assert abs(result.reserved_ratio - 1.0) <= (0.0 if result.cold else 0.005)


def test_nearly_all_blind_replays_are_exact() -> None:
    ratios = [result.reserved_ratio for path in FILES for result in comparisons(path, blind=True)]

    assert sum(ratio != 1.0 for ratio in ratios) <= 2
    assert max(abs(ratio - 1.0) for ratio in ratios) <= 0.002


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize(
    ("name", "device", "counts"), [("010", 1, (2, 1)), ("013", 0, (1, 0)), ("019", 0, (1, 0)), ("061", 0, (39, 0))]
)
def test_one_limit_explains_every_failure_of_the_driver(name: str, device: int, counts: tuple[int, int], blind: bool) -> None:
    result = next(r for r in comparisons(FOLDER / f"trace_{name}.json.gz", blind=blind) if r.device == device)

    assert result.differences == ()
    assert result.limit_bytes == result.measured.peak_reserved_bytes
    assert (result.num_flushes, result.num_ooms) == counts  # flushes, out of memory


def test_a_lower_limit_than_the_real_one_fails_where_the_real_run_went_on() -> None:
    recorded = read_snapshot(FOLDER / "trace_005.json.gz")

    result = compare(recorded, 0, blind=True, limit_bytes=compare(recorded, 0).measured.peak_requested_bytes - 1)

    assert result.num_ooms == 1
    assert "out of memory" in result.differences[0]
