"""LLM.int8: what a layer keeps and makes, against bitsandbytes, and a real training step."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from memplan.models.int8 import OUTLIERS, THRESHOLD, _Product
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, IN, OUT = 24, 64, 48

bnb = pytest.importorskip("bitsandbytes")


class Live(TorchDispatchMode):
    """Bytes of what ops make, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(result.alias_info is not None for result in func._schema.returns):
            return out
        for result in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in self._seen:
                self.see(result.untyped_storage())
        return out

    def see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()

        def died(_: Any) -> None:
            del self._seen[key]
            self.live -= nbytes

        self._seen[key] = weakref.ref(storage, died)
        self.live += nbytes
        self.peak = max(self.peak, self.live)


def layer() -> Any:
    made = bnb.nn.Linear8bitLt(IN, OUT, bias=False, has_fp16_weights=False, threshold=THRESHOLD)
    made.load_state_dict({"weight": torch.randn(OUT, IN)}, strict=False)
    made = made.to("cpu")
    made.init_8bit_state()
    return made


def the_librarys(part: Any, x: torch.Tensor) -> torch.Tensor:
    """Its product for GPUs, whose parts have a kernel for the CPU too."""
    out: torch.Tensor = bnb.autograd._functions.MatMul8bitLt.apply(x, part.weight, None, None, part.state)
    return out


def ours(part: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _Product.apply(x, part.weight.data, part.state.SCB, None, part.state.threshold)
    return out


def run(product: Any, dtype: torch.dtype) -> tuple[int, int, int]:
    """(bytes held after forward with the input dropped, peak of backward above that, bytes left)."""
    part = layer()
    watch = Live()
    with watch:
        source = torch.randn(1, TOKENS, IN, dtype=dtype)
        source[..., :OUTLIERS] = 20.0
        x = source.requires_grad_() * 1
        before = watch.live
        out = product(part, x)
        del x
        held = watch.live - before
        grad = torch.ones_like(out)
        watch.peak = there = watch.live
        out.backward(grad)
        peak = watch.peak - there
        del out, grad
    return held, peak, watch.live


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_keeps_its_input_and_makes_the_whole_weight_in_backward_as_the_library_does(dtype):
    held, peak, left = run(ours, dtype)
    real_held, real_peak, real_left = run(the_librarys, dtype)
    indices = 8 * OUTLIERS  # of the columns that are outliers
    assert (held + indices, peak, left + indices) == (real_held, real_peak, real_left)
    size = torch.empty(0, dtype=dtype).element_size()
    assert peak >= OUT * IN * size


def test_a_forward_on_a_gpu_makes_what_its_source_says():
    """fp16 input, its absolute values and mask and its packed form; later the int32 product beside fp16 and bf16 ones."""
    watch = Live()
    x = torch.randn(1, TOKENS, 4 * IN, dtype=torch.bfloat16, requires_grad=True)
    wide = type("Part", (), {})()
    wide.weight, wide.state = (
        torch.zeros(8, 4 * IN, dtype=torch.int8),
        type("State", (), {"SCB": torch.ones(8), "threshold": 6.0}),
    )
    with watch:
        ours(wide, x)
    elements = TOKENS * 4 * IN
    assert elements * (2 + 1 + 2 + 1) <= watch.peak <= elements * (2 + 1 + 2 + 1) + 4 * TOKENS + 4 * IN + 64
    tall = type("Part", (), {})()
    tall.weight = torch.zeros(4096, IN, dtype=torch.int8)
    tall.state = type("State", (), {"SCB": torch.ones(4096), "threshold": 0.0})
    watch, x = Live(), torch.randn(1, TOKENS, IN, dtype=torch.bfloat16, requires_grad=True)
    with watch:
        ours(tall, x)
    product = TOKENS * 4096
    assert product * (4 + 2 + 2) <= watch.peak <= product * (4 + 2 + 2) + TOKENS * (IN + 4) + 64
