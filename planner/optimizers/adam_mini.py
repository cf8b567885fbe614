"""Adam-mini 1.1.1: one second moment for a row, a head or a whole tensor, chosen by the parameter's name.

State: the first moment m (n*s), and vmean in the parameter's dtype: one a head for query and key weights (n /
(dim*dim/n_heads)), one a row for embeddings, heads, values, projections and MLPs, one in all for the rest; biases keep a full
v.  Step: the square of the gradient, then the update and its negative, 2*n*s, beside the update of the parameter before.
Source: adam_mini/adam_mini.py, `Adam_mini.__init__` (the names) and `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UserError
from ..trace.steptrace import ITEMSIZE
from .entry import Entry
from .rule import OptimizerTensor
from .tape import FP32, DocumentedRule, Tape, in_order

_BIAS = ("bias",)
_BY_HEAD = ("k_proj", "q_proj", "wq", "wk", "query", "key")
_BY_ROW = (
    *("embed", "embd", "wte"),
    *("lm_head", "output", "final_layer"),
    *("v_proj", "wv", "value"),
    *("feed_forward", "linear", "mlp"),
    *("o_proj", "wo", "attn.proj"),
)


@dataclass(frozen=True)
class AdamMini(DocumentedRule):
    name: str = "adam-mini"
    impl: str = "default"
    dim: int = 2048  # hidden size; the library's default
    n_heads: int = 32

    def __post_init__(self) -> None:
        if self.dim < 1 or self.n_heads < 1 or self.dim * self.dim % self.n_heads:
            raise UserError(f"--optimizer adam-mini: n_heads={self.n_heads} does not divide dim*dim of dim={self.dim}")

    def moments(self, p: OptimizerTensor) -> int:
        """Elements of the second moment of `p`.  Raises UserError where the library fails."""
        name, per_head = p.name.lower(), self.dim * self.dim // self.n_heads
        if _has(name, _BIAS):
            return p.numel
        if _has(name, _BY_HEAD):
            if p.numel % per_head:
                raise UserError(
                    f"--optimizer adam-mini: {p.name} of {p.numel} elements is no whole number of heads of {per_head} "
                    f"(dim={self.dim}, n_heads={self.n_heads})",
                    "Give the model's sizes: dim=HIDDEN,n_heads=HEADS",
                )
            return p.numel // per_head
        if _has(name, _BY_ROW):
            if len(p.shape) != 2:
                raise UserError(
                    f"--optimizer adam-mini: {p.name} has {len(p.shape)} dimensions and a matrix's name: the library fails"
                )
            return p.shape[0]
        return 1

    def check(self, tensors: Sequence[OptimizerTensor]) -> None:
        for p in tensors:
            self.moments(p)

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        for tape.tensor, p in in_order(tensors):
            name, size = p.name.lower(), ITEMSIZE[p.dtype]
            few = size * self.moments(p)
            by_name = _has(name, _BIAS) or _has(name, _BY_HEAD) or _has(name, _BY_ROW)
            if first:
                if not by_name:
                    tape.chain("block_numel", FP32)
                tape.state(p.nbytes)
                if not by_name:
                    tape.chain("total", p.nbytes, size)  # zeros_like(torch.sum(p * p))
                tape.state(few)
                tape.drop("total")
            if _has(name, _BIAS):
                tape.chain("h", p.nbytes, p.nbytes)
                continue
            tape.chain("tmp_lr", p.nbytes, few)  # the mean or sum of grad * grad
            if not by_name:
                tape.bind("tmp_lr", size)
            tape.chain("h", few, few)
            tape.chain("stepsize", few, few)
            tape.bind("update", p.nbytes)
            tape.flash(p.nbytes)  # add_(-update)


def _has(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name for word in words)


ENTRIES = (
    Entry(
        "adam-mini",
        "adam-mini",
        "1.1.1",
        "Adam with one second moment for a head, a row or a tensor",
        "s, and s for each row or head; 2*s of a bias",
        "2*n*s of one parameter, or n*s beside the update of the one before",
        "adam_mini/adam_mini.py: Adam_mini.step",
        rule=AdamMini,
        not_with=("parameters without names (flat partitions count as one block)", "dim and n_heads that are not the model's"),
        checked="state and transient",
    ),
)
