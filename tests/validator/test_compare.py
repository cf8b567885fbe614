"""The decision and its words."""

import json
from dataclasses import replace

import pytest
from memplan.validator.compare import Comparison, Row, rows_of
from memplan.validator.measurement import PhaseBytes, Usage

QUESTION = {"model": "tiny", "micro_batch_size": 2, "seq_len": 64, "precision": "fp32", "optimizer": "adamw", "mode": "train",
            "loop": {"iterations": 2}}  # fmt: skip


def usage(forward, backward=90, *, grad=10, counter="live", reserved=None):
    phases = (
        PhaseBytes(phase="init", step="first", peak_bytes=999_999, after_bytes=20),
        PhaseBytes(phase="forward", step="first", peak_bytes=forward, after_bytes=50),
        PhaseBytes(phase="backward", step="later", peak_bytes=backward, after_bytes=40),
    )
    components = {"init": {"param": 20, "buffer": 0}, "backward": {"grad": grad}}
    return Usage(counter=counter, phases=phases, components=components, reserved_peak_bytes=reserved)


def compared(ours, theirs, **more):
    rows = rows_of(ours, theirs) if theirs else ()
    fields = {"question": QUESTION, "device": "cpu", "tolerance": 0.001, "predicted": ours, "measured": theirs, "rows": rows}
    return Comparison(**{**fields, **more})


def test_the_peak_of_all_steps_decides_and_the_making_of_the_model_is_no_step():
    result = compared(usage(100_000), usage(100_000))
    assert (result.peak.predicted_bytes, result.peak.measured_bytes) == (100_000, 100_000)


@pytest.mark.parametrize(("measured", "code"), [(100_000, 0), (100_100, 0), (99_900, 1), (100_200, 1)])
def test_it_agrees_within_the_tolerance_of_the_measured_peak(measured, code):
    assert compared(usage(100_000), usage(measured)).exit_code == code


def test_a_run_that_gave_nothing_is_neither_agreement_nor_difference():
    result = compared(usage(100_000), None, reason="the run was killed")
    assert result.exit_code == 2
    assert not result.agrees
    assert result.to_json()["outcome"] == "could_not_run"
    assert str(result).startswith("COULD NOT RUN  the run was killed")


def test_each_phase_has_its_peak_and_its_rest_and_each_component_its_moment():
    rows = rows_of(usage(100), usage(100, grad=8))
    names = [(r.what, r.phase, r.step) for r in rows]
    assert names == [
        ("peak", "", ""), ("after", "init", "first"), ("peak", "forward", "first"), ("after", "forward", "first"),
        ("peak", "backward", "later"), ("after", "backward", "later"), ("param", "init", ""), ("buffer", "init", ""),
        ("grad", "backward", ""),
    ]  # fmt: skip
    assert rows[-1].ratio == 10 / 8


def test_reserved_bytes_are_a_row_where_both_sides_have_them():
    rows = rows_of(usage(1, counter="allocated", reserved=4), usage(1, counter="allocated", reserved=5))
    assert Row(what="reserved", predicted_bytes=4, measured_bytes=5) in rows


def test_the_ratio_of_nothing_is_nothing():
    assert Row(what="buffer", predicted_bytes=0, measured_bytes=0).ratio is None


def test_the_report_says_the_verdict_first_and_then_every_row_with_its_ratio():
    text = str(compared(usage(100_000), usage(200_000)))
    lines = text.splitlines()
    assert lines[0] == "DIFFERS  peak predicted 97.7 KiB, measured 195.3 KiB: 50.000% apart, 0.1% allowed"
    assert lines[1] == "tiny on cpu: 2 steps run for real, micro batch 2, sequence 64, fp32, adamw"
    assert any(
        line.split() == ["peak", "of", "all", "steps", "97.7", "KiB", "195.3", "KiB", "0.5000", "-100,000"] for line in lines
    )


def test_the_json_carries_what_the_report_says():
    data = compared(usage(100), usage(100), notes=("a note",)).to_json()
    assert json.loads(json.dumps(data)) == data
    assert list(data) == [
        "outcome", "reason", "device", "counter", "tolerance", "rows", "question", "predicted", "measured", "notes", "versions",
    ]  # fmt: skip
    assert set(data["rows"][0]) == {"what", "phase", "step", "predicted_bytes", "measured_bytes", "ratio"}


def test_a_usage_is_the_same_after_a_trip_through_json():
    sent = replace(usage(7, reserved=9), notes=("n",), detail={"gpu": "x"})
    assert Usage.from_json(json.loads(json.dumps(sent.to_json()))) == sent
