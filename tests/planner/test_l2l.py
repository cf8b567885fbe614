"""The layer-to-layer relay: its order, its bytes in closed form, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from memplan.errors import CannotTell, UserError
from memplan.planner.api import make_request
from memplan.planner.ledger import Tier
from memplan.planner.predict import predict, simulated
from memplan.planner.simulate import HOST
from memplan.planner.strategies import traced_as
from memplan.planner.strategies.l2l import L2lSettings
from memplan.planner.trace.relay_segments import cut_relay
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import EventKind, Phase
from memplan.validator.zoo import find

GPU = "rtx-4090"
TRACES = TraceSource()


def asked(name="llama", blocks=3, **options):
    spec = find(name).spec(num_hidden_layers=blocks)
    given = {"micro_batch_size": 2, "seq_len": 16, "precision": "fp32", "method": "l2l", **options}
    return make_request(spec, GPU, **given)


def run_of(request):
    request.check()
    return simulated(request, TRACES.step(request, target="cpu"))


def peak(request, tier=Tier.GPU, *, since=Phase.FORWARD):
    ledger = run_of(request).ledger
    rows = ledger.rows(tier)
    live = ledger.live_bytes(tier)
    return int(live[ledger.phase[rows] >= since].max())


def test_the_segments_cover_the_step_and_every_parameter_has_one_layer():
    for name in ("llama", "gpt2", "bert"):
        trace = TRACES.step(asked(name), target="cpu")
        segments = cut_relay(trace)
        ranges = [layer.forward for layer in segments.layers] + [layer.backward for layer in segments.layers[::-1]]
        assert [start for start, _ in ranges[1:]] == [stop for _, stop in ranges[:-1]]
        assert (ranges[0][0], ranges[-1][1]) == (0, len(trace.event_kind))
        owned = sorted(p for layer in segments.layers for p in layer.params)
        assert owned == list(range(len(trace.params)))
        grads = {int(a) for k, a, _ in trace.events() if k is EventKind.GRAD}
        for block in segments.blocks:  # a block's gradients come in its own backward
            inside = trace.event_kind[slice(*block.backward)] == EventKind.GRAD
            assert set(trace.event_arg[slice(*block.backward)][inside].tolist()) == grads & set(block.params)


def test_every_layer_runs_all_micro_batches_before_the_next_one_comes():
    work = run_of(asked(grad_accum_steps=3)).work
    order = [(ran.run.segment.name, ran.run.lane) for ran in work.runs if ran.iteration == 0]
    forward = [(name, lane) for name in ("front", *(f"model.layers.{i}" for i in range(3))) for lane in range(3)]
    tail = [("tail", lane) for lane in range(3) for _ in ("forward", "backward")]
    backward = [(name, lane) for name in (*(f"model.layers.{i}" for i in (2, 1, 0)), "front") for lane in range(3)]
    assert order == forward + tail + backward


@pytest.mark.parametrize("overlap", [True, False])
def test_weights_are_uploaded_twice_and_gradients_come_home_once(overlap):
    request = asked(grad_accum_steps=4, l2l=L2lSettings(overlap=overlap))
    trace = TRACES.step(request, target="cpu")
    blocks = sum(p.nbytes for p in trace.params if ".layers." in p.fqn)
    others = sum(p.nbytes for p in trace.params) - blocks
    last = sum(p.nbytes for p in trace.params if ".layers.2." in p.fqn)
    work = [w for w in run_of(request).work if w.iteration == 1]
    uploaded = sum(w.nbytes for w in work if w.kind == "h2d")
    assert uploaded == 2 * blocks + others - (last if overlap else 0)  # the last block stays while the tail runs
    assert sum(w.nbytes for w in work if w.kind == "d2h") == blocks + others
    assert any(w.stream == HOST for w in work)


def test_one_layer_or_two_are_on_the_gpu():
    """The closed form of the strategy's docstring, at a batch whose activations are as small as they get."""
    name = "llama"
    trace = TRACES.step(asked(name, blocks=6, micro_batch_size=1, seq_len=1), target="cpu")
    sizes = {layer.name: sum(trace.params[p].nbytes for p in layer.params) for layer in cut_relay(trace).layers}
    front, block, tail = sizes["front"], sizes["model.layers.0"], sizes["tail"]
    small = 0.04 * (front + 4 * block)
    for overlap, expected in (
        (True, front + max(block + 2 * tail, 3 * block + tail, 4 * block, front + block)),
        (False, front + max(2 * tail, 2 * block, front)),
    ):
        found = peak(asked(name, blocks=6, micro_batch_size=1, seq_len=1, l2l=L2lSettings(overlap=overlap)))
        assert expected <= found <= expected + small


def test_another_micro_batch_costs_its_boundaries_only():
    blocks, boundary = 6, 2 * 16 * find("llama").spec().config["hidden_size"] * 4
    two, three = (peak(asked(blocks=blocks, grad_accum_steps=k)) for k in (2, 3))
    assert blocks * boundary <= three - two <= (blocks + 2) * boundary


def test_a_stash_on_the_host_takes_the_boundaries_off_the_gpu():
    here, there = (asked(blocks=8, grad_accum_steps=4, l2l=L2lSettings(stash=stash)) for stash in ("gpu", "host"))
    boundary = 2 * 16 * find("llama").spec().config["hidden_size"] * 4
    assert peak(here) - peak(there) >= 4 * 5 * boundary
    assert peak(there, Tier.HOST_PINNED) > peak(here, Tier.HOST_PINNED) or peak(there, Tier.HOST_PINNED) >= 4 * 8 * boundary


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bert", "mixtral"])
@pytest.mark.parametrize("stash", ["gpu", "host"])
def test_nothing_is_left_on_the_gpu_after_a_step_but_buffers_and_losses(name, stash):
    request = asked(name, grad_accum_steps=2, l2l=L2lSettings(stash=stash))
    ledger = run_of(request).ledger
    left = ledger.components_after(len(ledger) - 1)
    trace = TRACES.step(request, target="cpu")
    assert left.pop("buffer", 0) == sum(b.nbytes for b in trace.buffers)
    assert sum(left.values()) < 8192  # the batches, the losses, and positions that the graph of the loss has kept
    on_host = ledger.components_after(len(ledger) - 1, Tier.HOST_PINNED)
    assert on_host == {"param": sum(p.nbytes for p in trace.params)}
    assert (np.asarray(ledger.live_bytes()) >= 0).all()


def test_a_head_that_is_tied_to_the_embedding_is_uploaded_once_and_has_one_gradient():
    request = asked("gpt2", grad_accum_steps=2)
    trace = TRACES.step(request, target="cpu")
    segments = cut_relay(trace)
    (tied,) = segments.tied
    assert trace.params[tied.param].fqn == "transformer.wte.weight"
    assert tied.param in segments.front.params
    assert tied.param not in segments.tail.params
    ledger = run_of(request).ledger
    sent = [w for w in run_of(request).work if w.kind == "d2h" and w.iteration == 1]
    assert sum(w.nbytes for w in sent) == sum(p.nbytes for p in trace.params)
    gradients = [ledger.labels[ledger.label[row]] for row in ledger.rows(Tier.HOST_PINNED) if ledger.delta_bytes[row] > 0]
    assert gradients.count(("transformer.wte.weight", "gradient")) == 2  # one a step


def test_the_optimizer_steps_on_the_host_as_torch_does_there():
    adam, sgd = (run_of(asked(optimizer=name)).ledger for name in ("adamw", "sgd"))
    count = sum(p.numel for p in TRACES.step(asked(), target="cpu").params)
    state = adam.components_after(len(adam) - 1, Tier.HOST_PAGEABLE)["optimizer_state"]
    assert 2 * 4 * count <= state < 2 * 4 * count + 1024  # and a step counter for each
    assert "optimizer_state" not in sgd.components_after(len(sgd) - 1, Tier.HOST_PAGEABLE)
    assert "optimizer_state" not in adam.components_after(len(adam) - 1)


def test_the_answer_has_a_time_and_no_error_bars_of_other_runs():
    found = predict(asked(grad_accum_steps=2), TRACES)
    assert found.time is not None
    assert {"h2d", "d2h", "cpu_optimizer"} <= set(found.time.busy_s)
    assert found.error_bars == ()


def test_what_is_walked_is_a_step_with_recomputed_blocks():
    traced = traced_as(asked())
    assert (traced.recompute, traced.reentrant) == ("full", True)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"mode": "inference"}, UserError, "a way to train"),
        ({"gpus": 2, "strategy": "ddp"}, CannotTell, "several GPUs"),
        ({"strategy": "release"}, UserError, "--grad-release"),
        ({"optimizer": "adamw-8bit"}, UserError, "steps on the host"),
        ({"optimizer_impl": "foreach"}, UserError, "for-loop or fused"),
        ({"precision": "fp16-autocast"}, CannotTell, "fp16-autocast"),
        ({"offload": ("optimizer",)}, UserError, "everything on the host"),
        ({"recompute": "every-k:2"}, UserError, "recomputes every block"),
        ({"clip_grad_norm": True}, CannotTell, "--clip-grad-norm"),
        ({"set_to_none": False}, CannotTell, "--keep-grads"),
    ],
)
def test_what_does_not_go_together_is_refused(options, kind, said):
    with pytest.raises(kind, match=said):
        asked(**options).check()


def test_a_model_with_two_lists_of_blocks_is_not_answered():
    request = make_request(find("t5").spec(), GPU, method="l2l", micro_batch_size=1, seq_len=8)
    found = predict(request, TRACES)
    assert found.verdict.value == "unknown"
    assert "several lists of blocks" in found.reason
    assert "--method full" in found.reason


def test_bert_large_runs_a_batch_of_256_on_16_gb():
    """arXiv 2002.05645, abstract: BERT-Large "with a device batch size of up to 256" on a V100 of 16 GB."""
    options = {"micro_batch_size": 8, "grad_accum_steps": 32, "seq_len": 128, "precision": "fp32"}
    relay = predict(make_request("google-bert/bert-large-uncased", "v100-16gb", method="l2l", **options), TRACES)
    assert relay.verdict.value == "fits"
    whole = make_request("google-bert/bert-large-uncased", "v100-16gb", micro_batch_size=256, seq_len=128, precision="fp32")
    assert predict(whole, TRACES).verdict.value == "does_not_fit"


def test_more_than_50_billion_parameters_run_on_16_gb_with_512_on_the_host():
    """The same abstract.  57 of Llama-3.1-70B's layers are 51 billion."""
    request = make_request(
        "meta-llama/Llama-3.1-70B", "v100-16gb", overrides={"num_hidden_layers": "57"}, method="l2l", precision="fp16",
        l2l=L2lSettings(stash="host"), grad_accum_steps=4, seq_len=512, host_ram_bytes=512 * 10**9,
    )  # fmt: skip
    found = predict(request, TRACES)
    assert found.num_params > 50e9
    assert found.verdict.value in ("fits", "tight")
    assert found.host.node_bytes < 512 * 10**9
