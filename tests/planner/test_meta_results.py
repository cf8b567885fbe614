"""Results that are made from an earlier op's are those of the op."""

from __future__ import annotations

import pytest
import torch
from memplan.planner.optimizers import traced
from memplan.planner.optimizers.rule import OptimizerTensor
from memplan.planner.trace.meta_results import MetaResults

aten = torch.ops.aten
# scalars, one element, equal shapes in two groups and in two dtypes
TENSORS = (
    *(OptimizerTensor((3, 5, 7), "float32"), OptimizerTensor((), "float32")),
    *(OptimizerTensor((8, 3), "bfloat16", 1), OptimizerTensor((8, 3), "bfloat16", 1), OptimizerTensor((1,), "bfloat16", 1)),
    *(OptimizerTensor((3, 5, 7), "float32", 2), OptimizerTensor((8, 3), "float32", 2), OptimizerTensor((7,), "float16", 2)),
)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def form(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.add.Tensor, (meta(4, 1), meta(3, dtype=torch.float64))),
        (aten.mul.Tensor, (meta(4, dtype=torch.bfloat16), meta(dtype=torch.float32))),
        (aten.sqrt.default, (meta(6, 4).t(),)),
        (aten.mean.dim, (meta(6, 4), [-1], True)),
        (aten.max.dim, (meta(6, 4), 1)),
        (aten._foreach_div.List, ([meta(2), meta(3)], [meta(2, dtype=torch.float64), meta(3)])),
        (aten._foreach_mul.Scalar, ([meta(2), meta(2), meta(3, 2).t()], 2)),
    ],
)
def test_a_known_op_gives_new_tensors_of_the_ops_form(func, args):
    results = MetaResults()
    expected = func(*args)
    expected = expected if isinstance(expected, (list, tuple)) else [expected]
    for _ in range(3):
        out = results.run(func, args, {})
        out = out if isinstance(out, (list, tuple)) else [out]
        assert [form(t) for t in out] == [form(t) for t in expected]
        assert len({t.untyped_storage()._cdata for t in out}) == len(out)


def test_an_op_in_place_gives_its_own_argument():
    results = MetaResults()
    for _ in range(3):
        tensor = meta(5)
        assert results.run(aten.add_.Tensor, (tensor, meta(5)), {}) is tensor


def test_a_foreach_op_in_place_returns_what_torch_returns():
    results = MetaResults()
    lists = [meta(2), meta(3)]
    expected = aten._foreach_add_.Scalar(lists, 1)
    for _ in range(2):
        assert results.run(aten._foreach_add_.Scalar, (lists, 1), {}) == expected


def test_a_view_shares_its_storage_every_time():
    results = MetaResults()
    for _ in range(3):
        tensor = meta(4, 2)
        out = results.run(aten.view.default, (tensor, [8]), {})
        assert out.untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_equal_numbers_of_other_types_are_other_arguments():
    results = MetaResults()
    tensor = meta(2, dtype=torch.int64)
    assert results.run(aten.mul.Scalar, (tensor, 2), {}).dtype == torch.int64
    assert results.run(aten.mul.Scalar, (tensor, 2.0), {}).dtype == torch.float32
    assert results.run(aten.mul.Scalar, (tensor, 2), {}).dtype == torch.int64


def test_a_tensor_with_values_is_worked_with():
    results = MetaResults()
    tensor = torch.zeros(1)
    for _ in range(3):
        results.run(aten.add_.Tensor, (tensor, 1), {})
    assert tensor.item() == 3


@pytest.mark.parametrize("impl", ["foreach", "for-loop"])
@pytest.mark.parametrize("name", traced.names())
def test_an_optimizers_step_is_that_of_the_ops_themselves(name, impl, monkeypatch):
    made = traced._trace(name, impl, "cuda", TENSORS)
    monkeypatch.setattr(MetaResults, "run", lambda self, func, args, kwargs: func(*args, **kwargs))
    assert made == traced._trace(name, impl, "cuda", TENSORS)
