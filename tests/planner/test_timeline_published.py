from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
from memplan.__main__ import main
from memplan.errors import CannotTell, UserError
from memplan.hardware import catalogue
from memplan.planner.timeline import fit, published
from memplan.planner.timeline.roofline import best_matmul_share, coefficients
from memplan.planner.trace.source import TraceSource

SPEEDS = Path(__file__).parents[2] / ".." / "shared" / "facts" / "throughput.jsonl"
needs_speeds = pytest.mark.skipif(not SPEEDS.exists(), reason="the published speeds lie beside the repository")
ROOFLINE = json.loads((Path(__file__).parents[2] / "hardware" / "data" / "roofline.json").read_text())

ROW = {
    "id": "one",
    "source": {"repo": "a/b"},
    "scope": "step",
    "gpu": "a100-sxm-80gb",
    "n_gpus": 8,
    "gpus_per_node": 8,
    "model": {"name": "tiny", "family": "gpt2", "config": {"d_model": 128, "n_layers": 2, "n_heads": 2, "vocab_size": 512}},
    "task": "pretrain",
    "precision": "bf16",
    "seq_len": 64,
    "micro_batch": 4,
    "global_batch": 64,
    "parallel": {"data": "ddp", "dp": 8, "tp": 1, "pp": 1},
    "act_ckpt": "none",
    "offload": "none",
    "framework": "x",
    "tokens_per_s_total": 8000.0,
}


def row(**changes):
    return {**ROW, **changes}


def test_a_row_becomes_a_question_with_its_micro_steps():
    found = published.question_of(row())

    assert (found.request.strategy, found.request.gpus, found.request.micro_batch_size) == ("ddp", 8, 4)
    assert found.request.loop.grad_accum_steps == 2  # 64 sequences over 8 cards of 4
    assert found.rate == 1000.0  # of one card
    assert found.group == ("a/b", "a100-sxm-80gb")


def test_a_batch_of_all_cards_is_shared_among_them():
    found = published.question_of(row(samples_per_s_total=160.0, micro_batch=32))

    assert (found.request.micro_batch_size, found.rate, found.counts_samples) == (4, 20.0, True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scope": "layer"}, "one layer"),
        ({"precision": "nvfp4"}, "nvfp4 is not modelled"),
        ({"task": "lora"}, "method lora"),
        ({"offload": "optimizer-cpu"}, "offload optimizer-cpu"),
        ({"act_ckpt": "unknown"}, "what was recomputed"),
        ({"micro_batch": None}, "batch size is not stated"),
        ({"model": {"name": "nobody-knows", "family": "gpt3"}}, "shape of nobody-knows"),
        ({"tokens_per_s_total": None, "mfu": 0.5}, "only a share of the peak"),
        ({"parallel": {"data": "dist-opt"}}, "dist-opt"),
    ],
)
def test_a_row_that_cannot_be_asked_says_why(changes, reason):
    with pytest.raises(CannotTell, match=reason):
        published.question_of(row(**changes))


def test_a_broken_line_is_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n{oops\n")
    with pytest.raises(UserError, match="line 2"):
        published.read(file)
    file.write_text('{"id": "x"}\n')
    with pytest.raises(UserError, match="line 1: expected an object with act_ckpt"):
        published.read(file)
    with pytest.raises(UserError, match="cannot read"):
        published.read(tmp_path / "nowhere")


def test_a_row_is_predicted_and_judged_by_its_group():
    case = fit.case_of(published.question_of(row()), TraceSource())
    report = fit.judge([case], {"method lora": 3}, 4)

    assert case.two is not None
    rate = case.rate(coefficients())
    assert report.groups[0].bias == pytest.approx(rate / 1000.0)
    assert (report.covered, report.rows, report.groups[0].tau) == (1, 4, None)
    assert "method lora" in str(report)
    assert json.loads(json.dumps(report.to_json()))["covered"] == 1


def test_every_second_group_judges():
    groups = [("b", "x"), ("a", "x"), ("c", "x"), ("a", "y")]

    assert [fit.is_fitted(g, groups) for g in sorted(groups)] == [True, False, True, False]


def test_every_coefficient_is_within_its_bounds_and_says_where_it_is_from():
    assert ROOFLINE["coefficients"].keys() == fit._BOUNDS.keys()
    for name, entry in ROOFLINE["coefficients"].items():
        low, high = fit._BOUNDS[name]
        assert low <= entry["value"] <= high
        assert fit._COMMAND in entry["source"] or entry["source"].startswith("not fitted, as no row")
    assert sum(fit._COMMAND in entry["source"] for entry in ROOFLINE["coefficients"].values()) >= 7


def test_every_best_product_is_of_a_card_of_the_catalogue_and_says_where_it_is_from():
    for key, entry in ROOFLINE["best_matmul"]["gpus"].items():
        assert catalogue.find(key) == key
        assert entry["status"] in ("measured", "derived")
        assert entry["source"]
    for device in catalogue.devices():
        assert 0.3 < best_matmul_share(device) < 1.2


@needs_speeds
def test_most_published_speeds_can_be_asked():
    rows = [r for r in published.read(SPEEDS) if published.in_scope(r)]
    batches = published.stated_batches(rows)
    asked, reasons = 0, Counter()
    for r in rows:
        try:
            published.question_of(r, batches)
            asked += 1
        except CannotTell as error:
            reasons[str(error)] += 1

    assert asked >= 0.8 * len(rows), reasons


@needs_speeds
@pytest.mark.slow
def test_groups_that_were_not_fitted_are_within_thirty_percent_and_in_order():
    report = fit.accuracy(SPEEDS)

    assert report.errors[False] <= 0.30
    assert min(report.taus(False)) >= 0.7
    assert report.covered >= 0.8 * report.rows


def test_the_command_prints_groups_and_coverage(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in (ROW, row(id="two", task="lora"))))

    assert main(["accuracy", "--time", str(file)]) == 0
    said = capsys.readouterr().out
    assert "covered: 1 of 2 rows" in said
    assert "method lora" in said
    assert main(["accuracy", "--time", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["refused"] == {"method lora": 1}


def test_a_file_without_a_row_that_can_be_asked_is_no_success(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row(task="lora")))

    assert main(["accuracy", "--time", str(file)]) == 2
    assert "no row can be asked" in capsys.readouterr().err


def test_a_fit_moves_the_coefficient_that_made_the_rows():
    """Rows made with another memory bandwidth: the fit moves that share, and the error of its rows falls."""
    source = TraceSource()
    hidden = dataclasses.replace(coefficients(), memory=0.55)
    cases = []
    for batch in (4, 16, 64):
        case = fit.case_of(published.question_of(row(micro_batch=batch, global_batch=8 * batch, seq_len=512)), source)
        cases.append(dataclasses.replace(case, row=dataclasses.replace(case.row, rate=case.rate(hidden))))
    found = fit.fit(cases)

    def error(c):
        return max(abs(case.rate(c) / case.row.rate - 1) for case in cases)

    assert error(found) < 0.6 * error(fit.priors())
    assert found.memory < fit.priors().memory
