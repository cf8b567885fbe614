"""A plan as text: one row a configuration, what each gives up, and why the next better one was refused."""

from __future__ import annotations

import textwrap

from ...units import gib
from ..recompute.policy import PREFIX, Policy
from ..wording import columns
from .plan import Candidate, Plan

WIDTH = 100
_OBJECTIVE = {
    "throughput": "fastest first",
    "memory": "least memory first",
    "pareto": "the frontier: fastest first, each next row with less memory",
    "cost": "fewest GPU-seconds first",
    "quality-first": "what gives up least first, then the fastest",
}


def render(plan: Plan, width: int = WIDTH) -> str:
    """The table, `width` columns wide where the words allow, without a newline at its end."""
    parts = [_headline(plan, width), _asked(plan, width)]
    if plan.candidates:
        parts += [_rows(plan, width), _reasons(plan, width)]
    else:
        parts.append(_nothing(plan, width))
    parts += [_listed("Refused, though it would have come first", [f"{r.name}, micro batch {r.micro_batch_size}: {r.reason}"
                                                                   for r in plan.refused], width)]  # fmt: skip
    parts.append(_listed("Taken for granted", plan.notes, width))
    parts.append(f"{plan.num_considered} configurations considered, {plan.num_simulated} simulated")
    return "\n\n".join(part for part in parts if part)


def _headline(plan: Plan, width: int) -> str:
    best = plan.best
    if best is not None:
        text = f"RUN {best.name}; micro batch {best.micro_batch_size}, {best.grad_accum_steps} accumulated"
        if best.alloc_conf:
            text += f"; PYTORCH_ALLOC_CONF={best.alloc_conf}"
        return "\n".join(_wrapped(text, width, ""))
    closest = plan.closest
    if closest is None or not closest.needs_bytes:
        return "NO PLAN FITS"
    least = "" if closest.simulated else "at least "
    if closest.needs_bytes <= plan.usable_bytes:
        return "\n".join(_wrapped(f"NO PLAN FITS: the closest does not, because {closest.reason}", width, ""))
    return f"NO PLAN FITS: the closest needs {least}{gib(closest.needs_bytes)}, you have {gib(plan.usable_bytes)}"


def _asked(plan: Plan, width: int) -> str:
    q = plan.question
    many = f"{q['gpus']} x {plan.gpu}" + (f" on {q['nodes']} machines" if q["nodes"] > 1 else "")
    batch = f"{plan.global_batch_size} samples a step"
    length = "" if plan.counts_samples else f" of {plan.seq_len} tokens"
    tight = plan.objective != "memory" and len({c.verdict for c in plan.candidates}) > 1
    order = _OBJECTIVE[plan.objective] + (", tight ones last" if tight and plan.objective != "pareto" else "")
    return "\n".join(_wrapped(f"{q['model']} ({q['task']}) on {many}; {batch}{length}; {order}", width, ""))


def _rows(plan: Plan, width: int) -> str:
    unit = "samples/s" if plan.counts_samples else "tokens/s"
    several = len({c.gpus for c in plan.candidates}) > 1
    head = ["", "configuration", "batch", "fits", "headroom", "peak GiB", "step s", unit, "host GiB", "bound by"]
    rows = [[*head[:2], *(["GPUs"] if several else []), *head[2:]]]
    for number, c in enumerate(plan.candidates, 1):
        cells = [
            str(number),
            c.name + ("*" if c.alloc_conf else ""),
            *([str(c.gpus)] if several else []),
            f"{c.micro_batch_size} x {c.grad_accum_steps}",
            "tight" if c.verdict == "tight" else "yes",
            gib(max(c.headroom_bytes, 0)).removesuffix(" GiB"),
            gib(c.held_bytes).removesuffix(" GiB"),
            "?" if c.step_s is None else f"{c.step_s:.2f}",
            "?" if c.tokens_per_s is None else f"{c.tokens_per_s:,.0f}",
            gib(c.host_bytes, 0).removesuffix(" GiB") if c.host_bytes >= 1 << 29 else "-",
            c.bound_by,
        ]
        rows.append(cells)
    first = 3 if several else 2
    lines = columns(rows, frozenset(range(first + 2, first + 7)), indent=0)
    if any(c.alloc_conf for c in plan.candidates):
        conf = next(c.alloc_conf for c in plan.candidates if c.alloc_conf)
        lines += _wrapped(f"* with PYTORCH_ALLOC_CONF={conf}, against free memory in pieces", width, "")
    return "\n".join(lines)


def _reasons(plan: Plan, width: int) -> str:
    said = []
    for number, c in enumerate(plan.candidates, 1):
        parts = [f"gives up {', '.join(c.gives_up)}"] if c.gives_up else ["gives up nothing of the training itself"]
        if c.verdict == "tight" and c.headroom_bytes < 0:
            parts.append(f"tight: PyTorch would hold {gib(c.reserved_peak_bytes)} and has to empty its cache, which costs time")
        elif c.verdict == "tight":
            parts.append("tight: the headroom is less than the prediction's own error")
        if c.recompute.startswith(PREFIX):
            parts.append(f"selective: {Policy.parse(c.recompute).words} (--json has the policy)")
        if c.why_not_more:
            parts.append(f"why not more: {c.why_not_more}")
        said += _wrapped(f"{number}  {'; '.join(parts)}", width, "   ")
    return "\n".join(said)


def _nothing(plan: Plan, width: int) -> str:
    said = []
    if plan.closest is not None:
        said += _wrapped(
            f"closest: {plan.closest.name}, micro batch {plan.closest.micro_batch_size}: {plan.closest.reason}", width, "  "
        )
    if plan.would_fit:
        said.append(_listed("It would fit with any one of these", plan.would_fit, width))
    return "\n".join(said)


def _listed(title: str, items: tuple[str, ...] | list[str], width: int) -> str:
    lines = [line for item in items for line in textwrap.wrap(item, width, initial_indent="  - ", subsequent_indent="    ")]
    return "\n".join([title, *lines]) if lines else ""


def _wrapped(text: str, width: int, later: str) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=later, break_on_hyphens=False)


def command(plan: Plan, candidate: Candidate) -> str:
    """The `memplan fit` that answers for this row alone."""
    q = plan.question
    parts = [f"memplan fit {q['model']} --gpu {q['gpu']} --gpus {candidate.gpus}"]
    if candidate.nodes > 1:
        parts.append(f"--nodes {candidate.nodes}")
    parts.append(f"--seq {plan.seq_len} --micro-batch {candidate.micro_batch_size}")
    if candidate.method != "full":
        parts.append(f"--method {candidate.method}")
    if candidate.strategy == "release":
        parts.append("--grad-release")
    elif candidate.strategy != "single":
        parts.append(f"--strategy {candidate.strategy}")
    parts.append(f"--precision {candidate.precision}")
    if candidate.method not in ("mezo", "zo2", "distzo2"):
        parts.append(f"--optimizer {candidate.optimizer}")
    for option, value, default in (
        ("--optimizer-impl", candidate.optimizer_impl, "default"),
        ("--recompute", candidate.recompute, "none"),
        ("--offload", "+".join(candidate.offload), ""),
        ("--grad-accum", str(candidate.grad_accum_steps), "1"),
        ("--alloc-conf", candidate.alloc_conf, ""),
        ("--attention", str(q.get("attention", "sdpa")), "sdpa"),
        ("--loss", str(q.get("loss", "model")), "model"),
    ):
        if value != default:
            parts.append(f"{option} {value}")
    return " ".join(parts)
