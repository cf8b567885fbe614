"""ZO2: MeZO with the blocks on the host.  Each block visits the GPU once a step and runs both perturbed forwards there.

Models zo2/optimizer/mezo_sgd/zo2.py (`MeZO2SGD`) and zo2/model/huggingface/opt/mezo_sgd/zo2.py (`OptimizerOPTDecoder`,
`OptimizerOPTForCausalLM`), liangyuwang/zo2 at 4bca25c, for any model with one list of blocks.

Per unit (embedding, block, norm, head): the update of the *last* step, perturb, forward 1, perturb, forward 2, perturb back.
Per block i: upload i, send i - 1 back, compute.  Formula, with R what stays on the GPU, B one block, n its largest tensor, A
what the two forwards hold between blocks (hidden states, embeddings, masks) and T the transient of one block's forward:

    R + max(4 n of the largest embedding or head tensor, B + A + max(4 n, T), 2 B + A, head and loss of both forwards)

The host keeps every block in pinned memory, each tensor rounded up to a power of two; see `host_memory`.

An evaluation (`--mode inference`) is one forward: each block comes and goes before the next, so R + B + T, and the key-value
cache of the whole model, which `config.use_cache` leaves on.

Known limits.  The updates that are one step behind are never flushed (upstream has no flush), so a saved model lacks one.
Which tensors a unit reads twice (a tied head) is updated and perturbed twice, as upstream does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...errors import UserError
from ..simulate import Block, Simulation
from ..trace.block_segments import Piece, cut_blocks, without_cast_cache
from ..trace.steptrace import StepTrace, TensorSlot
from .base import Run, Strategy
from .mezo import check_forward_only, said_of_adapter, said_of_evaluation
from .zo_blocks import BlockWalk
from .zo_settings import ZoSettings

if TYPE_CHECKING:
    from ..request import Request


class Zo2(Strategy):
    """One GPU; both forwards walk from block to block together."""

    name = "zo2"

    def __init__(self, pieces: Sequence[Piece], settings: ZoSettings | None = None, *, lanes: int = 2, ways: int = 1) -> None:
        """`pieces`: the trace that will be walked, cut by `cut_blocks`; `lanes` and `ways` as for `BlockWalk`."""
        self._walk = BlockWalk(pieces, settings or ZoSettings(), lanes=lanes, ways=ways)
        self._sim: Simulation | None = None
        self._steps = 0

    def trains(self, trace: StepTrace) -> bool:
        return True

    def at_init(self, sim: Simulation) -> None:
        self._sim = sim
        self._walk.load(sim)

    def schedule(self, trace: StepTrace, micro_batch: int) -> Iterator[Run]:
        assert self._sim is not None
        yield from self._walk.run(self._sim, micro_batch, with_update=self._steps > 0)  # the first step has no gradient yet

    def step(self, sim: Simulation) -> None:
        self._steps += 1  # the projected gradient is a number on the host; the next step's walk applies it

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        raise AssertionError("a zeroth-order step has no gradient")

    def hints(self) -> list[str]:
        return self._walk.hints(self._sim) if self._sim is not None else []


class Zo2Evaluation(Strategy):
    """An evaluation between steps: the model lies as ZO2 has it, and one forward goes through it."""

    name = "zo2"

    def __init__(self, pieces: Sequence[Piece], settings: ZoSettings | None = None, *, ways: int = 1) -> None:
        """As for `Zo2`."""
        self._walk = BlockWalk(pieces, settings or ZoSettings(), lanes=1, ways=ways)
        self._sim: Simulation | None = None

    def at_init(self, sim: Simulation) -> None:
        self._sim = sim
        self._walk.load(sim)

    def schedule(self, trace: StepTrace, micro_batch: int) -> Iterator[Run]:
        assert self._sim is not None
        yield from self._walk.evaluate(self._sim, micro_batch)

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        raise AssertionError("an evaluation has no gradient")


def check(request: Request) -> None:
    """Raises UserError or CannotTell for a request that ZO2 cannot be asked."""
    check_forward_only(request)
    settings = request.zo or ZoSettings()
    if request.gpus != 1:
        raise UserError(f"--gpus {request.gpus}: ZO2 runs on one GPU", "Use --method distzo2")
    if settings.gpus != 1 or settings.zo_slice:
        raise UserError("--zo-pert, --zo-data and --zo-slice are options of several GPUs", "Use --method distzo2")
    check_amp(request)


def check_amp(request: Request) -> None:
    """ZO2's `amp` and autocast go together."""
    amp = (request.zo or ZoSettings()).amp
    if amp and not request.precision.endswith("-autocast"):
        raise UserError(
            f"--zo-amp with --precision {request.precision}: amp computes in autocast on fp32 parameters",
            "Use --precision bf16-autocast or fp16-autocast",
        )
    if not amp and request.precision.endswith("-autocast"):
        raise UserError(
            f"--precision {request.precision} with --method {request.method}: its autocast is the option amp", "Add --zo-amp"
        )


def traced_as(request: Request) -> Request:
    """The question whose trace ZO2 walks: a forward with the loss, without a graph, and with a key-value cache only in an
    evaluation, which leaves `config.use_cache` as it is."""
    evaluates = request.mode == "inference"
    return request.but(mode="inference", use_cache=evaluates and (request.zo or ZoSettings()).use_cache)


def prepared(trace: StepTrace) -> StepTrace:
    """The trace as ZO2 runs it: autocast is entered anew around every unit, so no cast outlives its use."""
    return without_cast_cache(trace)


def make(request: Request, trace: StepTrace) -> Zo2 | Zo2Evaluation:
    """`trace` is the one that will be walked, after `prepared`."""
    if request.mode == "inference":
        return Zo2Evaluation(cut_blocks(trace), request.zo)
    return Zo2(cut_blocks(trace), request.zo)


def said(request: Request) -> list[str]:
    settings = request.zo or ZoSettings()
    if request.mode == "inference":
        return [said_of_evaluation(request), "blocks visit the GPU one at a time", *said_of_blocks(settings)]
    return [
        *said_of_adapter(request),
        "ZO2: blocks live on the host and visit the GPU one after the other, two at a time",
        "updates run one step behind: an evaluation and a saved model lack the last one, which zo2 never applies",
        *said_of_blocks(settings),
    ]


def said_of_blocks(settings: ZoSettings) -> list[str]:
    """What is taken for granted about the transfers, in words."""
    found = []
    if settings.offloading_blocks != "all":
        found.append(f"the first {settings.offloading_blocks} blocks live on the host, the others on the GPU")
    if settings.overlap:
        found.append("blocks on the host are pinned, every tensor rounded up to a power of two as torch's host allocator does")
    else:
        found.append("copies do not overlap with compute, and the host's copies are pageable")
    if settings.bucket:
        found.append("a block moves as one bucket; the host keeps a stale copy of every block, as upstream's param_groups do")
    if settings.amp:
        kept = settings.precision_on_offloading_device or "fp16"
        found.append(f"fp32 on the GPU, {kept} on the host; autocast's casts live as long as the op that uses them")
    return found
