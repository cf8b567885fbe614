"""What lies on the GPU at the peak: the largest tensors by name, and every module's share; two answers side by side.

The moment is that of the report's peak: the event at which the allocator has most in use.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..units import gib, human
from .ledger import Component, Ledger, Tier
from .predict import replay_ledger
from .trace.steptrace import Phase
from .trace_report import every_layer as general
from .wording import COMPONENT, PHASE, columns, op_name


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Blocks of one size, place and purpose that are live at the peak; `num_blocks` of them, `block_bytes` each."""

    block_bytes: int
    num_blocks: int
    component: str
    fqn: str
    what: str

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


@dataclass(frozen=True, kw_only=True)
class Share:
    """What belongs to one module, or all modules of one name but for the number, by component."""

    fqn: str
    num_modules: int
    components: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.components.values())


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The peak in full: `storages` sum to `requested_bytes`, and so do `shares`."""

    phase: str
    step: str
    fqn: str
    what: str
    requested_bytes: int
    allocated_bytes: int
    storages: tuple[Storage, ...]
    shares: tuple[Share, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys; sizes in bytes."""
        from dataclasses import asdict

        data = asdict(self)
        for key in ("storages", "shares"):
            for row, made in zip(data[key], getattr(self, key), strict=True):
                row["total_bytes"] = made.total_bytes
        return data


def explain(ledger: Ledger, *, tier: Tier = Tier.GPU, alloc_conf: str = "") -> Explanation:
    """The peak of `tier`.  On the GPU: where the allocator's blocks are most; elsewhere: where the bytes asked for are."""
    from .allocator.config import AllocConf

    rows = ledger.rows(tier)
    if not len(rows):
        raise UserError(f"nothing lies in {tier.name.lower()} in this run", "Ask about gpu")
    live = ledger.live_bytes(tier)
    event, allocated = int(live.argmax()), int(live.max())
    if tier is Tier.GPU:
        played = replay_ledger(ledger, AllocConf.parse(alloc_conf))
        event, allocated = played.peak_allocated_event, played.peak_allocated_bytes
    row = int(rows[event])
    blocks = ledger.live_blocks(row, tier)
    fqn, what = ledger.labels[ledger.label[row]]
    return Explanation(
        phase=Phase(ledger.phase[row]).name.lower(),
        step="first step" if ledger.iteration[row] == 0 else "later steps",
        fqn=fqn,
        what=what,
        requested_bytes=int(live[event]),
        allocated_bytes=allocated,
        storages=_storages(blocks),
        shares=_shares(blocks),
    )


def _storages(blocks: Sequence[tuple[int, int, str, str]]) -> tuple[Storage, ...]:
    counts: dict[tuple[int, int, str, str], int] = {}
    for nbytes, component, fqn, what in blocks:
        key = nbytes, component, general(fqn), what if _is_op(what) else general(what)
        counts[key] = counts.get(key, 0) + 1
    found = [
        Storage(block_bytes=nbytes, num_blocks=n, component=Component(component).label, fqn=fqn, what=what)
        for (nbytes, component, fqn, what), n in counts.items()
    ]
    return tuple(sorted(found, key=lambda s: (-s.total_bytes, s.fqn, s.what)))


def _shares(blocks: Sequence[tuple[int, int, str, str]]) -> tuple[Share, ...]:
    sizes: dict[str, dict[str, int]] = {}
    names: dict[str, set[str]] = {}
    for nbytes, component, fqn, what in blocks:
        place = fqn if _is_op(what) else _owner(fqn)
        parts = sizes.setdefault(general(place), {})
        names.setdefault(general(place), set()).add(place)
        label = Component(component).label
        parts[label] = parts.get(label, 0) + nbytes
    found = [Share(fqn=fqn, num_modules=len(names[fqn]), components=parts) for fqn, parts in sizes.items()]
    return tuple(sorted(found, key=lambda s: (-s.total_bytes, s.fqn)))


def _owner(fqn: str) -> str:
    """The module of a parameter's name: `h.0.attn.c_attn.weight` is of `h.0.attn.c_attn`."""
    head, _, last = fqn.rpartition(".")
    return head if last in ("weight", "bias") else fqn


def _is_op(what: str) -> bool:
    return "." in what and op_name(what) != what


def render(explanation: Explanation, *, top: int = 15) -> str:
    """The two tables as text."""
    e = explanation
    at = op_name(e.what) + (f" in {e.fqn}" if e.fqn else "")
    head = f"Peak: {gib(e.allocated_bytes)} in use by tensors ({gib(e.requested_bytes)} asked for), "
    head += f"{_when(e.phase, e.step)}, at {at}"
    rows = [("size", "blocks", "what it is for", "where", "made by")]
    for s in e.storages[:top]:
        made = op_name(s.what) if s.fqn or _is_op(s.what) else s.what
        rows.append((human(s.total_bytes), str(s.num_blocks), COMPONENT[s.component], s.fqn or "-", made))
    left = e.storages[top:]
    if left:
        size, blocks = sum(s.total_bytes for s in left), sum(s.num_blocks for s in left)
        rows.append((human(size), str(blocks), f"{len(left)} more kinds", "", ""))
    shown = ["Largest tensors at the peak (same size, module and op counted together)", *columns(rows, frozenset({0, 1}))]
    parts = list(dict.fromkeys(name for share in e.shares for name in share.components))
    parts.sort(key=lambda name: -sum(share.components.get(name, 0) for share in e.shares))
    table: list[tuple[str, ...]] = [("module", "of them", "in all", *(COMPONENT[p].split(" (")[0] for p in parts[:4]))]
    for share in e.shares[:top]:
        sizes = (human(share.components[p]) if share.components.get(p) else "-" for p in parts[:4])
        table.append((share.fqn or "(no module)", str(share.num_modules), human(share.total_bytes), *sizes))
    rest = e.shares[top:]
    if rest:
        sums = (human(sum(share.components.get(p, 0) for share in rest)) for p in parts[:4])
        table.append((f"{len(rest)} more", "", human(sum(share.total_bytes for share in rest)), *sums))
    modules = ["Each module at the peak", *columns(table, frozenset(range(1, 7)))]
    return "\n\n".join((head, "\n".join(shown), "\n".join(modules)))


# -- two answers side by side ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One row of a comparison, in bytes."""

    name: str
    before: int
    after: int

    @property
    def change(self) -> int:
        return self.after - self.before


def read_answer(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `memplan fit --json` printed.  Raises UserError for anything else, and for an answer that is unknown."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read {str(path)!r}: {error.strerror}", "Name a file with what `memplan fit --json` prints"
        ) from error
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}", "Name a file with what `memplan fit --json` prints") from error
    if not isinstance(data, dict) or not {"verdict", "question", "peak"} <= set(data):
        raise UserError(f"{path}: is no answer of `memplan fit --json`", "Make one with `memplan fit ... --json > FILE`")
    if not isinstance(data["peak"], dict):
        raise UserError(
            f"{path}: the answer is {data['verdict']!r}: there is no peak to compare", "Compare answers with figures"
        )
    return data


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Component by component at each answer's own peak, then the sums; rows without bytes on either side are left out."""
    parts = (before["peak"]["components"], after["peak"]["components"])
    found = [Difference(name=name, before=parts[0].get(name, 0), after=parts[1].get(name, 0)) for name in COMPONENT]
    for name in ("allocated_peak_bytes", "reserved_peak_bytes", "device_peak_bytes", "usable_bytes"):
        found.append(Difference(name=name, before=before.get(name, 0), after=after.get(name, 0)))
    hosts = (before.get("host") or {}, after.get("host") or {})
    for name in ("node_bytes", "node_nvme_bytes"):
        found.append(Difference(name=name, before=hosts[0].get(name, 0), after=hosts[1].get(name, 0)))
    return tuple(d for d in found if d.before or d.after)


_SUMS = {
    "allocated_peak_bytes": "= in use by tensors (allocated)",
    "reserved_peak_bytes": "= held by PyTorch (reserved)",
    "device_peak_bytes": "= what nvidia-smi shows",
    "usable_bytes": "PyTorch can have (usable)",
    "node_bytes": "host memory of one machine",
    "node_nvme_bytes": "NVMe of one machine",
}


def changed(before: Mapping[str, Any], after: Mapping[str, Any], at: str = "") -> list[tuple[str, Any, Any]]:
    """(option, before, after) of what was asked differently, nested ones with dots."""
    found = []
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += changed(old, new, f"{at}{key}.")
        elif old != new:
            found.append((f"{at}{key}", old, new))
    return found


def render_difference(before: Mapping[str, Any], after: Mapping[str, Any], names: tuple[str, str] = ("A", "B")) -> str:
    """The comparison as text."""
    asked = changed(before["question"], after["question"])
    lines = [f"  {key}: {_short(old)} -> {_short(new)}" for key, old, new in asked]
    parts = ["\n".join(["Asked differently", *lines]) if lines else "The same question"]
    rows = [("", names[0], names[1], "change")]
    for d in differences(before, after):
        label = COMPONENT.get(d.name) or _SUMS[d.name]
        sign = "+" if d.change > 0 else "-" if d.change < 0 else ""
        rows.append((label, human(d.before), human(d.after), f"{sign}{human(abs(d.change))}" if d.change else "same"))
    parts.append("\n".join(["At the peak of each", *columns(rows, frozenset({1, 2, 3}))]))
    where = [
        f"{name}: {a['verdict'].replace('_', ' ')}; peak: {_place(a['peak'])}"
        for name, a in zip(names, (before, after), strict=True)
    ]
    return "\n\n".join([*parts, "\n".join(where)])


def _place(peak: Mapping[str, Any]) -> str:
    fqn = f" in {peak['fqn']}" if peak.get("fqn") else ""
    return f"{_when(peak['phase'], peak['step'])}, at {op_name(peak['what'])}{fqn}"


def _when(phase: str, step: str) -> str:
    name = PHASE.get(phase, phase)
    return f"{name} of {'the ' * (step == 'first step')}{step}" if phase in ("forward", "backward", "step") else name


def _short(value: Any) -> str:
    text = "-" if value in (None, "", [], ()) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
