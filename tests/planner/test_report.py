"""The report: the verdict comes first, its rows sum as printed, and it reads the same in a pipe."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memplan.planner.prediction import Failure, HostNeeds, Moment, Prediction, Remedy, Verdict
from memplan.planner.report import print_report, render
from memplan.planner.wording import COMPONENT, count, op_name, shares
from memplan.units import GiB, MiB

QUESTION = {
    "model": "some/model",
    "task": "causal-lm",
    "gpu": "l4",
    "micro_batch_size": 2,
    "seq_len": 512,
    "target_len": None,
    "image_size": None,
    "precision": "bf16",
    "method": "full",
    "strategy": "single",
    "optimizer": "adamw",
    "recompute": "none",
    "mode": "train",
    "gpus": 1,
    "loop": {"grad_accum_steps": 1},
}


def moment(components: dict[str, int], *, rounding: int = 0, phase: str = "backward", fqn: str = "layers.1.mlp") -> Moment:
    requested = sum(components.values())
    what = "aten.mm.default"
    return Moment(
        allocated_bytes=requested + rounding,
        requested_bytes=requested,
        phase=phase,
        fqn=fqn,
        what=what,
        step="later steps",
        components=components,
    )


def prediction(
    verdict: Verdict = Verdict.FITS,
    *,
    components: dict[str, int] | None = None,
    cached: int = GiB // 3,
    rounding: int = 0,
    usable: int = 22 * GiB,
    context: int = 300 * MiB,
    **others: object,
) -> Prediction:
    peak = moment(components or {"param": 2 * GiB, "grad": 2 * GiB, "activation": 5 * GiB, "buffer": 512}, rounding=rounding)
    reserved = peak.allocated_bytes + cached
    fields = {
        "verdict": verdict,
        "reason": "because",
        "question": QUESTION,
        "gpu": "L4",
        "num_params": 10**9,
        "num_trainable_params": 10**9,
        "total_bytes": usable + context,
        "context_bytes": context,
        "usable_bytes": usable,
        "allocated_peak_bytes": peak.allocated_bytes,
        "reserved_peak_bytes": reserved,
        "device_peak_bytes": reserved + context,
        "headroom_bytes": usable - reserved,
        "peak": peak,
        "phases": {"forward": moment({"param": GiB}, phase="forward"), "backward": peak},
        "assumptions": ("the loop keeps only the loss",),
    }
    return Prediction(**{**fields, **others})


NOT = {"verdict": Verdict.DOES_NOT_FIT, "usable": 4 * GiB}
FAILURE = Failure(
    phase="backward",
    fqn="layers.3.mlp",
    what="aten.mm.default",
    requested_bytes=300 * MiB,
    allocated_bytes=4 * GiB - MiB,
    reserved_bytes=4 * GiB,
    step="first step",
)


def first_line(p: Prediction) -> str:
    return render(p).splitlines()[0]


def test_the_first_line_says_that_it_fits_and_the_headroom():
    assert first_line(prediction()) == "FITS: 12.67 GiB to spare on one L4"


def test_the_first_line_says_that_it_does_not_fit_and_what_is_missing():
    assert first_line(prediction(**NOT)) == "DOES NOT FIT: 5.33 GiB too much for one L4"


def test_a_tight_fit_says_why_it_is_tight():
    lines = render(prediction(Verdict.TIGHT, usable=10 * GiB)).splitlines()

    assert lines[0] == "TIGHT: 0.67 GiB to spare on one L4"
    assert lines[1].startswith("That is less than the prediction's own error")


def test_a_fit_that_needs_an_emptied_cache_claims_no_headroom():
    text = render(prediction(Verdict.TIGHT, usable=9 * GiB + 100 * MiB, num_alloc_retries=1))

    assert text.startswith("TIGHT: nothing to spare on one L4\n")
    assert "only because PyTorch empties its cache" in text
    assert "missing, until the cache is emptied" in text


def test_a_question_without_an_answer_says_so_and_shows_no_figures():
    text = render(Prediction(verdict=Verdict.UNKNOWN, reason="torch.compile is not modelled", question=QUESTION, gpu="L4"))

    assert text.splitlines()[:2] == ["CANNOT TELL", "torch.compile is not modelled."]
    assert "GiB" not in text


def test_a_failure_is_named_by_phase_module_and_size():
    text = " ".join(render(prediction(**NOT, failure=FAILURE)).split())

    assert (
        "The run stops in the backward pass of the first step, at layers.3.mlp (mm): it asks for 300.0 MiB when 4.00 GiB of"
        in text
    )


def test_a_failure_of_fragmentation_says_that_the_free_memory_is_in_pieces():
    holes = replace(FAILURE, allocated_bytes=3 * GiB)

    assert "the other 1.00 GiB lie in pieces that are too small" in " ".join(render(prediction(**NOT, failure=holes)).split())


def test_a_model_that_does_not_even_load_is_said_to_be_too_large_by_itself():
    text = render(prediction(**NOT, failure=replace(FAILURE, phase="init", fqn="layers.9.weight")))

    assert "before its first step: the model alone takes more than the 4.00 GiB" in text


def printed_table(text: str) -> list[tuple[str, str, float]]:
    """(mark, label, GiB) of each row of the memory table."""
    table = text.split("Memory on the card at the peak")[1].split("\n\n")[0].splitlines()[1:]
    rows = [re.fullmatch(r"(.) (.{38})\s*(-?[0-9]+\.[0-9]{2})(?:\s+[0-9]+ %.*)?", line) for line in table]
    assert all(rows), table
    return [(row[1], row[2].strip(), float(row[3])) for row in rows]


def assert_rows_sum(text: str) -> None:
    running = 0.0
    for mark, label, value in printed_table(text)[:-1]:
        if mark == "=":
            assert running == pytest.approx(value, abs=1e-6), f"{label}: the rows above sum to {running:.2f}"
            running = value
        else:
            running += value


@given(
    components=st.dictionaries(st.sampled_from(sorted(COMPONENT)), st.integers(1, 40 * GiB), min_size=1),
    cached=st.integers(0, 3 * GiB),
    rounding=st.integers(0, 64 * MiB),
    usable=st.integers(GiB, 140 * GiB),
    context=st.integers(100 * MiB, GiB),
)
def test_the_rows_of_the_table_sum_as_printed(components, cached, rounding, usable, context):
    made = prediction(components=components, cached=cached, rounding=rounding, usable=usable, context=context)

    assert_rows_sum(render(made))


@given(parts=st.lists(st.integers(0, 10**12), min_size=1), total=st.integers(0, 10**5))
def test_shares_sum_to_the_total_and_each_is_within_one_of_exact(parts, total):
    given_out = shares(parts, total)

    if sum(parts):
        assert sum(given_out) == total
        assert all(abs(got - part * total / sum(parts)) < 1 + 1e-6 for got, part in zip(given_out, parts, strict=True))
    else:
        assert not any(given_out)


def test_the_table_ends_with_the_cards_own_figures():
    rows = {label: value for _, label, value in printed_table(render(prediction()))}

    assert rows["memory of the card"] == 22.29
    assert rows["of which PyTorch can have (usable)"] == 22.0
    assert rows["held by PyTorch (reserved)"] == 9.33


def test_the_peak_names_phase_step_module_and_op():
    assert "peak    in the backward pass of later steps, layers.1.mlp (mm)" in render(prediction())


def test_the_largest_sizes_that_fit_are_shown_when_it_fits():
    text = render(prediction(max_micro_batch_size=7, max_seq_len=4096))

    assert "micro batch      7 at 512 tokens" in text
    assert "sequence length  4096 tokens at micro batch 2" in text


def test_changes_that_help_are_shown_with_their_peak_when_it_does_not_fit():
    better = Remedy(change="recompute", option="--recompute full", reserved_peak_bytes=3 * GiB, verdict=Verdict.FITS)
    text = render(prediction(**NOT, remedies=(better,)))

    assert "Any one of these makes it fit" in text
    assert re.search(r"3\.00 +fits +--recompute full +recompute", text)


def test_changes_that_do_not_suffice_are_not_called_a_cure():
    better = Remedy(change="recompute", option="--recompute full", reserved_peak_bytes=30 * GiB, verdict=Verdict.DOES_NOT_FIT)
    text = render(prediction(**NOT, remedies=(better,)))

    assert "None of these changes is enough; they come closest" in text


def test_words_that_do_not_fit_beside_their_option_follow_on_a_line_of_their_own():
    option, words = (
        "--precision bf16 --optimizer adafactor --recompute full",
        "smaller numbers, another optimizer, and more time",
    )
    remedy = Remedy(change=words, option=option, reserved_peak_bytes=3 * GiB, verdict=Verdict.FITS)
    lines = render(prediction(**NOT, remedies=(remedy,)), 92).splitlines()

    row = next(i for i, line in enumerate(lines) if option in line)
    assert lines[row + 1].strip() == words
    assert max(map(len, lines)) <= 92


def test_inference_has_no_steps_and_keeps_nothing_for_backward():
    text = render(prediction(question={**QUESTION, "mode": "inference"}))

    assert "inputs, and results that are kept" in text
    assert "for backward" not in text
    assert "later steps" not in text


def test_host_memory_is_shown_where_the_run_needs_it():
    assert "Host memory" not in render(prediction())
    needs = HostNeeds(pinned_bytes=3 * GiB, pinned_reserved_bytes=4 * GiB, pageable_bytes=GiB, node_bytes=5 * GiB)
    text = render(prediction(host=needs))
    lines = {line.split()[0]: line for line in text[text.index("Host memory") :].splitlines()[1:4]}
    assert "4.00" in lines["pinned"]
    assert "asked for as 3.00" in lines["pinned"]
    assert "1.00" in lines["pageable"]
    assert "5.00" in lines["a"]


@pytest.mark.parametrize("width", [70, 80, 100])
def test_no_line_is_wider_than_asked(width):
    long = moment({"param": GiB}, fqn="model." + "very_long_name." * 9)
    made = prediction(peak=long, phases={"backward": long}, assumptions=("a word " * 40,), failure=FAILURE)

    lines = render(made, width).splitlines()
    assert max(map(len, lines)) <= max(width, max(len(word) for line in lines for word in line.split()) + 8)


def test_colour_is_only_in_the_verdict():
    plain, coloured = render(prediction()), render(prediction(), colour=True)

    assert "\x1b" not in plain
    assert coloured.startswith("\x1b[1;32mFITS\x1b[0m: ")
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


@pytest.mark.parametrize(("terminal", "no_color", "coloured"), [(True, "", True), (True, "1", False), (False, "", False)])
def test_colour_is_for_terminals_that_want_it(capsys, monkeypatch, terminal, no_color, coloured):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)

    print_report(prediction())

    assert ("\x1b" in capsys.readouterr().out) is coloured


def test_str_of_a_prediction_is_its_report():
    assert str(prediction()) == render(prediction())


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("aten._softmax_backward_data.default", "softmax_backward_data"),
        ("aten.add.Tensor", "add"),
        ("optimizer step", "optimizer step"),
        ("memplan.attention.default", "attention"),
        ("clip_grad_norm_", "clip_grad_norm_"),
    ],
)
def test_ops_are_named_without_namespace_and_overload(op, name):
    assert op_name(op) == name


def test_large_counts_are_written_in_words():
    assert [count(n) for n in (12, 8_030_261_248, 5e12)] == ["12", "8.03 billion", "5.00 trillion"]
