"""How long the ops of a trace take on a GPU: a roofline over FLOPs and bytes, with efficiencies fitted from published steps.

For an op of F operations and B bytes (read and written) on a GPU of peak P for its dtype and memory bandwidth W:

    matrix product   max(F / (P e m q k), B / (W w)) + gap     e: `matmul`, of m, the best product measured on that GPU
    convolution      max(F / (P c m), B / (W w)) + gap         c: `convolution`
    attention        max(F / (P a m), B / (W w)) + gap         a: `attention`, one fused kernel; `attention_hopper` on Hopper
    anything else    B / (W w) + gap                           w: `memory`

q is the share of the tiles of the last wave that work (a product is cut into tiles of 128 x 128, one a multiprocessor at a
time), and k = K / (K + `matmul_k_half`) the start-up of each tile's inner loop.  `gap` is what a kernel costs beside its work.
The host issues an op every `host_op` seconds: a step of small ops waits for it.

The coefficients, the best products and where they are from: `hardware/data/roofline.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from ...hardware import data as hardware_data
from ...hardware.profile import Device, Dtype

if TYPE_CHECKING:
    from ..trace.steptrace import Signature, StepTrace

_TILE = 128  # rows and columns of a tile; the shape that cuBLAS takes for large products
_MATMULS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm", "aten._grouped_mm")
_CONVOLUTIONS = ("aten.convolution", "aten.convolution_backward", "aten._convolution")
_PRODUCT_OF_4_BITS = "bitsandbytes.gemm_4bit"
_ATTENTION, _ATTENTION_BACKWARD = "memplan.attention", "memplan.attention_backward"
_NO_KERNEL = ("aten.empty", "aten.empty_like", "aten.empty_strided", "aten.detach")
_DTYPES: dict[str, Dtype] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "int8": "int8"}
_BACKWARD_PRODUCTS = 2.5  # of the forward's two: scores again, and the gradients of values, weights, queries and keys
MATMUL, CONVOLUTION, ATTENTION, MEMORY, NOTHING = range(5)
_NAMES = ("matmul", "convolution", "attention", "memory", "nothing")


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Fitted; shares are of a rate that was measured or that the data sheet states."""

    matmul: float
    convolution: float
    attention: float
    attention_hopper: float
    memory: float
    matmul_k_half: float  # elements
    gap: float  # seconds
    host_op: float  # seconds
    collective: float  # share of a collective's bandwidth that is left while kernels compute
    fused_memory: float  # share of the bytes of small ops that is left under torch.compile


@cache
def _data() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(files(hardware_data).joinpath("roofline.json").read_text(encoding="utf-8"))
    return content


@cache
def coefficients() -> Coefficients:
    """Those of the data file."""
    return Coefficients(**{name: entry["value"] for name, entry in _data()["coefficients"].items()})


def typical_error() -> float:
    """The median error of predicted speeds over published ones of groups that were not fitted, as a share."""
    return float(_data()["fit"]["median_error"]["held_out"])


def best_matmul_share(device: Device) -> float:
    """The best matrix product that was measured on this GPU, as a share of its data-sheet peak; its family's where none was."""
    if device.best_matmul_share is not None:
        return device.best_matmul_share
    shares = _data()["best_matmul"]
    if device.key in shares["gpus"]:
        return float(shares["gpus"][device.key]["value"])
    return float(shares["families"][_family(device)]["value"])


def _family(device: Device) -> str:
    if device.vendor != "nvidia":
        return device.vendor
    if device.name.startswith("GeForce"):
        return "geforce"
    return "hbm" if device.memory_type.startswith("HBM") else "gddr"


class OpTable:
    """The distinct ops of a trace as columns, one row a signature, free of any GPU."""

    def __init__(self, trace: StepTrace) -> None:
        rows = [_row(s) for s in trace.signatures]
        self.kind = np.array([r[0] for r in rows], np.int8)
        self.flops = np.array([r[1] for r in rows], np.float64)
        self.bytes = np.array([r[2] for r in rows], np.float64)
        self.dtype = [r[3] for r in rows]
        self.tiles = np.array([r[4] for r in rows], np.float64)
        self.inner = np.array([r[5] for r in rows], np.float64)

    def seconds(
        self, device: Device, c: Coefficients | None = None, *, tf32: bool = False, compiled: bool = False
    ) -> np.ndarray:
        """Seconds of each signature on `device`.  `tf32`: fp32 products use the tensor cores (torch's default is not to)."""
        c = c or coefficients()
        best = best_matmul_share(device)
        names = {d: ("tf32" if tf32 and d == "fp32" and "tf32" in device.flops_per_s else d) for d in set(self.dtype)}
        peaks = {d: device.peak_flops(name) * (1.0 if name == "fp32" else best) for d, name in names.items()}  # type: ignore[arg-type]
        peak = np.array([peaks[d] for d in self.dtype])
        waves = np.ceil(self.tiles / device.sm_count)
        quantum = np.where(self.tiles > 0, self.tiles / np.maximum(waves, 1) / device.sm_count, 1.0)
        hopper = device.compute_capability is not None and device.compute_capability >= (9, 0)
        share = np.ones(len(self.kind))
        share[self.kind == MATMUL] = c.matmul
        share[self.kind == CONVOLUTION] = c.convolution
        share[self.kind == ATTENTION] = c.attention_hopper if hopper else c.attention
        products = self.kind == MATMUL
        share = np.where(products, share * np.maximum(quantum, 0.25) * self.inner / (self.inner + c.matmul_k_half), share)
        moved = np.where((self.kind == MEMORY) & compiled, self.bytes * c.fused_memory, self.bytes)
        moving = moved / (device.memory_bandwidth_bytes_per_s * c.memory)
        seconds: np.ndarray = np.maximum(self.flops / (peak * share), moving) + c.gap
        seconds[self.kind == NOTHING] = 0.0
        return seconds

    def kinds_s(self, seconds: np.ndarray, counts: np.ndarray) -> Mapping[str, float]:
        """The seconds of `counts` runs of each signature, by kind of op."""
        return {
            name: float((seconds * counts)[self.kind == kind].sum())
            for kind, name in enumerate(_NAMES)
            if (self.kind == kind).any()
        }


def _row(s: Signature) -> tuple[int, float, float, Dtype, float, float]:
    """(kind, FLOPs, bytes, dtype of the products, tiles, inner length) of an op."""
    name = s.op.rpartition(".")[0] or s.op
    dtype: Dtype = _DTYPES.get(s.inputs[0].dtype, "fp32") if s.inputs else "fp32"
    moved = float(s.moved_bytes)
    if name in _NO_KERNEL:
        return NOTHING, 0.0, 0.0, dtype, 0.0, 1.0
    if name in (_ATTENTION, _ATTENTION_BACKWARD):
        backward = name == _ATTENTION_BACKWARD
        query, key = s.inputs[1:3] if backward else s.inputs[0:2]
        products = _BACKWARD_PRODUCTS if backward else 1.0
        causal = 0.5 if s.scalars.get("9" if backward else "5") is True else 1.0
        length = key.shape[-2]
        return ATTENTION, 4.0 * query.numel * length * products * causal, moved, _DTYPES.get(query.dtype, "fp32"), 0.0, 1.0
    if name in _MATMULS and s.flops:
        # a bias comes first in addmm and baddbmm
        left, right = s.inputs[-2:]
        rows, inner = left.shape[-2:]
        columns = right.shape[-1]
        batch = left.numel // max(rows * inner, 1)
        tiles = batch * -(-rows // _TILE) * -(-columns // _TILE)
        return MATMUL, float(s.flops), moved, _DTYPES.get(left.dtype, "fp32"), float(tiles), float(inner)
    if name == _PRODUCT_OF_4_BITS and s.flops:  # the packed weight has no shape of a matrix
        left, out = s.inputs[0], s.outputs[0]
        inner, columns = left.shape[-1], out.shape[-1]
        tiles = -(-(left.numel // max(inner, 1)) // _TILE) * -(-columns // _TILE)
        return MATMUL, float(s.flops), moved, _DTYPES.get(left.dtype, "fp32"), float(tiles), float(inner)
    if name in _CONVOLUTIONS and s.flops:
        return CONVOLUTION, float(s.flops), moved, dtype, 0.0, 1.0
    if name == "aten.embedding":  # the rows that are looked up, not the whole table
        moved = 2.0 * sum(t.nbytes for t in s.outputs)
    return MEMORY, 0.0, moved, dtype, 0.0, 1.0
