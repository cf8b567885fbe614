"""Event ranges that come again: playing them by what is known of them changes no figure."""

import dataclasses
import random

import pytest
from memplan.planner.allocator.config import AllocConf
from memplan.planner.allocator.replay import ALLOC, FREE, replay
from memplan.planner.ledger import Component, LedgerBuilder
from memplan.planner.trace.steptrace import Phase

KIB, MIB = 2**10, 2**20


def closed_range(rng):
    """(action, size, number within the range) that free all that they allocate."""
    events, live = [], []
    for made in range(rng.randrange(2, 8)):
        events.append((ALLOC, rng.choice([0, 512, 700 * KIB, 3 * MIB, 30 * MIB]), made))
        live.append(made)
        while live and rng.random() < 0.5:
            events.append((FREE, 0, live.pop(rng.randrange(len(live)))))
    return events + [(FREE, 0, number) for number in live]


def stream_with_repeats(seed):
    """Closed ranges between allocations and frees that stay, and where they lie."""
    rng = random.Random(seed)
    patterns = [closed_range(rng) for _ in range(3)]
    rows, repeats, live, key = [], [], [], 0
    for _ in range(60):
        if rng.random() < 0.6:
            number = rng.randrange(3)
            start = len(rows)
            rows += [(action, size, key + place) for action, size, place in patterns[number]]
            key += len(patterns[number])
            repeats.append((start, len(rows), number))
        elif live and rng.random() < 0.5:
            rows.append((FREE, 0, live.pop(rng.randrange(len(live)))))
        else:
            rows.append((ALLOC, rng.choice([2 * KIB, MIB, 40 * MIB, 7 * MIB]), key))
            live.append(key)
            key += 1
    return list(zip(*rows, strict=True)), repeats


CONFIGURATIONS = ["", "expandable_segments:True", "garbage_collection_threshold:0.6", "max_split_size_mb:32"]


@pytest.mark.parametrize("conf", CONFIGURATIONS)
@pytest.mark.parametrize("limit_bytes", [None, 120 * MIB])
@pytest.mark.parametrize("with_series", [False, True])
def test_repeats_change_no_figure(conf, limit_bytes, with_series):
    for seed in range(40):
        columns, repeats = stream_with_repeats(seed)
        options = {"conf": AllocConf.parse(conf), "limit_bytes": limit_bytes, "with_series": with_series}
        plain = replay(*columns, **options)
        quick = replay(*columns, **options, repeats=repeats)
        for field in dataclasses.fields(plain):
            if field.name != "state":
                assert getattr(quick, field.name) == getattr(plain, field.name), (seed, field.name)
        assert quick.state.allocator.free_memory() == plain.state.allocator.free_memory()


def test_a_known_range_is_not_played_again(monkeypatch):
    columns = [ALLOC, FREE] * 50, [MIB, 0] * 50, [number // 2 for number in range(100)]
    played = []
    monkeypatch.setattr(
        "memplan.planner.allocator.caching.bisect_left", lambda keys, key: played.append(key) or _bisect(keys, key)
    )
    replay(*columns, repeats=[(2 * n, 2 * n + 2, 0) for n in range(50)])
    assert len(played) == 2  # once while there is no memory yet, once where it is left as it was


def _bisect(keys, key):
    return sum(held < key for held in keys)


def closed_by_hand(builder, names):
    for name in names:
        block = builder.alloc(MIB, Component.TEMP, (name, "z"))
        builder.free(block)


def test_closed_rows_are_those_that_would_have_been_written():
    quick, plain = LedgerBuilder(), LedgerBuilder()
    for step, names in enumerate((["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"])):
        for builder in (quick, plain):
            builder.now_iteration, builder.now_phase = step, int(Phase.FORWARD)
            builder.alloc(512, Component.PARAM, (f"kept {step}", "x"))
        quick.closed("key", names, lambda names=names: closed_by_hand(quick, names))
        closed_by_hand(plain, names)
    quick, plain = quick.finish(lambda key: key), plain.finish(lambda key: key)
    assert quick.repeats == tuple((1 + 5 * n, 5 + 5 * n, 0) for n in range(4))
    for column in ("block", "delta_bytes", "component", "tier", "stream", "phase", "iteration"):
        assert (getattr(quick, column) == getattr(plain, column)).all(), column
    assert [quick.labels[label] for label in quick.label] == [plain.labels[label] for label in plain.label]
    quick.check()
