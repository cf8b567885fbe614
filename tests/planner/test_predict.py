"""From a question to a verdict: a prediction's figures hang together, and a replay under the limit gives the verdict."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memplan.errors import CannotTell, UserError
from memplan.planner.api import make_request
from memplan.planner.predict import ERROR_BAND, ledger_of, predict, replay_ledger
from memplan.planner.prediction import Prediction, Verdict
from memplan.planner.request import Request
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


def asked(**options) -> Request:
    options = {"micro_batch_size": 2, "seq_len": 64, "precision": "fp32", **options}
    return make_request(MODEL, options.pop("gpu", "a100-80gb"), overrides=LAYERS, **options)


def with_usable(request: Request, usable: int) -> Request:
    """The same question for a card that leaves `usable` bytes to torch."""
    missing = usable - request.device.usable_bytes
    device = request.device.model_copy(update={"total_bytes": request.device.total_bytes + missing})
    assert device.usable_bytes == usable
    return replace(request, device=device)


def answer(source, **options) -> Prediction:
    return predict(asked(**options), source)


def test_the_figures_of_a_prediction_hang_together(source):
    found = answer(source)
    assert found.usable_bytes == found.total_bytes - found.context_bytes
    assert found.device_peak_bytes == found.reserved_peak_bytes + found.context_bytes
    assert found.headroom_bytes == found.usable_bytes - found.reserved_peak_bytes
    assert found.reserved_peak_bytes >= found.allocated_peak_bytes >= found.peak.requested_bytes
    assert found.peak.allocated_bytes == found.allocated_peak_bytes
    assert sum(found.peak.components.values()) == found.peak.requested_bytes
    assert max(m.allocated_bytes for m in found.phases.values()) == found.allocated_peak_bytes
    assert found.num_params == found.num_trainable_params


def test_the_peak_is_that_of_the_ledger(source):
    request = asked()
    ledger = ledger_of(request, source.step(request))
    found = predict(request, source)
    # the allocator rounds to 512 bytes, and leaves a rest below 1 MiB with its block
    blocks = len(ledger.live_blocks(int(ledger.live_bytes().argmax())))
    assert 0 <= found.allocated_peak_bytes - ledger.peak_bytes() < 2**20 * blocks
    assert found.allocated_peak_bytes == replay_ledger(ledger).peak_allocated_bytes


def test_parameters_gradients_and_states_are_four_times_the_weights(source):
    found = answer(source, optimizer="adamw", optimizer_impl="fused", micro_batch_size=1, seq_len=32)
    weights = 4 * found.num_params
    step = found.phases["step"].components
    assert step["param"] == step["grad"] == weights
    assert step["optimizer_state"] == 2 * weights + 4 * step_tensors(source)


def step_tensors(source) -> int:
    return len(source.step(asked(micro_batch_size=1, seq_len=32)).params)


# -- verdicts --------------------------------------------------------------------------------------------------------------


def test_the_verdict_turns_at_the_reserved_peak(source):
    request = asked()
    needs = predict(request, source).reserved_peak_bytes
    roomy = predict(with_usable(request, int(needs / (1 - ERROR_BAND)) + 2**21), source)
    assert (roomy.verdict, roomy.verdict.exit_code()) == (Verdict.FITS, 0)
    close = predict(with_usable(request, needs), source)
    assert (close.verdict, close.verdict.exit_code(), close.verdict.exit_code(strict=True)) == (Verdict.TIGHT, 0, 1)
    assert "error" in close.reason


def test_a_card_smaller_than_what_is_allocated_does_not_fit_and_the_failure_is_named(source):
    request = asked()
    needs = predict(request, source).allocated_peak_bytes
    found = predict(with_usable(request, needs - 512), source)
    assert (found.verdict, found.verdict.exit_code()) == (Verdict.DOES_NOT_FIT, 1)
    assert found.failure is not None
    assert found.failure.requested_bytes > 0
    assert found.failure.allocated_bytes <= found.usable_bytes
    assert found.failure.phase in found.reason


def test_between_allocated_and_reserved_it_fits_after_a_flush_or_not_at_all(source):
    request = asked()
    free = predict(request, source)
    for share in (0.25, 0.5, 0.75):
        usable = int(free.allocated_peak_bytes + share * (free.reserved_peak_bytes - free.allocated_peak_bytes))
        found = predict(with_usable(request, usable), source)
        assert found.verdict in (Verdict.TIGHT, Verdict.DOES_NOT_FIT)
        assert found.verdict is Verdict.DOES_NOT_FIT or found.num_alloc_retries > 0


@settings(max_examples=8, deadline=None)
@given(st.floats(0.6, 1.3))
def test_more_memory_never_turns_a_fit_into_none(source, share):
    order = [Verdict.DOES_NOT_FIT, Verdict.TIGHT, Verdict.FITS]
    request = asked()
    needs = predict(request, source).reserved_peak_bytes
    less, more = (predict(with_usable(request, int(needs * s)), source).verdict for s in (share, share * 1.2))
    assert order.index(less) <= order.index(more)


# -- monotone --------------------------------------------------------------------------------------------------------------


@settings(max_examples=6, deadline=None)
@given(st.integers(2, 20), st.integers(2, 24))
def test_twice_the_batch_needs_more(source, batch, length):
    # what is allocated may fall by a little: rests below 1 MiB stay with their blocks
    requests = [asked(micro_batch_size=n, seq_len=16 * length) for n in (batch, 2 * batch)]
    small, large = (ledger_of(request, source.step(request)).peak_bytes() for request in requests)
    assert large >= small


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ({"optimizer": "adamw"}, {"optimizer": "sgd"}),
        ({"optimizer": "adamw-amsgrad"}, {"optimizer": "adamw"}),
        ({"optimizer_impl": "foreach"}, {"optimizer_impl": "fused"}),
        ({"precision": "fp32"}, {"precision": "bf16"}),
        ({"attention": "eager", "micro_batch_size": 16, "seq_len": 512}, {"micro_batch_size": 16, "seq_len": 512}),
        ({"set_to_none": False, "optimizer": "sgd", "micro_batch_size": 16}, {"optimizer": "sgd", "micro_batch_size": 16}),
        ({"keep_outputs": True, "micro_batch_size": 8}, {"micro_batch_size": 8}),
        ({"mode": "train"}, {"mode": "forward"}),
        ({"mode": "forward"}, {"mode": "inference"}),
    ],
)
def test_what_should_need_more_needs_more(source, more, less):
    assert answer(source, **more).allocated_peak_bytes > answer(source, **less).allocated_peak_bytes


def test_recompute_lowers_what_activations_take(source):
    request = make_request(MODEL, "a100-80gb", overrides={"n_layer": "6"}, micro_batch_size=16, seq_len=512, precision="bf16")
    plain, recomputed = predict(request, source), predict(request.but(recompute="full"), source)
    assert recomputed.peak.components["activation"] < plain.peak.components["activation"]
    assert recomputed.flops_per_step > plain.flops_per_step


STACK = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    def build():
        return (
            nn.Sequential(*[Block() for _ in range(6)]),
            lambda batch, seq: {"input": torch.zeros(batch, seq, 64)},
            lambda m, b: m(b["input"]).sum(),
        )
"""


def test_a_model_that_is_its_own_list_of_blocks_recomputes_them(tmp_path, source):
    file = tmp_path / "stack.py"
    file.write_text(textwrap.dedent(STACK))
    request = make_request(f"{file}:build", "a100-80gb", micro_batch_size=4, seq_len=512, precision="fp32")
    plain, recomputed = predict(request, source), predict(request.but(recompute="full"), source)
    of_blocks = 6 * 4 * 512 * 64 * 4  # each keeps its input alone
    assert (
        recomputed.phases["forward"].components["activation"] < 2 * of_blocks < plain.phases["forward"].components["activation"]
    )


def test_frozen_parameters_take_neither_gradient_nor_state(source):
    found = answer(source, frozen=("transformer.wte", "transformer.wpe"))
    assert found.num_trainable_params == found.num_params - (1024 + 1024) * 768
    assert found.phases["step"].components["grad"] == 4 * found.num_trainable_params


# -- what cannot be answered -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": 2}, "--strategy single"),
        ({"compiled": True}, "torch.compile"),
        ({"precision": "bf16-mixed"}, "masters"),
        ({"method": "lisa"}, "lisa"),
    ],
)
def test_what_is_not_modelled_is_unknown_with_the_reason(source, changes, said):
    found = predict(replace(asked(), **changes), source)
    assert (found.verdict, found.verdict.exit_code()) == (Verdict.UNKNOWN, 2)
    assert said in found.reason
    assert not found.fits


@pytest.mark.parametrize(
    "changes",
    [{"precision": "fp13"}, {"optimizer": "adamww"}, {"recompute": "sometimes"}, {"attention": "quick"}, {"mode": "dream"}],
)
def test_what_does_not_exist_is_an_error(source, changes):
    with pytest.raises(UserError):
        predict(replace(asked(), **changes), source)


def test_a_trace_that_depends_on_values_is_unknown_not_an_error():
    class Blind(TraceSource):
        def step(self, request, target="cuda"):
            raise CannotTell("it decides by values")

    found = predict(asked(), Blind())
    assert (found.verdict, found.reason) == (Verdict.UNKNOWN, "it decides by values")
