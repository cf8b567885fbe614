"""Words and rows for people: names of components, phases and ops, figures that visibly sum, aligned columns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..units import GiB

COMPONENT = {
    "param": "weights",
    "buffer": "buffers (fixed tables of the model)",
    "grad": "gradients",
    "optimizer_state": "optimizer state",
    "master_weight": "fp32 master weights",
    "activation": "activations kept for backward",
    "temp": "temporary tensors",
    "comm_buffer": "communication buffers",
    "offload_buffer": "offload buffers",
    "workspace": "workspaces of GPU kernels",
}
PHASE = {
    "load": "loading",
    "init": "before the first step",
    "forward": "forward pass",
    "backward": "backward pass",
    "step": "optimizer step",
    "eval": "evaluation",
    "save": "saving",
}

# What bounds a step (lanes of planner.timeline.step_time).
LANE = {
    "host": "the CPU that launches the kernels",
    "compute": "the compute",
    "nvlink": "NVLink",
    "pcie": "PCIe between the GPUs",
    "network": "the network between machines",
    "h2d": "PCIe copies to the GPU",
    "d2h": "PCIe copies to the host",
    "nvme": "NVMe",
    "cpu_optimizer": "the optimizer on the CPU",
}


def hundredths(num_bytes: int) -> int:
    """`num_bytes` in hundredths of a GiB, rounded: what a figure with two decimals shows."""
    return round(num_bytes * 100 / GiB)


def figure(count: int) -> str:
    """Hundredths of a GiB as text: 1234 -> "12.34"."""
    return f"{count / 100:.2f}"


def shares(parts: Sequence[int], total: int) -> list[int]:
    """Whole numbers near-proportional to `parts` that sum to `total` exactly (largest remainders are rounded up first)."""
    whole = sum(parts)
    if whole <= 0:
        return [0 for _ in parts]
    exact = [part * total / whole for part in parts]
    rounded = [int(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: rounded[i] - exact[i])
    for index in by_remainder[: total - sum(rounded)]:
        rounded[index] += 1
    return rounded


def op_name(what: str) -> str:
    """An op without its namespace and overload: "aten.nll_loss_forward.default" -> "nll_loss_forward"."""
    match = re.fullmatch(r"(?:aten|memplan|prims)\.(\w+?)(?:\.\w+)?", what)
    return match.group(1).strip("_") if match else what


def count(number: float) -> str:
    """A large count for people: 8030261248 -> "8.03 billion"."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.2f} {word}"
    return f"{number:,.0f}"


def columns(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset(), indent: int = 2) -> list[str]:
    """Rows as aligned lines; the columns in `right` are aligned to the right, empty ones are left out."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)) if w)
        lines.append((" " * indent + "  ".join(cells)).rstrip())
    return lines
