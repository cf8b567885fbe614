"""APOLLO of apollo-torch 1.0.3: Adam's scaling, learned on a random projection of the gradient and applied to the full one.

State of a projected R x C matrix (mn, mx: its smaller and larger side): two moments of rank*mx and the projector of rank*mn,
which stays between refreshes although it could be drawn again from its seed; one number for the norm-growth limiter.  All in
the gradient's dtype. Step: the low-rank gradient, denominator and quotient (rank*mx*g each), the scaled gradient and, from
the second step on, the limited one (2*n*g). Refresh (every 200 steps): an fp32 copy of a 16-bit gradient, only to read its
shape, and the random matrix twice.  `later` has one.
Sources: apollo_torch/apollo.py, `AdamW.step`; random_projector.py, `get_orthogonal_matrix` (proj random, proj_type std).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UserError
from ..trace.steptrace import ITEMSIZE
from .entry import Entry
from .lowrank import Projection, check_rank, others_first
from .rule import OptimizerTensor
from .tape import FP32, DocumentedRule, Tape, is_half


@dataclass(frozen=True)
class Apollo(DocumentedRule):
    name: str = "apollo-adamw"
    impl: str = "default"
    rank: int = 128
    scale_type: str = "channel"
    targets: tuple[str, ...] = ("attn", "mlp")  # words in the names of the weights that are projected, or all-linear

    def __post_init__(self) -> None:
        check_rank(self.name, self.rank)
        if self.scale_type not in ("channel", "tensor"):
            raise UserError(f"--optimizer {self.name}: scale_type={self.scale_type}: expected channel or tensor")

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        for tape.tensor, p, low in others_first(tensors, self.targets):
            size = ITEMSIZE[p.dtype]
            tape.drop("grad")
            if not low:
                if first:
                    tape.state(p.nbytes)
                    tape.state(p.nbytes)
                tape.bind("denom", p.nbytes)
                tape.bind("norm_grad", p.nbytes)
                continue
            rows, columns = p.shape
            sizes = Projection(rows, columns, self.rank)
            small = size * sizes.gradient
            _project(tape, sizes, p, first=first)
            tape.bind("grad", small)
            if first:
                tape.state(small)
                tape.state(small)
            tape.bind("denom", small)
            tape.bind("norm_grad", small)
            each = size * (sizes.large if self.scale_type == "channel" else 1)
            tape.bind("low_norm", each)
            tape.chain("sum", each, each)
            tape.bind("grad_scaling_factor", each)
            tape.drop("low_norm", "sum")
            tape.bind("scaled_grad", p.nbytes)
            if first:
                tape.state(size)  # state["scaled_grad"], its norm
            else:
                for name in ("scaled_grad_norm", "limiter"):
                    tape.bind(name, size)
                tape.bind("scaled_grad", p.nbytes)
            tape.drop("norm_grad")  # norm_grad = scaled_grad


def _project(tape: Tape, sizes: Projection, p: OptimizerTensor, *, first: bool) -> None:
    wide, kept = FP32 * sizes.projector, p.nbytes // p.numel * sizes.projector if p.numel else 0
    if is_half(p):
        tape.bind("matrix", FP32 * p.numel)
        tape.chain("proj", wide, wide)
    else:
        tape.bind("randn", wide)
    if first:
        tape.state(kept)
    else:
        tape.bind("ortho_matrix", kept)
    tape.drop("randn", "matrix", "proj", "ortho_matrix")


@dataclass(frozen=True)
class ApolloMini(Apollo):
    """Rank 1, one scale for the whole tensor (the paper's APOLLO-Mini)."""

    name: str = "apollo-mini"
    rank: int = 1
    scale_type: str = "tensor"


def _entry(rule: type[Apollo], summary: str, aliases: tuple[str, ...]) -> Entry:
    return Entry(
        rule.name,
        "apollo-torch",
        "1.0.3",
        summary,
        "per projected matrix s*(r*mn + 2*r*mx) and one number; else 2*s",
        "2*n*g + 3*r*mx*g; at a refresh the gradient in fp32",
        "apollo_torch/apollo.py: step, random_projector.py: get_orthogonal_matrix",
        rule=rule,
        not_with=(
            "sharded parameters (ZeRO, FSDP): the projection needs the whole gradient",
            "its layer-wise form (the step inside backward) with accumulation or DDP: transformers refuses both",
        ),
        aliases=aliases,
        checked="state and transient",
    )


ENTRIES = (
    _entry(Apollo, "AdamW's scaling learned on a random projection to rank r", ("apollo_adamw",)),
    _entry(ApolloMini, "APOLLO with rank 1 and one scale for the tensor", ()),
)
