"""The relay as real training steps: it trains as a plain loop does, and it takes what was predicted."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from memplan.__main__ import main
from memplan.errors import UserError
from memplan.planner.api import make_request
from memplan.planner.optimizers.traced import make_optimizer
from memplan.planner.strategies.l2l import L2lSettings
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.prepare import ready
from memplan.planner.trace.source import TraceSource
from memplan.validator.engines import run_engine
from memplan.validator.runtimes.l2l import L2lRun, find_layers, run_l2l
from memplan.validator.zoo import find

TRACES = TraceSource(exact=True)
UNTIED = {"llama": {}, "gpt2": {"tie_word_embeddings": False}, "mixtral": {}, "gpt_neox": {}}


def plain(run):
    """The parameters and losses of a plain loop over the same micro batches."""
    torch.manual_seed(run.seed)
    options = TraceOptions(batch_size=run.micro_batch_size, seq_len=run.seq_len, precision=run.precision, target="cpu")
    built = ready(run.model, options)
    batches = [built.make_batch(run.micro_batch_size, run.seq_len) for _ in range(run.grad_accum_steps)]
    optimizer = make_optimizer(run.optimizer, run.optimizer_impl, list(built.module.parameters()))
    losses = []
    for _ in range(run.steps):
        losses.append([])
        for batch in batches:
            loss = built.step(built.module, batch)
            loss.backward()
            losses[-1].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return dict(built.module.named_parameters()), losses


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("stash", ["gpu", "host"])
@pytest.mark.parametrize("name", UNTIED)
def test_a_relay_trains_bit_for_bit_as_a_plain_loop(name, stash):
    config = {"attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **UNTIED[name]}
    known = find(name).spec().config
    spec = find(name).spec(**{key: value for key, value in config.items() if key in known or key == "tie_word_embeddings"})
    run = L2lRun(model=spec, settings=L2lSettings(stash=stash), seq_len=16, grad_accum_steps=3, steps=3)
    found = run_l2l(run)
    parameters, losses = plain(run)
    assert [list(step) for step in found.losses] == losses
    assert all(torch.equal(parameters[key], value) for key, value in found.parameters.items())


def test_a_tied_head_trains_too():
    spec = find("gpt2").spec(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    run = L2lRun(model=spec, optimizer="sgd", seq_len=16, grad_accum_steps=2, steps=3)
    found, (parameters, _) = run_l2l(run), plain(run)
    for key, value in found.parameters.items():  # the two gradients of the embedding are added in another order
        torch.testing.assert_close(value, parameters[key], rtol=1e-4, atol=1e-5)


def test_dropout_draws_the_same_numbers_in_both_runs_of_a_block():
    spec = find("gpt2").spec(tie_word_embeddings=False, resid_pdrop=0.5, embd_pdrop=0.0, attn_pdrop=0.0)
    run = L2lRun(model=spec, seq_len=16, steps=2)  # of one micro batch: a plain step draws in the same order, and once
    found, (parameters, losses) = run_l2l(run), plain(run)
    assert [list(step) for step in found.losses] == losses
    assert all(torch.equal(parameters[key], value) for key, value in found.parameters.items())


def test_masters_are_what_is_stepped():
    spec = find("llama").spec()
    run = L2lRun(model=spec, precision="bf16-mixed", optimizer="sgd", seq_len=16, grad_accum_steps=2, steps=2)
    narrow = run_l2l(replace(run, precision="bf16"))
    found = run_l2l(run)
    wide = run_l2l(replace(run, precision="fp32"))
    assert found.losses[0] == narrow.losses[0]  # the first step computes with the same weights
    far = {key: (narrow.parameters[key].float() - value).norm() for key, value in wide.parameters.items()}
    near = {key: (found.parameters[key].float() - value).norm() for key, value in wide.parameters.items()}
    assert sum(near.values()) < sum(far.values())


CASES = {
    "llama": ("llama", {"grad_accum_steps": 2}, {}),
    "one micro batch": ("llama", {"grad_accum_steps": 1}, {}),
    "tied and with positions": ("opt", {"grad_accum_steps": 3}, {}),
    "an encoder": ("bert", {"grad_accum_steps": 2}, {}),
    "experts": ("mixtral", {"grad_accum_steps": 2}, {}),
    "images": ("vit", {"grad_accum_steps": 2}, {}),
    "bf16": ("qwen3", {"grad_accum_steps": 2, "precision": "bf16"}, {}),
    "masters": ("qwen3", {"grad_accum_steps": 2, "precision": "bf16-mixed"}, {}),
    "masters, no overlap": ("bert", {"grad_accum_steps": 2, "precision": "bf16-mixed"}, {"overlap": False}),
    "autocast": ("llama", {"grad_accum_steps": 2, "precision": "bf16-autocast"}, {}),
    "no overlap": ("gpt2", {"grad_accum_steps": 3}, {"overlap": False}),
    "stash on the host": ("gpt_neox", {"grad_accum_steps": 4}, {"stash": "host"}),
    "stash on the host, an encoder": ("bert", {"grad_accum_steps": 3}, {"stash": "host"}),
    "stash on the host, no overlap": ("phi3", {"grad_accum_steps": 2}, {"overlap": False, "stash": "host"}),
    "sgd": ("llama", {"grad_accum_steps": 2, "optimizer": "sgd"}, {}),
    "frozen embedding": ("llama", {"grad_accum_steps": 2, "frozen": ("model.embed_tokens",)}, {}),
    "two windows": ("gemma3_text", {"grad_accum_steps": 2}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_relay_takes_what_was_predicted(case):
    name, options, settings = CASES[case]
    request = make_request(
        find(name).spec(), "rtx-4090", method="l2l", l2l=L2lSettings(**settings),
        **{"micro_batch_size": 2, "seq_len": 32, "precision": "fp32", **options},
    )  # fmt: skip
    request.check()
    found = run_engine(request, TRACES)
    assert found.reason == ""
    for row in found.rows:
        if "after" in row.what:  # a few losses and positions
            assert abs(row.predicted_bytes - row.measured_bytes) < 8192
        elif row.what == "host_pinned" and "stash" in settings:  # blocks of its sizes wait for gradients, or do not
            assert row.measured_bytes <= row.predicted_bytes <= 1.25 * row.measured_bytes
        elif "host" in row.what:
            assert row.predicted_bytes == pytest.approx(row.measured_bytes, abs=256)
        else:
            assert row.predicted_bytes == pytest.approx(row.measured_bytes, rel=4e-3), row.what


def test_the_layers_are_found_in_calling_order_and_share_nothing():
    built = ready(find("bert").spec(), TraceOptions(batch_size=1, seq_len=8, precision="fp32", target="cpu"))
    batch = built.make_batch(1, 8)
    layers = find_layers(built.module, lambda: built.step(built.module, batch))
    assert [layers[0].name, layers[-1].name] == ["front", "tail"]
    assert len([p for layer in layers for p in layer.params]) == len(list(built.module.parameters()))
    with pytest.raises(UserError, match="list of equal blocks"):
        find_layers(copy.deepcopy(torch.nn.Linear(2, 2)), lambda: None)


def test_a_written_relay_is_validated_by_this_runtime(tmp_path, capsys):
    """No library runs a relay, so that there is no train.py."""
    (tmp_path / "config.json").write_text(json.dumps(find("llama").spec().config))
    asked = [str(tmp_path), "--gpu", "rtx-4090", "--method", "l2l", "--seq", "16", "--global-batch", "4", "--precision", "fp32"]
    assert main(["plan", *asked, "--write", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert main(["validate", "--plan", str(tmp_path / "out" / "plan.json")]) == 0
    assert capsys.readouterr().out.startswith("AGREES")
