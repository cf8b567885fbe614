"""StableAdamW of torch-optimi 0.3.3, with its Triton kernels, the default on a GPU.

State: exp_avg and exp_avg_sq (n*s each, in the parameter's dtype), a compensation of n*s for Kahan summation if the parameter
is 16-bit (one byte if not, which the kernel wants to point at), eps squared as a scalar of the parameter's dtype, and a
scratch of 4 bytes.  The kernels work in place.
Source: optimi/stableadamw.py, `StableAdamW._init_state`, `_triton_stableadamw`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..trace.steptrace import ITEMSIZE
from .entry import Entry
from .rule import OptimizerTensor
from .tape import FP32, DocumentedRule, Tape, in_order, is_half


@dataclass(frozen=True)
class StableAdamW(DocumentedRule):
    name: str = "stable-adamw"
    impl: str = "default"
    kahan_sum: bool = True

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        if not first:
            return
        for tape.tensor, p in in_order(tensors):
            compensation = p.nbytes if self.kahan_sum and is_half(p) else 1
            for nbytes in (p.nbytes, p.nbytes, ITEMSIZE[p.dtype], compensation, FP32):
                tape.state(nbytes)


ENTRIES = (
    Entry(
        "stable-adamw",
        "torch-optimi",
        "0.3.3",
        "AdamW with update clipping and Kahan summation",
        "3*s of a 16-bit parameter (2*s with kahan_sum=false), 2*s of an fp32 one",
        "none: Triton kernels in place",
        "optimi/stableadamw.py: _init_state",
        rule=StableAdamW,
        not_with=("foreach=True or triton=False, whose temporaries are others",),
        aliases=("stable_adamw",),
    ),
)
