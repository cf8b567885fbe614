from __future__ import annotations

import itertools
import json
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memplan.errors import UserError
from memplan.planner.timeline.engine import Engine, Task, totals
from memplan.planner.timeline.export import repeated, write_trace

LANES = ("host", "compute", "h2d", "network")


def zo_step(first: int, upload: float = 2.0, run: float = 1.0, blocks: int = 4):
    """Uploads of blocks, each run when it is there, each sent back when it has run."""
    for block in range(blocks):
        key = first + 3 * block
        yield Task(key, "h2d", upload, f"upload {block}")
        yield Task(key + 1, "compute", run, f"run {block}", (key,))
        yield Task(key + 2, "d2h", upload / 2, f"offload {block}", (key + 1,))


@st.composite
def programs(draw):
    tasks = []
    for key in range(draw(st.integers(1, 40))):
        after = draw(st.lists(st.integers(0, key - 1), max_size=3)) if key else []
        tasks.append(Task(key, draw(st.sampled_from(LANES)), draw(st.integers(0, 20)) / 4, "", tuple(after)))
    return tasks


def by_hand(tasks):
    """The ends of tasks in order lanes without links: each begins at the latest end of what it waits for."""
    ends, lanes = {}, {}
    for task in tasks:
        start = max([lanes.get(task.lane, 0.0), *(ends[k] for k in task.after)])
        ends[task.key] = lanes[task.lane] = start + task.seconds
    return ends


@given(programs())
def test_every_task_begins_when_its_lane_and_all_that_it_waits_for_are_over(tasks):
    spans = list(Engine().run(tasks))

    assert {s.key: s.end_s for s in spans} == pytest.approx(by_hand(tasks))


@given(programs())
def test_the_critical_path_of_every_task_adds_up_to_its_end(tasks):
    for span in Engine().run(tasks):
        assert sum(span.critical.values()) == pytest.approx(span.end_s)


@given(programs(), st.integers(1, 5))
def test_a_host_that_may_run_ahead_less_is_never_faster(tasks, queue):
    assert totals(Engine(queue=queue).run(tasks)).seconds >= totals(Engine().run(tasks)).seconds - 1e-9


def test_spans_come_in_the_order_in_which_they_end():
    spans = list(Engine().run([Task(0, "a", 3.0), Task(1, "b", 1.0), Task(2, "b", 1.0)]))

    assert [s.key for s in spans] == [1, 2, 0]


def test_uploads_that_are_slower_than_the_blocks_bound_the_step():
    found = totals(Engine().run(zo_step(0)))

    assert found.seconds == 4 * 2.0 + 1.0 + 1.0  # four uploads, then the last block runs and leaves
    assert found.bound_by == "h2d"
    assert found.busy_s == {"h2d": 8.0, "compute": 4.0, "d2h": 4.0}


def test_blocks_that_are_slower_than_their_uploads_bound_the_step():
    assert totals(Engine().run(zo_step(0, upload=1.0, run=3.0))).bound_by == "compute"


def test_two_cards_that_upload_through_one_switch_take_twice_as_long():
    shared = Engine({"gpu0 h2d": "pcie0", "gpu1 h2d": "pcie0"})
    tasks = [Task(0, "gpu0 h2d", 1.0), Task(1, "gpu1 h2d", 1.0)]

    assert totals(shared.run(tasks)).seconds == 2.0
    assert totals(Engine().run(tasks)).seconds == 1.0


def test_a_transfer_has_the_whole_link_again_when_the_other_one_is_over():
    ends = {s.key: s.end_s for s in Engine({"a": "link", "b": "link"}).run([Task(0, "a", 1.0), Task(1, "b", 3.0)])}

    assert ends == {0: 2.0, 1: 4.0}  # half speed until 2, when one of three seconds is done; then two more


def test_a_link_carries_no_more_than_one_second_of_work_a_second():
    rng = random.Random(7)
    tasks = [Task(i, rng.choice("abc"), rng.random()) for i in range(60)]
    found = totals(Engine(dict.fromkeys("abc", "link")).run(tasks))

    assert found.seconds == pytest.approx(sum(t.seconds for t in tasks))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([Task(0, "a", -1.0)], "takes -1.0 seconds"),
        ([Task(0, "a", 1.0), Task(0, "a", 1.0)], "keys must rise"),
        ([Task(0, "a", 1.0, "", (1,))], "waits for a later one"),
    ],
)
def test_a_program_that_cannot_run_is_refused(tasks, message):
    with pytest.raises(ValueError, match=message):
        list(Engine().run(tasks))


def test_a_thousand_steps_are_written_without_being_held_in_memory(tmp_path):
    def peak(steps):
        tracemalloc.start()
        count = write_trace(repeated(zo_step, steps), tmp_path / "trace.json")
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return count, most

    few, many = peak(300), peak(1000)
    assert (few[0], many[0]) == (300 * 12 + 3, 1000 * 12 + 3)
    assert many[1] < 1.3 * few[1]
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == many[0]


def test_the_trace_names_its_lanes_and_counts_in_microseconds(tmp_path):
    file = tmp_path / "trace.json"
    write_trace([Task(0, "h2d", 0.5, "upload"), Task(1, "compute", 0.25, "run", (0,))], file, rank=3)
    events = json.loads(file.read_text())["traceEvents"]

    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["h2d", "compute"]
    assert {"name": "run", "ph": "X", "pid": 3, "tid": 1, "ts": 500000.0, "dur": 250000.0} in events


def test_a_trace_that_cannot_be_written_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="cannot write"):
        write_trace([Task(0, "a", 1.0)], tmp_path / "nowhere" / "trace.json")


def test_a_trace_that_breaks_off_leaves_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match=r"takes -1\.0 seconds"):
        write_trace([Task(0, "a", 1.0), Task(1, "a", -1.0)], tmp_path / "trace.json", Engine(queue=1))

    assert list(tmp_path.iterdir()) == []


def test_steps_follow_one_another():
    one, three = (totals(Engine().run(repeated(zo_step, steps))).seconds for steps in (1, 3))

    assert one < three <= 3 * one


def test_an_endless_program_can_be_watched():
    endless = repeated(zo_step, 10**9)

    assert len(list(itertools.islice(Engine().run(endless), 50))) == 50
