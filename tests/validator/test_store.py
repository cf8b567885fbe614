"""Records survive whatever happens to the process that writes them, and never cost the answer."""

import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest
from memplan.errors import UserError
from memplan.validator import store
from memplan.validator.compare import Comparison, rows_of
from memplan.validator.measurement import PhaseBytes, Usage


def comparison(reason=""):
    used = Usage(
        counter="live", phases=(PhaseBytes(phase="forward", step="first", peak_bytes=100, after_bytes=60),), components={}
    )
    measured = None if reason else used
    question = {"model": "tiny", "micro_batch_size": 1, "seq_len": 8, "precision": "fp32", "mode": "train"}
    return Comparison(
        question=question, device="cpu", tolerance=0.001, predicted=used, measured=measured, reason=reason,
        rows=rows_of(used, used) if measured else (), versions={"torch": "2.13"},
    )  # fmt: skip


def test_a_record_says_what_was_asked_predicted_and_measured(tmp_path):
    place = tmp_path / "new" / "records.sqlite3"
    assert store.remember(comparison(), place) is None
    (record,) = store.records(place)
    assert (record.outcome, record.device, record.versions) == ("agrees", "cpu", {"torch": "2.13"})
    assert record.request["model"] == "tiny"
    assert record.predicted["peak_bytes"] == record.measured["peak_bytes"] == 100
    assert record.made.endswith("+00:00")


def test_a_run_that_could_not_be_run_is_remembered_with_its_reason(tmp_path):
    place = tmp_path / "records.sqlite3"
    store.remember(comparison("the run was killed"), place)
    (record,) = store.records(place)
    assert (record.outcome, record.measured, record.reason) == ("could_not_run", None, "the run was killed")


def test_records_come_in_the_order_in_which_they_were_made(tmp_path):
    place = tmp_path / "records.sqlite3"
    for reason in ("one", "two", "three"):
        store.remember(comparison(reason), place)
    assert [r.reason for r in store.records(place)] == ["one", "two", "three"]


def test_there_are_no_records_where_there_is_no_file_and_none_is_made(tmp_path):
    assert store.records(tmp_path / "none.sqlite3") == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MEMPLAN_HOME": "/a", "XDG_DATA_HOME": "/b"}, "/a/records.sqlite3"),
        ({"XDG_DATA_HOME": "/b", "HOME": "/h"}, "/b/memplan/records.sqlite3"),
        ({"HOME": "/h"}, "/h/.local/share/memplan/records.sqlite3"),
    ],
)
def test_the_place_follows_the_environment(environment, expected, monkeypatch):
    for name in ("MEMPLAN_HOME", "XDG_DATA_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(store.default_path()) == expected


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from test_store import comparison
from memplan.validator import store
while True:
    assert store.remember(comparison("x" * 5000), sys.argv[1]) is None
    print(len(store.records(sys.argv[1])), flush=True)
"""


def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_file_with_every_record_it_had_reported(tmp_path):
    place = tmp_path / "records.sqlite3"
    folder = os.path.dirname(__file__)
    for round_number in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(place), folder], stdout=subprocess.PIPE, text=True) as writer:
            reported = int(writer.stdout.readline())
            time.sleep(0.003 * round_number)
            writer.send_signal(signal.SIGKILL)
            rest = [line for line in writer.stdout.read().splitlines() if line]
            assert writer.wait() == -signal.SIGKILL
        reported = max([reported, *(int(line) for line in rest[:-1])])
        with sqlite3.connect(place) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        found = store.records(place)
        assert len(found) >= reported
        assert {len(r.reason) for r in found} == {5000}


def test_a_place_that_cannot_be_written_costs_one_line_of_warning(tmp_path):
    (tmp_path / "file").write_text("")
    warning = store.remember(comparison(), tmp_path / "file" / "records.sqlite3")
    assert warning.startswith("the result was not recorded in ")
    assert "\n" not in warning


def test_a_full_disk_costs_one_line_of_warning_and_leaves_the_old_records(tmp_path, monkeypatch):
    place = tmp_path / "records.sqlite3"
    store.remember(comparison("kept"), place)
    full = store.add

    def add(connection, result):
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")  # what SQLite says then is what it says of a full disk
        full(connection, result)

    monkeypatch.setattr(store, "add", add)
    warning = store.remember(comparison("x" * 100_000), place)
    assert "full" in warning
    assert [r.reason for r in store.records(place)] == ["kept"]


def test_a_file_of_a_newer_memplan_is_left_alone(tmp_path):
    place = tmp_path / "records.sqlite3"
    store.remember(comparison(), place)
    with sqlite3.connect(place) as connection:
        connection.execute(f"PRAGMA user_version = {store.SCHEMA_VERSION + 1}")
    assert "newer memplan" in store.remember(comparison(), place)
    with pytest.raises(UserError, match="newer memplan"):
        store.records(place)


def test_a_file_that_is_no_database_is_a_mistake_that_names_it(tmp_path):
    place = tmp_path / "records.sqlite3"
    place.write_text("not a database, but long enough to be looked at as one" * 40)
    assert "not a database" in store.remember(comparison(), place)
    with pytest.raises(UserError, match=r"records\.sqlite3.*--store"):
        store.records(place)
