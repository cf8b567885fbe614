"""MeZO: the whole model on one GPU, two forwards a step, the same noise drawn four times from one seed.

Models zo2/optimizer/mezo_sgd/zo.py, `MeZOSGD.zo_forward` (liangyuwang/zo2 at 4bca25c, `zo2=False`), which does in place what
princeton-nlp/MeZO at 552cb1b (large_models/trainer.py, `zo_step`, `zo_update`) does by rebinding `param.data`: the peaks agree.

Formula, with P the bytes of all parameters and n those of the largest one:

    P + max(4 n in the update, 3 n in a perturbation, what one forward without a graph holds)

No gradient, no optimizer state.  Both trainers leave `config.use_cache` as it is, so the forward holds a key-value cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...errors import CannotTell, UserError
from ..ledger import Component
from ..simulate import Block, Simulation
from ..trace.steptrace import Pass, StepTrace, TensorSlot
from .base import Run, Segment, Strategy
from .single import SingleDevice
from .zo_blocks import perturb, update
from .zo_settings import TRAINED, ZoSettings

if TYPE_CHECKING:
    from ..request import Request


class Mezo(Strategy):
    """Perturb, forward, perturb back and beyond, forward, restore, update."""

    name = "mezo"

    def __init__(self) -> None:
        self._sim: Simulation | None = None

    def trains(self, trace: StepTrace) -> bool:
        return True

    def at_init(self, sim: Simulation) -> None:
        self._sim = sim
        for slot in sim.trace.params:
            sim.place(Component.PARAM, slot.fqn, slot.shape, slot.dtype)
        for slot in sim.trace.buffers:
            sim.place(Component.BUFFER, slot.fqn, slot.shape, slot.dtype)

    def schedule(self, trace: StepTrace, micro_batch: int) -> Iterator[Run]:
        assert self._sim is not None
        whole = Segment("forward", 0, len(trace.event_kind))
        for lane in (0, 1):
            perturb(self._sim, trace.params)  # +1, then -2
            yield Run(whole, Pass.FORWARD, micro_batch, lane)
        perturb(self._sim, trace.params)

    def step(self, sim: Simulation) -> None:
        update(sim, sim.trace.params)

    def grad_ready(self, sim: Simulation, param: TensorSlot, block: Block | None) -> None:
        raise AssertionError("a zeroth-order step has no gradient")


def check(request: Request) -> None:
    """Raises UserError or CannotTell for a request that MeZO cannot be asked."""
    check_forward_only(request)
    if request.gpus > 1:
        raise CannotTell(
            f"--gpus {request.gpus}: MeZO's trainer lays the layers on several GPUs one after the other (device_map='auto'), "
            "which is not modelled. Use one GPU, or --method distzo2"
        )
    settings = request.zo or ZoSettings()
    if settings != ZoSettings(use_cache=settings.use_cache, eval_batch=settings.eval_batch):
        raise UserError(
            "--method mezo keeps the model on the GPU: it has none of the --zo-* options of blocks", "Use --method zo2"
        )


def check_forward_only(request: Request) -> None:
    """What MeZO, ZO2 and DistZO2 refuse alike."""
    name = request.method
    if request.strategy != "single":
        raise CannotTell(f"--method {name} with --strategy {request.strategy} is not modelled. Leave --strategy out")
    if request.optimizer != "adamw":  # what nobody chose
        raise UserError(
            f"--optimizer {request.optimizer}: --method {name} has none: its step is p -= lr * g * z", "Leave it out"
        )
    if request.use_cache and name != "mezo":
        raise UserError(f"--use-cache: --method {name} builds no key-value cache", "Leave it out")
    if (adapter := request.adapter) is not None:
        if adapter.kind not in TRAINED or adapter.base_quant != "none" or adapter.modules_to_save:
            what = f"{adapter.kind} on a {adapter.base_quant} base" if adapter.base_quant != "none" else adapter.kind
            raise CannotTell(f"--method {name} with {what} is not modelled. Use --zo-train {' or '.join(TRAINED[1:])} alone")
        if name != "mezo" and adapter.kind != "lora":
            raise CannotTell(
                f"--zo-train {adapter.kind} with --method {name} is not modelled: its cache goes through all blocks. "
                "Use --zo-train lora, or --method mezo"
            )
    if request.loop.grad_accum_steps > 1:
        raise UserError(
            f"--grad-accum {request.loop.grad_accum_steps}: zeroth-order trainers take a step for every batch",
            "Use a larger --micro-batch: there are no gradients to make it expensive",
        )
    if request.recompute != "none":
        raise UserError(f"--recompute {request.recompute}: --method {name} has no backward to recompute for", "Leave it out")
    if request.loop.clip_grad_norm:
        raise UserError(f"--clip-grad-norm: --method {name} has no gradients", "Leave it out")
    if request.mode == "forward":
        raise CannotTell(
            f"--mode forward with --method {name} is not modelled. An evaluation between steps is --mode inference"
        )
    if request.precision.endswith("-mixed"):
        raise CannotTell(f"--precision {request.precision}: zeroth-order methods keep no fp32 masters. Use bf16, fp16 or fp32")


def traced_as(request: Request) -> Request:
    """The question whose trace MeZO walks: a forward with the loss, without a graph, with the cache that trainers leave on."""
    return request.but(mode="inference", use_cache=(request.zo or ZoSettings()).use_cache)


def make(request: Request, trace: StepTrace) -> Mezo | SingleDevice:
    return SingleDevice() if request.mode == "inference" else Mezo()


def said(request: Request) -> list[str]:
    settings = request.zo or ZoSettings()
    return [
        *said_of_adapter(request),
        said_of_evaluation(request)
        if request.mode == "inference"
        else "MeZO: two forwards a step, noise from one seed, updates in place; no gradients, no optimizer state",
        "the forward builds a key-value cache, as both MeZO trainers leave it"
        if settings.use_cache
        else "the forward builds no key-value cache (use_cache=False)",
    ]


def said_of_evaluation(request: Request) -> str:
    return f"an evaluation between the steps of {request.method}: one forward, nothing is perturbed"


def said_of_adapter(request: Request) -> list[str]:
    """What is perturbed where not all of the model is."""
    if request.adapter is None:
        return []
    return [f"only the parameters of {request.adapter.kind} are perturbed, in the dtype of the model; the modules are peft's"]
