"""GaLore of galore-torch 1.0: Adam in the gradient's low-rank subspace, found by a full SVD every 200 steps.

State of a projected R x C matrix (mn, mx: its smaller and larger side): two moments of rank*mx in the gradient's dtype, and
the projector.  With 16-bit gradients that is rank*mn; with fp32 it is a view of the full SVD factor, which stays whole:
4*mn*mn bytes. Step: the low-rank gradient, denominator and quotient (rank*mx*g each), the full-size update and its scaled
copy (2*n*g).  Refresh: the gradient in fp32 (16-bit only), U, S, Vh and the solver's copy of the matrix.  `later` is a step
with a refresh.
Sources: galore_torch/galore_projector.py, `get_orthogonal_matrix`, `project`, `project_back` (proj_type std); adamw.py,
adamw8bit.py, adafactor.py, `step`.

The 8-bit one hands bitsandbytes its old arguments: percentile_clipping=100 lands in `max_unorm`, so every parameter has a
4-byte norm, and those with fp32 state a norm of an fp32 copy of the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..trace.steptrace import ITEMSIZE
from .bitsandbytes import CODE_BOOK, make_states
from .entry import Entry
from .hf_adafactor import make_factors, update_from_factors
from .lowrank import Projection, check_rank, others_first
from .rule import OptimizerTensor
from .tape import FP32, DocumentedRule, Tape, is_half

_MIN_8BIT = 4096  # elements, bitsandbytes' min_8bit_size


@dataclass(frozen=True)
class GaLore(DocumentedRule):
    name: str = "galore-adamw"
    impl: str = "default"
    rank: int = 128
    targets: tuple[str, ...] = ("attn", "mlp")  # words in the names of the weights that are projected, or all-linear

    def __post_init__(self) -> None:
        check_rank(self.name, self.rank)

    def projection(self, p: OptimizerTensor) -> Projection:
        rows, columns = p.shape
        return Projection(rows, columns, min(self.rank, rows, columns))  # the SVD has no more vectors than that

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        for tape.tensor, p, low in others_first(tensors, self.targets):
            size = ITEMSIZE[p.dtype]
            tape.drop("grad")
            small = size * (self.projection(p).gradient if low else p.numel)
            if low:
                project(tape, self.projection(p), p.dtype, first=first)
                tape.bind("grad", small)
            if first:
                tape.state(small)
                tape.state(small)
            tape.bind("denom", small)
            tape.bind("norm_grad", small)
            if low:
                project_back(tape, p.nbytes, "norm_grad")


@dataclass(frozen=True)
class GaLore8bit(GaLore):
    name: str = "galore-adamw-8bit"

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        books = False
        for tape.tensor, p, low in others_first(tensors, self.targets):
            size = ITEMSIZE[p.dtype]
            numel = self.projection(p).gradient if low else p.numel
            if low:
                project(tape, self.projection(p), p.dtype, first=first)
                tape.bind("grad", size * numel)
                tape.bind("saved_data", p.nbytes)  # p.data.clone(): an attribute of the parameter, so it stays
                tape.bind("p_data", size * numel)
                tape.drop_grad()
            if first:
                if numel >= _MIN_8BIT and not books:
                    books = True
                    tape.state(CODE_BOOK)
                    tape.state(CODE_BOOK)
                make_states(tape, numel, "adam", eight=numel >= _MIN_8BIT, paged=False, unorm=True)
            if numel < _MIN_8BIT:
                tape.flash(FP32 * numel if is_half(p) else 0, FP32)
            if low:
                tape.chain("update", p.nbytes, p.nbytes)
                tape.drop("update", "p_data", "saved_data")


@dataclass(frozen=True)
class GaLoreAdafactor(GaLore):
    name: str = "galore-adafactor"

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        for tape.tensor, p, low in others_first(tensors, self.targets):
            wide = FP32 * p.numel
            shape = self.projection(p).shape if low else p.shape
            tape.drop("grad")
            if is_half(p):
                tape.bind("grad", wide)
            if low:
                project(tape, self.projection(p), "float32", first=first)
                tape.bind("grad", FP32 * self.projection(p).gradient)
            make_factors(tape, shape, momentum=False, first=first)
            tape.drop("p_data_fp32")
            if is_half(p):
                tape.bind("p_data_fp32", wide)
            tape.flash(FP32, FP32)
            update_from_factors(tape, shape)
            if low:
                project_back(tape, wide, "update")
            tape.flash(wide)  # add_(-update)


def project(tape: Tape, sizes: Projection, dtype: str, *, first: bool) -> None:
    """`GaLoreProjector.project` up to the product: a refresh of the projector, which is kept."""
    half = dtype != "float32"
    wide, rank = FP32 * sizes.rows * sizes.columns, sizes.rank
    if half:
        tape.bind("matrix", wide)
    tape.bind("solver", wide)  # the SVD works on a copy of its input (ATen/native/BatchLinearAlgebra.cpp, linalg_svd)
    left, right = FP32 * sizes.rows * sizes.small, FP32 * sizes.small * sizes.columns
    kept = ITEMSIZE[dtype] * sizes.projector if half else FP32 * sizes.small**2
    tall = sizes.rows >= sizes.columns
    factor_is_kept = not half and first  # the projector is a view of Vh (tall) or U
    for name, nbytes, is_kept in (("U", left, not tall), ("S", FP32 * sizes.small, False), ("Vh", right, tall)):
        if is_kept and factor_is_kept:
            tape.state(nbytes)
        else:
            tape.bind(name, nbytes)
    tape.drop("solver")
    tape.chain("A", FP32 * rank * rank, FP32 * rank * (sizes.rows if tall else sizes.columns))
    if half:
        if first:
            tape.state(kept)
        else:
            tape.bind("ortho_matrix", kept)  # the old one goes when the new one is bound
    tape.drop("matrix", "U", "S", "Vh", "A", "ortho_matrix")


def project_back(tape: Tape, nbytes: int, name: str) -> None:
    """`name = projector.project_back(name)`: the full-size product, and its scaled copy."""
    tape.bind("full_rank_grad", nbytes)
    tape.bind("scaled", nbytes)
    tape.drop("full_rank_grad")
    tape.rename("scaled", name)


_NOT_WITH = (
    "sharded parameters (ZeRO, FSDP): the SVD needs the whole gradient",
    "its layer-wise form (the step inside backward) with accumulation or DDP: transformers refuses both",
)
ENTRIES = (
    Entry(
        "galore-adamw",
        "galore-torch",
        "1.0",
        "AdamW on the gradient's projection to rank r (SVD)",
        "per projected matrix s*(r*mn + 2*r*mx), but 4*mn^2 + 8*r*mx with fp32 gradients; else 2*s",
        "2*n*g + 3*r*mx*g; at a refresh the fp32 gradient, its SVD and a copy",
        "galore_torch/adamw.py: step, galore_projector.py: get_orthogonal_matrix",
        rule=GaLore,
        not_with=_NOT_WITH,
        aliases=("galore_adamw",),
        checked="state and transient",
    ),
    Entry(
        "galore-adamw-8bit",
        "galore-torch",
        "1.0",
        "GaLore with bitsandbytes' 8-bit states",
        "per projected matrix s*r*mn (fp32: 4*mn^2) + 2.03125*r*mx; else 2.03125",
        "s*n (a copy of the weight) + 2*n*g; at a refresh the fp32 gradient, its SVD and a copy",
        "galore_torch/adamw8bit.py: step",
        rule=GaLore8bit,
        not_with=(*_NOT_WITH, "a machine without CUDA: it synchronises the device", "bitsandbytes older than its own version"),
        aliases=("galore_adamw_8bit", "galore-adamw8bit"),
    ),
    Entry(
        "galore-adafactor",
        "galore-torch",
        "1.0",
        "GaLore with Adafactor's factored moments",
        "per projected matrix 4*mn^2 + 4*(rows + columns) of its projection; else as hf-adafactor",
        "about 13*n (16-bit), 9*n (fp32); at a refresh also the SVD and a copy",
        "galore_torch/adafactor.py: step",
        rule=GaLoreAdafactor,
        not_with=_NOT_WITH,
        aliases=("galore_adafactor",),
        checked="state and transient",
    ),
)
