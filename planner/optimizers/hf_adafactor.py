"""Adafactor of transformers 5.24: factored second moments, always fp32, and an fp32 copy of the parameter inside the step.

State: 4*(n/C + n/R) for two dimensions and more (the last two are factored), 4*n below, 4*n more with `beta1`, and the RMS of
the parameter (4 bytes).  Step: grad and parameter in fp32 (16-bit only), grad^2, its sum with eps, and the update of the
parameter before, which the loop variable still holds: 16*n + 4*prev bytes for 16-bit parameters, 8*n + 4*prev for fp32.
Source: transformers/optimization.py, `Adafactor.step`, `_approx_sq_grad`, `_rms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .entry import Entry
from .rule import OptimizerTensor
from .tape import FP32, DocumentedRule, Tape, in_order, is_half


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Elements of `shape[:-1]` and of `shape[:-2] + shape[-1:]`: what factoring the last two dimensions keeps."""
    numel = OptimizerTensor(shape, "float32").numel
    if not numel:
        return OptimizerTensor(shape[:-1], "float32").numel, OptimizerTensor((*shape[:-2], shape[-1]), "float32").numel
    return numel // shape[-1], numel // shape[-2]


@dataclass(frozen=True)
class HfAdafactor(DocumentedRule):
    name: str = "hf-adafactor"
    impl: str = "default"
    momentum: bool = False  # beta1 is given

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        for tape.tensor, p in in_order(tensors):
            wide = FP32 * p.numel
            tape.drop("grad")  # grad = p.grad
            if is_half(p):
                tape.bind("grad", wide)
            make_factors(tape, p.shape, momentum=self.momentum, first=first)
            tape.drop("p_data_fp32")
            if is_half(p):
                tape.bind("p_data_fp32", wide)
            tape.flash(FP32, FP32)  # the norm of the parameter and its quotient
            update_from_factors(tape, p.shape)
            if self.momentum:
                tape.drop("update")  # update = exp_avg
            tape.flash(wide)  # add_(-update)


def make_factors(tape: Tape, shape: tuple[int, ...], *, momentum: bool, first: bool) -> None:
    """The state of one parameter or projected gradient of `shape`; fp32."""
    if not first:
        return
    numel = OptimizerTensor(shape, "float32").numel
    if momentum:
        tape.state(FP32 * numel)
    for size in rows_and_columns(shape) if len(shape) >= 2 else (numel,):
        tape.state(FP32 * size)
    tape.state(FP32)  # RMS, a tensor from the first step on


def update_from_factors(tape: Tape, shape: tuple[int, ...]) -> None:
    """From `update = (grad**2) + eps` to the division by its RMS; binds `update`."""
    wide = FP32 * OptimizerTensor(shape, "float32").numel
    tape.chain("update", wide, wide)
    if len(shape) >= 2:
        rows, columns = (FP32 * size for size in rows_and_columns(shape))
        tape.flash(rows)
        tape.flash(columns)
        tape.chain("r_factor", rows // shape[-2] if shape[-2] else 0, rows)
        tape.bind("c_factor", columns)
        tape.bind("approximation", wide)
        tape.drop("r_factor", "c_factor")  # _approx_sq_grad returns
        tape.rename("approximation", "update")
    else:
        tape.bind("update", wide)
    tape.flash(FP32, FP32)


ENTRIES = (
    Entry(
        "hf-adafactor",
        "transformers",
        "5.24.0",
        "factored second moments in fp32, as transformers' Trainer uses them",
        "4*(rows + columns) of a matrix, 4 of a vector; +4 with momentum=true",
        "16*n + 4*previous bytes for 16-bit parameters, 8*n + 4*previous for fp32",
        "transformers/optimization.py: Adafactor.step",
        rule=HfAdafactor,
        not_with=(
            "torch.optim's own Adafactor is another one: --optimizer adafactor keeps its factors in the gradient's dtype",
        ),
        checked="state and transient",
    ),
)
