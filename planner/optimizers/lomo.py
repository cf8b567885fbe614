"""LOMO and AdaLomo of lomo-optim 0.1.1: the parameter is updated inside backward, in fp32, and its gradient dropped at once.

Both hook the gradient *tensor*, before it is accumulated: when the hook of one parameter runs, the `.grad` that it finds is
that of the parameter before, and the last one is stepped after backward.  So two gradients live at a time. LOMO keeps
nothing.  AdaLomo keeps 4*(rows + columns) of a matrix and 4*n of a vector, made by the constructor. Step of a 16-bit
parameter: its gradient in fp32, (`.grad` goes), [the squares, the update, its row and column factors,] the parameter in fp32:
8*n bytes, AdaLomo 12*n.
Sources: lomo_optim/lomo.py, `Lomo.fuse_update`; lomo_optim/adalomo.py, `AdaLomo.__init__`, `fuse_update`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UserError
from .entry import Entry
from .hf_adafactor import update_from_factors
from .rule import OptimizerTensor
from .tape import FP32, DocumentedRule, Tape, in_order, is_half


@dataclass(frozen=True)
class Lomo(DocumentedRule):
    name: str = "lomo"
    impl: str = "default"
    in_backward = True

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        for tape.tensor, p in in_order(tensors):
            wide = FP32 * p.numel if is_half(p) else 0  # `.to(float32)` of an fp32 tensor is the tensor
            tape.bind("grad_fp32", wide)
            if is_half(p):
                tape.drop_grad()
            tape.bind("p_fp32", wide)
            if not is_half(p):
                tape.drop_grad()  # grad_fp32 is the gradient, until the loop goes on


@dataclass(frozen=True)
class AdaLomo(DocumentedRule):
    name: str = "adalomo"
    impl: str = "default"
    in_backward = True

    def check(self, tensors: Sequence[OptimizerTensor]) -> None:
        for p in tensors:
            if len(p.shape) not in (1, 2):
                raise UserError(
                    f"--optimizer adalomo: {p.name or 'a parameter'} has {len(p.shape)} dimensions: not 1 or 2",
                    "Use lomo, or freeze it",
                )

    def build(self, tape: Tape, tensors: Sequence[OptimizerTensor]) -> None:
        for tape.tensor, p in in_order(tensors):
            for size in p.shape:
                tape.state(FP32 * size)

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        for tape.tensor, p in in_order(tensors):
            wide = FP32 * p.numel if is_half(p) else 0
            tape.bind("grad_fp32", wide)
            if is_half(p):
                tape.drop_grad()
            update_from_factors(tape, p.shape)
            tape.bind("p_fp32", wide)
            tape.flash(FP32, FP32)
            if not is_half(p):
                tape.drop_grad()


_NOT_WITH = (
    "gradient accumulation: the gradient is gone when the hook returns",
    "DDP: its reducer wants the gradients",
    "clipping by norm costs a second full backward, which is not modelled",
    "fp16 with loss scaling (LOMO's own scaler needs clipping)",
)
ENTRIES = (
    Entry(
        "lomo",
        "lomo-optim",
        "0.1.1",
        "SGD inside backward, no state, two gradients at a time",
        "0",
        "8*n of one 16-bit parameter; nothing for fp32",
        "lomo_optim/lomo.py: fuse_update",
        rule=Lomo,
        not_with=_NOT_WITH,
        checked="state and transient",
    ),
    Entry(
        "adalomo",
        "lomo-optim",
        "0.1.1",
        "LOMO with factored second moments in fp32",
        "4*(rows + columns) of a matrix, 4 of a vector; of frozen parameters too",
        "12*n of one 16-bit parameter, 8*n of an fp32 one",
        "lomo_optim/adalomo.py: fuse_update",
        rule=AdaLomo,
        not_with=(*_NOT_WITH, "parameters of more than two dimensions", "a machine without CUDA: it calls .cuda()"),
        checked="state and transient",
    ),
)
