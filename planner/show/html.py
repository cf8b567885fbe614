"""Answers in HTML without a script: what the page and notebooks share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from ...units import gib, human
from ..explain import explain
from ..wording import COMPONENT, LANE, op_name

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..prediction import Prediction
    from ..search.plan import Plan

TENSORS = 25  # rows of the list


def prediction_html(p: Prediction) -> str:
    """An answer as a notebook shows it."""
    parts = sorted(p.peak.components.items(), key=lambda part: -part[1]) if p.peak else []
    rows = [(label(name), gib(size)) for name, size in parts if size]
    peak = table(("at the peak", "GiB"), rows, numbers=(1,)) if rows else ""
    return f"<b>{escape(str(p.question['model']))} on {p.question['gpus']} x {escape(p.gpu)}</b>" + verdict(p) + asked(p) + peak


def plan_html(plan: Plan) -> str:
    """A plan as a notebook shows it."""
    q = plan.question
    head = f"<b>{escape(str(q['model']))} on {q['gpus']} x {escape(plan.gpu)}</b>"
    if plan.best is None:
        return f"{head}<p>NO PLAN FITS</p>" + "".join(f"<p>{escape(way)}</p>" for way in plan.would_fit)
    return head + candidates(plan)


def label(part: str) -> str:
    return COMPONENT[part].split(" (")[0]


def verdict(p: Prediction) -> str:
    room = f"{gib(p.headroom_bytes)} to spare" if p.headroom_bytes >= 0 else f"{gib(-p.headroom_bytes)} too much"
    return (
        f'<p class="verdict {p.verdict.value}">{escape(p.verdict.value.replace("_", " ").upper())}: {room} on a GPU</p>'
        f"<p>{escape(p.reason)}</p>"
    )


def asked(p: Prediction) -> str:
    q, time = p.question, p.time
    rows: list[tuple[str, str]] = [
        ("training", f"{q['method']}, {q['strategy']}, {q['optimizer']}, {q['precision']}, recompute {q['recompute']}"),
        ("batch", f"micro batch {q['micro_batch_size']}, {q['loop']['grad_accum_steps']} accumulated, length {q['seq_len']}"),
        ("in use by tensors (allocated)", gib(p.allocated_peak_bytes)),
        ("held by PyTorch (reserved)", f"{gib(p.reserved_peak_bytes)} of {gib(p.usable_bytes)}"),
        ("shown by nvidia-smi", f"{gib(p.device_peak_bytes)} of {gib(p.total_bytes)}"),
    ]
    if p.host.total_bytes or p.host.nvme_bytes:
        nvme = f", NVMe {gib(p.host.node_nvme_bytes)}" if p.host.node_nvme_bytes else ""
        rows.append(("a machine beside its GPUs", f"host memory {gib(p.host.node_bytes)}{nvme}"))
    if time is not None:
        unit = "samples" if time.counts_samples else "tokens"
        rows.append(("a step", f"{time.seconds:.3g} s, {time.tokens_per_s:,.0f} {unit} a second, bound by "
                     f"{LANE.get(time.bound_by, time.bound_by)}"))  # fmt: skip
    return table((), rows, numbers=())


def candidates(plan: Plan) -> str:
    unit = "samples/s" if plan.counts_samples else "tokens/s"
    head = ("", "configuration", "batch", "peak", "headroom", "step", unit, "host", "bound by", "gives up")
    rows = [
        (
            str(n), c.name, f"{c.micro_batch_size} x {c.grad_accum_steps}", gib(c.held_bytes), gib(max(c.headroom_bytes, 0)),
            "?" if c.step_s is None else f"{c.step_s:.2f} s", "?" if c.tokens_per_s is None else f"{c.tokens_per_s:,.0f}",
            gib(c.host_bytes, 0) if c.host_bytes >= 1 << 29 else "-",
            LANE.get(c.bound_by, c.bound_by), "; ".join(c.gives_up) or "nothing",
        )
        for n, c in enumerate(plan.candidates, 1)
    ]  # fmt: skip
    text = table(head, rows, numbers=(3, 4, 5, 6, 7))
    if plan.refused:
        text += "<p>Refused, though it would have come first:</p><ul>" + "".join(
            f"<li>{escape(r.name)}, micro batch {r.micro_batch_size}: {escape(r.reason)}</li>" for r in plan.refused
        )
        text += "</ul>"
    return text


def tensors(ledger: Ledger, alloc_conf: str) -> str:
    found = explain(ledger, alloc_conf=alloc_conf)
    rows = [
        (human(s.total_bytes), str(s.num_blocks), label(s.component), s.fqn or "-", op_name(s.what))
        for s in found.storages[:TENSORS]
    ]
    rest = found.storages[TENSORS:]
    if rest:
        rows.append(
            (human(sum(s.total_bytes for s in rest)), str(sum(s.num_blocks for s in rest)), f"{len(rest)} more kinds", "", "")
        )
    return table(("size", "tensors", "what it is for", "where", "made by"), rows, numbers=(0, 1))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{' class=n' if i in numbers else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(row))

    top = f"<tr>{cells(head, 'th')}</tr>" if head else ""
    return "<table>" + top + "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows) + "</table>"
