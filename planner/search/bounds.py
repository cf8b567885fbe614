"""Lower bounds on what a configuration needs, before it is simulated: bytes on the GPU, and seconds of a step.

Independent of the simulation: closed forms for what lies on the GPU for good, and the trace's own activations.  Both bounds are
at most what the simulation finds (a test holds them to it), so that what they rule out needs no simulation.

    bytes    resident + max(gradients at the step, activations + gradients so far, where micro steps accumulate)
    seconds  micro steps x seconds of the trace's ops, plus the host's optimizer step where the optimizer is offloaded

`resident` are the parameters, masters and optimizer state that one rank keeps on the GPU.  With P parameters and T of them
trained, N ranks that share, s bytes of a parameter in compute and c copies that the optimizer keeps of what it trains:

                           resident                            gradients at the step     so far
    single, ddp            s P + c s T                         s T                       s T  (release: neither)
    zero1                  s P + (4 + 4 c) T / N               s T / N                   s T
    zero2                  s P + (4 + 4 c) T / N               s T / N                   s T / N
    zero3                  s P / N + (4 + 4 c) T / N           s T / N                   s T / N
    fsdp1, fsdp2, hsdp     4 P / N + 4 c T / N                 4 T / N                   s T  (without sync)

In pure precisions FSDP keeps s bytes instead of 4, and ZeRO in fp32 has no masters.  What is offloaded does not count.
Sources: Rajbhandari et al. 2020, section 3 (ZeRO), and the strategies' own modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import CannotTell, UserError
from ...models.adapters import ADAPTER_METHODS
from ..optimizers.catalogue import TORCH_COPIES
from ..optimizers.methods import METHODS as OPTIMIZER_METHODS
from ..recompute.policy import is_selective
from ..strategies import MIXED, ZEROTH_ORDER, traced_as
from ..timeline.roofline import OpTable
from ..timeline.step_time import cpu_adam_per_s
from ..trace.options import PARAM_DTYPE
from ..trace.source import trace_options
from ..trace.steptrace import ITEMSIZE, EventKind, Role, StepTrace

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.source import TraceSource

_KEPT = (Role.BATCH, Role.ACTIVATION, Role.TEMP)
_ENDS = ("none", "full")  # of selective recompute
_HALF, _FULL = 2, 4  # bytes of a 16-bit number, of an fp32 one


@dataclass(frozen=True)
class Sizes:
    """Elements of a model's parameters, and of those that receive a gradient."""

    num_params: int
    num_trained: int

    @classmethod
    def of(cls, trace: StepTrace) -> Sizes:
        return cls(trace.num_params, sum(trace.params[i].numel for i in trace.params_with_grad))


def state_bytes(request: Request, sizes: Sizes) -> tuple[int, int, int]:
    """(resident, gradients at the optimizer step, gradients while micro steps accumulate) on the most loaded GPU, at least."""
    if request.method == "mezo":
        return sizes.num_params * _itemsize(request), 0, 0
    if request.method in ZEROTH_ORDER or request.method in ADAPTER_METHODS:
        return 0, 0, 0  # blocks on the host; a base of any number of bits
    if request.method in OPTIMIZER_METHODS:  # what they keep beside the weights is their own
        return sizes.num_params * _itemsize(request) if request.gpus == 1 and not request.offload else 0, 0, 0
    params, trained, copies = sizes.num_params, sizes.num_trained, TORCH_COPIES.get(request.optimizer, 0)
    size = _itemsize(request)
    grads = size * trained
    parts = {part.partition(":")[0] for part in request.offload}
    if request.strategy.startswith("zero"):
        ranks = request.gpus
        weights = 0 if "param" in parts else size * params // (ranks if request.strategy == "zero3" else 1)
        if parts:
            return weights, 0, 0
        masters = _FULL * trained if request.precision in MIXED else 0
        mine = grads // ranks
        return weights + (masters + copies * _FULL * trained) // ranks, mine, grads if request.strategy == "zero1" else mine
    if request.strategy.startswith(("fsdp", "hsdp")):
        if parts:
            return 0, 0, 0
        ranks = request.gpus // (request.nodes if request.strategy == "hsdp" else 1)
        stored = _FULL if request.precision in MIXED else size
        return (stored * params + copies * stored * trained) // ranks, stored * trained // ranks, grads
    if request.strategy == "release":
        grads = 0
    return size * params + copies * size * trained, grads, grads


def _itemsize(request: Request) -> int:
    return ITEMSIZE[PARAM_DTYPE[request.precision]]


@dataclass(frozen=True)
class Micro:
    """One micro step of a trace: the most that its own tensors hold at a time, and the seconds of its ops on the GPU."""

    activation_bytes: int
    compute_s: float
    sizes: Sizes


def micro_of(trace: StepTrace, request: Request) -> Micro:
    """Of a trace on the request's GPU."""
    kept = np.isin(trace.storage_role, _KEPT)
    storage = trace.event_arg
    change = np.zeros(len(storage) + 1, np.int64)
    change[0] = trace.storage_bytes[list(trace.batch_storages)].sum()
    for kind, sign in ((EventKind.ALLOC, 1), (EventKind.FREE, -1)):
        at = np.flatnonzero(trace.event_kind == kind)
        at = at[kept[storage[at]]]
        change[at + 1] = sign * trace.storage_bytes[storage[at]]
    seconds = OpTable(trace).seconds(request.device)
    return Micro(int(np.cumsum(change).max()), float(seconds[trace.op_signature].sum()), Sizes.of(trace))


class Bounds:
    """Bounds of many configurations, from as few traces as will do.

    A micro step that was not traced yet is bounded by traces at hand: recomputing adds ops, and a sample of a smaller micro
    batch takes no less time than one of a larger (the second holds for every GPU of the catalogue but for the last tiles of a
    product, so a margin is left).
    """

    MARGIN = 0.9

    def __init__(self, traces: TraceSource) -> None:
        self._traces = traces
        self._micro: dict[Any, dict[int, Micro]] = {}
        self._refused: dict[Any, str] = {}
        self._sizes: Sizes | None = None

    def known(self, request: Request) -> bool:
        """Whether the request's own micro step was traced; for selective recompute, what it chooses between."""
        if is_selective(request.recompute):
            return all(self.known(request.but(recompute=end)) for end in _ENDS)
        return request.micro_batch_size in self._micro.get(_family(request), {})

    def look(self, request: Request) -> str:
        """Traces the request's micro step; why that cannot be, or ""."""
        if is_selective(request.recompute):
            return next(filter(None, (self.look(request.but(recompute=end)) for end in _ENDS)), "")
        try:
            found = micro_of(self._traces.step(request), request)
        except (CannotTell, UserError) as error:
            return str(error)
        self._micro.setdefault(_family(request), {})[request.micro_batch_size] = found
        if request.method == "full":
            self._sizes = found.sizes
        return ""

    def floor_bytes(self, request: Request) -> int:
        """What the run needs on the GPU at least."""
        micro = self._micro.get(_family(request), {}).get(request.micro_batch_size)
        sizes = micro.sizes if micro and request.method == "full" else self._sizes
        resident, grads, accumulated = state_bytes(request, sizes) if sizes else (0, 0, 0)
        activations = micro.activation_bytes if micro else 0
        return resident + max(grads, activations + (accumulated if request.loop.grad_accum_steps > 1 else 0))

    def floor_s(self, request: Request) -> float:
        """What a step takes at least."""
        passes = request.loop.grad_accum_steps
        return passes * self._micro_s(request) + self._host_s(request)

    def _micro_s(self, request: Request) -> float:
        if is_selective(request.recompute):
            return self._micro_s(request.but(recompute="none"))
        samples = request.micro_batch_size
        own = self._micro.get(_family(request), {})
        if samples in own:
            return own[samples].compute_s
        plain = self._micro.get(_family(request.but(recompute="none")), {}) if request.recompute != "none" else {}
        found = [m.compute_s for n, m in plain.items() if n == samples]
        found += [self.MARGIN * samples / n * m.compute_s for known in (own, plain) for n, m in known.items() if n > samples]
        return max(found, default=0.0)

    def _host_s(self, request: Request) -> float:
        """The optimizer step on the host comes after backward."""
        offloaded = any(part.startswith("optimizer") for part in request.offload)
        if self._sizes is None or not offloaded or request.optimizer not in ("adam", "adamw") or request.method != "full":
            return 0.0
        return self._sizes.num_trained / request.gpus / cpu_adam_per_s(request.device, request.gpus // request.nodes)


def _family(request: Request) -> Any:
    """Configurations with one of these have one micro step for each micro batch."""
    traced = traced_as(request)
    prepared = request.method if request.method in ZEROTH_ORDER else ""
    return trace_options(traced.but(micro_batch_size=1)), prepared
