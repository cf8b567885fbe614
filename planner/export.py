"""Traces and simulated runs as files that other programs read."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import write_for_user
from .trace.steptrace import EventKind, Pass, Phase, Role

if TYPE_CHECKING:
    from .ledger import Ledger
    from .trace.steptrace import Signature, StepTrace, TensorInfo, TensorSlot

FORMAT = "memplan-trace-1"


def trace_data(trace: StepTrace) -> dict[str, Any]:
    """The trace as JSON data.  Keys are documented in docs/json.md; indices count from 0 in the list that they name."""
    births, deaths = _lifetimes(trace)
    starts, inputs = trace.op_input_start.tolist(), trace.op_inputs.tolist()
    columns = zip(trace.op_signature.tolist(), trace.fqn_of_op, trace.op_pass.tolist(), pairwise(starts), strict=True)
    ops = [
        {
            "op": trace.signatures[signature].op,
            "fqn": fqn,
            "pass": Pass(kind).name.lower(),
            "flops": trace.signatures[signature].flops,
            "moved_bytes": trace.signatures[signature].moved_bytes,
            "signature": signature,
            "reads": inputs[start:stop],
        }
        for signature, fqn, kind, (start, stop) in columns
    ]
    made = (trace.storage_bytes, trace.storage_role, trace.storage_op, trace.storage_output)
    storages = [
        {
            "bytes": nbytes,
            "role": Role(role).name.lower(),
            "op": None if op < 0 else op,
            "output": None if op < 0 else output,
            "birth": births.get(index),
            "death": deaths.get(index),
        }
        for index, (nbytes, role, op, output) in enumerate(zip(*(column.tolist() for column in made), strict=True))
    ]
    return {
        "format": FORMAT,
        "name": trace.name,
        "options": trace.options,
        "versions": trace.versions,
        "num_params": trace.num_params,
        "flops": trace.flops,
        "assumptions": list(trace.assumptions),
        "modules": [{"fqn": module.fqn, "class": module.class_name} for module in trace.modules],
        "params": [_slot(slot) for slot in trace.params],
        "buffers": [_slot(slot) for slot in trace.buffers],
        "calls": [
            {"module": module, "parent": None if parent < 0 else parent}
            for module, parent in zip(trace.call_module.tolist(), trace.call_parent.tolist(), strict=True)
        ],
        "signatures": [_signature(signature) for signature in trace.signatures],
        "ops": ops,
        "storages": storages,
        "events": [_event(kind, arg, aux) for kind, arg, aux in trace.events()],
        "batch_storages": list(trace.batch_storages),
        "output_storages": list(trace.output_storages),
        "loss_storage": None if trace.loss_storage < 0 else trace.loss_storage,
    }


def write_trace(path: str | os.PathLike[str], trace: StepTrace) -> None:
    """Writes `trace_data` to `path`: whole, or not at all.  Raises UserError where it cannot be written."""
    write_for_user(path, json.dumps(trace_data(trace), separators=(",", ":")))


def write_run(path: str | os.PathLike[str], ledger: Ledger, alloc_conf: str = "") -> None:
    """Writes the simulated run as a memory snapshot for PyTorch's memory_viz: GPU rows only, addresses from the replay.

    The frame of an event is its module path and op.  Raises UserError where it cannot be written.
    """
    from .allocator.config import AllocConf
    from .allocator.export import export_replay
    from .allocator.replay import ALLOC, FREE

    rows = ledger.rows()
    block = ledger.block[rows]
    actions = np.full(len(rows), FREE, np.int8)
    _, first = np.unique(block, return_index=True)
    actions[first] = ALLOC
    where = zip(ledger.label[rows].tolist(), ledger.phase[rows].tolist(), strict=True)
    named = [(*ledger.labels[label], Phase(phase).name.lower()) for label, phase in where]
    frames = [(fqn or "(training loop)", f"{phase}: {what}") for fqn, what, phase in named]
    sizes = np.abs(ledger.delta_bytes[rows]).tolist()
    conf = AllocConf.parse(alloc_conf)
    export_replay(path, actions.tolist(), sizes, block.tolist(), ledger.stream[rows].tolist(), frames=frames, conf=conf)


def _lifetimes(trace: StepTrace) -> tuple[dict[int, int], dict[int, int]]:
    """storage -> index of the event at which it is born, and at which it dies; no entry: before the step, or after it."""
    births: dict[int, int] = {}
    deaths: dict[int, int] = {}
    for index, (kind, arg, _) in enumerate(trace.events()):
        if kind is EventKind.ALLOC:
            births[arg] = index
        elif kind is EventKind.FREE:
            deaths[arg] = index
    return births, deaths


def _event(kind: EventKind, arg: int, aux: int) -> list[Any]:
    """[kind, arg] or [kind, arg, aux], with the names of passes and phases written out."""
    name = kind.name.lower()
    if kind is EventKind.PHASE:
        return [name, Phase(arg).name.lower()]
    if kind in (EventKind.ENTER, EventKind.LEAVE):
        return [name, arg, Pass(aux).name.lower()]
    if kind is EventKind.GRAD:
        return [name, arg, None if aux < 0 else aux]
    return [name, arg]


def _slot(slot: TensorSlot) -> dict[str, Any]:
    return {"fqn": slot.fqn, "shape": list(slot.shape), "dtype": slot.dtype, "bytes": slot.nbytes,
            "requires_grad": slot.requires_grad, "module": slot.module, "storage": slot.storage}  # fmt: skip


def _signature(signature: Signature) -> dict[str, Any]:
    return {
        "op": signature.op,
        "inputs": [_tensor(tensor) for tensor in signature.inputs],
        "outputs": [_tensor(tensor) for tensor in signature.outputs],
        "scalars": signature.scalars,
        "flops": signature.flops,
        "moved_bytes": signature.moved_bytes,
    }


def _tensor(info: TensorInfo) -> dict[str, Any]:
    return {"dtype": info.dtype, "shape": list(info.shape), "stride": list(info.stride)}
