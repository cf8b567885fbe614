"""Muon of torch 2.13 for weight matrices, with AdamW beside it for everything else, as its documentation asks.

State: `momentum_buffer`, one of the gradient's dtype.  Step, per matrix: the nesterov update (n*g), its copy in bf16 (fp32
gradients only), and for five Newton-Schulz rounds the two mn x mn products and the next iterate, all bf16, mn the smaller
side; each name holds its last tensor until the next is there.
Source: torch/optim/_muon.py, `_single_tensor_muon`, `_zeropower_via_newtonschulz`.

Muon raises for a parameter that is not a matrix, so embeddings, heads, norms and biases go to `torch.optim.AdamW`, which
steps after it. Which matrices are which is the user's choice; here a matrix is Muon's unless it is an embedding or its name
has one of `others`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .bitsandbytes import is_embedding
from .entry import Entry
from .rule import OptimizerRule, OptimizerTensor, StepEvents
from .tape import Tape, in_order
from .traced import traced_rule

_BF16 = 2
_ROUNDS = 5  # ns_steps


@dataclass(frozen=True)
class Muon(OptimizerRule):
    name: str = "muon"
    impl: str = "default"  # of the AdamW beside it
    target: str = "cuda"
    others: tuple[str, ...] = ("embed", "wte", "wpe", "lm_head", "output_layer")

    def is_muons(self, p: OptimizerTensor) -> bool:
        return len(p.shape) == 2 and not is_embedding(p) and not any(word in p.name for word in self.others)

    def step(self, tensors: Sequence[OptimizerTensor]) -> StepEvents:
        matrices = [i for i, p in in_order(tensors) if self.is_muons(p)]
        rest = [i for i, p in in_order(tensors) if not self.is_muons(p)]
        adamw = StepEvents((), ())
        if rest:
            adamw = traced_rule("adamw", self.impl, target=self.target).step([tensors[i] for i in rest])
        first, later = Tape(), Tape()
        for tape, events in ((first, adamw.first), (later, adamw.later)):
            if tape is first:
                for tape.tensor in matrices:  # _init_group runs over the whole group first
                    tape.state(tensors[tape.tensor].nbytes)
            for tape.tensor in matrices:
                _orthogonalise(tape, tensors[tape.tensor])
            tape.drop("update")  # muon() returns before AdamW steps
            tape.replay(events, rest)
        return StepEvents(first.done(), later.done())


def _orthogonalise(tape: Tape, p: OptimizerTensor) -> None:
    half, gram = _BF16 * p.numel, _BF16 * min(p.shape) ** 2
    tape.bind("update", p.nbytes)  # grad.lerp(buf, momentum)
    if p.dtype != "bfloat16":
        tape.bind("ortho_grad", half)
    tape.flash(_BF16, _BF16)  # the norm, clamped
    for _ in range(_ROUNDS):
        tape.bind("gram_matrix", gram)
        tape.bind("gram_update", gram)
        tape.bind("ortho_grad", half)
    tape.drop("gram_matrix", "gram_update")
    tape.rename("ortho_grad", "update")


ENTRIES = (
    Entry(
        "muon",
        "torch",
        "2.13.0",
        "orthogonalised momentum for weight matrices, AdamW for the rest",
        "g of a matrix; 2*s of the rest",
        "per matrix about 6*n + 4*mn^2 bytes (bf16), 8*n + 4*mn^2 (fp32); then AdamW's",
        "torch/optim/_muon.py: _zeropower_via_newtonschulz",
        rule=Muon,
        not_with=("parameters that are not matrices: it raises, so they need a second optimizer", "foreach and fused"),
        checked="state and transient",
    ),
)
