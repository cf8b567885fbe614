"""Fake results of ops, fast: the fake mode is asked only for what is not known yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

aten = torch.ops.aten
# The real kernels give grad_input the input's shape, contiguous (layer_norm_kernel.cu, layer_norm.cpp: empty_like with
# LEGACY_CONTIGUOUS); the fake one keeps the gradient's strides.
_CONTIGUOUS_FIRST_OUTPUT = {aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default}
_NEVER_CACHED = {aten.lift_fresh.default, aten.lift_fresh_copy.default, aten._to_copy.default, aten.scalar_tensor.default}
_WITHOUT_DISPATCH = torch._C._DisableTorchDispatch
_GROUPED_MM = aten._grouped_mm.default


@dataclass(slots=True)
class Arguments:
    """The arguments of one op: its tensors, what tells it from other ops (None: cannot be hashed), and their fx form."""

    inputs: list[torch.Tensor]
    key: Any
    node_args: tuple[Any, ...]
    node_kwargs: dict[str, Any]


class FakeResults:
    """Answers ops on tensors of one fake mode, which is not entered meanwhile.

    The mode spends most of its time on finding an op's result in its own cache.  Two kinds of ops need none of that: one seen
    before with the same arguments, whose outputs are all new tensors, and a view, which its kernel answers.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._results: dict[Any, Any] = {}  # arguments -> what to make, for ops whose outputs are new tensors

    def run(self, func: Any, args: Any, kwargs: Any, read: Arguments) -> Any:
        """The fake result of an op."""
        out: Any
        made = self._results.get(read.key) if read.key is not None else None
        if made is not None:
            device, single, infos = made
            fresh = [self._new_fake(info, device) for info in infos]
            return fresh[0] if single else tuple(fresh)
        if (
            func.is_view
            and not kwargs
            and read.inputs
            and all(isinstance(t, FakeTensor) and t.constant is None for t in read.inputs)
        ):
            with in_kernel_invocation_manager(self._mode):
                out = func(*args)
            if isinstance(out, torch.Tensor):
                return FakeTensor(self._mode, out, read.inputs[0].fake_device)  # type: ignore[attr-defined]
            return [FakeTensor(self._mode, t, read.inputs[0].fake_device) for t in out]  # type: ignore[attr-defined]
        out = _fake_grouped_mm(args, kwargs) if func is _GROUPED_MM else self._mode.dispatch(func, (), args, kwargs)
        if func in _CONTIGUOUS_FIRST_OUTPUT and out[0] is not None and not out[0].is_contiguous():
            out = (torch.empty_like(out[0], memory_format=torch.contiguous_format), *out[1:])
        if read.key is not None and func not in _NEVER_CACHED and not func._schema.is_mutable:
            self._remember(read, out)
        return out

    def _remember(self, read: Arguments, out: Any) -> None:
        outputs = [out] if isinstance(out, torch.Tensor) else out
        given = {t.untyped_storage()._cdata for t in read.inputs}
        if not isinstance(outputs, (list, tuple)) or isinstance(out, list) or not outputs:
            return
        for tensor in outputs:
            if (
                not isinstance(tensor, FakeTensor)
                or tensor.constant is not None
                or tensor.storage_offset()
                or tensor.layout is not torch.strided
            ):
                return
            if tensor.untyped_storage()._cdata in given or tensor.is_conj() or tensor.is_neg():
                return
        if any(getattr(t, "constant", None) is not None for t in read.inputs):
            return
        if len({t.untyped_storage()._cdata for t in outputs}) < len(outputs):
            return
        infos = [(tuple(t.shape), t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in outputs]
        if any(nbytes != _dense_bytes(*info[:2], info[2].itemsize) for info in infos for nbytes in info[3:]):
            return
        self._results[read.key] = (outputs[0].fake_device, isinstance(out, torch.Tensor), infos)

    def _new_fake(self, info: Any, device: torch.device) -> torch.Tensor:
        shape, stride, dtype, _ = info
        with _WITHOUT_DISPATCH():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(self._mode, meta, device)


def fake_of(mode: FakeTensorMode, real: torch.Tensor) -> torch.Tensor:
    """`mode.from_tensor(real)` for a tensor that shares its storage with no other; a plain one goes without torch._dynamo."""
    if type(real) is not torch.Tensor or real.layout is not torch.strided or real.requires_grad or real._is_view():
        return mode.from_tensor(real)
    shape, stride, nbytes = tuple(real.shape), real.stride(), real.untyped_storage().nbytes()
    if real.is_quantized or real.is_conj() or real.is_neg() or nbytes != _dense_bytes(shape, stride, real.itemsize):
        return mode.from_tensor(real)
    with _WITHOUT_DISPATCH():
        meta = torch.empty_strided(shape, stride, dtype=real.dtype, device="meta")
    return FakeTensor(mode, meta, real.device)


def _fake_grouped_mm(args: Any, kwargs: Any) -> torch.Tensor:
    """The output of `_grouped_mm`, whose meta function takes bf16 only although the kernels take fp32 and fp16 too.

    2-d x 3-d (rows split among the experts) -> [rows, n]; 2-d x 2-d (the weights' gradient) -> [experts, m, n];
    3-d x 2-d -> [m, cols].  Rows are padded to 16 bytes (torch/_meta_registrations.py, _create_grouped_mm_output_tensor).
    """
    names = ("self", "mat2", "offs", "bias", "out_dtype")
    given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    a, b, offs, out_dtype = given["self"], given["mat2"], given["offs"], given.get("out_dtype")
    size: tuple[int, ...]
    if a.dim() == 2 and b.dim() == 2:
        size = (offs.size(0), a.size(0), b.size(1))
    elif a.dim() == 2:
        size = (a.size(0), b.size(-1))
    elif b.dim() == 2:
        size = (a.size(1), b.size(1))
    else:
        size = (a.size(0), a.size(1), b.size(-1))
    dtype = out_dtype or a.dtype
    per_row = 16 // dtype.itemsize
    padded = -(-size[-1] // per_row) * per_row
    strides = (size[1] * padded, padded, 1)[-len(size) :]
    return a.new_empty(0, dtype=dtype).new_empty_strided(size, strides)


def _dense_bytes(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> int:
    """Bytes that `empty_strided` allocates."""
    if 0 in shape:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))) * itemsize
