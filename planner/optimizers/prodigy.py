"""Prodigy of prodigyopt 1.1.2: Adam that estimates its own learning rate, for four states.

State, all of the parameter's dtype: exp_avg, exp_avg_sq, and two of one element in `slice_p`: s, and p0, the parameter as it
was.  A parameter that is all zeros at the start (a bias of a fresh model) keeps one number as p0; fine-tuning has none, and
none is taken here.  Step: the distance from p0 and the magnitudes of s, each dropped at once, then one square root, held
until the next is there.
Source: prodigyopt/prodigy.py, `Prodigy.step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UserError
from ..trace.steptrace import ITEMSIZE
from .entry import Entry
from .rule import OptimizerTensor
from .tape import DocumentedRule, Tape, blocks_of, in_order


@dataclass(frozen=True)
class Prodigy(DocumentedRule):
    name: str = "prodigy"
    impl: str = "default"
    slice_p: int = 1

    def __post_init__(self) -> None:
        if self.slice_p < 1:
            raise UserError(f"--optimizer prodigy: slice_p={self.slice_p}: must be at least 1")

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        for tape.tensor, p in in_order(tensors):
            sliced = blocks_of(p.numel, self.slice_p) * ITEMSIZE[p.dtype]
            if first:
                for nbytes in (sliced, sliced, p.nbytes, p.nbytes):
                    tape.state(nbytes)
            tape.flash(sliced)  # p0 - p
            tape.flash(sliced)  # s.abs()
        for tape.tensor, p in in_order(tensors):
            tape.bind("denom", p.nbytes)


ENTRIES = (
    Entry(
        "prodigy",
        "prodigyopt",
        "1.1.2",
        "Adam that estimates its learning rate",
        "4*s; 2*s + 2*s/slice_p",
        "2*n*s of two neighbours: the last square root stays until the next is there",
        "prodigyopt/prodigy.py: step",
        rule=Prodigy,
        checked="state and transient",
    ),
)
