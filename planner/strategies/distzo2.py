"""DistZO2: ZO2 on several GPUs, which share the two forwards of a step, the batch, and the uploads.

No code of it is public (liangyuwang/zo2 at 4bca25c has none).  This follows the abstract (arXiv 2507.03211) and the notes on
its traces (liangyuwang/distzo2paper at 90a9e90, README.md); what they leave open is decided here and said in the answer:

* PertP (`zo_pert=2`): the GPUs of a pair run one forward each, on the same batch; two perturbations a unit, not three.
* DDP (`zo_data=D`): every group has a batch of its own and the same seed.  2D is both: rank r has sign r % 2 and batch r // 2.
* slicing (`zo_slice`): of N GPUs each holds and uploads 1/N of every block, a slice of the flat block; an all-gather over
  NVLink makes it whole on each, in place; each sends its own slice back.

Formula: that of ZO2 for the batch of one group; under PertP what a lane holds (hidden states, masks, logits, loss) counts once.
On the host every rank has the pinned copies of ZO2, or one N-th of them, a single pinned tensor for each slice.  What goes
between GPUs beside slices is a loss or a projected gradient: 4 bytes a step.

Ranks of a pair restore parameters by other sums (+1 -1, and -1 +1), which differ in the last bit; the sources leave open who
is right.  The runtime (validator/runtimes/zo) hands the +eps rank's copy to its partner when it flushes; no memory is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import CannotTell, UserError
from ..simulate import Simulation
from ..trace.block_segments import Piece, cut_blocks
from ..trace.steptrace import StepTrace
from .mezo import check_forward_only, said_of_adapter, said_of_evaluation
from .zo2 import Zo2, Zo2Evaluation, check_amp, prepared, said_of_blocks, traced_as
from .zo_settings import ZoSettings

if TYPE_CHECKING:
    from ..request import Request

__all__ = ["DistZo2", "check", "make", "prepared", "said", "traced_as"]

_SCALAR_BYTES = 4  # an fp32 loss


class DistZo2(Zo2):
    """What every rank does: their events are equal."""

    name = "distzo2"

    def __init__(self, pieces: Sequence[Piece], settings: ZoSettings) -> None:
        """`pieces`: the trace of one group's batch, cut by `cut_blocks`."""
        ways = settings.gpus if settings.zo_slice else 1
        super().__init__(pieces, settings, lanes=2 // settings.zo_pert, ways=ways)
        self._gpus = settings.gpus

    def step(self, sim: Simulation) -> None:
        if self._gpus > 1:
            sim.enqueue("all_reduce", _SCALAR_BYTES)
        super().step(sim)


def check(request: Request) -> None:
    """Raises UserError or CannotTell for a request that DistZO2 cannot be asked."""
    check_forward_only(request)
    settings = request.zo or ZoSettings()
    check_amp(request)
    if request.gpus < 2:
        raise UserError(f"--method distzo2: expected several GPUs, got {request.gpus}", "Use --gpus N, or --method zo2")
    if settings.gpus != request.gpus:
        fitting = request.gpus // settings.zo_pert if request.gpus % settings.zo_pert == 0 else 0
        raise UserError(
            f"--zo-pert {settings.zo_pert} x --zo-data {settings.zo_data}: {settings.gpus} GPUs, and --gpus is {request.gpus}",
            f"Use --zo-data {fitting}" if fitting else "An odd number of GPUs has no pairs: use --zo-pert 1",
        )
    if settings.zo_slice:
        _check_slicing(request, settings)


def _check_slicing(request: Request, settings: ZoSettings) -> None:
    link = request.device.nvlink
    if link is None or (link.pairs_only and request.gpus > 2):
        missing = "no NVLink" if link is None else "NVLink between pairs of cards only"
        raise UserError(
            f"--zo-slice on {request.device.name}: the cards exchange parts of a block over NVLink, and there is {missing}",
            "Leave --zo-slice out: over PCIe the exchange costs what the smaller uploads save",
        )
    if request.nodes > 1:
        raise CannotTell("--zo-slice over several nodes is not modelled. Use one node, or leave it out")
    if settings.bucket:
        raise CannotTell("--zo-slice with --zo-bucket is not modelled: a slice is of the flat block already. Leave one out")


def make(request: Request, trace: StepTrace) -> DistZo2 | Zo2Evaluation:
    """`trace` is the one that will be walked, after `prepared`."""
    if request.mode == "inference":
        settings = request.zo or ZoSettings()
        return Zo2Evaluation(cut_blocks(trace), settings, ways=settings.gpus if settings.zo_slice else 1)
    return DistZo2(cut_blocks(trace), request.zo or ZoSettings())


def said(request: Request) -> list[str]:
    settings = request.zo or ZoSettings()
    if request.mode == "inference":
        return [said_of_evaluation(request), *said_of_blocks(settings)]
    found = [
        *said_of_adapter(request),
        "DistZO2 as its abstract and notes describe it, since its code is not public: blocks visit the GPU as in ZO2, updates "
        "run one step behind",
    ]
    if settings.zo_pert > 1:
        found.append("each GPU of a pair runs one of the two perturbed forwards, on the same batch")
        found.append(
            "the GPUs of a pair restore parameters by other sums (+1 -1, -1 +1), which differ in the last bit: "
            + ("slices of one copy keep them equal" if settings.zo_slice else "the copy of the +eps GPU is the one to keep")
        )
    if settings.zo_data > 1:
        found.append(f"{settings.zo_data} groups with a micro batch each; rank r has the sign r % {settings.zo_pert}")
    if settings.zo_slice:
        share = f"1/{settings.gpus} of every block, one flat slice"
        found.append(f"each GPU holds and uploads {share}, and gathers the rest over NVLink")
    elif settings.gpus > 1:
        found.append("each GPU uploads every block by itself, from its own pinned copies")
    return [*found, *said_of_blocks(settings)]
