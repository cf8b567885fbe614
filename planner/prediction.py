"""The answer: one result object, failure included."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .error_bars import ErrorBar
    from .timeline.step_time import StepTime


class Verdict(enum.StrEnum):
    """Whether the run fits; each with the exit code that the command line gives it."""

    FITS = "fits"
    TIGHT = "tight"  # only after the allocator flushed its cache, or with less headroom than the prediction's own error
    DOES_NOT_FIT = "does_not_fit"
    UNKNOWN = "unknown"

    def exit_code(self, strict: bool = False) -> int:
        return {"fits": 0, "tight": int(strict), "does_not_fit": 1, "unknown": 2}[self.value]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A peak and what was live then.  `components` are requested bytes and sum to `requested_bytes`."""

    allocated_bytes: int
    """What torch.cuda.max_memory_allocated would report: blocks as the allocator rounds them."""
    requested_bytes: int
    phase: str
    fqn: str
    """Path of the module that ran ("" for the loop itself)."""
    what: str
    """The op or part that made the last block."""
    step: str
    """"first step" or "later steps"."""
    components: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The allocation that finds no room under the limit, after the cache was flushed."""

    phase: str
    fqn: str
    what: str
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    step: str


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change that makes it fit, or brings it closest."""

    change: str
    """In words."""
    option: str
    """What to add to the command."""
    reserved_peak_bytes: int
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class HostNeeds:
    """Memory and disk of the machine beside the Python processes themselves.  Sizes of one rank, but for `node_...`."""

    pinned_bytes: int = 0
    """Asked for, at its peak."""
    pinned_reserved_bytes: int = 0
    """Taken by torch's pinned allocator: every block a power of two, never returned."""
    pageable_bytes: int = 0
    nvme_bytes: int = 0
    node_bytes: int = 0
    """Host memory of all ranks of one machine, pinned as taken."""
    node_nvme_bytes: int = 0
    missing_bytes: int = 0
    """Host memory, or NVMe, that a machine lacks; 0 where there is enough, or nobody said how much there is."""

    @property
    def total_bytes(self) -> int:
        """Host memory of one rank."""
        return self.pinned_reserved_bytes + self.pageable_bytes


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Whether it fits, and why.  Sizes in bytes; the documented keys of `to_json` are these field names."""

    verdict: Verdict
    reason: str
    """One sentence."""
    question: dict[str, Any]
    gpu: str
    num_params: int = 0
    num_trainable_params: int = 0
    total_bytes: int = 0
    context_bytes: int = 0
    usable_bytes: int = 0
    allocated_peak_bytes: int = 0
    reserved_peak_bytes: int = 0
    device_peak_bytes: int = 0
    headroom_bytes: int = 0
    fragmentation_bytes: int = 0
    """Reserved but not asked for, at the reserved peak: rounding, and holes that no block fitted."""
    peak: Moment | None = None
    phases: dict[str, Moment] = field(default_factory=dict)
    host: HostNeeds = field(default_factory=HostNeeds)
    failure: Failure | None = None
    num_alloc_retries: int = 0
    flops_per_step: int = 0
    time: StepTime | None = None
    """One optimizer step in the steady state; None where it cannot be told."""
    max_micro_batch_size: int | None = None
    max_seq_len: int | None = None
    error_bars: tuple[ErrorBar, ...] = ()
    """How far off predictions of runs like this one have been."""
    remedies: tuple[Remedy, ...] = ()
    hints: tuple[str, ...] = ()
    """What a person should know who would run this: a setting that works against its purpose, and its cure."""
    assumptions: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        return self.verdict in (Verdict.FITS, Verdict.TIGHT)

    def to_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        data = asdict(self)
        data["verdict"] = self.verdict.value
        for remedy in data["remedies"]:
            remedy["verdict"] = remedy["verdict"].value
        return data

    def __str__(self) -> str:
        from .report import render

        return render(self)

    def _repr_html_(self) -> str:
        from .show.html import prediction_html

        return prediction_html(self)
