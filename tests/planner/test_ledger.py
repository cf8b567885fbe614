"""The ledger's invariants, for ledgers that hypothesis makes and for broken ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memplan.planner.ledger import Component, Ledger, LedgerBuilder, Tier

ACTIONS = st.lists(
    st.tuples(st.integers(0, 2**33), st.sampled_from(Component), st.sampled_from(Tier), st.integers(0, 3), st.randoms()),
    max_size=40,
)


def made(actions) -> tuple[Ledger, dict[int, tuple[int, int, int]]]:
    """A ledger of random allocations, each followed by up to three frees of random live blocks; and what is still live."""
    builder = LedgerBuilder()
    live: dict[int, tuple[int, int, int]] = {}
    for nbytes, component, tier, frees, random in actions:
        block = builder.alloc(nbytes, component, ("m", str(nbytes)), tier)
        live[block] = (nbytes, component, tier)
        for _ in range(min(frees, len(live))):
            gone = random.choice(sorted(live))
            builder.free(gone)
            del live[gone]
    return builder.finish(lambda key: key), live


@given(ACTIONS)
def test_blocks_have_one_birth_and_at_most_one_death(actions):
    ledger, _ = made(actions)
    ledger.check()
    blocks, counts = np.unique(ledger.block, return_counts=True)
    assert set(counts.tolist()) <= {1, 2}
    assert len(blocks) == len(actions)


@given(ACTIONS, st.sampled_from(Tier))
def test_components_sum_to_the_live_bytes_after_every_row(actions, tier):
    ledger, _ = made(actions)
    rows, live = ledger.rows(tier), ledger.live_bytes(tier)
    for row, expected in zip(rows.tolist(), live.tolist(), strict=True):
        assert sum(ledger.components_after(row, tier).values()) == expected


@given(ACTIONS, st.sampled_from(Tier))
def test_live_bytes_are_never_negative_and_end_at_what_was_not_freed(actions, tier):
    ledger, left = made(actions)
    live = ledger.live_bytes(tier)
    assert not len(live) or live.min() >= 0
    assert (int(live[-1]) if len(live) else 0) == sum(n for n, _, t in left.values() if t is tier)


@given(ACTIONS, st.sampled_from(Tier))
def test_the_live_blocks_are_those_that_were_not_freed(actions, tier):
    ledger, left = made(actions)
    found = ledger.live_blocks(len(ledger) - 1, tier)
    expected = sorted((n, int(c)) for n, c, t in left.values() if t is tier and n)
    assert sorted((n, c) for n, c, _, _ in found) == expected
    assert [n for n, *_ in found] == sorted((n for n, *_ in found), reverse=True)


@given(ACTIONS)
def test_both_rows_of_a_block_carry_its_component_tier_and_stream(actions):
    ledger, _ = made(actions)
    for block in np.unique(ledger.block).tolist():
        rows = np.flatnonzero(ledger.block == block)
        for column in (ledger.component, ledger.tier, ledger.stream):
            assert len(np.unique(column[rows])) == 1


def small() -> Ledger:
    builder = LedgerBuilder()
    a = builder.alloc(100, Component.PARAM, ("a", ""))
    b = builder.alloc(50, Component.GRAD, ("b", ""))
    builder.free(b)
    builder.free(a)
    return builder.finish(lambda key: key)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("block", [0, 1, 1, 1], "more than one death"),
        ("delta_bytes", [100, 50, -40, -100], "is freed with -40"),
        ("delta_bytes", [-100, 50, -50, 100], "before it is born"),
        ("block", [0, 0, 1, 1], "is freed with 50"),
    ],
)
def test_a_ledger_that_breaks_an_invariant_is_found_out(column, values, message):
    small().check()
    broken = replace(small(), **{column: np.array(values, getattr(small(), column).dtype)})
    with pytest.raises(AssertionError, match=message):
        broken.check()


def test_a_tier_is_counted_by_itself():
    builder = LedgerBuilder()
    builder.alloc(10, Component.PARAM, ("p", ""), Tier.HOST_PINNED)
    builder.alloc(3, Component.PARAM, ("p", ""), Tier.GPU)
    ledger = builder.finish(lambda key: key)
    assert (ledger.peak_bytes(), ledger.peak_bytes(Tier.HOST_PINNED), ledger.peak_bytes(Tier.NVME)) == (3, 10, 0)
    assert ledger.components_after(1, Tier.GPU) == {"param": 3}
    assert ledger.components_after(-1) == {}


def test_sums_of_many_terabytes_are_exact():
    builder = LedgerBuilder()
    for _ in range(3):
        builder.alloc(2**44 + 1, Component.PARAM, ("p", ""))
    ledger = builder.finish(lambda key: key)
    assert ledger.peak_bytes() == 3 * (2**44 + 1) == sum(ledger.components_after(2).values())


def test_an_empty_ledger_has_no_peak():
    ledger = LedgerBuilder().finish(lambda key: key)
    ledger.check()
    assert (len(ledger), ledger.peak_bytes(), ledger.live_blocks(-1)) == (0, 0, [])
