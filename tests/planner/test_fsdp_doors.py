"""What FSDP's doors let in, and what they refuse with a reason."""

from __future__ import annotations

import textwrap

import pytest
from memplan.errors import CannotTell
from memplan.planner.api import fits, make_request
from memplan.planner.predict import ledger_of, simulated
from memplan.planner.prediction import Verdict
from memplan.planner.simulate import WAIT
from memplan.planner.strategies import make_strategy
from memplan.planner.strategies.fsdp_settings import FsdpSettings
from memplan.planner.strategies.fsdp_units import float_inputs, must_suit_narrow_trace
from memplan.planner.trace.source import TraceSource, trace_options

MODELS = """
    import torch

    def words(buffer=0):
        model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
        if buffer:
            model.register_buffer("table", torch.zeros(buffer))
        return model, lambda batch, seq: {"ids": torch.zeros(batch, seq, dtype=torch.long)}, lambda m, b: m(b["ids"]).sum()

    def pictures():
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
        return model, lambda batch, seq: {"x": torch.zeros(batch, 16)}, lambda m, b: m(b["x"].to(m[0].weight.dtype)).sum()
"""
MIXED = {"precision": "bf16-mixed", "gpus": 4}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(textwrap.dedent(MODELS))
    return path


def ask(file, factory="words", **options):
    buffer = {"overrides": {"buffer": str(options.pop("buffer"))}} if "buffer" in options else {}
    return make_request(f"{file}:{factory}", "a100-80gb", micro_batch_size=2, seq_len=8, **buffer, **options)


def made(request):
    request.check()
    return make_strategy(request, TraceSource().step(request))


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_autocast_goes_with_fsdp(file, strategy):
    answer = fits(f"{file}:words", "a100-80gb", seq_len=8, strategy=strategy, gpus=4, precision="bf16-autocast")

    assert answer.verdict is Verdict.FITS


def test_autocast_keeps_no_casts_of_fsdp1s_parameters_since_they_are_views(file):
    options = {"gpus": 4, "precision": "bf16-autocast"}

    assert not trace_options(ask(file, strategy="fsdp1", **options)).autocast_cache
    assert trace_options(ask(file, strategy="fsdp2", **options)).autocast_cache


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_autocast_over_parameters_that_are_gathered_narrow_is_refused(file, strategy):
    request = ask(file, strategy=strategy, gpus=4, precision="bf16-autocast", fsdp=FsdpSettings(param_dtype="bfloat16"))
    with pytest.raises(CannotTell, match="Use bf16-mixed"):
        request.check()


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_a_users_model_that_reads_token_ids_may_be_mixed(file, strategy):
    assert made(ask(file, strategy=strategy, **MIXED)).settings.param_dtype == "bfloat16"


def test_an_input_that_is_wider_than_the_traces_parameters_is_refused(file):
    wide = TraceSource().step(ask(file, "pictures", precision="fp32"))
    with pytest.raises(CannotTell, match="a floating-point input that the model takes wider"):
        must_suit_narrow_trace("fsdp2", wide, "bfloat16")


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_a_large_buffer_of_a_mixed_run_is_refused_by_name(file, strategy):
    with pytest.raises(CannotTell, match="the buffer table is not modelled"):
        made(ask(file, strategy=strategy, buffer=5000, **MIXED))


def test_a_small_buffer_makes_no_difference(file):
    assert made(ask(file, strategy="fsdp2", buffer=500, **MIXED)).name == "fsdp2"


def test_fsdp1_casts_buffers_where_it_is_told_to(file):
    settings = FsdpSettings(version=1, param_dtype="bfloat16", buffer_dtype="bfloat16")

    assert made(ask(file, strategy="fsdp1", buffer=5000, fsdp=settings, **MIXED)).name == "fsdp1"


def test_the_root_may_be_wrapped_otherwise_than_its_blocks(file):
    settings = FsdpSettings(reshard_after_forward=True, root_reshard_after_forward=False)
    strategy = made(ask(file, strategy="fsdp2", gpus=4, precision="fp32", fsdp=settings))

    assert (strategy.settings.reshard_after_forward, strategy.settings.root_reshard_after_forward) == (True, False)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_images_of_a_mixed_run_are_there_in_fp32_and_narrow(strategy):
    tiny = {"hidden_size": "32", "num_hidden_layers": "2", "num_attention_heads": "2", "intermediate_size": "64"}
    request = make_request("google/vit-base-patch16-224", "a100-80gb", overrides=tiny, strategy=strategy, **MIXED)
    trace = TraceSource().step(request)
    ledger = ledger_of(request, trace)

    half = 1 * 3 * 224 * 224 * 2  # bytes of an image in 16 bits, which is half of it in 32
    assert list(float_inputs(trace).values()) == ["bfloat16"]
    assert max(ledger.live_bytes()) > 3 * half


@pytest.mark.parametrize(("factory", "expected"), [("words", []), ("pictures", ["float32"])])
def test_what_a_step_reads_says_whether_its_input_is_floating_point(file, factory, expected):
    assert list(float_inputs(TraceSource().step(ask(file, factory, precision="fp32"))).values()) == expected


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_every_gather_is_waited_for(file, strategy):
    request = ask(file, strategy=strategy, gpus=4, precision="fp32")
    work = simulated(request, TraceSource().step(request)).work

    gathers = {ticket for ticket, w in enumerate(work) if w.kind == "all_gather"}
    assert gathers
    assert gathers == {ticket for w in work if w.kind == WAIT for ticket in w.after}
