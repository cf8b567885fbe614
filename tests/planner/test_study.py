"""`memplan study`: strategies side by side, and the picture of it."""

import json

import pytest
from memplan import __main__ as command_line
from memplan.errors import CannotTell
from memplan.planner.api import make_request
from memplan.planner.ledger import Component, LedgerBuilder, Tier
from memplan.planner.predict import ledger_of
from memplan.planner.study.figure import draw, picture
from memplan.planner.study.page import page
from memplan.planner.study.phases import step_peaks
from memplan.planner.study.study import combinations, study
from memplan.planner.study.table import render
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import Phase

MODEL = "bert-base-uncased"
QUICK = {"micro_batch_size": 2, "seq_len": 32, "precision": "fp32", "overrides": {"num_hidden_layers": "2"}}
GPUS = 4


@pytest.fixture(scope="module")
def traces():
    return TraceSource()


@pytest.fixture(scope="module")
def found(traces):
    names = [("ddp", "ddp"), ("zero1", "zero1"), ("zero2", "zero2"), ("zero3", "zero3"), ("offloaded ddp", "ddp+")]

    def ask(strategy):
        offload = ("optimizer",) if strategy.endswith("+") else ()
        return make_request(MODEL, "v100-16gb", strategy=strategy.rstrip("+"), gpus=GPUS, offload=offload, **QUICK)

    return study([(name, lambda s=s: ask(s)) for name, s in names], traces)


def test_a_column_is_the_prediction_of_its_strategy(found, traces):
    request = make_request(MODEL, "v100-16gb", strategy="zero2", gpus=GPUS, **QUICK)
    ledger = ledger_of(request, traces.step(request))
    column = found.columns[2]

    assert column.name == "zero2"
    assert column.peak_bytes() == ledger.peak_bytes()
    assert column.prediction.peak.requested_bytes == ledger.peak_bytes()


def test_components_of_a_step_sum_to_what_it_holds(found):
    peaks = [peak for c in found.columns for places in c.steps.values() for peak in places.values()]

    assert len(peaks) >= 4 * len(found.columns)
    assert all(sum(peak.components.values()) == peak.total_bytes for peak in peaks)


def test_savings_are_against_the_first_column(found):
    first, *others = found.columns

    assert found.saving(first) == 0
    for column in others:
        kept = (1 - found.saving(column)) * first.prediction.reserved_peak_bytes
        assert kept == pytest.approx(column.prediction.reserved_peak_bytes)


def test_what_cannot_be_answered_is_left_out_with_its_reason(found):
    assert [c.name for c in found.columns] == ["ddp", "zero1", "zero2", "zero3"]
    ((name, reason),) = found.left_out
    assert name == "offloaded ddp"
    assert "--offload optimizer: DDP keeps everything on the GPU" in reason


def test_a_step_counts_what_is_alive_when_it_begins():
    builder = LedgerBuilder()
    builder.now_phase = int(Phase.INIT)
    kept = builder.alloc(100, Component.PARAM, "weights")
    gone = builder.alloc(900, Component.TEMP, "copy")
    builder.now_phase = int(Phase.STEP)
    builder.free(gone)
    builder.alloc(50, Component.TEMP, "scratch")
    builder.alloc(7, Component.OFFLOAD_BUFFER, "host", Tier.HOST_PINNED)
    builder.free(kept)
    steps = step_peaks(builder.finish(lambda key: ("", key)))

    assert steps["init"]["gpu"].total_bytes == 1000
    assert steps["step"]["gpu"].components == {"param": 100, "temp": 900}
    assert steps["step"]["host_pinned"].total_bytes == 7
    assert "host_pinned" not in steps["init"]
    assert steps["forward"] == {}


@pytest.mark.parametrize("width", [60, 100, 400])
def test_the_table_is_no_wider_than_asked_and_names_every_column(found, width):
    text = render(found, width)

    assert max(len(line) for line in text.splitlines()) <= width
    for column in found.columns:
        assert column.name in text
    assert "Left out\n  - offloaded ddp: " in text


def test_a_pair_that_does_not_go_together_is_left_out_and_the_others_are_answered(capsys):
    words = ["--strategies", "zero0,zero2", "--offload", "none,optimizer,optimizer+param", "--json"]
    assert command_line.main([*BASE, *words]) == 0

    told = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in told["columns"]] == ["zero0", "zero2", "zero2, optimizer offloaded"]
    assert [gone["name"] for gone in told["left_out"]] == [
        "zero0, optimizer offloaded",
        "zero0, optimizer+param offloaded",
        "zero2, optimizer+param offloaded",
    ]


def test_every_pair_of_strategy_and_offload_is_a_column():
    assert combinations(["zero2", "zero3"], ["none", "optimizer"]) == [
        ("zero2", "zero2", "none"),
        ("zero2, optimizer offloaded", "zero2", "optimizer"),
        ("zero3", "zero3", "none"),
        ("zero3, optimizer offloaded", "zero3", "optimizer"),
    ]


def test_a_picture_is_the_same_file_whenever_it_is_drawn(found):
    pytest.importorskip("matplotlib")
    svg, png = picture(found, "svg"), picture(found, "png")

    assert svg == picture(found, "svg")
    assert svg.startswith(b"<?xml")
    assert png.startswith(b"\x89PNG")
    for words in (b"zero3", b"activations kept for backward", b"GPU memory in use by tensors"):
        assert words in svg


def test_a_page_needs_no_other_file(found):
    pytest.importorskip("matplotlib")
    text = page(found)

    assert "<svg" in text
    assert "= in use by tensors" in text
    assert not any(mark in text for mark in ("<script", "<link", "src="))


def test_a_picture_without_matplotlib_says_what_to_install(found, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)

    with pytest.raises(CannotTell, match="pip install matplotlib"):
        draw(found)


BASE = [
    "study",
    MODEL,
    "--set",
    "num_hidden_layers=2",
    "--gpu",
    "v100-16gb",
    "--gpus",
    "4",
    "--seq",
    "32",
    "--precision",
    "fp32",
]


def test_the_command_prints_json_and_writes_its_files(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = ["--figure", str(tmp_path / "a.svg"), "--html", str(tmp_path / "a.html")]

    assert command_line.main([*BASE, "--strategies", "ddp,zero2", "--json", *files]) == 0

    told = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in told["columns"]] == ["ddp", "zero2"]
    assert told["columns"][0]["prediction"]["verdict"] == "fits"
    assert {p.name for p in tmp_path.iterdir()} == {"a.svg", "a.html"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategies", "ddp,,zero1"], "--strategies 'ddp,,zero1': there is nothing between two commas"),
        (["--strategies", "zero9"], "--strategy 'zero9' is not known. Did you mean"),
        (["--strategy", "zero1"], "--strategy zero1: a study takes several. Use --strategies A,B"),
        (["--offload", "none,weights"], "--offload 'weights' is not known. Choose one of optimizer, param,"),
        (["--figure", "a.jpg"], "--figure a.jpg: expected a name that ends in .png or .svg"),
        (["--html", "/nowhere/a.html"], "cannot write '/nowhere/a.html': there is no such folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, words, said):
    assert command_line.main([*BASE, *words]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
