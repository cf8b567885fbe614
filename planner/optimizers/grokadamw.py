"""GrokAdamW 0.1.2: AdamW with an amplified slow gradient, whose three states live on the host.

State: exp_avg, exp_avg_sq and grok_ema, n*s each in pageable host memory; they belong to the parameter group, not to
`optimizer.state`.  Step: all three are copied to the GPU for the parameter at hand and held until the next one's are there,
beside the scaled slow gradient, its sum with the gradient and the square root: 3*n*s at rest, 5*n*s and what is left of the
one before.
Source: grokadamw/grokadamw.py, `GrokAdamW._update_group`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ledger import Tier
from .entry import Entry
from .rule import OptimizerTensor
from .tape import DocumentedRule, Tape, in_order

_STATES = ("exp_avg", "exp_avg_sq", "grok_ema")


@dataclass(frozen=True)
class GrokAdamW(DocumentedRule):
    name: str = "grokadamw"
    impl: str = "default"

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        group = None
        for tape.tensor, p in in_order(tensors):
            if p.group != group:
                group = p.group
                tape.drop(*_STATES, "grok_grad")  # _update_group returned
            if first:
                for _ in _STATES:
                    tape.state(p.nbytes, Tier.HOST_PAGEABLE)
            # `exp_avg, exp_avg_sq = a, b`: both are there before either name lets go
            tape.bind("new_exp_avg", p.nbytes)
            tape.bind("exp_avg_sq", p.nbytes)
            tape.rename("new_exp_avg", "exp_avg")
            tape.bind("grok_ema", p.nbytes)
            tape.chain("grok_grad", p.nbytes, p.nbytes)  # grad + lamb * grok_ema
            tape.flash(p.nbytes)  # exp_avg_sq.sqrt()


ENTRIES = (
    Entry(
        "grokadamw",
        "grokadamw",
        "0.1.2",
        "AdamW with an amplified slow gradient, states on the host",
        "3*s on the host",
        "up to 5*n*s of one parameter, beside 4*n*s of the one before",
        "grokadamw/grokadamw.py: _update_group",
        rule=GrokAdamW,
        checked="state and transient",
        not_with=(
            "clipping by the norm of all gradients: it clips each by its own",
            "checkpoints: its states are not in state_dict()['state']",
        ),
    ),
)
