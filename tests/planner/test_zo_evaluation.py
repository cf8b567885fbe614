"""Evaluations between zeroth-order steps: what they need, against the real run and beside training."""

from __future__ import annotations

import json

import pytest
from memplan import __main__ as command_line
from memplan.models import load
from memplan.planner.api import make_request
from memplan.planner.predict import ledger_of, predict
from memplan.planner.strategies.zo_settings import ZoSettings
from memplan.planner.trace.source import TraceSource
from memplan.validator.api import request_for
from memplan.validator.runtimes.zo.run import ZoRun, run_zo

OPT = {"num_hidden_layers": "3", "hidden_size": "64", "ffn_dim": "128", "num_attention_heads": "4"}
OPT |= {"word_embed_proj_dim": "64", "vocab_size": "512", "tie_word_embeddings": "false"}
QWEN = {"num_hidden_layers": "3", "hidden_size": "64", "intermediate_size": "128", "num_attention_heads": "4"}
QWEN |= {"num_key_value_heads": "2", "head_dim": "16", "vocab_size": "512"}
NO_CACHE = ZoSettings(use_cache=False)


@pytest.fixture(scope="module")
def traces():
    return TraceSource(exact=True)


@pytest.mark.parametrize(
    ("model", "overrides", "method", "zo"),
    [
        ("facebook/opt-125m", OPT, "mezo", ZoSettings()),
        ("facebook/opt-125m", OPT, "mezo", NO_CACHE),
        ("facebook/opt-125m", OPT, "zo2", NO_CACHE),
        ("facebook/opt-125m", OPT, "zo2", ZoSettings(use_cache=False, offloading_blocks=1)),
        ("Qwen/Qwen3-0.6B", QWEN, "zo2", NO_CACHE),
    ],
)
def test_an_evaluation_is_predicted_to_the_byte(traces, model, overrides, method, zo):
    options = {"precision": "fp16", "micro_batch_size": 2, "seq_len": 32}
    request = request_for(model, "cpu", method=method, mode="inference", overrides=overrides, zo=zo, **options)
    run = ZoRun.asked(load(model, overrides=overrides), method, zo, steps=2, evaluate=True, **options)

    measured = run_zo(run).ranks[0].peaks()["eval"]

    assert ledger_of(request, traces.step(request, target="cpu")).peak_bytes() == measured


def asked(**options):
    given = {"method": "zo2", "precision": "fp16", "micro_batch_size": 1, "seq_len": 256, **options}
    return make_request("facebook/opt-125m", "rtx-4090", overrides={**OPT, "vocab_size": "50272"}, **given)


def test_one_block_is_there_at_a_time_and_the_cache_of_all(traces):
    """Training has two blocks; an evaluation one, but the keys and values of three blocks."""
    without, cached = (
        ledger_of(
            asked(mode="inference", zo=ZoSettings(use_cache=cache)),
            traces.step(asked(mode="inference", zo=ZoSettings(use_cache=cache))),
        )
        for cache in (False, True)
    )

    assert cached.peak_bytes() - without.peak_bytes() == 3 * 2 * 256 * 64 * 2


def test_a_large_evaluation_is_said_to_need_more_than_training(traces):
    plain, small, large = (predict(asked(zo=ZoSettings(eval_batch=n)), traces) for n in (None, 1, 64))

    assert plain.hints == ()
    assert "an evaluation with micro batch 1 peaks at" in small.hints[-1]
    assert "more than training" in large.hints[-1]
    assert (plain.allocated_peak_bytes, plain.verdict) == (large.allocated_peak_bytes, "fits")


def test_an_evaluation_that_does_not_fit_is_the_verdict(traces):
    found = predict(asked(zo=ZoSettings(eval_batch=4096)), traces)

    assert found.verdict == "does_not_fit"
    assert found.reason.startswith("training fits, an evaluation with micro batch 4096 does not: ")
    assert str(found).startswith("DOES NOT FIT\nTraining fits, an evaluation with micro batch 4096")


def test_the_command_takes_it(capsys):
    words = ["fit", "facebook/opt-125m", "--gpu", "rtx-4090", "--precision", "fp16", "--seq", "64", "--no-advice", "--json"]
    words += [part for key, value in OPT.items() for part in ("--set", f"{key}={value}")]

    assert command_line.main([*words, "--method", "mezo", "--zo-eval-batch", "8"]) == 0
    assert "an evaluation with micro batch 8" in json.loads(capsys.readouterr().out)["hints"][-1]
    assert command_line.main([*words, "--method", "mezo", "--zo-eval-batch", "0"]) == 2
    assert "--zo-eval-batch 0: must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "said"), [("zo2", "lack the last one, which zo2 never applies"), ("mezo", "MeZO: two forwards")]
)
def test_the_update_that_is_never_applied_is_said(traces, method, said):
    assert any(said in line for line in predict(asked(method=method), traces).assumptions)


@pytest.mark.parametrize(
    ("sliced", "said"), [(False, "the copy of the +eps GPU is the one to keep"), (True, "slices of one copy keep them equal")]
)
def test_whose_parameters_count_is_said(sliced, said):
    zo = ZoSettings(zo_pert=2, zo_slice=sliced)
    request = make_request("facebook/opt-125m", "h100-80gb", method="distzo2", precision="fp16", gpus=2, zo=zo, overrides=OPT)
    from memplan.planner.strategies import said_of

    assert any(said in line for line in said_of(request))
