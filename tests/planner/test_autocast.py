"""Casts on CPU tensors that stand in for CUDA's: which are kept, which have a gradient, and in which order they die."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from memplan.planner.trace.autocast import cuda_lists
from torch.utils._python_dispatch import TorchDispatchMode

MODES: dict[str, Callable[[], Any]] = {
    "with a graph": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


class Casts(TorchDispatchMode):
    """How many casts run, and the sizes of their results in the order in which those die."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.deaths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled() and func._can_decompose():  # composite ops arrive whole there
            with self:
                return func.decompose(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.count += 1
            weakref.finalize(out.untyped_storage(), self.deaths.append, out.numel())
        return out


def by_einsum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """An op that CPU autocast leaves alone, so that the casts are ours."""
    return torch.einsum("bi,oi->bo", x, weight)


def casts(op: Callable[..., torch.Tensor], mode: str, uses: int) -> int:
    x, weight = torch.ones(4, 8), torch.nn.Parameter(torch.ones(3, 8))
    with MODES[mode](), torch.autocast("cpu", dtype=torch.bfloat16), Casts() as seen:
        for _ in range(uses):
            op(x, weight)
    return seen.count


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_is_cast_as_often_as_by_torch_itself(mode: str) -> None:
    theirs = casts(torch.nn.functional.linear, mode, uses=3)

    with cuda_lists():
        assert casts(by_einsum, mode, uses=3) == theirs


@pytest.mark.parametrize(("mode", "expected"), [("with a graph", 4), ("no_grad", 4), ("inference_mode", 6)])
def test_a_weight_is_cast_once_a_region_but_in_inference_mode(mode: str, expected: int) -> None:
    """Three uses cast the input three times; the weight once, or three times."""
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 11):
        pytest.skip("torch kept casts under inference_mode too")
    with cuda_lists():
        assert casts(by_einsum, mode, uses=3) == expected


def test_a_cast_that_no_grad_made_has_a_gradient_in_the_same_region() -> None:
    x, weight = torch.ones(4, 8), torch.nn.Parameter(torch.ones(3, 8))

    with cuda_lists(), torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            by_einsum(x, weight)
        by_einsum(x, weight).sum().backward()

    assert weight.grad is not None


def test_the_casts_of_one_op_die_in_the_order_of_its_operands() -> None:
    with cuda_lists(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), Casts() as seen:
        by_einsum(torch.ones(4, 8), torch.ones(3, 8))

    assert seen.deaths == [32, 24]
