"""torchao 0.18.0: AdamW and Adam with 8-bit, 4-bit and fp8 states, and optimizer steps on the host (CPUOffloadOptimizer).

State of a parameter of n elements, twice (exp_avg, exp_avg_sq): codes (n, n/2 or n bytes), one fp32 scale for every block
(256; 4-bit: 128), and a code book of its own (1 KiB; 4-bit: 64 bytes; fp8: none), if n >= 4096 and the block divides n; else
a plain tensor of the *parameter's* dtype.  The step counter stays on the host.
Sources: torchao/optim/adam.py, `_AdamBase._new_buffer`; subclass_8bit.py, subclass_4bit.py, subclass_fp8.py, `zeros`.

Step: `torch.compile(single_param_adam)` for each distinct shape.  What the compiled kernel keeps is Inductor's choice.  On
the CPU it was measured as 8*n bytes (two fp32 buffers, the new moments before they are quantised again) for 8 bits and
nothing for fp8.  The 8*n are taken for 8 and 4 bits on CUDA as an upper bound: the library's own Llama-2-7B peaks (39.1 and
33.2 GiB) leave no more room for its largest parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UserError
from ..ledger import Tier
from .entry import Entry
from .rule import OptimizerTensor
from .tape import FP32, DocumentedRule, Tape, in_order

SMALLEST = 4096  # elements (adam.py, `_new_buffer`; cpu_offload.py, `minimal_size`)
_STATES = ("exp_avg", "exp_avg_sq")
# format -> (bytes of the codes of 2 elements, of the code book, of the transient of one element)
_FORMATS = {"8bit": (2, 256 * FP32, 2 * FP32), "4bit": (1, 16 * FP32, 2 * FP32), "fp8": (2, 0, 0)}


@dataclass(frozen=True)
class TorchaoAdam(DocumentedRule):
    name: str = "torchao-adamw-8bit"
    impl: str = "default"
    format: str = "8bit"
    block_size: int = 256

    def __post_init__(self) -> None:
        if self.block_size < 1 or (self.format == "4bit" and self.block_size % 2):
            raise UserError(f"--optimizer {self.name}: block_size={self.block_size}: expected a positive (4-bit: even) number")

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        codes, book, transient = _FORMATS[self.format]
        for tape.tensor, p in in_order(tensors):
            quantised = p.numel >= SMALLEST and p.numel % self.block_size == 0
            if first:
                for _ in _STATES:
                    if quantised:
                        tape.state(p.numel * codes // 2)
                        tape.state(p.numel // self.block_size * FP32)
                        tape.state(book)
                    else:
                        tape.state(p.nbytes)
            if quantised:
                tape.flash(p.numel * transient)


@dataclass(frozen=True)
class TorchaoAdam4bit(TorchaoAdam):
    """The 4-bit classes have blocks of 128 by default."""

    format: str = "4bit"
    block_size: int = 128


@dataclass(frozen=True)
class TorchaoCpuOffload(DocumentedRule):
    """AdamW on the host for every parameter of 4096 elements and more; the rest is stepped on the GPU, fused.

    Pinned: a copy of the parameter and its gradient, both of the parameter's dtype (no fp32 master), made by the constructor.
    Pageable: the two states.  `offload_gradients` frees the GPU's gradient inside backward, which a step does not show.
    Source: torchao/optim/cpu_offload.py, `CPUOffloadOptimizer`.
    """

    name: str = "torchao-cpu-offload"
    impl: str = "default"
    minimal_size: int = SMALLEST
    steps_one = False

    def build(self, tape: Tape, tensors: Sequence[OptimizerTensor]) -> None:
        for tape.tensor, p in in_order(tensors):
            if p.numel >= self.minimal_size:
                tape.state(p.nbytes, Tier.HOST_PINNED)
                tape.state(p.nbytes, Tier.HOST_PINNED)

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        if not first:
            return
        small = [(i, p) for i, p in in_order(tensors) if p.numel < self.minimal_size]
        large = [(i, p) for i, p in in_order(tensors) if p.numel >= self.minimal_size]
        for tape.tensor, p in small:  # the optimizer of the small ones steps first; a fused one's counter is on the GPU
            for nbytes in (FP32, p.nbytes, p.nbytes):
                tape.state(nbytes)
        for tape.tensor, p in large:
            for nbytes in (FP32, p.nbytes, p.nbytes):
                tape.state(nbytes, Tier.HOST_PAGEABLE)


def _entry(kind: str, form: str, title: str) -> Entry:
    codes, book, transient = _FORMATS[form]
    block = 128 if form == "4bit" else 256
    kept = 2 * (codes / 2 + FP32 / block)
    trainer = {"adamw-8bit": ("adamw_torch_8bit",), "adamw-4bit": ("adamw_torch_4bit",)}.get(f"{kind}-{form}", ())
    return Entry(
        f"torchao-{kind}-{form}",
        "torchao",
        "0.18.0",
        f"{title}; a compiled step",
        f"{kept:.6g}{f' (+{2 * book} bytes a parameter tensor)' if book else ''} from 4096 elements on; else 2*s",
        f"at most {transient}*n of one parameter (an upper bound)" if transient else "none",
        "torchao/optim/adam.py: _AdamBase",
        rule=TorchaoAdam4bit if form == "4bit" else TorchaoAdam,
        fixed={"format": form},
        not_with=(
            f"a parameter whose elements {block} does not divide stays unquantised, in its own dtype",
            "amsgrad",
            *(("GPUs below compute capability 8.9",) if form == "fp8" else ()),
            *(("transformers' Trainer gives block_size=256",) if form == "4bit" else ()),
        ),
        aliases=trainer,
    )


ENTRIES = (
    *(_entry(k, "8bit", "block-wise 8-bit states") for k in ("adamw", "adam")),
    *(_entry(k, "4bit", "block-wise 4-bit states") for k in ("adamw", "adam")),
    *(_entry(k, "fp8", "block-wise float8 states") for k in ("adamw", "adam")),
    Entry(
        "torchao-cpu-offload",
        "torchao",
        "0.18.0",
        "AdamW on the host for all but the smallest parameters",
        "on the host: s of the parameter and s of the gradient pinned, 2*s pageable; below 4096 elements 2*s on the GPU",
        "none on the GPU",
        "torchao/optim/cpu_offload.py: CPUOffloadOptimizer",
        rule=TorchaoCpuOffload,
        not_with=("gradient clipping", "offload_gradients with gradient accumulation", "a learning-rate scheduler"),
        checked="state",
    ),
)
