"""`save_on_cpu`: the tensors that a real hook sees, a real run whose saved tensors are elsewhere, and what is refused."""

from __future__ import annotations

import textwrap
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from memplan.errors import CannotTell
from memplan.models import load
from memplan.planner.api import make_request
from memplan.planner.ledger import Tier
from memplan.planner.loop import LoopFacts
from memplan.planner.optimizers.catalogue import optimizer_rule
from memplan.planner.simulate import simulate
from memplan.planner.strategies.offloaded_activations import OffloadedActivations, check, saved_tensors
from memplan.planner.strategies.release import GradientRelease
from memplan.planner.strategies.single import SingleDevice
from memplan.planner.timeline.step_time import step_time
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import Phase, StepTrace
from memplan.planner.trace.tracer import trace_step
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, SEQ = 2, 48
MODELS = {
    "llama": """
        import torch, transformers

        def build():
            config = transformers.LlamaConfig(
                hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
                vocab_size=500, use_cache=False)
            return transformers.LlamaForCausalLM(config).train(), batch
    """,
    "gpt2": """
        import torch, transformers

        def build():
            config = transformers.GPT2Config(
                n_embd=64, n_layer=3, n_head=4, vocab_size=500, n_positions=64, use_cache=False, attn_pdrop=0.0)
            return transformers.GPT2LMHeadModel(config).train(), batch
    """,
    "words": """
        import torch

        class Words(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = torch.nn.Embedding(500, 64)
                self.norm = torch.nn.LayerNorm(64)
                self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
                self.head = torch.nn.Linear(64, 500, bias=False)

            def forward(self, input_ids, labels):
                hidden = self.embed(input_ids)
                for _ in range(3):
                    hidden = hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))
                return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

        def build():
            return Words(), batch
    """,
}
BATCH_OF = """
        def batch(batch, seq):
            ids = torch.zeros(batch, seq, dtype=torch.int64)
            return {"input_ids": ids, "labels": ids.clone()}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


def source(name: str) -> str:
    return textwrap.dedent(MODELS[name]) + textwrap.dedent(BATCH_OF)


def traced(tmp_path: Any, name: str) -> StepTrace:
    file = tmp_path / f"{name}.py"
    file.write_text(source(name))
    return trace_step(load(f"{file}:build"), TraceOptions(batch_size=BATCH, seq_len=SEQ, mode="train", target="cpu"))


def built(name: str) -> tuple[torch.nn.Module, Any]:
    namespace: dict[str, Any] = {}
    exec(source(name), namespace)
    model, batch_of = namespace["build"]()
    return model, batch_of


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def offloaded(trace: StepTrace, inner: Any = SingleDevice, **loop: Any) -> Any:
    facts = LoopFacts(**loop)
    ledger, work = simulate(trace, OffloadedActivations(inner()), optimizer=optimizer_rule("sgd", target="cpu"), loop=facts)
    ledger.check()
    return ledger, work


@pytest.mark.parametrize("name", MODELS)
def test_a_hook_sees_the_tensors_that_the_trace_says(tmp_path, name):
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.numel() * tensor.element_size())
        return tensor

    model, batch_of = built(name)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model(**batch_of(BATCH, SEQ)))
    expected = Counter(saved.nbytes for saved in saved_tensors(traced(tmp_path, name)))

    assert expected == Counter(seen)


class Device(TorchDispatchMode):
    """Bytes of every storage that is on the device: seen by an op, and not said to be on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.host = self.host_peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(result, torch.Tensor):
                self.see(result)
        return out

    def see(self, tensor: torch.Tensor, host: bool = False) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def died(_: Any) -> None:
            del self._seen[key]
            if host:
                self.host -= nbytes
            else:
                self.live -= nbytes

        self._seen[key] = weakref.ref(storage, died)
        if host:
            self.host += nbytes
        else:
            self.live += nbytes
        self.peak, self.host_peak = max(self.peak, self.live), max(self.host_peak, self.host)


def real_run(name: str) -> Device:
    """The second step of SGD, with every saved tensor copied away as `save_on_cpu` does, and back when asked for."""
    model, batch_of = built(name)
    watch = Device()
    for tensor in (*model.parameters(), *model.buffers()):
        watch.see(tensor)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            packed = torch.empty(tensor.size(), dtype=tensor.dtype)
            packed.copy_(tensor)
        watch.see(packed, host=True)
        return packed

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        return packed.clone()

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    with watch:
        for _ in range(2):
            batch = batch_of(BATCH, SEQ)
            watch.peak = watch.live
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                loss = loss_of(model(**batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return watch


@pytest.mark.parametrize("name", MODELS)
def test_a_real_run_with_its_saved_tensors_elsewhere_peaks_where_the_ledger_says(tmp_path, name):
    real = real_run(name)
    ledger, _ = offloaded(traced(tmp_path, name))

    assert ledger.peak_bytes() == real.peak
    assert ledger.peak_bytes(Tier.HOST_PINNED) == real.host_peak


@pytest.mark.parametrize("inner", [SingleDevice, GradientRelease])
def test_the_gpu_holds_less_and_the_host_is_empty_after_the_step(tmp_path, inner):
    trace = traced(tmp_path, "llama")
    plain, _ = simulate(trace, inner(), optimizer=optimizer_rule("sgd", target="cpu"))
    ledger, _ = offloaded(trace, inner)

    assert ledger.peak_bytes() < plain.peak_bytes()
    assert ledger.live_bytes(Tier.HOST_PINNED)[-1] == 0
    assert ledger.components_after(len(ledger) - 1) == plain.components_after(len(plain) - 1)


def test_every_saved_tensor_is_copied_once_each_way_in_its_own_phase(tmp_path):
    trace = traced(tmp_path, "llama")
    _, work = offloaded(trace, grad_accum_steps=2, iterations=1)
    saved = Counter(s.nbytes for s in saved_tensors(trace))
    twice = Counter({nbytes: 2 * count for nbytes, count in saved.items()})

    copies = [w for w in work if w.kind in ("d2h", "h2d")]
    assert {(w.kind, w.phase) for w in copies} == {("d2h", Phase.FORWARD), ("h2d", Phase.BACKWARD)}
    assert Counter(w.nbytes for w in copies if w.kind == "d2h") == twice
    assert Counter(w.nbytes for w in copies if w.kind == "h2d") == twice


def test_the_host_holds_a_copy_of_every_weight_that_is_multiplied(tmp_path):
    trace = traced(tmp_path, "llama")
    weights = {p.storage: p.nbytes for p in trace.params}
    saved = Counter(s.storage for s in saved_tensors(trace) if s.storage in weights)

    embedding = next(p.storage for p in trace.params if "embed" in p.fqn)
    assert set(saved) == set(weights) - {embedding}  # a look-up saves its indices
    assert set(saved.values()) == {1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": "zero2", "gpus": 2}, "--offload activation with --strategy zero2"),
        ({"recompute": "full"}, "checkpoints have hooks of their own"),
        ({"mode": "forward"}, "--mode forward"),
    ],
)
def test_what_is_not_modelled_is_said(changes, said):
    request = make_request("gpt2", "rtx-4090", seq_len=64, **{"precision": "fp32", **changes})

    with pytest.raises(CannotTell, match=said):
        check(request)


def test_copies_on_the_stream_of_the_compute_add_to_the_time_of_a_step():
    request = make_request("gpt2", "a100-sxm-80gb", micro_batch_size=16, seq_len=512, precision="bf16", loss="model")
    trace = TraceSource().step(request)
    seconds = {}
    for strategy in (SingleDevice(), OffloadedActivations(SingleDevice())):
        ledger, work = simulate(trace, strategy, optimizer=optimizer_rule("sgd"))
        seconds[type(strategy)] = step_time(request, trace, ledger, work).seconds
    device, saved = request.device, sum(s.nbytes for s in saved_tensors(trace))
    copies = saved / device.h2d_bytes_per_s + saved / device.d2h_bytes_per_s

    assert copies > 0.1  # seconds, so that what the copies cost can be seen
    assert seconds[OffloadedActivations] == pytest.approx(seconds[SingleDevice] + copies, rel=0.1)
