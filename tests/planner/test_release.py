"""Gradient release: closed forms on a chain of linear layers, real hooks on the CPU, and what it is refused with."""

from __future__ import annotations

import textwrap
import types
import weakref
from typing import Any

import pytest
import torch
from memplan.errors import CannotTell, UserError
from memplan.models import load
from memplan.planner.ledger import Component, Ledger
from memplan.planner.loop import LoopFacts
from memplan.planner.optimizers.catalogue import optimizer_rule
from memplan.planner.simulate import simulate
from memplan.planner.strategies.release import GradientRelease, check
from memplan.planner.strategies.single import SingleDevice
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.steptrace import Phase, StepTrace
from memplan.planner.trace.tracer import trace_step
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, WIDTH, WORDS = 16, 32, 500
E = WORDS * WIDTH * 4  # bytes of the embedding, which is larger than everything else together

MODEL = """
    import torch

    class Words(torch.nn.Module):
        def __init__(self, tied, dtype):
            super().__init__()
            self.embed = torch.nn.Embedding(500, 32, dtype=dtype)
            self.body = torch.nn.Linear(32, 32, bias=False, dtype=dtype)
            self.head = torch.nn.Linear(32, 500, bias=False, dtype=dtype)
            if tied:
                self.head.weight = self.embed.weight

        def forward(self, input):
            return self.head(self.body(self.embed(input)))

    def build(tied=False, half=False):
        model = Words(tied, torch.bfloat16 if half else torch.float32)
        return model, lambda batch, seq: {"input": torch.zeros(16, dtype=torch.int64)}, lambda m, b: m(**b).sum()
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


def words(tmp_path, *, tied: bool = False, half: bool = False) -> StepTrace:
    file = tmp_path / "words.py"
    file.write_text(textwrap.dedent(MODEL))
    spec = load(f"{file}:build", overrides={"tied": str(tied), "half": str(half)})
    return trace_step(spec, TraceOptions(batch_size=1, seq_len=1, mode="train", target="cpu"))


def released(trace: StepTrace, optimizer: str, impl: str = "default") -> Ledger:
    ledger, _ = simulate(trace, GradientRelease(), optimizer=optimizer_rule(optimizer, impl))
    ledger.check()
    return ledger


def peak_of(ledger: Ledger, *components: Component, iteration: int = 1) -> int:
    """Highest sum of these components in one step."""
    rows = ledger.rows()
    chosen = [ledger.delta_bytes[r] if ledger.component[r] in components else 0 for r in rows]
    live = peak = 0
    for row, delta in zip(rows, chosen, strict=True):
        live += delta
        if ledger.iteration[row] == iteration:
            peak = max(peak, live)
    return int(peak)


def test_one_gradient_lives_at_a_time(tmp_path):
    assert peak_of(released(words(tmp_path), "sgd"), Component.GRAD) == E
    plain, _ = simulate(words(tmp_path), SingleDevice(), optimizer=optimizer_rule("sgd"))
    assert peak_of(plain, Component.GRAD) == 2 * E + WIDTH * WIDTH * 4


@pytest.mark.parametrize(("impl", "times"), [("fused", 1), ("foreach", 2), ("for-loop", 3)])
def test_the_step_of_the_largest_parameter_is_the_peak(tmp_path, impl, times):
    # AdamW alone with the embedding: fused makes nothing, foreach a square root, the loop a square root and a quotient
    ledger = released(words(tmp_path), "adamw", impl)
    held = peak_of(ledger, Component.GRAD, Component.TEMP)
    logits = TOKENS * WORDS * 4
    assert times * E <= held <= times * E + 2 * logits


@pytest.mark.parametrize("strategy", [GradientRelease, SingleDevice])
def test_tied_weights_cost_three_gradients_with_release_or_without(tmp_path, strategy):
    ledger, _ = simulate(words(tmp_path, tied=True), strategy(), optimizer=optimizer_rule("sgd"))
    assert 3 * E <= peak_of(ledger, Component.GRAD, Component.TEMP) <= 3 * E + 3 * TOKENS * WORDS * 4


def test_no_gradient_survives_backward_and_states_do(tmp_path):
    trace = words(tmp_path)
    ledger = released(trace, "flash-adamw:master_weight_bits=none")
    left = ledger.components_after(len(ledger) - 1)
    assert "grad" not in left
    assert left["optimizer_state"] == sum(2 * (p.numel + 2 * -(-p.numel // 32)) for p in trace.params)


def test_states_are_made_inside_the_first_backward(tmp_path):
    ledger = released(words(tmp_path), "adamw", "fused")
    born = (ledger.component == Component.OPTIMIZER_STATE) & (ledger.delta_bytes > 0)
    assert set(ledger.phase[born].tolist()) == {Phase.BACKWARD}
    assert set(ledger.iteration[born].tolist()) == {0}


def test_lomo_holds_the_gradient_before_too(tmp_path):
    trace = words(tmp_path, half=True)
    ledger = released(trace, "lomo")
    sizes = {p.fqn: p.numel for p in trace.params}
    big, small = sizes["embed.weight"], sizes["body.weight"]
    assert peak_of(ledger, Component.GRAD) == 2 * big + 2 * small
    # the head is stepped when the body's gradient comes: 8 bytes an element of the head (4 of its gradient, 4 of itself)
    held = peak_of(ledger, Component.GRAD, Component.TEMP)
    assert 8 * big + 2 * small <= held <= 8 * big + 2 * small + 2 * TOKENS * WORDS * 2


# -- real hooks ---------------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Bytes of the blocks that ops make and drop, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(result, torch.Tensor):
                self.see(result)
        return out

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        nbytes = storage.nbytes()

        def died(_: Any) -> None:
            del self._seen[key]
            self.live -= nbytes

        self._seen[key] = weakref.ref(storage, died)
        self.live += nbytes
        self.peak = max(self.peak, self.live)


def real_peak(tied: bool, make: Any) -> int:
    """Peak of the second step of the model above with an optimizer of its own on every parameter, everything counted."""
    namespace: dict[str, Any] = {}
    exec(textwrap.dedent(MODEL), namespace)
    model, batch_of, loss_of = namespace["build"](tied)
    watch = Live()
    for param in model.parameters():
        optimizer = make(param)

        def hook(p: torch.Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(hook)
        watch.see(param)
    with watch:
        for _ in range(2):
            batch = batch_of(1, 1)
            watch.peak = watch.live
            loss = loss_of(model, batch)
            loss.backward()
    return watch.peak


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("impl", ["foreach", "for-loop", "fused"])
def test_a_real_run_with_hooks_peaks_where_the_ledger_says(tmp_path, tied, impl):
    how = {"fused": True} if impl == "fused" else {"foreach": impl == "foreach"}
    real = real_peak(tied, lambda p: torch.optim.AdamW([p], **how))
    trace = words(tmp_path, tied=tied)
    ledger, _ = simulate(trace, GradientRelease(), optimizer=optimizer_rule("adamw", impl, target="cpu"))
    rows = ledger.rows()
    second = ledger.live_bytes()[ledger.iteration[rows] == 1].max()
    assert second == pytest.approx(real, abs=256)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["lomo", "adalomo"])
def test_a_real_run_of_lomo_peaks_where_the_ledger_says(tmp_path, name, half, monkeypatch):
    library = pytest.importorskip("lomo_optim")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    namespace: dict[str, Any] = {}
    exec(textwrap.dedent(MODEL), namespace)
    model, batch_of, loss_of = namespace["build"](False, half)
    optimizer = (library.Lomo if name == "lomo" else library.AdaLomo)(model, lr=1e-3)
    watch = Live()
    for param in model.parameters():
        watch.see(param)
    for state in [getattr(optimizer, k, {}) for k in ("exp_avg_sq_row", "exp_avg_sq_col")]:
        for tensor in state.values():
            watch.see(tensor)
    with watch:
        for _ in range(2):
            batch = batch_of(1, 1)
            watch.peak = watch.live
            loss = loss_of(model, batch)
            optimizer.fused_backward(loss, 1e-3)
    trace = words(tmp_path, half=half)
    ledger, _ = simulate(trace, GradientRelease(), optimizer=optimizer_rule(name))
    second = ledger.live_bytes()[ledger.iteration[ledger.rows()] == 1].max()
    assert second == pytest.approx(watch.peak, abs=256)


# -- what it is refused with --------------------------------------------------------------------------------------------------


def question(**changes: Any) -> Any:
    known = {
        "loop": LoopFacts(**{k: changes.pop(k) for k in ("grad_accum_steps", "clip_grad_norm") if k in changes}),
        "precision": "bf16",
        "gpus": 1,
        "mode": "train",
        "optimizer": "adamw",
        "optimizer_impl": "default",
        "offload": (),
    }
    return types.SimpleNamespace(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grad_accum_steps": 2}, "--grad-accum 2: each gradient is gone before the next"),
        ({"clip_grad_norm": True}, "--clip-grad-norm: the norm of all gradients is known when the first are gone"),
        ({"precision": "fp16-autocast"}, "GradScaler"),
        ({"optimizer": "badam"}, "--optimizer badam: it needs all gradients at once"),
    ],
)
def test_what_release_cannot_be_combined_with_is_one_sentence(changes, message):
    with pytest.raises(UserError, match=message) as refused:
        check(question(**changes))
    assert "\n" not in str(refused.value)
    assert refused.value.next_step


@pytest.mark.parametrize("changes", [{"gpus": 2}, {"precision": "bf16-mixed"}])
def test_what_is_not_modelled_is_not_told(changes):
    with pytest.raises(CannotTell):
        check(question(**changes))


def test_a_gradient_that_comes_in_parts_is_not_told(tmp_path):
    trace = words(tmp_path)
    with pytest.raises(CannotTell, match=r"gradient of embed\.weight comes in several parts"):
        GradientRelease().grad_ready(types.SimpleNamespace(), trace.params[0], None)


@pytest.mark.parametrize("optimizer", ["adamw", "flash-adamw:master_weight_bits=32", "lomo", "galore-adamw", "adamw-8bit"])
def test_optimizers_that_step_one_parameter_are_taken(optimizer):
    check(question(optimizer=optimizer))
