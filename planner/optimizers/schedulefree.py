"""Schedule-free AdamW, RAdam and SGD of schedulefree 1.4.1: the averaged point is not stored, the fast one is.

State: `z`, a copy of the parameter, and for AdamW and RAdam `exp_avg_sq`; both of the parameter's dtype.  There is no first
moment.  Step: foreach, as everywhere torch has it: one list of denominators, held until the next group's is there.  The
gradient is normalised in place.  RAdam makes no denominators in its first steps; `later` is one with them.
Sources: schedulefree/adamw_schedulefree.py, radam_schedulefree.py, sgd_schedulefree.py, `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .entry import Entry
from .rule import OptimizerTensor
from .tape import DocumentedRule, Tape, in_order


@dataclass(frozen=True)
class ScheduleFree(DocumentedRule):
    name: str = "schedule-free-adamw"
    impl: str = "default"
    kind: str = "adamw"

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        held: list[str] = []
        for group in sorted({p.group for p in tensors}):
            members = [(i, p) for i, p in in_order(tensors) if p.group == group]
            if first:
                for tape.tensor, p in members:
                    tape.state(p.nbytes)
                    if self.kind != "sgd":
                        tape.state(p.nbytes)
            if self.kind == "adamw" or (self.kind == "radam" and not first):
                for tape.tensor, p in members:
                    tape.bind(f"denom{tape.tensor}", p.nbytes)
                tape.drop(*held)
                held = [f"denom{i}" for i, _ in members]


def _entry(kind: str, summary: str) -> Entry:
    return Entry(
        f"schedule-free-{kind}",
        "schedulefree",
        "1.4.1",
        summary,
        "s" if kind == "sgd" else "2*s",
        "none" if kind == "sgd" else "one foreach list: the size of a parameter group",
        f"schedulefree/{kind}_schedulefree.py: step",
        rule=ScheduleFree,
        fixed={"kind": kind},
        not_with=("evaluation and saving without optimizer.eval() before them",),
        aliases=(f"schedule_free_{kind}",),
        checked="state and transient",
    )


ENTRIES = (
    _entry("adamw", "schedule-free AdamW: the fast iterate instead of a first moment"),
    _entry("radam", "schedule-free RAdam: the fast iterate instead of a first moment"),
    _entry("sgd", "schedule-free SGD with momentum: the fast iterate"),
)
