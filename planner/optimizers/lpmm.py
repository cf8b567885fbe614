"""The 4-bit AdamW of lpmm (low-bit-optimizers, commit 9033157), with its fused kernel and scales by groups of 128.

State of a parameter of n elements, twice: ceil(n/2) bytes of codes and one fp32 scale for every 128 elements, if n > 4096;
else a tensor of the parameter's dtype.  Two code books of 16 fp32 values serve all parameters.  The fused kernel works in
place.
Sources: lpmm/optim/adamw.py, `_fused_adamw4bit`; lpmm/optim/optimizer.py, `init_qstate`; lpmm/config.py, THRESHOLD. It needs
a CUDA extension, so nothing of this was run: the bytes are those of the source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .entry import Entry
from .rule import OptimizerTensor
from .tape import FP32, DocumentedRule, Tape, blocks_of, in_order

THRESHOLD = 4096  # elements up to which a state stays as it is (lpmm/config.py)
GROUP = 128
CODE_BOOK = 16 * FP32
_STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class LpmmAdamW4bit(DocumentedRule):
    name: str = "lpmm-adamw-4bit"
    impl: str = "default"

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        if not first:
            return
        for _ in _STATES:  # init_qstate moves the code books for every parameter, quantised or not
            tape.state(CODE_BOOK)
        for tape.tensor, p in in_order(tensors):
            for _ in _STATES:
                if p.numel > THRESHOLD:
                    tape.state(blocks_of(p.numel, 2))
                    tape.state(blocks_of(p.numel, GROUP) * FP32)
                else:
                    tape.state(p.nbytes)


ENTRIES = (
    Entry(
        "lpmm-adamw-4bit",
        "lpmm",
        "9033157",
        "4-bit states with scales by groups of 128 (fused=True)",
        f"{2 * (1 / 2 + FP32 / GROUP):.6g} above 4096 elements; else 2*s",
        "none: a fused kernel in place",
        "lpmm/optim/adamw.py: _fused_adamw4bit",
        rule=LpmmAdamW4bit,
        not_with=("the default rank-1 scales (fused=False), which dequantise both moments", "stepping inside backward"),
        checked="nothing",
    ),
)
