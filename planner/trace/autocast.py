"""CUDA's autocast lists on fake CPU tensors.

CPU autocast casts other ops than CUDA autocast does: einsum, pow, rsqrt, exp, sum, layer_norm and others are missing, some
are there that CUDA lacks.  `cuda_lists` registers CUDA's policy for them under the AutocastCPU key while a trace runs.
Source: ATen/autocast_mode.h, AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE,
AT_FORALL_PROMOTE (torch 2.13), and the CPU block of ATen/autocast_mode.cpp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_KEY = torch._C.DispatchKey.AutocastCPU
# The running torch, as for the ops whose casts go through torch's own cache: see `_WeightCache`.
_SINCE_2_11 = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 11)
_NARROW = (torch.float16, torch.bfloat16)

# In CUDA's list and not in the CPU's.
_LOWER = ("einsum", "addmv", "addr", "mv", "chain_matmul", "linalg_multi_dot", "linalg_vecdot", "prelu")
_FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm",
    "group_norm", "cosine_similarity", "nll_loss", "nll_loss2d", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
    "soft_margin_loss", "dist", "pdist", "cdist", "renorm", "logsumexp", "poisson_nll_loss", "cosine_embedding_loss",
    "hinge_embedding_loss", "margin_ranking_loss", "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss",
    "binary_cross_entropy_with_logits", "mse_loss",
)  # fmt: skip
# The output is fp32 and no copy of the input is made: the kernel widens as it reads.
_FP32_OUTPUT = ("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList")
# The CPU casts these to fp32; CUDA leaves them alone.
_CPU_ONLY = (
    "avg_pool3d", "binary_cross_entropy", "grid_sampler", "polar", "quantile", "quantile.scalar", "nanquantile",
    "nanquantile.scalar", "stft", "grid_sampler_2d", "_grid_sampler_2d_cpu_fallback", "grid_sampler_3d", "trace",
    "view_as_complex", "cholesky", "cholesky_inverse", "cholesky_solve", "inverse", "lu_solve", "orgqr", "ormqr", "pinverse",
    "max_pool3d", "max_unpool2d", "max_unpool3d", "adaptive_avg_pool3d", "reflection_pad1d", "reflection_pad2d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d", "ctc_loss.IntList", "ctc_loss.Tensor", "geqrf",
)  # fmt: skip


@contextlib.contextmanager
def cuda_lists() -> Iterator[None]:
    """While open, autocast on CPU tensors follows CUDA's lists."""
    library = torch.library.Library("aten", "IMPL")
    cache = _WeightCache()
    try:
        for names, policy in ((_LOWER, cache.lower), (_FP32, _widen), (_FP32_OUTPUT, None), (_CPU_ONLY, _leave_alone)):
            for name in names:
                op = _overload(name)
                if op is not None:
                    library.impl(name, _fp32_output(op) if policy is None else _casting(op, policy), "AutocastCPU")
        with cache.follow_autocast():
            yield
    finally:
        library._destroy()


def _overload(name: str) -> Any:
    packet_name, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    return getattr(packet, overload or "default", None) if packet is not None else None


def _casting(op: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            narrow = _map(args, cast)
            out = op(*narrow, **{k: _map(v, cast) for k, v in kwargs.items()})
        for operands in narrow:
            if isinstance(operands, list):  # a std::vector of casts dies from its first to its last, a list from its last
                operands.reverse()
        return out

    return kernel


def _fp32_output(op: Any) -> Callable[..., Any]:
    """Sets dtype=fp32 where the first argument is narrow and the caller gave no dtype (`set_opt_dtype`)."""

    def kernel(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        narrow = x.dtype in _NARROW and kwargs.get("dtype") is None and not any(isinstance(a, torch.dtype) for a in args)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            return op(x, *args, **{**kwargs, "dtype": torch.float32}) if narrow else op(x, *args, **kwargs)

    return kernel


def _map(value: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return cast(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(v, cast) for v in value)
    return value


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in _NARROW else x


def _leave_alone(x: torch.Tensor) -> torch.Tensor:
    return x


class _WeightCache:
    """autocast's cache of cast weights, for the ops that torch's own cache does not see here (einsum and the like).

    A leaf fp32 parameter is cast once until the outermost autocast region ends (autocast_mode.cpp, `cached_cast`), also under
    no_grad.  Since torch 2.11 (pytorch/pytorch pull request 165068) that cast has a gradient wherever it was made, and nothing
    is kept under inference_mode: there each use is a cast of its own that dies with the op.
    """

    def __init__(self) -> None:
        self._cast: dict[int, torch.Tensor] = {}

    def lower(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point() or x.dtype is torch.float64:
            return x
        target = torch.get_autocast_dtype("cpu")
        if x.dtype is target:
            return x
        weight = x.dtype is torch.float32 and x.is_leaf and x.requires_grad and not x._is_view()
        if not weight or (_SINCE_2_11 and torch.is_inference_mode_enabled()):
            return x.to(target)
        if id(x) not in self._cast:
            with torch.enable_grad() if _SINCE_2_11 else contextlib.nullcontext():
                self._cast[id(x)] = x.to(target)
        return self._cast[id(x)]

    @contextlib.contextmanager
    def follow_autocast(self) -> Iterator[None]:
        """Empties the cache where torch empties its own: at the end of the outermost region."""
        clear = torch.clear_autocast_cache

        def clear_both() -> None:
            self._cast.clear()
            clear()

        torch.clear_autocast_cache = clear_both  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.clear_autocast_cache = clear  # type: ignore[assignment]
            self._cast.clear()
