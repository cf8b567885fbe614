"""What CUDA kernels allocate inside an op, where no trace can see it; by GPU.

One function an op family, each with its source.  All sizes are requested bytes; the allocator rounds them.  Where a formula was
seen exactly in a recorded memory snapshot, the docstring says so.  Not covered, for want of a public size: cuDNN workspaces
(convolution, its attention), sort, top-k, unique, hipBLASLt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .trace.steptrace import Signature, StepTrace, TensorInfo

if TYPE_CHECKING:
    from ..hardware.profile import Device

_FP32, _INT64 = 4, 8


@dataclass(frozen=True, slots=True)
class Hidden:
    """What one op allocates beyond what its trace says.

    `transient`: blocks in the order of the kernel, after its outputs; a positive entry allocates that many bytes, a negative
    one -k frees the k-th block (from 1); what is left is freed when the op ends.
    `output_bytes`: sizes of outputs that depend on the kernel, by output index.
    `workspace`: (key, bytes) of a block that the first such op of a thread allocates and keeps.
    """

    transient: tuple[int, ...] = ()
    output_bytes: dict[int, int] | None = None
    workspace: tuple[str, int] | None = None


_NOTHING = Hidden()


@dataclass
class Kernels:
    """The expansions for one GPU and torch version, computed once per signature."""

    device: Device | None
    torch_version: tuple[int, int] = (2, 13)
    _known: dict[int, Hidden] = field(default_factory=dict)

    @classmethod
    def none(cls) -> Kernels:
        """No expansion: the trace as recorded (the cpu target)."""
        return cls(None)

    @classmethod
    def for_device(cls, device: Device, torch_version: str) -> Kernels:
        major, minor = torch_version.split(".")[:2]
        return cls(device, (int(major), int(minor)))

    def of_ops(self, trace: StepTrace) -> list[Hidden]:
        """The expansion of every op of the trace."""
        known = [_NOTHING] * len(trace.signatures)
        for signature in set(trace.op_signature.tolist()):
            if signature not in self._known:
                self._known[signature] = self._expand(trace.signatures[signature])
            known[signature] = self._known[signature]
        return [known[signature] for signature in trace.op_signature.tolist()]

    def _expand(self, signature: Signature) -> Hidden:
        if self.device is None:
            return _NOTHING
        rule = _RULES.get(signature.op)
        return rule(signature, self.device, self.torch_version) if rule else _NOTHING


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


# -- matrix products ---------------------------------------------------------------------------------------------------


def _matmul(signature: Signature, device: Device, torch_version: tuple[int, int]) -> Hidden:
    """cuBLAS workspace, one per (thread, stream), kept: 4096 KiB x 2 + 16 KiB x 8; 32 MiB on compute capability 9.0.

    ATen/cuda/CUDABlas: CublasHandlePool.cpp, parseChosenWorkspaceSize.  In snapshots: 8,519,680 and 33,554,432 bytes, one after
    a forward, a second after a backward, whose thread has a handle of its own.
    """
    if device.compute_capability is None:
        return _NOTHING
    nbytes = 32 * 2**20 if device.compute_capability == (9, 0) else 4096 * 1024 * 2 + 16 * 1024 * 8
    return Hidden(workspace=("cublas", nbytes))


def _addmm(signature: Signature, device: Device, torch_version: tuple[int, int]) -> Hidden:
    """addmm with a 1-d bias goes through cuBLASLt: up to torch 2.7 one MiB a call, then part of the cuBLAS workspace.

    CUDABlas.cpp, CUBLASLT_WORKSPACE_SIZE; 132 calls of 1,048,576 bytes in a torch 2.7 snapshot.
    """
    plain = _matmul(signature, device, torch_version)
    if torch_version <= (2, 7) and signature.inputs and len(signature.inputs[0].shape) == 1:
        return Hidden(transient=(2**20,), workspace=plain.workspace)
    return plain


def _matmul_4bit(signature: Signature, device: Device, torch_version: tuple[int, int]) -> Hidden:
    """bitsandbytes' product with a 4-bit weight: dequantised whole, in the dtype of the input, and multiplied by cuBLAS.

    backends/cuda/ops.py (0.50.2), _dequant_linear_fallback: with double quantisation first the scales, twice (before and after
    their offset is added).  Few rows go through a kernel that dequantises as it reads: always up to 4, and up to 512 rows where
    it was found to be faster, by card and shape; from 5 rows on the copy is counted.
    """
    rows, weight = signature.inputs[0], signature.inputs[1]
    width = rows.shape[-1]
    if rows.numel <= 4 * width and width % 64 == 0:
        return _NOTHING
    dense = width * signature.outputs[0].shape[-1] * rows.itemsize
    blocks = -(-2 * weight.nbytes // 64)
    scales = (_FP32 * blocks, _FP32 * blocks) if any(s.dtype == "uint8" for s in signature.inputs[2:]) else ()
    return Hidden(transient=(*scales, dense), workspace=_matmul(signature, device, torch_version).workspace)


# -- attention ---------------------------------------------------------------------------------------------------------


def _attention(signature: Signature, device: Device, torch_version: tuple[int, int]) -> Hidden:
    """Outputs: out, logsumexp (fp32), rng state.

    flash (flash_api.cpp, mha_fwd): logsumexp as it is; rng state uint64[2] and an unused uint64, each a block on the GPU
    (two blocks of 512 bytes; a CPU scalar before torch 2.6).  Split-KV accumulators exist only without dropout and when few
    blocks run.  efficient (kernel_forward.h): logsumexp rows are rounded up to 32; seed and offset stay on the host; an fp32
    accumulator only for 16-bit types with head_dim > 128.
    """
    query, key, value = signature.inputs[:3]
    batch, heads, length, dim = query.shape
    if _kernel(signature) == "efficient":
        statistics = _FP32 * batch * heads * _round_up(length, 32) if signature.outputs[1].numel else 0  # compute_logsumexp
        accumulator = _FP32 * batch * length * heads * value.shape[-1] if query.itemsize == 2 and value.shape[-1] > 128 else 0
        return Hidden(transient=(accumulator,) if accumulator else (), output_bytes={1: statistics, 2: 0})
    transient: tuple[int, ...] = ()
    if float(signature.scalars.get("4", 0.0)) == 0.0:
        splits = _flash_splits(batch * heads * -(-length // 64), 2 * device.sm_count, -(-key.shape[2] // _flash_block(dim)))
        if splits > 1:
            padded = _round_up(dim, 32) if dim <= 128 else _round_up(dim, 64)
            rows = _FP32 * splits * batch * heads * length
            transient = (rows, rows * padded)
    return Hidden(transient=transient, output_bytes={1: _FP32 * batch * heads * length, 2: 1024})


def _flash_block(head_dim: int) -> int:
    return 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64


def _flash_splits(blocks: int, sms: int, num_n_blocks: int, max_splits: int = 128) -> int:
    """flash_api.cpp, num_splits_heuristic: the smallest split count whose wave efficiency is within 15 % of the best."""
    if blocks >= 0.8 * sms:
        return 1
    limit = min(max_splits, sms, num_n_blocks)

    def eligible(n: int) -> bool:
        return n == 1 or -(-num_n_blocks // n) != -(-num_n_blocks // (n - 1))

    efficiency = {}
    for n in range(1, limit + 1):
        if eligible(n):
            waves = blocks * n / sms
            efficiency[n] = waves / math.ceil(waves)
    best = max(efficiency.values())
    return next(n for n, e in efficiency.items() if e >= 0.85 * best)


def _attention_backward(signature: Signature, device: Device, torch_version: tuple[int, int]) -> Hidden:
    """flash (mha_bwd): softmax_d, the fp32 accumulator of dq, and for grouped keys dk and dv expanded to all heads.

    efficient (attention_backward.cu, kernel_backward.h): delta (fp32 inputs: first the product grad * out, then delta), and
    the workspace of partial gradients.  134,348,800 bytes for fp32, B*H = 2048, Sq = 1, D = 256 in a snapshot.
    """
    grad, query, key, value = signature.inputs[:4]
    batch, heads, length, dim = query.shape
    key_len, key_heads = key.shape[2], key.shape[1]
    half = query.itemsize == 2
    if _kernel(signature) == "efficient":
        delta = _FP32 * batch * heads * length
        workspace = _efficient_workspace(batch * heads, length, key_len, dim, value.shape[-1], half, device)
        if half:
            return Hidden(transient=(delta, workspace))
        product = _FP32 * batch * length * heads * value.shape[-1]
        return Hidden(transient=(product, delta, -1, workspace))
    rows = _round_up(length, 128)
    padded = _round_up(dim, 32) if dim <= 128 else _round_up(dim, 64)
    blocks = [_FP32 * batch * heads * rows, _FP32 * batch * rows * heads * padded]
    if key_heads != heads:
        blocks += [query.itemsize * batch * key_len * heads * dim] * 2
    if not _is_bshd(grad):  # the kernel wants [batch, seq, head, dim] with the last dim dense
        blocks.insert(0, grad.nbytes)
    return Hidden(transient=tuple(blocks))


def _efficient_workspace(
    batch_heads: int, length: int, key_len: int, dim: int, value_dim: int, half: bool, device: Device
) -> int:
    """Bytes of the partial-gradient workspace: B*H*4*up4(gk + gv + gq) (kernel_backward.h, workspace_size)."""
    widest = max(dim, value_dim)
    large_shared = device.max_shared_memory_per_block_optin >= 163 * 1024  # A100 and newer data-centre parts
    registers = True  # whether dK and dV stay in registers
    if not half:
        block_i, block_j = (64, 64) if widest <= 64 else (128, 64) if large_shared else (64, 64)
    elif widest <= 64:
        block_i, block_j = 64, 64
    elif widest <= 96 and device.compute_capability in ((8, 6), (8, 9)):
        block_i, block_j = 128, 64
    elif widest <= 128:
        block_i, block_j = (128, 128) if large_shared else (64, 64)
        registers = large_shared
    else:
        block_i, block_j = (128, 64) if large_shared else (64, 64)
        registers = False
    grad_q = -(-length // block_i) * -(-dim // block_j) * (16 + 4 * block_i * block_j) // 4
    grad_k = grad_v = 0
    if half and not registers:
        splits = -(-key_len // block_j)
        splits = max(1, min(splits, 200 // batch_heads))
        grad_k = splits * block_j * _round_up(dim, block_i)
        grad_v = splits * block_j * _round_up(value_dim, block_i)
    return batch_heads * 4 * _round_up(grad_k + grad_v + grad_q, 4)


def _kernel(signature: Signature) -> str:
    return next(str(v) for v in signature.scalars.values() if v in ("flash", "efficient"))


def _is_bshd(info: TensorInfo) -> bool:
    """Laid out as [batch, seq, head, dim] in memory, seen as [batch, head, seq, dim]."""
    _, heads, length, dim = info.shape
    wanted = (length * heads * dim, dim, heads * dim, 1)
    return all(n == 1 or s == w for n, s, w in zip(info.shape, info.stride, wanted, strict=True))


# -- reductions --------------------------------------------------------------------------------------------------------


def _reduction(signature: Signature, device: Device, torch_version: tuple[int, int]) -> Hidden:
    """Column sums that several thread blocks share go through a global buffer and semaphores.

    cuda/Reduce.cuh, setReduceConfig and gpu_reduce_kernel; exact in six snapshots (for instance 41,943,040 + 80 bytes).
    Only reductions whose fastest dimension is kept are modelled: the others need a few bytes per output.
    """
    source, result = signature.inputs[0], signature.outputs[0]
    outputs = result.numel
    if outputs < 2 or source.numel <= outputs or not _keeps_fastest(signature):
        return _NOTHING
    rows = source.numel // outputs
    vector = 4 if outputs % 4 == 0 else 2 if outputs % 2 == 0 else 1
    max_threads = 512 // vector
    columns = outputs // vector

    def power(n: int) -> int:
        return min(1 << (n.bit_length() - 1), max_threads)

    width = min(power(columns), 32)
    height = min(power(rows), max_threads // width)
    width = min(power(columns), max_threads // height)
    step = height if rows >= min(16 * height, 256) else 1
    grid = -(-columns // width)
    per_thread = -(-rows // step)
    target = device.sm_count * (device.max_threads_per_sm // (width * height))
    if per_thread < 256 or grid > target:
        return _NOTHING
    blocks = max(min(-(-target // grid), -(-per_thread // 16)), -(-per_thread // 256))
    # global_memory_size() counts a whole block per output where threads of a block keep outputs apart: an upper bound
    # The buffer is declared before the semaphores, so it dies after them: seen in three snapshots (8,388,608 after 32 bytes).
    return Hidden(transient=(_FP32 * outputs * blocks * width * vector, _FP32 * grid, -2, -1))


def _keeps_fastest(signature: Signature) -> bool:
    """Whether the reduced dimensions are not the one with the smallest stride."""
    source = signature.inputs[0]
    dims = signature.scalars.get("1")
    if not isinstance(dims, list) or not dims or not source.shape:
        return False
    reduced = {d % len(source.shape) for d in dims}
    strides = [(stride, dim) for dim, (stride, size) in enumerate(zip(source.stride, source.shape, strict=True)) if size > 1]
    return bool(strides) and min(strides)[1] not in reduced and any(d in reduced for _, d in strides)


# -- indexing ----------------------------------------------------------------------------------------------------------


def _sort_temporary(n: int) -> int:
    """cub radix sort of n int64 pairs: 1 byte up to 2048, then about 16 n + 6 to 10 KB (72,191 at 4,096; 138,751 at 8,192;
    271,871 at 16,384 in snapshots: 16.25 n + 5,631)."""
    return 1 if n <= 2048 else (65 * n) // 4 + 5631


def _embedding_backward(signature: Signature, device: Device, torch_version: tuple[int, int]) -> Hidden:
    """Above 3,072 indices the gradient is built from sorted indices, with one fp32 row per index.

    cuda/Embedding.cu and EmbeddingBackwardKernel.cu, embedding_backward_cuda_kernel.
    """
    grad, indices = signature.inputs[0], signature.inputs[1]
    n, width = indices.numel, grad.shape[-1]
    if n <= 3072:
        return _NOTHING
    ints = _INT64 * n
    sort = (ints, ints, ints, _sort_temporary(n), -4, -3)  # sorted, original, range, cub; cub and range go
    partials = (
        ints,
        _INT64,
        ints,
        ints,
        ints,
        _FP32 * n * width,
    )  # offsets, count, per segment, its offsets, partial offsets, rows
    return Hidden(transient=sort + partials)


def _index_put(signature: Signature, device: Device, torch_version: tuple[int, int]) -> Hidden:
    """`index_put_(accumulate=True)`, the backward of `x[i]`: sorts the linear index.

    cuda/Indexing.cu, index_put_with_sort_kernel; five blocks of 8 n bytes and the cub temporary in snapshots.
    """
    if True not in signature.scalars.values() or len(signature.inputs) < 3:
        return _NOTHING
    n = max(info.numel for info in signature.inputs[1:-1])
    ints = _INT64 * n
    return Hidden(transient=(ints, ints, -1, ints, ints, ints, _sort_temporary(n), -6))  # cub's own goes first


def _layer_norm_backward(signature: Signature, device: Device, torch_version: tuple[int, int]) -> Hidden:
    """Partial sums of the weight and bias gradients when the rows are many and the columns few.

    layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: rows > 65,536 and columns / 32 < SMs / 2.
    """
    source = signature.inputs[1]
    columns = signature.inputs[-1].numel if len(signature.inputs) > 4 else source.shape[-1]
    rows = source.numel // columns if columns else 0
    if rows <= 65_536 or columns / 32 >= device.sm_count / 2:
        return _NOTHING
    count = min(32_768 // -(-columns // 32), -(-rows // 32))
    return Hidden(transient=(count * columns * source.itemsize,) * 2)


_RULES: dict[str, Callable[[Signature, Device, tuple[int, int]], Hidden]] = {
    "aten.mm.default": _matmul,
    "aten.bmm.default": _matmul,
    "aten.baddbmm.default": _matmul,
    "aten.addmm.default": _addmm,
    "aten.addmv.default": _matmul,
    "aten.mv.default": _matmul,
    "bitsandbytes.gemm_4bit.default": _matmul_4bit,
    "memplan.attention.default": _attention,
    "memplan.attention_backward.default": _attention_backward,
    "aten.sum.dim_IntList": _reduction,
    "aten.mean.dim": _reduction,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.index_put.default": _index_put,
    "aten.index_put_.default": _index_put,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
}
