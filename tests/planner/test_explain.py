"""What lies on the GPU at the peak, and two answers side by side."""

from __future__ import annotations

import argparse
import json

import pytest
from memplan.errors import UserError
from memplan.planner import explain_cli
from memplan.planner.api import make_request
from memplan.planner.explain import changed, differences, explain, read_answer, render, render_difference
from memplan.planner.ledger import Tier
from memplan.planner.predict import predict, predict_with_ledger
from memplan.planner.trace.source import TraceSource

MODEL, LAYERS = "openai-community/gpt2", {"n_layer": "2", "vocab_size": "1024"}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMPLAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def source() -> TraceSource:
    return TraceSource()


def asked(**options):
    return make_request(MODEL, "a100-80gb", overrides=LAYERS, **{"micro_batch_size": 8, "seq_len": 256, **options})


@pytest.fixture(scope="module")
def answered(source):
    return predict_with_ledger(asked(precision="fp32"), source)


def test_storages_and_shares_sum_to_the_bytes_of_the_reports_peak(answered):
    prediction, ledger = answered
    found = explain(ledger)
    assert found.requested_bytes == prediction.peak.requested_bytes
    assert found.allocated_bytes == prediction.allocated_peak_bytes
    assert (found.phase, found.fqn, found.what) == (prediction.peak.phase, prediction.peak.fqn, prediction.peak.what)
    assert sum(s.total_bytes for s in found.storages) == found.requested_bytes
    assert sum(s.total_bytes for s in found.shares) == found.requested_bytes


def test_components_of_the_shares_are_those_of_the_report(answered):
    prediction, ledger = answered
    sums: dict[str, int] = {}
    for share in explain(ledger).shares:
        for name, size in share.components.items():
            sums[name] = sums.get(name, 0) + size
    assert sums == prediction.peak.components


def test_the_same_place_in_every_block_is_one_row(answered):
    _, ledger = answered
    share = next(s for s in explain(ledger).shares if s.fqn == "transformer.h.*.mlp.c_fc")
    assert share.num_modules == 2
    assert share.components["param"] == 2 * (768 * 3072 + 3072) * 4


def test_storages_come_largest_first(answered):
    sizes = [s.total_bytes for s in explain(answered[1]).storages]
    assert sizes == sorted(sizes, reverse=True)


def test_the_text_names_module_op_and_purpose(answered):
    text = render(explain(answered[1]), top=4)
    assert text.startswith("Peak: ")
    assert "Largest tensors at the peak" in text
    assert "transformer.h.*.mlp" in text
    assert "more kinds" in text
    assert all(len(line) < 140 for line in text.splitlines())


def test_host_memory_can_be_explained(source):
    _, ledger = predict_with_ledger(asked(strategy="zero2", gpus=2, precision="bf16-mixed", offload=("optimizer",)), source)
    found = explain(ledger, tier=Tier.HOST_PINNED)
    assert found.requested_bytes == ledger.peak_bytes(Tier.HOST_PINNED) > 0
    assert sum(s.total_bytes for s in found.storages) == found.requested_bytes


def test_a_tier_without_bytes_is_a_mistake(answered):
    with pytest.raises(UserError, match="nothing lies in nvme"):
        explain(answered[1], tier=Tier.NVME)


def _files(tmp_path, source):
    paths = []
    for precision in ("fp32", "bf16"):
        path = tmp_path / f"{precision}.json"
        path.write_text(json.dumps(predict(asked(precision=precision), source).to_json()))
        paths.append(path)
    return paths


def test_differences_are_those_of_the_two_peaks(tmp_path, source):
    before, after = map(read_answer, _files(tmp_path, source))
    rows = {d.name: d for d in differences(before, after)}
    assert rows["param"].after * 2 == rows["param"].before
    assert rows["param"].change == rows["param"].after - rows["param"].before < 0
    assert rows["reserved_peak_bytes"].before == before["reserved_peak_bytes"]
    assert "optimizer_state" in rows
    assert "offload_buffer" not in rows


def test_what_was_asked_differently_is_named(tmp_path, source):
    before, after = map(read_answer, _files(tmp_path, source))
    assert changed(before["question"], after["question"]) == [("precision", "fp32", "bf16")]
    text = render_difference(before, after)
    assert "precision: fp32 -> bf16" in text
    assert "fits; peak: " in text


def test_nested_options_are_compared_with_dots():
    assert changed({"loop": {"grad_accum_steps": 1}}, {"loop": {"grad_accum_steps": 4}}) == [("loop.grad_accum_steps", 1, 4)]


def test_equal_answers_have_no_change(tmp_path, source):
    first, _ = map(read_answer, _files(tmp_path, source))
    assert all(d.change == 0 for d in differences(first, first))
    assert render_difference(first, first).startswith("The same question")


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not JSON"), ("[]", "is no answer"), ('{"verdict": "fits"}', "is no answer"),
     ('{"verdict": "unknown", "question": {}, "peak": null}', "there is no peak to compare")],
)  # fmt: skip
def test_a_file_that_is_no_answer_is_a_mistake(tmp_path, text, words):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_answer(path)


def test_a_missing_file_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_answer(tmp_path / "none.json")


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    explain_cli.add_commands(parser.add_subparsers())
    args = parser.parse_args(words)
    return args.run(args)


def test_the_command_explains_as_json(capsys):
    sets = [word for key, value in LAYERS.items() for word in ("--set", f"{key}={value}")]
    assert _run("explain", MODEL, "--gpu", "rtx-4090", "--seq", "128", "--json", *sets) == 0
    data = json.loads(capsys.readouterr().out)
    assert sum(row["total_bytes"] for row in data["storages"]) == data["requested_bytes"]


def test_the_command_compares_as_json(tmp_path, source, capsys):
    before, after = _files(tmp_path, source)
    assert _run("diff", str(before), str(after), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["asked"] == [{"option": "precision", "before": "fp32", "after": "bf16"}]
    assert {row["name"] for row in data["bytes"]} >= {"param", "reserved_peak_bytes"}
