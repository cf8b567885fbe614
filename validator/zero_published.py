"""What others have published about ZeRO's memory, beside what is predicted for that setting and DeepSpeed's own estimate.

Sources: the issues 1302 (BERT-Large in 2021, ViT-G in 2023) and 3734 (13B in 2023) of the deepspeedai/DeepSpeed repository.
None states its whole setting; what was taken for the rest is said below the table.  They ran older DeepSpeeds than the 0.19
that is predicted.  Most rows are differences between two runs of one setting, from which what is not stated drops out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..planner.api import make_request
from ..planner.engines.estimator import estimator
from ..planner.ledger import Phase
from ..planner.predict import ledger_of
from ..planner.strategies.deepspeed_settings import DeepSpeedSettings
from ..planner.trace.source import TraceSource

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What was run, as far as it is stated, and what was taken for the rest."""

    model: str
    gpu: str
    gpus: int
    micro_batch_size: int
    seq_len: int | None
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: stage, knobs, and which figure of it."""

    stage: int
    knobs: Mapping[str, Any]
    figure: str = "peak"  # of one step; or backward, step: what is in use when that has ended


@dataclass(frozen=True, kw_only=True)
class Published:
    """A figure of a run, or how much it differs from that of `base`."""

    what: str
    source: str
    mib: float
    setting: Setting
    run: Run
    base: Run | None = None


@dataclass(frozen=True, kw_only=True)
class Compared:
    row: Published
    predicted_mib: float
    estimate_mib: float | None  # DeepSpeed's own, of the run; None: it has none, or the row is a difference

    @property
    def ratio(self) -> float | None:
        return self.predicted_mib / self.row.mib if self.row.mib else None


_VIT_G = Setting(
    model="google/vit-large-patch16-224", gpu="a100-40gb", gpus=8, micro_batch_size=8, seq_len=None,
    options={
        "overrides": {
            "hidden_size": "1664", "intermediate_size": "8192", "num_hidden_layers": "48", "num_attention_heads": "16",
            "patch_size": "14",
        }
    },
)  # fmt: skip
_BERT = Setting(
    model="bert-large-uncased", gpu="v100-32gb", gpus=4, micro_batch_size=32, seq_len=128,
    options={"task": "question-answering"},
)  # fmt: skip
_13B = Setting(
    model="meta-llama/Llama-2-13b-hf", gpu="a100-80gb", gpus=8, micro_batch_size=1, seq_len=512, options={}
)  # fmt: skip
_SWEEP = Run(stage=2, knobs={"overlap_comm": True})
ROWS: tuple[Published, ...] = (
    Published(what="ViT-G, ZeRO-2: reduce_scatter off", source="#1302", mib=0, setting=_VIT_G, base=_SWEEP,
              run=Run(stage=2, knobs={"overlap_comm": True, "reduce_scatter": False})),
    Published(what="ViT-G, ZeRO-2: overlap_comm off", source="#1302", mib=20198 - 21152, setting=_VIT_G, base=_SWEEP,
              run=Run(stage=2, knobs={"overlap_comm": False})),
    Published(what="ViT-G, ZeRO-2: bucket 5e8 to 1e8", source="#1302", mib=19625 - 21152, setting=_VIT_G, base=_SWEEP,
              run=Run(stage=2, knobs={"overlap_comm": True, "reduce_bucket_size": 10**8})),
    Published(what="ViT-G, ZeRO-2: bucket 5e8 to 1e7", source="#1302", mib=19284 - 21152, setting=_VIT_G, base=_SWEEP,
              run=Run(stage=2, knobs={"overlap_comm": True, "reduce_bucket_size": 10**7})),
    Published(what="ViT-G, ZeRO-2: contiguous gradients off", source="#1302", mib=19247 - 21152, setting=_VIT_G, base=_SWEEP,
              run=Run(stage=2, knobs={"overlap_comm": True, "contiguous_gradients": False})),
    Published(what="ViT-G, ZeRO-2: bucket 1e7, overlap and contiguous gradients off", source="#1302", mib=19247 - 21152,
              setting=_VIT_G, base=_SWEEP,
              run=Run(stage=2, knobs={"overlap_comm": False, "contiguous_gradients": False, "reduce_bucket_size": 10**7})),
    Published(what="13B, ZeRO-2, in use", source="#3734", mib=45.4646 * 1024, setting=_13B,
              run=Run(stage=2, knobs={}, figure="backward")),
    Published(what="13B, ZeRO-3, in use", source="#3734", mib=25.3114 * 1024, setting=_13B,
              run=Run(stage=3, knobs={}, figure="step")),
    Published(what="BERT-Large: stage 2 instead of 1", source="#1302", mib=9600 - 8900, setting=_BERT,
              run=Run(stage=2, knobs={"overlap_comm": False}),
              base=Run(stage=1, knobs={"overlap_comm": False, "contiguous_gradients": False})),
)  # fmt: skip
NOTES = (
    "ViT-G: neither the number of GPUs nor the batch is stated (8 and 8 taken; the saving of 2.9 GB that the maintainers name "
    "between stages 1 and 2 means 8). A sweep of one setting, so only differences are compared. Without "
    "contiguous gradients up to a bucket of them waits in backward: with the batch taken that is the peak, with a larger one, "
    "whose activations are more, it is not, and the difference is that of the row below it.",
    "13B: model, batch and sequence are not stated (Llama 13B taken). \"After training step\" that version still kept the "
    "partition's gradients at stage 2, which 0.19 drops within the step: it is compared with what is in use after backward. "
    "The published maxima, 52.4 and 56.1 GiB, depend on the batch.",
    "BERT-Large: the sequence is not stated (128 taken). Stage 1 of 2021 ignored contiguous_gradients, as later pull requests "
    "(#4887) say, and had no bucket in backward: so it is predicted. With today's stage 1, whose bucket is there as well, both "
    "stages need the same.",
)  # fmt: skip


def compared(rows: tuple[Published, ...] = ROWS) -> list[Compared]:
    """Every row predicted.  Traces are shared."""
    traces = TraceSource()
    found = []
    for row in rows:
        mib, estimate = _predicted(row.setting, row.run, traces)
        if row.base is not None:
            mib, estimate = mib - _predicted(row.setting, row.base, traces)[0], None
        found.append(Compared(row=row, predicted_mib=mib, estimate_mib=estimate))
    return found


def _predicted(setting: Setting, run: Run, traces: TraceSource) -> tuple[float, float | None]:
    """The figure, and DeepSpeed's own estimate, in MiB."""
    request = make_request(
        setting.model, setting.gpu, gpus=setting.gpus, micro_batch_size=setting.micro_batch_size, seq_len=setting.seq_len,
        precision="fp16-mixed", strategy=f"zero{run.stage}", deepspeed=DeepSpeedSettings(**run.knobs), **setting.options,
    )  # fmt: skip
    request.check()
    trace = traces.step(request)
    ledger = ledger_of(request, trace)
    live, rows = ledger.live_bytes(), ledger.rows()
    nbytes = int(live.max())
    if run.figure != "peak":
        last = int(ledger.iteration[rows].max())
        wanted = (ledger.phase[rows] == Phase[run.figure.upper()]) & (ledger.iteration[rows] == last)
        nbytes = int(live[np.flatnonzero(wanted)[-1]])
    estimate = estimator(request, trace)
    return nbytes / _MIB, estimate.gpu_bytes / _MIB if estimate is not None else None


def section(found: list[Compared]) -> list[str]:
    """The table as lines of Markdown."""
    lines = [
        "## Figures that others have published",
        "",
        "Issues of the deepspeedai/DeepSpeed repository; MiB of one GPU.  Differences carry a sign.",
        "",
        "| what | source | published | predicted | ratio | DeepSpeed's own estimator |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for one in found:
        sign = "+," if one.row.base is not None else ","
        ratio = f"{one.ratio:.3f}" if one.ratio is not None else "-"
        estimate = f"{one.estimate_mib:,.0f}" if one.estimate_mib is not None else "-"
        published, predicted = (f"{round(mib):{sign}}" if round(mib) else "0" for mib in (one.row.mib, one.predicted_mib))
        lines.append(f"| {one.row.what} | {one.row.source} | {published} | {predicted} | {ratio} | {estimate} |")
    return [*lines, "", *(f"- {note}" for note in NOTES)]
