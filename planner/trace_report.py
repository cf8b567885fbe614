"""What one recorded step does, as text: sizes, FLOPs, what stays for backward, and the biggest tensors at the peak."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np

from ..units import human
from .ledger import Component
from .trace.steptrace import EventKind, Pass, Phase, Role
from .wording import COMPONENT, PHASE, columns, count, op_name

if TYPE_CHECKING:
    from .ledger import Ledger
    from .trace.steptrace import StepTrace

_OF_THE_STEP = (Component.ACTIVATION, Component.TEMP, Component.GRAD, Component.WORKSPACE)


def summary(trace: StepTrace, ledger: Ledger, *, top: int = 10) -> str:
    """`ledger` is that of a run with this trace; `top` limits the rows of each list."""
    parts = [_head(trace), _modules(trace, top), _peak(ledger, top), _assumptions(trace)]
    return "\n\n".join(part for part in parts if part)


def params_table(trace: StepTrace) -> str:
    """Every parameter, one a line; tied ones appear once."""
    rows = [("parameter", "shape", "dtype", "size", "trains")]
    rows += [
        (
            slot.fqn,
            " x ".join(map(str, slot.shape)) or "scalar",
            slot.dtype,
            human(slot.nbytes),
            "yes" if slot.requires_grad else "no",
        )
        for slot in trace.params
    ]
    return "\n".join(columns(rows, right=frozenset({3})))


def _head(trace: StepTrace) -> str:
    trains = sum(p.numel for p in trace.params if p.requires_grad)
    weights = sum(p.nbytes for p in trace.params)
    passes = Counter(Pass(kind).name.lower() for kind in trace.op_pass.tolist())
    flops: Counter[str] = Counter()
    for signature, kind in zip(trace.op_signature.tolist(), trace.op_pass.tolist(), strict=True):
        flops[Pass(kind).name.lower()] += trace.signatures[signature].flops
    calls = sum(1 for kind, _, _ in trace.events() if kind is EventKind.ENTER)
    options = trace.options
    words = (
        f"micro batch {options['batch_size']}, sequence {options['seq_len']}, {options['precision']}, for {options['target']}"
    )
    rows = [
        ("model", trace.name),
        ("step", f"{options['mode']}; {words}"),
        ("params", f"{count(trace.num_params)} ({count(trains)} train), {human(weights)} in {len(trace.params)} tensors"),
        ("modules", f"{len(trace.modules):,}, entered {calls:,} times"),
        ("ops", f"{trace.num_ops:,}: " + ", ".join(f"{number:,} {name}" for name, number in passes.items())),
        ("flops", f"{count(trace.flops)}: " + ", ".join(f"{count(number)} {name}" for name, number in flops.items() if number)),
        ("kept", f"{human(_role_bytes(trace, Role.ACTIVATION))} of activations stay from forward for backward"),
    ]
    attention = Counter(trace.signatures[s].op for s in trace.op_signature.tolist() if "attention" in trace.signatures[s].op)
    if attention:
        rows.append(("fused", ", ".join(f"{op_name(op)} x {number}" for op, number in attention.items())))
    return "\n".join(columns(rows, indent=0))


def _role_bytes(trace: StepTrace, role: Role) -> int:
    return int(trace.storage_bytes[trace.storage_role == role].sum())


def _modules(trace: StepTrace, top: int) -> str:
    """Activations by the module that made them; the same place in every layer is one row."""
    nbytes: defaultdict[str, int] = defaultdict(int)
    tensors: Counter[str] = Counter()
    fqns = trace.fqn_of_op
    for size, role, op in zip(
        trace.storage_bytes.tolist(), trace.storage_role.tolist(), trace.storage_op.tolist(), strict=True
    ):
        if role == Role.ACTIVATION and size:
            place = every_layer(fqns[op]) if op >= 0 else "(input)"
            nbytes[place] += size
            tensors[place] += 1
    whole = sum(nbytes.values())
    if not whole:
        return ""
    ranked = sorted(nbytes.items(), key=lambda item: -item[1])
    rows = [("module", "size", "share", "tensors")]
    rows += [
        (name or "(the model itself)", human(size), f"{size / whole:.0%}", str(tensors[name])) for name, size in ranked[:top]
    ]
    if len(ranked) > top:
        rest = ranked[top:]
        size = sum(size for _, size in rest)
        rows.append((f"{len(rest)} more", human(size), f"{size / whole:.0%}", str(sum(tensors[name] for name, _ in rest))))
    title = "Activations kept for backward, by module (* stands for every layer)"
    return "\n".join([title, *columns(rows, right=frozenset({1, 2, 3}))])


def every_layer(fqn: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", fqn)


def _peak(ledger: Ledger, top: int) -> str:
    """The biggest tensors when forward and backward need most beside weights and optimizer state; equal ones are one row."""
    rows = ledger.rows()
    own = np.isin(ledger.component[rows], _OF_THE_STEP)
    live = np.cumsum(np.where(own, ledger.delta_bytes[rows], 0))
    live[~np.isin(ledger.phase[rows], (Phase.FORWARD, Phase.BACKWARD))] = 0
    if not len(live) or live.max() <= 0:
        return ""
    moment = int(live.argmax())
    row = int(rows[moment])
    fqn, what = ledger.labels[ledger.label[row]]
    phase = PHASE[Phase(ledger.phase[row]).name.lower()]
    alike: Counter[tuple[int, int, str, str]] = Counter()
    for nbytes, component, module, op in ledger.live_blocks(row):
        if component in _OF_THE_STEP:
            alike[nbytes, component, every_layer(module), op_name(op)] += 1
    ranked = sorted(alike.items(), key=lambda item: -item[0][0] * item[1])
    table = [("size", "number", "each", "what it is", "made by", "module")]
    for (nbytes, component, module, op), number in ranked[:top]:
        kind = COMPONENT[Component(component).label].removesuffix(" kept for backward")
        table.append((human(nbytes * number), str(number), human(nbytes), kind, op, module or "-"))
    place = ", ".join(text for text in (phase, fqn, op_name(what)) if text)
    size = human(int(live[moment]))
    title = f"The biggest tensors at the peak of forward and backward: {size} beside weights and optimizer state"
    return "\n".join([title, f"  (in the {place})", *columns(table, right=frozenset({0, 1, 2}))])


def _assumptions(trace: StepTrace) -> str:
    if not trace.assumptions:
        return ""
    return "\n".join(["Assumed", *(f"  - {text}" for text in trace.assumptions)])
