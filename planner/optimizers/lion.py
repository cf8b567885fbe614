"""Lion of lion-pytorch 0.2.5: one momentum of the parameter's dtype.

State: `exp_avg`, n*s.  Step: `exp_avg.clone().mul_(b1).add(grad)` makes a clone and a sum, so 2*n*s for the parameter at
hand.
Source: lion_pytorch/lion_pytorch.py, `update_fn` and `Lion.step` (use_triton=False, the default).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .entry import Entry
from .rule import OptimizerTensor
from .tape import DocumentedRule, Tape, in_order


@dataclass(frozen=True)
class Lion(DocumentedRule):
    name: str = "lion"
    impl: str = "default"

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        for tape.tensor, p in in_order(tensors):
            if first:
                tape.state(p.nbytes)
            tape.chain("update", p.nbytes, p.nbytes)
            tape.drop("update")  # update_fn returns


ENTRIES = (
    Entry(
        "lion",
        "lion-pytorch",
        "0.2.5",
        "sign momentum; one state of the parameter's dtype",
        "s",
        "2*n*s of one parameter",
        "lion_pytorch/lion_pytorch.py: update_fn",
        rule=Lion,
        checked="state and transient",
    ),
)
