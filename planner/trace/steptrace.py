"""StepTrace: one recorded training step as columns, free of torch, of the GPU and of the strategy.

Terms
    storage     a block of memory that an op made; views share it.  Parameters and buffers are storages too, but the
                *strategy* places them: the trace owns activations and temporaries only.
    call        one execution of one module; calls nest.  Modules that run no op enter and leave too.
    event       the stream that the simulator walks, in the order in which the host issued it (`EventKind`).
    signature   what an op is, apart from when: name, input and output shapes, strides and dtypes, scalar arguments.
                Kernels that a GPU would choose (attention, reductions, matmul workspaces) are expanded from it.
"""

from __future__ import annotations

import enum
import io
import json
import math
import struct
import zipfile
import zlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

FORMAT = 1  # version of the file format of `to_bytes`


class EventKind(enum.IntEnum):
    """What happened; `arg` and `aux` of the event mean what is written behind each kind."""

    OP = 0  # arg: op; only ops that make or write a storage, not views
    ALLOC = 1  # arg: storage; follows the OP that made it
    FREE = 2  # arg: storage; the last reference went away
    ENTER = 3  # arg: call, aux: Pass
    LEAVE = 4  # arg: call, aux: Pass
    GRAD = 5  # arg: parameter, aux: storage of its gradient, or -1: autograd handed the gradient to the parameter
    PHASE = 6  # arg: Phase that begins


class Phase(enum.IntEnum):
    """Where in the life of the run an event lies."""

    LOAD = 0
    INIT = 1
    FORWARD = 2
    BACKWARD = 3
    STEP = 4
    EVAL = 5
    SAVE = 6


class Pass(enum.IntEnum):
    """Why a module runs.  RECOMPUTE is a forward inside backward (activation checkpointing)."""

    FORWARD = 0
    RECOMPUTE = 1
    BACKWARD = 2
    STEP = 3
    EVAL = 4


class Role(enum.IntEnum):
    """What a storage is for; fixed by its lifetime in the trace."""

    PARAM = 0  # placed by the strategy
    BUFFER = 1  # placed by the strategy
    BATCH = 2  # an input of the step
    ACTIVATION = 3  # made in forward (or recompute), needed after it
    TEMP = 4  # dies in the pass that made it
    GRAD = 5  # becomes a parameter's gradient: handed to the strategy at GRAD
    GRAD_COPY = 6  # a copy that autograd makes because the gradient's layout is not the parameter's; only when .grad is None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape, stride (in elements; 0 for a dimension of size 1, where it means nothing) and dtype of an argument or result."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


ITEMSIZE = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int64": 8, "int32": 4,
    "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Signature:
    """What an op is.  `inputs` are its tensor arguments in order (lists flattened), `scalars` the rest by position or name."""

    op: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    scalars: dict[str, Any]
    flops: int  # multiply and add count as two
    moved_bytes: int  # inputs read plus outputs written; 0 for views


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    fqn: str  # "" is the root
    class_name: str


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A parameter or buffer of the model, before any strategy places it.  Shared (tied) tensors appear once."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    module: int  # index in `modules`
    storage: int  # index in the storage table

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class StepTrace:
    """One forward, loss and backward (one micro step) of a model.

    Columns: `event_*` one row an event; `op_*` one row an op; `storage_*` one row a storage; `call_*` one row a module call.
    `op_inputs[op_input_start[i]:op_input_start[i + 1]]` are the storages that op i reads.
    """

    name: str  # the model, for people
    options: dict[str, Any]  # TraceOptions as data: what was traced
    versions: dict[str, str]
    modules: tuple[ModuleInfo, ...]
    params: tuple[TensorSlot, ...]
    buffers: tuple[TensorSlot, ...]
    signatures: tuple[Signature, ...]
    event_kind: np.ndarray  # int8
    event_arg: np.ndarray  # int32
    event_aux: np.ndarray  # int32
    op_signature: np.ndarray  # int32
    op_call: np.ndarray  # int32
    op_pass: np.ndarray  # int8
    op_input_start: np.ndarray  # int32, one longer than the ops
    op_inputs: np.ndarray  # int32
    storage_bytes: np.ndarray  # int64
    storage_role: np.ndarray  # int8
    storage_op: np.ndarray  # int32: the op that made it, or -1
    storage_output: np.ndarray  # int16: which output of that op it backs
    call_module: np.ndarray  # int32
    call_parent: np.ndarray  # int32, -1 for the root
    batch_storages: tuple[int, ...]
    output_storages: tuple[int, ...]  # what the model returned (logits ...); dies with the last reference to the output
    loss_storage: int  # -1 when nothing is left after the step
    assumptions: tuple[str, ...] = ()
    graph: Any = field(default=None, compare=False, repr=False)  # torch.fx.Graph of a fresh trace; None from the cache

    # -- views for the reader ------------------------------------------------------------------------------------------

    @property
    def num_ops(self) -> int:
        return len(self.op_signature)

    @property
    def num_params(self) -> int:
        """Weights of the model; two to a byte where they are packed in 4 bits, eight to a number in GPTQ's tables."""
        packed = sum(8 * b.numel for b in self.buffers if b.fqn.endswith(".qweight"))
        storage = (self.options.get("adapter") or {}).get("quant_storage")  # 4-bit weights as elements of that dtype, for FSDP

        def weights(p: TensorSlot) -> int:
            if p.dtype == storage and not p.requires_grad and p.shape[1:] == (1,):
                return p.numel * 2 * ITEMSIZE[p.dtype]
            return p.numel * (2 if p.dtype == "uint8" else 1)

        return packed + sum(weights(p) for p in self.params)

    @property
    def flops(self) -> int:
        """FLOPs of the micro step, forward and backward (and recompute)."""
        table = np.array([s.flops for s in self.signatures], dtype=np.float64)
        return int(table[self.op_signature].sum())

    @cached_property
    def params_with_grad(self) -> frozenset[int]:
        """Indices of the parameters that receive a gradient; one that the loss does not reach is trainable, but has none."""
        return frozenset(self.event_arg[self.event_kind == EventKind.GRAD].tolist())

    @cached_property
    def worked_out(self) -> dict[Hashable, Any]:
        """What others have worked out from this trace and from nothing else, by a name of theirs; it is not to be changed."""
        return {}

    def events(self) -> Iterator[tuple[EventKind, int, int]]:
        kinds = list(EventKind)
        for kind, arg, aux in zip(self.event_kind.tolist(), self.event_arg.tolist(), self.event_aux.tolist(), strict=True):
            yield kinds[kind], arg, aux

    def call_fqn(self, call: int) -> str:
        return self.modules[self.call_module[call]].fqn if call >= 0 else ""

    @cached_property
    def fqn_of_op(self) -> list[str]:
        return [self.call_fqn(c) for c in self.op_call.tolist()]

    # -- storage on disk -----------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The trace without its fx graph, as a zip of one JSON header and one .npy file per column."""
        header = {
            "format": FORMAT,
            "name": self.name,
            "options": self.options,
            "versions": self.versions,
            "modules": [[m.fqn, m.class_name] for m in self.modules],
            "params": [_slot_row(p) for p in self.params],
            "buffers": [_slot_row(b) for b in self.buffers],
            "signatures": [
                [s.op, [_info_row(t) for t in s.inputs], [_info_row(t) for t in s.outputs], s.scalars, s.flops, s.moved_bytes]
                for s in self.signatures
            ],
            "batch_storages": list(self.batch_storages),
            "output_storages": list(self.output_storages),
            "loss_storage": self.loss_storage,
            "assumptions": list(self.assumptions),
        }
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("header.json", json.dumps(header))
            for column in _COLUMNS:
                raw = io.BytesIO()
                np.save(raw, getattr(self, column), allow_pickle=False)
                archive.writestr(column + ".npy", raw.getvalue())
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> StepTrace:
        """The inverse of `to_bytes`.  Raises ValueError for anything that is not a trace of this format."""
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                header = json.loads(archive.read("header.json"))
                if header["format"] != FORMAT:
                    raise ValueError(f"trace format {header['format']}, expected {FORMAT}")
                columns = {c: np.load(io.BytesIO(archive.read(c + ".npy")), allow_pickle=False) for c in _COLUMNS}
        except UNREADABLE as error:
            raise ValueError(f"not a trace: {error}") from error
        return cls(
            name=header["name"],
            options=header["options"],
            versions=header["versions"],
            modules=tuple(ModuleInfo(*m) for m in header["modules"]),
            params=tuple(_slot(p) for p in header["params"]),
            buffers=tuple(_slot(b) for b in header["buffers"]),
            signatures=tuple(
                Signature(op, tuple(map(_info, ins)), tuple(map(_info, outs)), scalars, flops, moved)
                for op, ins, outs, scalars, flops, moved in header["signatures"]
            ),
            batch_storages=tuple(header["batch_storages"]),
            output_storages=tuple(header["output_storages"]),
            loss_storage=header["loss_storage"],
            assumptions=tuple(header["assumptions"]),
            **columns,
        )


# What a broken zip, .npy or JSON can raise while it is read.
UNREADABLE = (
    zipfile.BadZipFile, zlib.error, struct.error, KeyError, IndexError, TypeError, EOFError, OSError, RuntimeError,
    NotImplementedError,
)  # fmt: skip
_COLUMNS = (
    "event_kind", "event_arg", "event_aux", "op_signature", "op_call", "op_pass", "op_input_start", "op_inputs",
    "storage_bytes", "storage_role", "storage_op", "storage_output", "call_module", "call_parent",
)  # fmt: skip


def _slot_row(slot: TensorSlot) -> list[Any]:
    return [slot.fqn, list(slot.shape), slot.dtype, slot.requires_grad, slot.module, slot.storage]


def _slot(row: Sequence[Any]) -> TensorSlot:
    fqn, shape, dtype, requires_grad, module, storage = row
    return TensorSlot(fqn, tuple(shape), dtype, requires_grad, module, storage)


def _info_row(info: TensorInfo) -> list[Any]:
    return [info.dtype, list(info.shape), list(info.stride)]


def _info(row: Sequence[Any]) -> TensorInfo:
    return TensorInfo(row[0], tuple(row[1]), tuple(row[2]))
