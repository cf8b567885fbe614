"""Loading: what the GPU holds while a checkpoint is quantised, against transformers, bitsandbytes and peft themselves."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from memplan.models.adapters import AdapterSettings
from memplan.planner.api import make_request
from memplan.planner.loading import host_bytes, loading_peak, steps
from memplan.planner.predict import predict
from memplan.planner.prediction import Verdict
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import StepTrace
from torch.utils._python_dispatch import TorchDispatchMode

GPU = "a100-80gb"
SLACK = 4096  # bytes of tables that bitsandbytes keeps once for all layers


class OnTheDevice(TorchDispatchMode):
    """Bytes of what ops make, and their peak: not the mapped file, and not what has no device yet."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(result.alias_info is not None for result in func._schema.returns):  # a view makes nothing
            return out
        for result in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(result, torch.Tensor) and result.device.type != "meta":
                self.see(result)
        return out

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def died(_: Any) -> None:
            self._seen.discard(key)
            self._watched.pop(key)
            self.live -= nbytes

        self._seen.add(key)
        self._watched[key] = weakref.ref(storage, died)
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    @property
    def _watched(self) -> dict[int, Any]:
        return self.__dict__.setdefault("watched", {})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small Llama in fp32, so that every tensor is cast on its way in, as it is copied on its way to a GPU."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=300, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("checkpoint")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


def asked(checkpoint: str, quant: str, upcast: bool, traces: TraceSource) -> tuple[Any, StepTrace]:
    adapter = AdapterSettings.of("qlora", base_quant=quant, upcast=upcast)
    request = make_request(checkpoint, GPU, method="qlora", precision="bf16", micro_batch_size=1, seq_len=16, adapter=adapter)
    return request, traces.step(request, "cpu")


def loaded(checkpoint: str, quant: str, upcast: bool) -> int:
    """The peak of really loading it, in bytes as asked for."""
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if quant == "int8":
        how = BitsAndBytesConfig(load_in_8bit=True)
    else:
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quant[:3],
            bnb_4bit_use_double_quant=quant.endswith("-dq"),
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    with OnTheDevice() as watch:
        module = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.bfloat16, device_map={"": "cpu"}, quantization_config=how
        )
        if upcast:
            peft.prepare_model_for_kbit_training(module, use_gradient_checkpointing=False)
    return watch.peak


@pytest.mark.parametrize("upcast", [True, False])
@pytest.mark.parametrize("quant", ["nf4", "nf4-dq", "int8"])
def test_a_quantised_model_is_loaded_with_the_peak_that_is_told(checkpoint, quant, upcast):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    request, trace = asked(checkpoint, quant, upcast, TraceSource())
    told = loading_peak(request, trace, block_bytes=1)
    assert told is not None
    assert told.nbytes == pytest.approx(loaded(checkpoint, quant, upcast), abs=SLACK)
    packed = "a 16-bit weight, its fp16 copy and its 8-bit form" if quant == "int8" else "a 16-bit weight beside its 4-bit form"
    assert told.what in (packed, "its fp32 form beside the 16-bit one")


def test_weights_come_in_the_order_of_their_numbers(checkpoint):
    pytest.importorskip("bitsandbytes")
    request, trace = asked(checkpoint, "nf4", True, TraceSource())
    names = [step.fqn.split(".layers.")[1].split(".")[0] for step in steps(request, trace) if ".layers." in step.fqn]
    assert names[: names.index("2")] == sorted(names[: names.index("2")])
    assert sum(sum(step.kept) - sum(step.gone) for step in steps(request, trace)) == sum(
        t.nbytes for t in (*trace.params, *trace.buffers) if not getattr(t, "requires_grad", False)
    )


def test_loading_is_a_phase_of_the_answer_where_something_is_quantised(checkpoint):
    pytest.importorskip("bitsandbytes")
    traces = TraceSource()
    request, _ = asked(checkpoint, "nf4", True, traces)
    answer = predict(request, traces)
    assert next(iter(answer.phases)) == "load"
    assert answer.phases["load"].allocated_bytes >= answer.phases["init"].allocated_bytes * 0.9
    assert "loading" in str(answer)
    plain = make_request(checkpoint, GPU, precision="bf16", micro_batch_size=1, seq_len=16)
    assert "load" not in predict(plain, traces).phases


def test_a_card_that_cannot_load_does_not_fit(checkpoint, monkeypatch):
    pytest.importorskip("bitsandbytes")
    traces = TraceSource()
    request, trace = asked(checkpoint, "nf4", True, traces)
    peak = loading_peak(request, trace)
    assert peak is not None
    import memplan.planner.predict as module

    room = request.device.usable_bytes
    monkeypatch.setattr(module, "loading_peak", lambda *args: replace(peak, nbytes=room + 1))
    answer = predict(request, traces)
    assert answer.verdict is Verdict.DOES_NOT_FIT
    assert answer.headroom_bytes == -1
    assert "while the checkpoint is loaded" in answer.reason


def test_a_model_that_is_made_on_the_host_needs_room_there_in_each_process(checkpoint):
    traces = TraceSource()
    known = {"precision": "bf16", "micro_batch_size": 1, "seq_len": 16}
    request = make_request(checkpoint, GPU, gpus=4, strategy="ddp", host_ram_bytes=1 << 20, **known)
    own = host_bytes(request, traces.step(request))
    assert own == 2 * predict(request, traces).num_params
    (said,) = [hint for hint in predict(request, traces).hints if "from_pretrained" in hint]
    assert "4 processes" in said
    enough = request.but(host_ram_bytes=1 << 40)
    assert not [hint for hint in predict(enough, traces).hints if "from_pretrained" in hint]
