"""The cache on disk never decides an answer, and says at most one line about its troubles."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from memplan.planner import cache


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())


def test_what_is_put_is_got():
    cache.put("a", b"one")
    cache.put("a", b"two")
    assert cache.get("a") == b"two"
    assert cache.get("b") is None


def test_nothing_half_written_is_left(tmp_path):
    cache.put("a", b"x" * 1000)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["a"]


def test_a_write_that_breaks_leaves_the_old_entry_and_no_other_file(tmp_path, monkeypatch, capsys):
    cache.put("a", b"old")

    def broken(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    cache.put("a", b"new")
    assert cache.get("a") == b"old"
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["a"]
    assert "disk full" in capsys.readouterr().err


def a_file_where_the_folder_should_be(tmp_path) -> Path:
    path = tmp_path / "file"
    path.write_text("")
    return path


def test_a_folder_that_cannot_be_made_costs_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEMPLAN_CACHE", str(a_file_where_the_folder_should_be(tmp_path) / "cache"))
    for _ in range(3):
        cache.put("a", b"one")
        assert cache.get("a") is None
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("memplan: warning: the trace cache cannot be written")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_costs_one_line(tmp_path, capsys):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    cache.put("a", b"one")
    cache.put("b", b"two")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_without_a_home_nothing_is_cached_and_nothing_breaks(monkeypatch, capsys):
    monkeypatch.delenv("MEMPLAN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    cache.put("a", b"one")
    assert cache.get("a") is None
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_folder_is_chosen_by_the_environment(monkeypatch, tmp_path):
    assert cache.folder() == tmp_path / "cache"
    monkeypatch.delenv("MEMPLAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg" / "memplan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == Path.home() / ".cache" / "memplan"


def test_keys_differ_where_anything_differs(monkeypatch):
    base = cache.key("family", "model", {"a": 1})
    assert base == cache.key("family", "model", {"a": 1})
    assert base != cache.key("point", "model", {"a": 1})
    assert base != cache.key("family", "model", {"a": 2})
    assert base != cache.key("family", "other", {"a": 1})
    monkeypatch.setattr(cache, "library_versions", lambda: {"torch": "0", "transformers": "0"})
    assert base != cache.key("family", "model", {"a": 1})
    monkeypatch.undo()
    monkeypatch.setattr(cache, "_code_fingerprint", lambda patterns: "another memplan")
    assert base != cache.key("family", "model", {"a": 1})


def test_a_key_is_a_plain_file_name():
    name = cache.key("family", "../../etc", "a/b")
    assert name == os.path.basename(name)
    assert len(name) < 64


def test_the_answer_is_the_same_without_a_cache(tmp_path, monkeypatch, capsys):
    import memplan

    options = {"micro_batch_size": 1, "seq_len": 32, "overrides": {"n_layer": "1"}, "advice": False}
    cached = memplan.fits("openai-community/gpt2", "l4", **options)
    monkeypatch.setenv("MEMPLAN_CACHE", str(a_file_where_the_folder_should_be(tmp_path) / "cache"))
    assert memplan.fits("openai-community/gpt2", "l4", **options) == cached
    assert len(capsys.readouterr().err.splitlines()) <= 1
