"""Methods that train one block at a time: BAdam against its library, HiFT's groups and moments, and what is refused."""

from __future__ import annotations

import textwrap
import weakref
from typing import Any

import pytest
import torch
from memplan.errors import CannotTell, UserError
from memplan.models import load
from memplan.planner.api import make_request
from memplan.planner.ledger import Component, Ledger, Tier
from memplan.planner.optimizers import badam, hift
from memplan.planner.optimizers.catalogue import optimizer_rule
from memplan.planner.optimizers.methods import METHODS, OPTIMIZERS, dearest_block, default_optimizer, optimizer_under
from memplan.planner.optimizers.rule import OptimizerTensor, StepEvents, StepKind
from memplan.planner.predict import predict_with_ledger
from memplan.planner.simulate import simulate
from memplan.planner.strategies.layerwise import Layerwise, LayerwiseOnHost
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import StepTrace
from memplan.planner.trace.tracer import trace_step
from torch.utils._python_dispatch import TorchDispatchMode

MODEL = """
    import torch

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(96, dtype=torch.bfloat16)
            self.up = torch.nn.Linear(96, 200, dtype=torch.bfloat16)
            self.down = torch.nn.Linear(200, 96, dtype=torch.bfloat16)

        def forward(self, x):
            return x + self.down(torch.nn.functional.relu(self.up(self.norm(x))))

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(150, 96, dtype=torch.bfloat16)
            self.layers = torch.nn.ModuleList([Block(), Block(), Block()])
            self.head = torch.nn.Linear(96, 150, bias=False, dtype=torch.bfloat16)

        def forward(self, input):
            x = self.embed(input)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    def build():
        return (
            Words(),
            lambda batch, seq: {"input": torch.zeros(16, dtype=torch.int64)},
            lambda m, b: m(**b).float().logsumexp(-1).sum(),
        )
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


def words(tmp_path, method: str) -> StepTrace:
    file = tmp_path / "words.py"
    file.write_text(textwrap.dedent(MODEL))
    options = TraceOptions(batch_size=1, seq_len=1, mode="train", target="cpu", blockwise=method)
    return trace_step(load(f"{file}:build"), options)


def peak_of(ledger: Ledger, iteration: int) -> int:
    return int(ledger.live_bytes()[ledger.iteration[ledger.rows()] == iteration].max())


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


def test_a_real_run_of_badam_peaks_where_the_ledger_says(tmp_path):
    """Two steps on the first block; after the second the library turns to the next block, whose copies are made beside it."""
    library = pytest.importorskip("badam")
    namespace: dict[str, Any] = {}
    exec(textwrap.dedent(MODEL), namespace)
    model, batch_of, loss_of = namespace["build"]()
    watch = Live()
    for param in model.parameters():
        watch.see(param)
    peaks = []
    with watch:
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        how = {"switch_block_every": 3, "switch_mode": "ascending"}
        optimizer = library.BlockOptimizer(adamw, list(model.named_parameters()), **how)
        for _ in range(2):
            batch = batch_of(1, 1)
            watch.peak = watch.live
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(watch.peak)
    trace = words(tmp_path, "badam")
    ledger, _ = simulate(trace, Layerwise(), optimizer=optimizer_rule("badam", target="cpu"))
    ledger.check()
    assert {p.fqn.rpartition(".layers.")[0] for p in trace.params if p.requires_grad} == {""}
    assert [peak_of(ledger, 0), peak_of(ledger, 1)] == [pytest.approx(peak, abs=512) for peak in peaks]


def test_only_the_block_that_trains_has_gradients_and_state(tmp_path):
    trace = words(tmp_path, "badam")
    ledger, _ = simulate(trace, Layerwise(), optimizer=optimizer_rule("badam"))
    made = {
        ledger.labels[label][0]
        for label, component in zip(ledger.label.tolist(), ledger.component.tolist(), strict=True)
        if component in (Component.GRAD, Component.OPTIMIZER_STATE)
    }
    assert {p.fqn for p in trace.params if p.requires_grad} == {p.fqn for p in trace.params if p.fqn.startswith("layers.0.")}
    assert {name for name in made if name.startswith(("embed", "head", "layers.1", "layers.2"))} == set()


def test_hifts_moments_are_on_the_gpu_inside_the_step_and_all_on_the_host(tmp_path):
    trace = words(tmp_path, "hift")
    ledger, _ = simulate(trace, LayerwiseOnHost(), optimizer=optimizer_rule("hift"))
    ledger.check()
    end = len(ledger) - 1
    total = sum(p.nbytes for p in trace.params)
    assert "optimizer_state" not in ledger.components_after(end)
    assert ledger.components_after(end, Tier.HOST_PAGEABLE)["optimizer_state"] == 2 * total


def test_hifts_step_is_torchs_with_both_moments_beside_it():
    tensors = [OptimizerTensor((64, 32), "bfloat16"), OptimizerTensor((64,), "bfloat16")]
    total = sum(t.nbytes for t in tensors)
    plain, away = (optimizer_rule(name).step(tensors) for name in ("adamw", "hift"))
    for events in ("first", "later"):
        made = StepEvents.transient_bytes(getattr(away, events))
        beside = StepEvents.transient_bytes(getattr(plain, events))
        assert made == beside + 2 * total
    assert away.state_bytes_in(Tier.GPU) == 0
    assert [e.tensor for e in away.later if e.kind is StepKind.DROP_GRAD] == [0, 1]


# -- which block -----------------------------------------------------------------------------------------------------------

LLAMA = [
    "model.embed_tokens.weight",
    *(f"model.layers.{i}.mlp.up_proj.weight" for i in range(12)),
    "model.norm.weight",
    "lm_head.weight",
]


def test_hift_makes_a_group_of_each_layer_and_of_each_module_outside():
    groups = hift.blocks(LLAMA)
    assert [len(group) for group in groups] == [1] * 15
    assert hift.blocks(["transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight"]) == [
        ["transformer.wte.weight", "transformer.wpe.weight"],
        ["transformer.h.0.ln_1.weight"],
    ]


def test_the_largest_block_decides_and_of_equal_ones_the_deepest():
    sizes = dict.fromkeys(LLAMA, 8)
    assert dearest_block("badam", sizes)[0] == ["model.layers.0.mlp.up_proj.weight"]
    sizes |= {"model.embed_tokens.weight": 100, "lm_head.weight": 100, "model.layers.4.mlp.up_proj.weight": 20}
    assert dearest_block("hift", sizes)[0] == ["model.embed_tokens.weight"]
    block, said = dearest_block("badam", sizes)
    assert block == ["model.layers.4.mlp.up_proj.weight"]
    assert "one of 12 blocks" in said
    assert "number 5" in said


def test_a_model_without_layers_in_its_names_has_no_blocks_for_badam():
    assert badam.blocks(["transformer.h.0.ln_1.weight"]) == []
    with pytest.raises(UserError, match="it finds no layers"):
        dearest_block("badam", {"transformer.h.0.ln_1.weight": 8})


# -- from a question -------------------------------------------------------------------------------------------------------

SMALL = {"micro_batch_size": 1, "seq_len": 64, "precision": "bf16", "overrides": {"num_hidden_layers": "3"}}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_and_its_optimizer_are_one_question(method):
    by_method = make_request("meta-llama/Llama-3.2-1B", "h200-sxm-141gb", method=method, **SMALL)
    assert by_method.optimizer == default_optimizer(method)
    by_method.check()
    if method in ("badam", "hift"):
        assert make_request("meta-llama/Llama-3.2-1B", "h200-sxm-141gb", optimizer=method, **SMALL) == by_method


def test_every_optimizer_of_a_method_is_known():
    for known in OPTIMIZERS.values():
        for name in known.values():
            assert optimizer_rule(name).name == name


def test_an_optimizer_keeps_its_options_under_a_method():
    assert optimizer_under("galore", "adamw-8bit:rank=4") == "galore-adamw-8bit:rank=4"
    with pytest.raises(UserError, match="it has none of that name"):
        optimizer_under("galore", "sgd")


def test_a_layer_of_llama_2_is_what_hift_trains_and_keeps():
    request = make_request(
        "meta-llama/Llama-2-7b-hf", "h200-sxm-141gb", method="hift", precision="fp32", micro_batch_size=1, seq_len=64
    )
    prediction, ledger = predict_with_ledger(request, TraceSource())
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert prediction.num_trainable_params == layer
    assert ledger is not None
    end = len(ledger) - 1
    assert ledger.components_after(end, Tier.HOST_PAGEABLE)["optimizer_state"] == 8 * prediction.num_params


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"method": "badam", "strategy": "release"}, UserError, "needs all gradients of the block at once"),
        ({"method": "badam", "mode": "inference"}, UserError, "it is a way to train"),
        ({"method": "hift", "gpus": 2, "strategy": "ddp"}, CannotTell, "--method hift on several GPUs"),
        ({"method": "hift", "offload": ("param",)}, CannotTell, "--offload param with --method hift"),
        ({"method": "badam", "precision": "bf16-mixed"}, CannotTell, "--precision bf16-mixed with --method badam"),
        ({"optimizer": "lomo"}, UserError, "it steps inside backward only. Add --grad-release"),
        ({"optimizer": "lomo", "gpus": 2, "strategy": "ddp"}, UserError, "before gradients are reduced"),
        ({"optimizer": "lomo", "strategy": "release", "clip_grad_norm": True}, UserError, "the norm of all gradients"),
        ({"optimizer": "lomo", "strategy": "release", "grad_accum_steps": 2}, UserError, "each gradient is gone before"),
        ({"optimizer": "deepspeed-cpu-adam"}, UserError, "it steps parameters that are on the host"),
        ({"optimizer": "galore-adamw", "gpus": 2, "strategy": "fsdp2"}, UserError, "projects whole gradients"),
        ({"optimizer": "apollo-mini", "gpus": 2, "strategy": "zero3"}, UserError, "projects whole gradients"),
        ({"optimizer": "badam", "method": "full"}, UserError, "Use --method badam"),
        ({"method": "galore", "optimizer": "lion"}, UserError, "it has none of that name"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(changes, error, said):
    with pytest.raises(error, match=said) as refused:
        make_request("meta-llama/Llama-3.2-1B", "h200-sxm-141gb", **{**SMALL, **changes}).check()
    assert "\n" not in str(refused.value)


def test_a_method_with_another_optimizer_than_its_own_is_refused():
    question = make_request("meta-llama/Llama-3.2-1B", "h200-sxm-141gb", method="galore", **SMALL)
    for other in ("adamw", "apollo-mini"):
        with pytest.raises(UserError, match="it is not its own"):
            question.but(optimizer=other).check()


def test_split_masters_on_fp32_weights_are_refused_in_one_sentence():
    request = make_request(
        "meta-llama/Llama-3.2-1B", "h200-sxm-141gb", optimizer="flash-adamw", **{**SMALL, "precision": "fp32"}
    )
    with pytest.raises(UserError, match="flash-adamw") as refused:
        predict_with_ledger(request, TraceSource())
    assert "\n" not in str(refused.value)
