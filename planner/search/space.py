"""What a plan may choose from: every configuration that trains the global batch on the GPUs at hand.

A *shape* is a configuration without its micro batch.  A level of the space says what is given up; a deeper one is opened only
where nothing fits above it, and only in what the user left open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import CannotTell, UserError
from ...models.adapters import ADAPTER_METHODS
from ..optimizers.methods import LAYERWISE, OPTIMIZERS, default_optimizer, optimizer_under
from ..strategies import SINGLE, ZEROTH_ORDER

if TYPE_CHECKING:
    from ..request import Request

OBJECTIVES = ("throughput", "memory", "cost", "quality-first")
ANY = "any"
_FUSED = ("adamw", "adam", "sgd-momentum")  # torch has a fused kernel: the same numbers, without temporary copies
Offload = tuple[str, ...]
_CPU: Offload = ("optimizer", "param")
NVME: tuple[Offload, ...] = (("optimizer:nvme",), ("optimizer:nvme", "param"), ("optimizer:nvme", "param:nvme"))
_ADAPTERS = tuple(m for m in ("lora", "qlora") if m in ADAPTER_METHODS)  # of the many kinds, those that people take
TO_THE_HOST = "part of it leaves the GPU"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The user's choices.  None: memplan chooses, and steps down only where nothing fits."""

    global_batch_size: int
    """Samples in one optimizer step, of all GPUs together."""
    methods: tuple[str, ...] | None = None
    strategies: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None
    optimizers: tuple[str, ...] | None = None
    recomputes: tuple[str, ...] | None = None
    offloads: tuple[Offload, ...] | None = None
    micro_batch_size: int | None = None
    objective: str = "throughput"
    """One of OBJECTIVES.  cost: GPU-seconds of a step, also with fewer of the GPUs."""

    def check(self) -> None:
        """Raises UserError for a value that does not exist."""
        if self.objective not in OBJECTIVES:
            raise UserError(f"--objective {self.objective!r} is not known", f"Choose one of {', '.join(OBJECTIVES)}")
        if self.global_batch_size < 1:
            raise UserError(f"--global-batch {self.global_batch_size}: must be 1 or more", "Leave it out for the default")


@dataclass(frozen=True, kw_only=True)
class Level:
    """What may be chosen, and in words what that gives up against the level above."""

    words: str
    methods: tuple[str, ...]
    optimizers: tuple[str, ...]
    recomputes: tuple[str, ...]
    narrow: bool = False
    """Also weights, gradients and state in 16 bits, without fp32 masters."""
    nvme: bool = False
    host: bool = True
    """Also what leaves something to the host."""


def levels(wanted: Wanted, *, nvme: bool = False, alone: bool = False) -> list[Level]:
    """The levels in the order in which they are opened; each holds the ones above it.

    `alone`: there is one GPU, so that a runtime for several is worth its trouble only for what it moves to the host.
    """
    level = Level(
        words="",
        methods=_methods(wanted.methods),
        optimizers=wanted.optimizers or ("adamw",),
        recomputes=wanted.recomputes or ("none", "full"),
        nvme=nvme and wanted.offloads is None,
        host=not alone or wanted.offloads is not None or wanted.strategies is not None,
    )
    found = [level]
    if not level.host:
        level = replace(level, host=True, words=TO_THE_HOST)
        found.append(level)
    if wanted.optimizers is None:
        level = replace(level, optimizers=(*level.optimizers, "adamw-8bit"))
        found.append(replace(level, words="the optimizer's state has 8 bits"))
    if wanted.precisions is None:
        level = replace(level, narrow=True)
        found.append(replace(level, words="weights and optimizer state have 16 bits, without fp32 masters"))
    if wanted.methods is None:
        level = replace(level, methods=(*level.methods, *_ADAPTERS))
        found.append(replace(level, words="only an adapter trains, not the model's own weights"))
        level = replace(level, methods=(*level.methods, *ZEROTH_ORDER))
        found.append(replace(level, words="zeroth-order training: no gradients, and more steps to the same loss"))
    return found


def _methods(asked: tuple[str, ...] | None) -> tuple[str, ...]:
    if asked is None:
        return ("full",)
    return ("full", *_ADAPTERS, *ZEROTH_ORDER) if ANY in asked else asked


def candidates(
    bases: Mapping[int, Request], wanted: Wanted, level: Level, why_not: dict[str, str] | None = None
) -> Iterator[Request]:
    """Every configuration of `level`: those first that need least of the machine.

    `bases`: by number of GPUs, the question without the choices.  What cannot be is left out; `why_not` is told why, by method.
    """
    why_not = {} if why_not is None else why_not
    for gpus, base in bases.items():
        for method in level.methods:
            for strategy, offload in _placements(method, gpus, base.nodes, wanted, level):
                for precision in _precisions(base, method, strategy, wanted, level):
                    for optimizer in _optimizers(method, wanted, level, why_not):
                        for recompute in level.recomputes if method not in ZEROTH_ORDER else ("none",):
                            shape = _shape(base, method, strategy, offload, precision, optimizer, recompute, why_not)
                            if shape is not None:
                                yield from _batches(shape, wanted)


def _shape(
    base: Request,
    method: str,
    strategy: str,
    offload: Offload,
    precision: str,
    optimizer: str,
    recompute: str,
    why_not: dict[str, str],
) -> Request | None:
    """The configuration, for a micro batch of 1; None where its parts do not go together, and why in `why_not`."""
    from ..strategies.zo_settings import ZoSettings

    fused = optimizer in _FUSED and not offload and not strategy.startswith("zero") and method not in ZEROTH_ORDER
    shape = base.but(
        method=method,
        strategy=strategy,
        offload=offload,
        precision=precision,
        optimizer=optimizer,
        optimizer_impl="fused" if fused else base.optimizer_impl,
        recompute=recompute,
        zo=ZoSettings(zo_data=base.gpus) if method == "distzo2" else None,
        micro_batch_size=1,
        grad_accum_steps=1,
    )
    try:
        shape.check()
    except (CannotTell, UserError) as error:
        why_not.setdefault(method, str(error))
        return None
    return shape


def _optimizers(method: str, wanted: Wanted, level: Level, why_not: dict[str, str]) -> tuple[str, ...]:
    """Those of the level; a method that an optimizer is has its own, by the names that are asked for."""
    if method in ZEROTH_ORDER:
        return ("adamw",)
    if method not in OPTIMIZERS:
        return level.optimizers
    found = [] if wanted.optimizers else [default_optimizer(method)]
    for optimizer in level.optimizers:
        try:
            found.append(optimizer_under(method, optimizer))
        except UserError as error:
            why_not.setdefault(method, str(error))
    return tuple(dict.fromkeys(found))


def _placements(method: str, gpus: int, nodes: int, wanted: Wanted, level: Level) -> Iterator[tuple[str, Offload]]:
    """(strategy, offload): what leaves nothing to the host first."""
    if method in ZEROTH_ORDER:
        if (method == "distzo2") == (gpus > 1):
            yield SINGLE, ()
        return
    plain = (SINGLE, "release") if gpus == 1 else ("ddp", "zero1", "zero2", "zero3", "fsdp2", *(("hsdp",) if nodes > 1 else ()))
    if method in ADAPTER_METHODS:
        plain = (SINGLE,) if gpus == 1 else ("ddp", "fsdp2", "fsdp1", "zero2", "zero3")
    moved: list[tuple[str, Offload]] = [("zero2", ("optimizer",)), ("zero3", ("optimizer",)), ("zero3", _CPU), ("fsdp2", _CPU)]
    if gpus == 1 and method in ADAPTER_METHODS:
        moved = []
    if level.nvme:
        moved += [("zero3", offload) for offload in NVME]
    if wanted.strategies is not None:
        plain = wanted.strategies
        moved = [(s, offload) for s in wanted.strategies for offload in dict.fromkeys(o for _, o in moved)]
    if wanted.offloads is not None:
        known = dict.fromkeys((*plain, *(s for s, _ in moved)))
        yield from ((s, offload) for offload in wanted.offloads for s in (known if offload else plain))
        return
    yield from ((s, ()) for s in plain)
    if level.host:
        yield from moved


def _precisions(base: Request, method: str, strategy: str, wanted: Wanted, level: Level) -> tuple[str, ...]:
    if wanted.precisions is not None:
        return wanted.precisions
    capability = base.device.compute_capability
    half = "fp16" if capability is not None and capability < (8, 0) else "bf16"
    if method in ZEROTH_ORDER or method in ADAPTER_METHODS:
        return (half,)  # what is frozen needs no master, and a perturbed weight has none
    kept = f"{half}-mixed" if strategy.startswith(("zero", "fsdp", "hsdp")) else f"{half}-autocast"
    return (kept, half) if level.narrow else (kept,)


def _batches(shape: Request, wanted: Wanted) -> Iterator[Request]:
    """The shape with every micro batch that makes up the global batch exactly, largest first."""
    each = per_gpu(wanted.global_batch_size, shape.gpus if shape.zo is None else shape.zo.zo_data)
    if each is None:
        return
    alone = shape.method in ZEROTH_ORDER or shape.strategy == "release"  # they take a step for every micro batch
    for micro in (each,) if alone else reversed(divisors(each)):
        if wanted.micro_batch_size in (None, micro):
            yield shape.but(micro_batch_size=micro, grad_accum_steps=each // micro)


def per_gpu(global_batch_size: int, replicas: int) -> int | None:
    """Samples of one GPU in a step; None where the batch does not divide."""
    return global_batch_size // replicas if global_batch_size % replicas == 0 else None


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def given_up(request: Request) -> tuple[str, ...]:
    """What the configuration gives up against full training with AdamW and fp32 weights, in words; least harm first."""
    found = []
    if request.method in ZEROTH_ORDER:
        return (f"{request.method}: zeroth-order steps, which need many more of them",)
    if request.method in LAYERWISE:
        found.append(f"{request.method}: one block of layers trains at a time")
    elif request.optimizer.partition(":")[0] not in ("adamw", "adam"):
        found.append(f"{request.optimizer} in the place of adamw")
    if request.method in ADAPTER_METHODS:
        found.append(f"{request.method}: only an adapter trains")
    elif request.precision in ("bf16", "fp16"):
        found.append(f"no fp32 masters: all in {request.precision}")
    return tuple(found)


def harm(request: Request) -> int:
    """How much is given up, for ordering: optimizer 1, masters 2, own weights 4, gradients 8."""
    if request.method in ZEROTH_ORDER:
        return 8
    found = int(request.optimizer.partition(":")[0] not in ("adamw", "adam"))
    return found + (4 if request.method in ADAPTER_METHODS else 2 if request.precision in ("bf16", "fp16") else 0)
