"""Host memory as DeepSpeed's offload engines use it: what is page-locked, what is not, and the optimizer that steps there.

Source: deepspeed 0.19.8, accelerator/abstract_accelerator.py (`pin_memory`), ops/adam (`DeepSpeedCPUAdam`, `FusedAdam`).
`pin_memory` copies: for a moment the pageable tensor and its page-locked copy both live.  On a machine without a GPU it is the
tensor itself.  Sizes are as asked for; what the pinned allocator makes of them is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..ledger import Component, Tier
from ..optimizers.rule import OptimizerRule, OptimizerTensor, StepEvent, StepEvents, StepKind
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE
from .deepspeed_settings import DeepSpeedSettings

FP32 = 4  # bytes; masters, their gradients and the optimizer's states
FP64 = 8  # bytes; norms are taken in fp64 (deepspeed/runtime/zero/utils.py, `get_norm_dtype`)


def master_dtype(settings: DeepSpeedSettings) -> str:
    """Of masters and of the gradients that are stepped."""
    if settings.fp16_master_weights_and_grads:
        return "float16"
    return "bfloat16" if settings.bf16_master_weights_and_grads else "float32"


def host_tier(pins: bool) -> Tier:
    return Tier.HOST_PINNED if pins else Tier.HOST_PAGEABLE


class HostTensors:
    """Makes the tensors of one engine on the host.  `pins`: `pin_memory` of its offload configuration."""

    def __init__(self, sim: Simulation, pins: bool) -> None:
        self._sim = sim
        self._pins = pins
        self._bound: dict[str, Block] = {}

    def make(self, component: Component, nbytes: int, what: str, *, name: str = "", pins: bool | None = None) -> Block:
        """A tensor that is pinned where the engine pins.  `name`: of the variable that holds the pageable one until it is bound
        again; none: it goes as soon as its copy is there."""
        pins = self._pins if pins is None else pins
        copies = pins and self._sim.target != "cpu"
        block = self._sim.alloc(component, nbytes, what=what, tier=host_tier(pins and not copies))
        if not copies:
            return block
        if name:
            self.drop(name)
        pinned = self._sim.alloc(component, nbytes, what=what, tier=Tier.HOST_PINNED)
        if name:
            self._bound[name] = block
        else:
            self._sim.free(block)
        return pinned

    def drop(self, *names: str) -> None:
        """The variables are bound again, or their function returns."""
        for name in names:
            if (block := self._bound.pop(name, None)) is not None:
                self._sim.free(block)


class Adam:
    """The optimizer behind a wrapper: DeepSpeed's own Adam (two states, no temporaries), or the simulation's rule."""

    def __init__(self, own: bool, settings: DeepSpeedSettings) -> None:
        self._own = own
        self.dtype = master_dtype(settings)
        self._keeps_fp32 = not settings.bf16_optimizer_states

    @property
    def itemsize(self) -> int:
        """Bytes of a master's element."""
        return ITEMSIZE[self.dtype]

    def events(self, sim: Simulation, elements: int) -> StepEvents:
        """Of one flat partition."""
        return self.rule(sim).step([OptimizerTensor((elements,), self.dtype)])

    def rule(self, sim: Simulation) -> OptimizerRule:
        if self._own:
            from ..optimizers.deepspeed_cpu_adam import DeepSpeedCPUAdam  # FusedAdam keeps the same two, where it steps

            return DeepSpeedCPUAdam(fp32_optimizer_states=self._keeps_fp32)
        return sim.optimizer


def play(sim: Simulation, events: Iterable[StepEvent], tier: Tier, *names: str) -> None:
    """The events of an optimizer's step whose tensors, of these names, lie in `tier`, wherever its rule puts them."""
    temporaries: dict[int, Block] = {}
    for event in events:
        fqn = names[event.tensor] if 0 <= event.tensor < len(names) else ""
        if event.kind is StepKind.FREE:
            sim.free(temporaries.pop(event.slot))
        elif event.kind is StepKind.STATE:
            sim.alloc(Component.OPTIMIZER_STATE, event.nbytes, fqn, "optimizer state", tier)
        elif event.kind is StepKind.TEMP:
            temporaries[event.slot] = sim.alloc(Component.TEMP, event.nbytes, fqn, "optimizer step", tier)
    for block in temporaries.values():
        sim.free(block)
