"""DeepSpeedCPUAdam of deepspeed 0.19.8: Adam on the host, for parameters that ZeRO-Offload keeps there.

State: two fp32 tensors on the host whatever the parameter's dtype (`fp32_optimizer_states=false`: of its dtype).  The step is
one C++ kernel in place.  `torch.zeros_like` makes the state, so it is pageable memory even where the parameters are pinned.
Source: deepspeed/ops/adam/cpu_adam.py, `DeepSpeedCPUAdam.step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ledger import Tier
from .entry import Entry
from .rule import OptimizerTensor
from .tape import FP32, DocumentedRule, Tape, in_order


@dataclass(frozen=True)
class DeepSpeedCPUAdam(DocumentedRule):
    name: str = "deepspeed-cpu-adam"
    impl: str = "default"
    fp32_optimizer_states: bool = True
    steps_one = False

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        for tape.tensor, p in in_order(tensors):
            if first:
                for _ in ("exp_avg", "exp_avg_sq"):
                    tape.state(FP32 * p.numel if self.fp32_optimizer_states else p.nbytes, Tier.HOST_PAGEABLE)


ENTRIES = (
    Entry(
        "deepspeed-cpu-adam",
        "deepspeed",
        "0.19.8",
        "Adam on the host, behind ZeRO-Offload",
        "8 on the host; 2*s with fp32_optimizer_states=false",
        "none",
        "deepspeed/ops/adam/cpu_adam.py: DeepSpeedCPUAdam.step",
        rule=DeepSpeedCPUAdam,
        not_with=("parameters on a GPU: it asserts that they are on the host, so it comes with --offload optimizer",),
    ),
)
