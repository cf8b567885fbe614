"""What the loop does to memory: accumulation, zero_grad, outputs that are held, workspaces; and the ledger that comes out."""

from __future__ import annotations

import itertools
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memplan.hardware.catalogue import resolve
from memplan.models import load
from memplan.planner.api import make_request
from memplan.planner.clipping import clip_grad_norm_events
from memplan.planner.kernels import Kernels
from memplan.planner.ledger import Component, Ledger
from memplan.planner.loop import LoopFacts
from memplan.planner.optimizers.traced import traced_rule
from memplan.planner.simulate import simulate
from memplan.planner.strategies.single import SingleDevice
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import Phase, StepTrace
from memplan.planner.trace.tracer import trace_step

WIDTH, BATCH = 32, 4
W, H, SCALAR = WIDTH * WIDTH * 4, BATCH * WIDTH * 4, 4
NET = """
    import torch

    def build(layers=3):
        chain = torch.nn.Sequential(*[torch.nn.Linear(32, 32, bias=False) for _ in range(layers)])
        return chain, lambda batch, seq: {"input": torch.ones(batch, 32)}, lambda m, b: m(**b).sum()
"""


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> StepTrace:
    file = tmp_path_factory.mktemp("chain") / "chain.py"
    file.write_text(textwrap.dedent(NET))
    return trace_step(load(f"{file}:build"), TraceOptions(batch_size=BATCH, seq_len=1, target="cpu"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> StepTrace:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMPLAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        asked = make_request("openai-community/gpt2", "a100-80gb", overrides={"n_layer": "2"}, micro_batch_size=2, seq_len=64)
        return TraceSource(exact=True).step(asked)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


def run(trace: StepTrace, *, optimizer: str = "sgd", impl: str = "for-loop", kernels: Kernels | None = None, **loop) -> Ledger:
    rule = traced_rule(optimizer, impl) if trace.options["mode"] == "train" else None
    ledger, _ = simulate(trace, SingleDevice(), optimizer=rule, loop=LoopFacts(**loop), kernels=kernels)
    ledger.check()
    return ledger


def live(ledger: Ledger, phase: Phase, iteration: int = 0) -> np.ndarray:
    """Live bytes at the start of the phase, and after each of its rows."""
    rows = ledger.rows()
    chosen = np.flatnonzero((ledger.phase[rows] == phase) & (ledger.iteration[rows] == iteration))
    return ledger.live_bytes()[np.concatenate([chosen[:1] - 1, chosen])]


def peak(ledger: Ledger, phase: Phase, iteration: int = 0) -> int:
    return int(live(ledger, phase, iteration).max())


def component(ledger: Ledger, which: Component) -> np.ndarray:
    """Bytes of one component after each row."""
    return np.cumsum(np.where(ledger.component == which, ledger.delta_bytes, 0))


LOOPS = [
    {"grad_accum_steps": n, "zero_grad": z, "set_to_none": s, "keep_outputs": k, "clip_grad_norm": c}
    for n, z, s, k, c in itertools.product(
        (1, 3), ("after-step", "before-forward", "before-backward"), (True, False), (True, False), (True, False)
    )
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: " ".join(str(v) for v in loop.values()))
def test_every_loop_keeps_the_ledgers_invariants_and_ends_as_it_must(chain, loop):
    ledger = run(chain, optimizer="adamw", impl="foreach", iterations=3, **loop)
    left = ledger.components_after(len(ledger) - 1)
    assert left["param"] == 3 * W
    assert left["optimizer_state"] == 6 * W
    grads_stay = loop["zero_grad"] != "after-step" or not loop["set_to_none"]
    assert left.get("grad", 0) == (3 * W if grads_stay else 0)
    # the batch, the loss, and the output where the loop holds it
    assert left["activation"] == H + SCALAR + (H if loop["keep_outputs"] else 0)
    assert "temp" not in left
    # a step that comes later is like the one before
    assert np.array_equal(live(ledger, Phase.BACKWARD, 1), live(ledger, Phase.BACKWARD, 2))


# -- hand-computed ---------------------------------------------------------------------------------------------------------


def test_the_forward_of_a_chain_holds_its_weights_and_every_hidden_state(chain):
    # the loss is there before the last hidden state goes
    assert peak(run(chain), Phase.FORWARD) == 3 * W + 4 * H + SCALAR


def test_the_backward_of_a_chain_holds_the_gradients_so_far(chain):
    # the first layer's gradient is there: three weights, three gradients; the input, the gradient of its output; loss and 1
    assert peak(run(chain), Phase.BACKWARD) == 6 * W + 2 * H + 2 * SCALAR


@pytest.mark.parametrize(
    ("optimizer", "states", "lists"), [("sgd", 0, 0), ("sgd-momentum", 1, 0), ("adamw", 2, 1), ("adadelta", 2, 2)]
)
def test_the_step_holds_states_and_lists_of_the_optimizer(chain, optimizer, states, lists):
    ledger = run(chain, optimizer=optimizer, impl="foreach")
    assert peak(ledger, Phase.STEP, 1) == (2 + states + lists) * 3 * W + H + SCALAR


# -- gradient accumulation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2, 4, 9])
def test_accumulation_takes_no_more_the_more_steps_there_are(chain, steps):
    two, more = run(chain, grad_accum_steps=2), run(chain, grad_accum_steps=steps)
    assert [peak(more, p, i) for p in (Phase.FORWARD, Phase.BACKWARD) for i in (0, 1)] == [
        peak(two, p, i) for p in (Phase.FORWARD, Phase.BACKWARD) for i in (0, 1)
    ]


def test_the_forward_of_the_first_micro_step_is_as_it_is_without_accumulation(gpt2):
    once, thrice = run(gpt2), run(gpt2, grad_accum_steps=3)
    first = live(once, Phase.FORWARD)
    assert np.array_equal(live(thrice, Phase.FORWARD)[: len(first)], first)


def test_later_micro_steps_carry_the_gradients_through_forward(chain):
    # the second forward: all gradients are there, and both losses: the old one until the forward has returned
    ledger = run(chain, grad_accum_steps=2)
    assert peak(ledger, Phase.FORWARD) == 3 * W + 3 * W + 4 * H + 2 * SCALAR
    # one gradient is added to its sum at a time: the last layer's, when all hidden states are still there
    assert peak(ledger, Phase.BACKWARD) == 6 * W + W + 4 * H + 2 * SCALAR


def test_a_gradient_is_never_held_twice_after_it_is_added(chain):
    ledger = run(chain, grad_accum_steps=4)
    assert component(ledger, Component.GRAD).max() == 3 * W + W


TRANSPOSED = """
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4, 12, 7))

        def forward(self, x):
            return torch.bmm(self.w.transpose(1, 2), x.T.unsqueeze(0).expand(4, -1, -1))

    def build():
        return Net(), lambda batch, seq: {"x": torch.ones(batch, 12)}, lambda m, b: m(**b).sum()
"""


def test_a_gradient_is_copied_into_the_parameters_layout_only_where_there_is_none_to_add_to(tmp_path):
    file = tmp_path / "transposed.py"
    file.write_text(textwrap.dedent(TRANSPOSED))
    trace = trace_step(load(f"{file}:build"), TraceOptions(batch_size=BATCH, seq_len=1, target="cpu"))
    ledger = run(trace, grad_accum_steps=3)
    copies = (ledger.component == Component.GRAD) & (ledger.delta_bytes > 0)
    assert ledger.delta_bytes[copies].tolist() == [4 * 12 * 7 * 4] * 2  # one in each of the two optimizer steps
    assert ledger.iteration[copies].tolist() == [0, 1]


# -- zero_grad -------------------------------------------------------------------------------------------------------------


def test_clearing_after_the_step_frees_gradients_before_the_next_forward(chain):
    after, before = run(chain, zero_grad="after-step"), run(chain, zero_grad="before-backward")
    assert peak(before, Phase.FORWARD, 1) - peak(after, Phase.FORWARD, 1) == 3 * W


def test_clearing_before_forward_is_as_good_as_after_the_step_but_for_what_lies_between(chain):
    after, before = run(chain, zero_grad="after-step"), run(chain, zero_grad="before-forward")
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP):
        assert peak(after, phase, 1) == peak(before, phase, 1)


def test_gradients_that_are_zeroed_stay_and_meet_the_new_ones(chain):
    kept = run(chain, set_to_none=False)
    assert component(kept, Component.GRAD)[-1] == 3 * W
    assert peak(kept, Phase.BACKWARD, 1) == 6 * W + W + 4 * H + 2 * SCALAR
    assert peak(kept, Phase.BACKWARD, 0) == peak(run(chain), Phase.BACKWARD, 0)  # in the first step there are none yet


@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_way_of_clearing_beats_after_the_step(gpt2, accumulate):
    best = run(gpt2, optimizer="adamw", impl="fused", grad_accum_steps=accumulate).peak_bytes()
    for when, to_none in itertools.product(("before-forward", "before-backward"), (True, False)):
        other = run(gpt2, optimizer="adamw", impl="fused", grad_accum_steps=accumulate, zero_grad=when, set_to_none=to_none)
        assert other.peak_bytes() >= best


# -- outputs ---------------------------------------------------------------------------------------------------------------


def test_an_output_that_the_loop_holds_lives_until_the_next_forward_has_returned(chain):
    ledger, plain = run(chain, keep_outputs=True), run(chain)
    assert peak(ledger, Phase.BACKWARD) == peak(plain, Phase.BACKWARD) + H
    assert peak(ledger, Phase.STEP) == peak(plain, Phase.STEP) + H
    # the next forward makes its own output when the old one is still bound
    assert peak(ledger, Phase.FORWARD, 1) == peak(plain, Phase.FORWARD, 1) + H
    assert live(ledger, Phase.BACKWARD, 1).max() == live(ledger, Phase.BACKWARD, 0).max()


def test_holding_the_output_never_takes_less(gpt2):
    assert run(gpt2, keep_outputs=True).peak_bytes() > run(gpt2).peak_bytes()
    assert run(gpt2, keep_outputs=True).peak_bytes() - run(gpt2).peak_bytes() <= 2 * 64 * 50257 * 4 * 2


# -- clipping --------------------------------------------------------------------------------------------------------------


def test_clipping_makes_small_blocks_only_and_leaves_none(chain):
    ledger = run(chain, clip_grad_norm=True)
    assert peak(ledger, Phase.STEP) - peak(run(chain), Phase.STEP) < 1024


def test_clipping_on_cuda_makes_partial_sums_and_a_block_a_tensor():
    events = clip_grad_norm_events([(1000, 1000), (10,), ()], "cuda")
    assert events[0] == 3 * 16 * 4  # three tensors, 1,000,000 / 65,536 chunks
    assert events[1:4] == [4, 4, 4]
    assert clip_grad_norm_events([], "cuda") == []


# -- kernels ---------------------------------------------------------------------------------------------------------------


def test_each_thread_makes_its_workspace_once_and_keeps_it(gpt2):
    kernels = Kernels.for_device(resolve("a100-80gb")[0], "2.13.0")
    ledger = run(gpt2, kernels=kernels, iterations=3, grad_accum_steps=2)
    kept = component(ledger, Component.WORKSPACE)[-1]
    assert kept == 2 * 8_519_680  # forward, and the autograd thread
    born = (ledger.component == Component.WORKSPACE) & (ledger.delta_bytes == 8_519_680)
    assert set(ledger.phase[born].tolist()) == {Phase.FORWARD, Phase.BACKWARD}
    assert set(ledger.iteration[born].tolist()) == {0}


def test_kernels_only_add(gpt2):
    with_kernels = run(gpt2, kernels=Kernels.for_device(resolve("a100-80gb")[0], "2.13.0"))
    for name in (Component.PARAM, Component.GRAD, Component.BUFFER):
        assert component(with_kernels, name).max() == component(run(gpt2), name).max()
    assert with_kernels.peak_bytes() >= run(gpt2).peak_bytes()


# -- modes -----------------------------------------------------------------------------------------------------------------


def traced(mode: str, batch: int = 2, seq: int = 64) -> StepTrace:
    asked = make_request(
        "openai-community/gpt2", "a100-80gb", overrides={"n_layer": "2"}, micro_batch_size=batch, seq_len=seq, mode=mode
    )
    return TraceSource().step(asked)


@pytest.mark.parametrize("mode", ["forward", "inference"])
def test_a_run_without_backward_has_no_gradient_and_no_state(mode):
    ledger = run(traced(mode))
    assert set(ledger.phase.tolist()) == {Phase.INIT, Phase.FORWARD}
    assert not np.isin(ledger.component, [Component.GRAD, Component.OPTIMIZER_STATE]).any()


def test_inference_takes_less_than_forward_and_forward_less_than_training():
    inference, forward, train = (run(traced(mode)).peak_bytes() for mode in ("inference", "forward", "train"))
    assert inference < forward < train


def test_the_fresh_ledger_of_a_trace_is_that_of_the_trace_read_back(gpt2):
    a, b = run(gpt2), run(StepTrace.from_bytes(gpt2.to_bytes()))
    assert np.array_equal(a.delta_bytes, b.delta_bytes)
    assert a.labels == b.labels


# -- more is never less ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> TraceSource:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMPLAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield TraceSource()


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 40), st.integers(1, 20), st.integers(2, 30), st.integers(1, 20))
def test_a_larger_batch_or_length_never_lowers_the_peak(source, batch, more, length, longer):
    asked = make_request(
        "openai-community/gpt2", "a100-80gb", overrides={"n_layer": "2"}, micro_batch_size=batch, seq_len=16 * length
    )
    kernels = Kernels.for_device(asked.device, "2.13.0")
    base = run(source.step(asked), kernels=kernels).peak_bytes()
    assert run(source.step(asked.but(micro_batch_size=batch + more)), kernels=kernels).peak_bytes() >= base
    assert run(source.step(asked.but(seq_len=16 * (length + longer))), kernels=kernels).peak_bytes() >= base


@pytest.mark.parametrize("layers", [1, 2, 6, 7, 12])
def test_each_layer_adds_the_same_to_what_stays(layers):
    def resting(n: int) -> int:
        asked = make_request(
            "openai-community/gpt2", "a100-80gb", overrides={"n_layer": str(n)}, micro_batch_size=1, seq_len=32
        )
        return int(run(TraceSource().step(asked), optimizer="adamw", impl="foreach").live_bytes()[-1])

    block = 12 * 768 * 768 + 13 * 768  # parameters of a GPT-2 block
    assert resting(layers + 1) - resting(layers) == 3 * 4 * block
