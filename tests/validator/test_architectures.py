"""The step is run for real and every allocator event is counted: the prediction must say the same, whatever the model."""

from pathlib import Path

import pytest
from memplan.models import load
from memplan.planner.trace.source import TraceSource
from memplan.validator.api import request_for, run
from memplan.validator.zoo import find

USER = Path(__file__).with_name("user_models.py")
FAMILIES = (
    "llama", "gpt2", "bert", "opt", "qwen2", "qwen3", "gemma2", "gemma3_text", "t5", "vit", "swin", "mobilenet_v2", "whisper",
    "mixtral", "deepseek_v3", "deberta-v2", "mamba",
)  # fmt: skip
FACTORIES = ("cnn", "shared", "several_forwards", "unused_layer")
TRANSFORMER = ("llama", "bert", "t5", "mixtral")


def model(name):
    if name in FACTORIES:
        return load(f"{USER}:{name}")
    return find(name).spec()


def validated(name, *, exact=True, **options):
    """The comparison of one run in this process; two samples of 64 tokens."""
    request = request_for(model(name), "cpu", **{"micro_batch_size": 2, "seq_len": 64, **options})
    return run(request, "cpu", isolated=False, traces=TraceSource(exact=exact))


def assert_agrees(comparison):
    assert comparison.reason == ""
    assert comparison.agrees, str(comparison)
    assert comparison.tolerance == 0.001


@pytest.mark.parametrize("name", [*FAMILIES, *FACTORIES])
def test_the_peak_of_a_real_fp32_step_is_the_predicted_one(name):
    assert_agrees(validated(name))


@pytest.mark.parametrize("name", [*TRANSFORMER, "vit", "cnn", "shared"])
def test_the_peak_in_bf16_is_the_predicted_one(name):
    assert_agrees(validated(name, precision="bf16"))


@pytest.mark.parametrize("name", [*TRANSFORMER, "vit", "cnn", "shared"])
def test_the_peak_under_bf16_autocast_is_the_predicted_one(name):
    assert_agrees(validated(name, precision="bf16-autocast"))


@pytest.mark.parametrize("name", TRANSFORMER)
def test_the_peak_with_activation_checkpointing_is_the_predicted_one(name):
    assert_agrees(validated(name, recompute="full"))


@pytest.mark.parametrize("name", ["bert"])
def test_the_peak_with_reentrant_checkpointing_is_the_predicted_one(name):
    assert_agrees(validated(name, recompute="full", reentrant=True))


@pytest.mark.parametrize(
    "recompute", ["every-k:2", "selective-layer:2", "selective-op:matmul", "selective-op:matmul+attention"]
)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_peak_with_selective_checkpointing_is_the_predicted_one(name, recompute):
    assert_agrees(validated(name, recompute=recompute))


@pytest.mark.parametrize("loss", ["plain", "chunked:3", "tiled:3"])
def test_the_peak_with_another_loss_is_the_predicted_one(loss):
    assert_agrees(validated("llama", loss=loss))


@pytest.mark.parametrize("name", ["llama", "cnn"])
@pytest.mark.parametrize("zero_grad", ["after-step", "before-forward", "before-backward"])
def test_the_peak_with_gradient_accumulation_is_the_predicted_one(name, zero_grad):
    assert_agrees(validated(name, grad_accum_steps=3, zero_grad=zero_grad))


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-momentum", "adam", "adafactor", "adagrad", "rmsprop", "nadam", "radam"])
def test_the_peak_with_another_optimizer_is_the_predicted_one(optimizer):
    assert_agrees(validated("shared", optimizer=optimizer))


@pytest.mark.parametrize("impl", ["foreach", "fused", "for-loop"])
@pytest.mark.parametrize("name", ["vit"])
def test_the_peak_with_another_implementation_of_adamw_is_the_predicted_one(name, impl):
    assert_agrees(validated(name, optimizer_impl=impl))


@pytest.mark.parametrize(
    "facts",
    [
        {"set_to_none": False},
        {"clip_grad_norm": True},
        {"keep_outputs": True},
        {"frozen": ("transformer.wte", "transformer.h.0")},
        {"attention": "eager"},
        {"precision": "fp16"},
        {"precision": "fp16-autocast"},
        {"mode": "forward"},
        {"mode": "inference"},
        {"iterations": 1},
    ],
    ids=str,
)
def test_the_peak_under_other_facts_of_the_loop_is_the_predicted_one(facts):
    facts = dict(facts)
    steps = facts.pop("iterations", 2)
    assert_agrees(validated("gpt2", steps=steps, **facts))


@pytest.mark.parametrize("name", ["gpt2", "shared"])
def test_every_phase_and_component_agrees_not_only_the_peak(name):
    comparison = validated(name)
    off = [row for row in comparison.rows if not row.within(0.001)]
    assert off == []
    assert {row.what for row in comparison.rows} == {"peak", "after", "param", "buffer", "grad", "optimizer_state"}


def test_a_trace_that_was_extended_in_depth_and_size_agrees_as_well():
    spec = find("llama").spec(num_hidden_layers=6)
    request = request_for(spec, "cpu", micro_batch_size=3, seq_len=48)
    assert_agrees(run(request, "cpu", isolated=False))


def test_a_wrong_prediction_is_seen():
    """The proof must be able to fail: another sequence length predicts another peak."""
    right = validated("gpt2", seq_len=64)
    source = TraceSource(exact=True)
    longer = source.step(request_for(model("gpt2"), "cpu", micro_batch_size=2, seq_len=72), target="cpu")

    class Wrong(TraceSource):
        def step(self, request, target="cuda"):
            return longer

    request = request_for(model("gpt2"), "cpu", micro_batch_size=2, seq_len=64)
    wrong = run(request, "cpu", isolated=False, traces=Wrong())
    assert right.exit_code == 0
    assert wrong.exit_code == 1
    assert wrong.peak.predicted_bytes > wrong.peak.measured_bytes
