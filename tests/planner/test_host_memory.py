"""Host memory as torch takes it: what is pinned, by the row."""

from __future__ import annotations

import pytest
from memplan.planner.host_memory import host_reserved_peak_bytes, pinned_bytes, pinned_reserved_bytes
from memplan.planner.ledger import Component, LedgerBuilder, Tier


@pytest.mark.parametrize(
    ("asked", "taken"),
    [(0, 0), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192), (3 * 2**30, 4 * 2**30), (2**30, 2**30)],
)
def test_a_pinned_tensor_takes_the_next_power_of_two(asked, taken):
    assert pinned_bytes(asked) == taken


def test_a_freed_pinned_block_does_not_serve_another_class():
    builder = LedgerBuilder()
    freed = builder.alloc(4000, Component.PARAM, ("w", "pinned"), Tier.HOST_PINNED)
    builder.free(freed)
    builder.alloc(1000, Component.PARAM, ("v", "pinned"), Tier.HOST_PINNED)

    assert pinned_reserved_bytes(builder.finish(lambda key: key)).tolist() == [4096, 4096, 4096 + 1024]


def test_gpu_rows_between_host_rows_are_not_counted():
    builder = LedgerBuilder()
    builder.alloc(100, Component.PARAM, ("w", "loaded"), Tier.HOST_PAGEABLE)
    builder.alloc(10**6, Component.PARAM, ("w", "gpu"))
    builder.alloc(100, Component.PARAM, ("w", "pinned"), Tier.HOST_PINNED)

    assert host_reserved_peak_bytes(builder.finish(lambda key: key)) == 100 + 128


def test_a_run_without_host_memory_has_a_host_peak_of_nothing():
    builder = LedgerBuilder()
    builder.alloc(1000, Component.PARAM, ("w", "gpu"))

    assert host_reserved_peak_bytes(builder.finish(lambda key: key)) == 0
