"""FusedLAMB of NVIDIA's Apex: two moments of the parameter's dtype, and the update written over the gradient.

State: `exp_avg` and `exp_avg_sq`, n*s each, and a 4-byte overflow flag that the constructor makes.  The two kernels keep the
update in the gradient's own memory, so a step makes norms only: 320 partial sums for a list, and for each of its tensors one
sum for every 65 536 elements of the largest.
Sources: apex/optimizers/fused_lamb.py, `FusedLAMB.step`; csrc/multi_tensor_lamb.cu, `multi_tensor_lamb_cuda`;
csrc/multi_tensor_l2norm_kernel.cu, `multi_tensor_l2norm_cuda` (master, commit 16fadfe).  It needs a CUDA extension: nothing
was run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UserError
from .entry import Entry
from .rule import OptimizerTensor
from .tape import FP32, DocumentedRule, Tape, blocks_of, in_order

CHUNK = 65_536  # elements (apex/multi_tensor_apply/__init__.py, 2048 * 32)
_PARTIAL = 320 * FP32
_DTYPES = ("float16", "float32")


@dataclass(frozen=True)
class ApexLamb(DocumentedRule):
    name: str = "apex-lamb"
    impl: str = "default"

    def check(self, tensors: Sequence[OptimizerTensor]) -> None:
        other = next((p for p in tensors if p.dtype not in _DTYPES), None)
        if other is not None:
            raise UserError(
                f"--optimizer {self.name}: it takes fp16 and fp32 parameters, got {other.dtype}", "Use --precision fp32"
            )

    def build(self, tape: Tape, tensors: Sequence[OptimizerTensor]) -> None:
        tape.state(FP32)  # _dummy_overflow_buf, int32

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        for _ in _DTYPES:
            tape.bind("norm", FP32)
            tape.flash(_PARTIAL, FP32)
        for group in sorted({p.group for p in tensors}):
            members = [(i, p) for i, p in in_order(tensors) if p.group == group]
            if first:
                for tape.tensor, p in members:
                    tape.state(p.nbytes)
                    tape.state(p.nbytes)
            tape.tensor = -1
            for dtype in _DTYPES:
                sizes = [p.numel for _, p in members if p.dtype == dtype]
                if sizes:
                    partial = len(sizes) * max(blocks_of(n, CHUNK) for n in sizes) * FP32
                    for name in ("param_norm", "update_norm"):
                        tape.bind(name, len(sizes) * FP32)
                        tape.flash(_PARTIAL, partial)
                    tape.drop("param_norm", "update_norm")


ENTRIES = (
    Entry(
        "apex-lamb",
        "apex",
        "16fadfe",
        "LAMB with fused kernels, the update written over the gradient",
        "2*s",
        "norms only",
        "apex/optimizers/fused_lamb.py: FusedLAMB.step, csrc/multi_tensor_lamb.cu",
        rule=ApexLamb,
        not_with=("bf16 parameters", "gradients that are read after the step: they hold the update"),
        aliases=("fused-lamb",),
        checked="nothing",
    ),
)
