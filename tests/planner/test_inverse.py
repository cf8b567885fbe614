"""Inverse questions: what is given out fits, and the next figure does not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from memplan.errors import CannotTell, UserError
from memplan.hardware.catalogue import device
from memplan.models import load
from memplan.planner import inverse
from memplan.planner.api import make_request
from memplan.planner.inverse import fewest, in_words, largest_batch, longest
from memplan.planner.predict import predict
from memplan.planner.prediction import Verdict
from memplan.planner.strategies.deepspeed_settings import DeepSpeedSettings
from memplan.planner.strategies.outside import with_nccl
from memplan.planner.trace.source import TraceSource

LLAMA = {"num_hidden_layers": "4", "hidden_size": "512", "intermediate_size": "1376", "num_attention_heads": "8"}
LLAMA |= {"num_key_value_heads": "2", "head_dim": "64", "vocab_size": "8192", "max_position_embeddings": "4096"}
GPT2 = {"n_layer": "3", "n_embd": "256", "n_head": "4", "vocab_size": "5000"}


@pytest.fixture(scope="module")
def traces():
    return TraceSource()


def _model(name):
    if name == "llama":
        return load("meta-llama/Llama-3.2-1B", overrides=LLAMA)
    return load("openai-community/gpt2", overrides=GPT2)


def _ask(name, **options):
    return make_request(_model(name), "t4", **{"gpu_memory": "4GiB", "precision": "fp32", "seq_len": 256, **options})


CASES = {
    "llama": ("llama", {}),
    "llama recomputed, eager attention": ("llama", {"recompute": "full", "attention": "eager"}),
    "llama of ZeRO-2": ("llama", {"strategy": "zero2", "gpus": 4, "precision": "bf16-mixed"}),
    "gpt2 with sgd": ("gpt2", {"optimizer": "sgd"}),
    "gpt2 of FSDP2": ("gpt2", {"strategy": "fsdp2", "gpus": 2, "optimizer": "adamw"}),
    "gpt2 of two machines": ("gpt2", {"strategy": "ddp", "gpus": 4, "nodes": 2}),
}


@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
def test_the_largest_batch_fits_and_one_more_does_not(name, options, traces):
    request = _ask(name, **options)

    found = largest_batch(request, traces)

    assert found.value is not None
    assert found.next_value == found.value + 1
    assert predict(request.but(micro_batch_size=found.value), traces).fits
    assert predict(request.but(micro_batch_size=found.value + 1), traces).verdict is Verdict.DOES_NOT_FIT
    assert found.why == found.next_prediction.reason


@pytest.mark.parametrize(("name", "options"), [CASES["llama"], CASES["llama of ZeRO-2"]])
def test_the_longest_samples_fit_and_the_next_length_does_not(name, options, traces):
    request = _ask(name, **options, micro_batch_size=8)

    found = longest(request, traces)

    assert 0 < found.value < 4096
    assert found.value % 16 == 0
    assert found.next_value == found.value + 16
    assert predict(request.but(seq_len=found.value), traces).fits
    assert not predict(request.but(seq_len=found.next_value), traces).fits


def test_samples_end_at_the_positions_of_the_model(traces):
    found = longest(_ask("gpt2"), traces)

    assert (found.value, found.next_value) == (1024, None)
    assert "model's own limit" in found.why


def test_a_limit_that_is_no_multiple_of_the_step_is_reached_all_the_same(traces):
    model = load("openai-community/gpt2", overrides={**GPT2, "n_positions": "1000"})

    found = longest(make_request(model, "a100-80gb", precision="fp32"), traces)

    assert (found.value, found.next_value) == (1000, None)


def test_where_not_one_sample_fits_there_is_no_figure_and_the_smallest_says_why(traces):
    found = largest_batch(_ask("llama", gpu_memory="450MiB", seq_len=4096), traces)

    assert (found.value, found.next_value) == (None, 1)
    assert in_words(found).startswith("NOTHING FITS")
    assert found.why == found.next_prediction.reason


SMALL_BUCKETS = DeepSpeedSettings(reduce_bucket_size=1_000_000, stage3_prefetch_bucket_size=1_000_000)


@pytest.mark.parametrize(
    "options", [{"strategy": "zero3", "deepspeed": SMALL_BUCKETS}, {"strategy": "fsdp2"}], ids=["zero3", "fsdp2"]
)
def test_the_fewest_gpus_fit_and_one_less_does_not(options, traces):
    wide = {"num_hidden_layers": "24", "hidden_size": "1024", "intermediate_size": "2752", "head_dim": "128"}
    model = load("meta-llama/Llama-3.2-1B", overrides=LLAMA | wide)
    outside = with_nccl(device("t4"), 4, options["strategy"]).context_bytes
    memory = outside + (1800 << 20)

    def at(gpus, nodes):
        asked = {**options, "gpus": gpus, "nodes": nodes, "gpu_memory": memory, "precision": "bf16-mixed", "seq_len": 64}
        return make_request(model, "t4", **asked)

    found = fewest(at, traces)

    assert 2 < found.value <= 8
    assert found.next_value == found.value - 1
    assert predict(at(found.value, 1), traces).fits
    assert not predict(at(found.next_value, 1), traces).fits


def test_one_gpu_that_is_enough_is_the_fewest(traces):
    found = fewest(lambda gpus, nodes: _ask("gpt2", strategy="fsdp2", gpus=gpus, nodes=nodes), traces)

    assert (found.value, found.next_value) == (1, None)


def test_copies_of_the_model_on_more_gpus_are_no_way_out(traces):
    asked = []

    def at(gpus, nodes):
        asked.append(gpus)
        return _ask("gpt2", strategy="ddp", gpus=gpus, nodes=nodes, micro_batch_size=4096)

    found = fewest(at, traces)

    assert found.value is None
    assert max(asked) <= 16


def test_a_tight_fit_is_none_with_strict(traces):
    request = _ask("llama")
    loose, strict = largest_batch(request, traces), largest_batch(request, traces, strict=True)

    assert strict.value <= loose.value
    assert predict(request.but(micro_batch_size=strict.value), traces).verdict is Verdict.FITS
    assert predict(request.but(micro_batch_size=strict.value + 1), traces).verdict is not Verdict.FITS


def test_a_run_that_needs_more_host_memory_than_there_is_does_not_fit(traces):
    request = _ask("llama", strategy="zero3", gpus=2, offload=("optimizer",), precision="bf16-mixed")

    found = largest_batch(replace(request, host_ram_bytes=1 << 20), traces)

    assert found.value is None
    assert "host memory" in found.why


def test_what_is_not_modelled_has_no_answer(traces):
    with pytest.raises(CannotTell, match=r"torch\.compile"):
        largest_batch(_ask("gpt2", compiled=True), traces)


def test_pictures_have_no_length(traces):
    with pytest.raises(UserError, match="pictures"):
        longest(make_request("google/vit-base-patch16-224", "t4"), traces)


def test_the_three_questions_are_asked_from_python():
    import memplan

    options = {"gpu_memory": "4GiB", "precision": "fp32"}
    found = memplan.max_batch(_model("gpt2"), "t4", seq_len=256, **options)

    assert json.loads(json.dumps(found.to_json()))["value"] == found.value
    assert memplan.max_seq(_model("gpt2"), "t4", **options).value == 1024
    few = memplan.min_gpus(_model("gpt2"), "t4", **options)
    assert few.value == 1
    assert "fsdp2" in few.notes[0]


def test_an_interval_is_searched_in_few_answers(traces):
    assert largest_batch(_ask("llama"), traces).num_answers <= 12


@pytest.fixture
def fit(capsys):
    from memplan.__main__ import main

    words = [f"--set={key}={value}" for key, value in GPT2.items()]

    def run(*more):
        code = main(["fit", "gpt2", "--gpu", "t4", "--gpu-memory", "4GiB", "--precision", "fp32", *words, *more])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_the_command_says_figure_next_and_why(fit):
    code, said = fit("--max-batch", "--seq", "256")

    lines = said.splitlines()
    assert code == 0
    assert "is the largest micro batch that fits" in lines[0]
    assert "does not fit: " in lines[1]
    assert "Assumed" in said


def test_the_command_prints_json(fit):
    code, said = fit("--max-seq", "--json")

    data = json.loads(said)
    assert code == 0
    assert (data["asked"], data["value"], data["next_value"]) == ("max_seq", 1024, None)
    assert data["prediction"]["question"]["seq_len"] == 1024


def test_nothing_that_fits_exits_with_1(fit):
    code, said = fit("--max-batch", "--gpu-memory", "300MiB", "--seq", "1024")

    assert code == 1
    assert said.startswith("NOTHING FITS")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--max-batch", "--micro-batch", "2"), "--micro-batch with --max-batch"),
        (("--max-seq", "--seq", "64"), "--seq with --max-seq"),
        (("--min-gpus", "--gpus", "2"), "--min-gpus with --gpus"),
        (("--max-batch", "--write", "out"), "--write with --max-batch"),
    ],
)
def test_what_is_searched_cannot_be_given(fit, words, said):
    code, text = fit(*words)

    assert (code, text.count("\n")) == (2, 1)
    assert said in text


def test_the_questions_of_the_module_are_those_of_the_package():
    import memplan

    assert {name: getattr(memplan, name) for name in ("max_batch", "max_seq", "min_gpus")} == {
        name: getattr(inverse, name) for name in ("max_batch", "max_seq", "min_gpus")
    }
