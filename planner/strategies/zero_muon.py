"""DeepSpeed's Muon under ZeRO: which parameters it takes, what it keeps, and what one of its updates makes.

Source: deepspeed 0.19.8, deepspeed/__init__.py (`set_optimizer_flags`), runtime/engine.py (`_muon_param_groups`) and
runtime/zero/muon/original_muon.py.  Every optimizer group is cut in two: Muon's are the parameters of two dimensions or more
whose names have neither "embed" nor "lm_head", in the order of their shapes, largest first; the others are FusedAdam's, or with
an offloaded optimizer DeepSpeedCPUAdam's.  With e bytes of the gradients' dtype, n elements of a matrix and k of its smaller
side:

    momentum    stages 1 and 2: e * n of every matrix that touches the partition, and as much once more, in which the new one
                waits until the step is known to be good; offloaded: 4 * ps on the host
    update      e * n of every matrix that touches the partition, beside its gradient, from the end of backward to the step
    transients  of one matrix, fp16: the iterate 2 * n and its successor, four of 2 * k * k; then e * n twice

The updates are compiled (`torch.compile`).  Here they are the ops as written, which the compiler fuses: what it allocates is
less, so these transients are an upper bound.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from ..ledger import Component
from ..optimizers.rule import StepEvent, StepKind
from ..optimizers.tape import Tape
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE, TensorSlot

_OTHERS = ("embed", "lm_head")
_EMBEDDINGS = ("wte", "wpe", "shared")
_HALF = 2  # bytes; Newton-Schulz runs in fp16 (gram) or bf16 (standard)
_ROUNDS = 5  # `ns_steps`
_RESTART = 2  # the round at which the Gram iteration begins anew
_FILTERS = 4  # dimensions of a convolution's weight, which is taken as a matrix


def is_muons(param: TensorSlot) -> bool:
    """`use_muon`."""
    return len(param.shape) > 1 and not any(word in param.fqn.lower() for word in _OTHERS)


def is_embedding(fqn: str) -> bool:
    """By the names that DeepSpeed does not look for: of GPT-2's family."""
    return any(part in _EMBEDDINGS for part in fqn.lower().split("."))


def halves(groups: Sequence[Sequence[TensorSlot]], *, have_shapes: bool = True) -> list[list[TensorSlot]]:
    """The optimizer's groups: of each given one what Muon takes, then the rest.

    `have_shapes`: the parameters are whole as the optimizer is made; under `zero.Init` all look the same to it.
    """
    found = []
    for group in groups:
        matrices = [p for p in group if is_muons(p)]
        found.append(sorted(matrices, key=lambda p: p.shape, reverse=True) if have_shapes else matrices)
        found.append([p for p in group if not is_muons(p)])
    return [half for half in found if half]


def is_muon_group(params: Sequence[TensorSlot]) -> bool:
    return is_muons(params[0])


def update(sim: Simulation, param: TensorSlot, dtype: str, method: str) -> Block:
    """`muon_update` of one whole gradient of `dtype`: its temporaries come and go, and the update is left."""
    made: dict[int, Block] = {}
    left: Block | None = None
    for event in _events(param.shape, dtype, method):
        if event.kind is StepKind.FREE:
            sim.free(made.pop(event.slot))
        elif event.kind is StepKind.STATE:
            left = sim.alloc(Component.GRAD, event.nbytes, param.fqn, "Muon's update")
        else:
            made[event.slot] = sim.alloc(Component.TEMP, event.nbytes, param.fqn, "Newton-Schulz")
    assert left is not None
    return left


@functools.lru_cache(maxsize=4096)
def _events(shape: tuple[int, ...], dtype: str, method: str) -> tuple[StepEvent, ...]:
    tape, e, n = Tape(), ITEMSIZE[dtype], math.prod(shape)
    if len(shape) == _FILTERS:
        shape = (shape[0], n // shape[0])
    rows, columns = shape[-2:]  # before them: of a batch of matrices, such as experts
    k = n // (rows * columns) * min(rows, columns) ** 2
    tape.flash(n, e * n, n, n)  # torch.isfinite: x == x, |x|, its comparison, both
    tape.flash(e * n, e * n)  # the new momentum, and the choice of it
    if method == "gram":
        _gram(tape, n, k, dtype, is_square=rows == columns)
    else:
        _standard(tape, n, k, dtype)
    if dtype != ("float16" if method == "gram" else "bfloat16"):
        tape.bind("update", e * n)
    tape.state(e * n)  # torch.where(grad_is_finite, update, grad)
    return tape.done()


def _standard(tape: Tape, n: int, k: int, dtype: str) -> None:
    """`zeropower_via_newtonschulz5`."""
    if dtype != "bfloat16":
        tape.bind("update", _HALF * n)
    tape.bind("update", _HALF * n)
    _rounds(tape, n, k)


def _rounds(tape: Tape, n: int, k: int) -> None:
    for _ in range(_ROUNDS):
        tape.bind("A", _HALF * k)
        _polynomial(tape, "B", k)
        tape.bind("scaled", _HALF * n)  # a * X
        tape.bind("product", _HALF * n)  # B @ X
        tape.bind("update", _HALF * n)
        tape.drop("scaled", "product")
    tape.drop("A", "B")


def _polynomial(tape: Tape, name: str, k: int) -> None:
    """`name = b * A + c * A @ A`."""
    tape.bind("linear", _HALF * k)
    tape.chain("square", _HALF * k, _HALF * k)
    tape.bind(name, _HALF * k)
    tape.drop("linear", "square")


def _gram(tape: Tape, n: int, k: int, dtype: str, *, is_square: bool) -> None:
    """`zeropower_via_gram_newtonschulz`."""
    wide = 4 if dtype == "float16" else ITEMSIZE[dtype]
    if dtype == "float16":
        tape.bind("update", wide * n)
    tape.bind("normal", wide * n)
    tape.bind("update", _HALF * n)
    tape.drop("normal")
    if is_square:
        _rounds(tape, n, k)
        return
    tape.bind("R", _HALF * k)
    for number in range(_ROUNDS):
        if number == _RESTART:
            tape.bind("update", _HALF * n)  # Q @ X
            tape.bind("R", _HALF * k)
            tape.drop("Q")
        _polynomial(tape, "Z", k)
        if number in (0, _RESTART):
            tape.bind("Q", _HALF * k)
        else:
            _sum(tape, "Q", k)
        if number < _ROUNDS - 1 and number + 1 != _RESTART:
            _sum(tape, "RZ", k)
            _sum(tape, "R", k)
    tape.bind("update", _HALF * n)
    tape.drop("R", "Q", "Z", "RZ")


def _sum(tape: Tape, name: str, k: int) -> None:
    """`name = a * one + Z @ other`."""
    tape.bind("linear", _HALF * k)
    tape.bind("product", _HALF * k)
    tape.bind(name, _HALF * k)
    tape.drop("linear", "product")
