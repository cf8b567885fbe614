"""What FSDP's doors let in, and what they refuse with a reason."""

from __future__ import annotations

import textwrap

import pytest
from memplan.errors import CannotTell
from memplan.planner.api import fits, make_request
from memplan.planner.prediction import Verdict
from memplan.planner.strategies import make_strategy
from memplan.planner.strategies.fsdp_settings import FsdpSettings
from memplan.planner.strategies.fsdp_units import has_float_inputs
from memplan.planner.trace.source import TraceSource

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


def test_autocast_goes_with_fsdp2(file):
    answer = fits(f"{file}:words", "a100-80gb", seq_len=8, strategy="fsdp2", gpus=4, precision="bf16-autocast")

    assert answer.verdict is Verdict.FITS


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_autocast_over_parameters_that_are_gathered_narrow_is_refused(file, strategy):
    request = ask(file, strategy=strategy, gpus=4, precision="bf16-autocast", fsdp=FsdpSettings(param_dtype="bfloat16"))
    with pytest.raises(CannotTell, match="Use bf16-mixed"):
        request.check()


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_a_users_model_that_reads_token_ids_may_be_mixed(file, strategy):
    assert made(ask(file, strategy=strategy, **MIXED)).settings.param_dtype == "bfloat16"


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_a_floating_point_input_of_a_mixed_run_is_refused(file, strategy):
    with pytest.raises(CannotTell, match="the model's floating-point input is not cast"):
        made(ask(file, "pictures", strategy=strategy, **MIXED))


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_a_large_buffer_of_a_mixed_run_is_refused_by_name(file, strategy):
    with pytest.raises(CannotTell, match="the buffer table is not cast"):
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


@pytest.mark.parametrize(("factory", "expected"), [("words", False), ("pictures", True)])
def test_what_a_step_reads_says_whether_its_input_is_floating_point(file, factory, expected):
    assert has_float_inputs(TraceSource().step(ask(file, factory, precision="fp32"))) is expected
