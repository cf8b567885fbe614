"""bitsandbytes 0.50.2: block-wise 8-bit and fp32 states, and paged ones in managed memory.

State of a parameter of n elements: `state1` (and `state2`), one byte an element with one fp32 absmax for every 256, if the
optimizer has 8 bits and n >= min_8bit_size (4096); else fp32 whatever the parameter's dtype.  AdEMAMix keeps two fast/slow
averages in `state1`.  The 256-entry code books (1 KiB each) are shared by all parameters of an optimizer.  LAMB and LARS add
a 4-byte `unorm_vec`.  A paged optimizer keeps state tensors of 100 000 elements and more in managed memory, outside torch's
allocator. The CUDA kernels work in place.  LAMB and LARS take the norm of an fp32 copy of the parameter first (fp32 states
only).
Sources: bitsandbytes/optim/optimizer.py, `Optimizer2State.init_state`, `Optimizer1State.init_state`, `get_state_buffer`;
optim/ademamix.py, `AdEMAMix.init_state`; functional.py, `optimizer_update_32bit`.

transformers' Trainer keeps the state of every `nn.Embedding` at 32 bits when the optimizer has 8 (trainer.py,
`create_optimizer`: `GlobalOptimManager.register_module_override`); a plain loop does not.  `embeddings=32` is the Trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UserError
from ..ledger import Tier
from .entry import Entry
from .rule import OptimizerTensor
from .tape import FP32, DocumentedRule, Tape, blocks_of, in_order, is_half

BLOCK = 256  # elements that share an absmax (optimizer.py, `blocksize`)
CODE_BOOK = 256 * FP32  # bytes of a quantisation map (functional.py, `create_dynamic_map`)
PAGED_FROM = 100_000  # elements (optimizer.py, `get_state_buffer`)
# kind -> (elements of state1 for one of the parameter, whether there is a state2, unorm_vec)
_KINDS = {
    "adam": (1, True, False),
    "adamw": (1, True, False),
    "lamb": (1, True, True),
    "ademamix": (2, True, False),
    "lion": (1, False, False),
    "sgd": (1, False, False),
    "rmsprop": (1, False, False),
    "adagrad": (1, False, False),
    "lars": (1, False, True),
}
_PAGED = ("adam", "adamw", "ademamix", "lion")  # the kinds that have Paged* classes


@dataclass(frozen=True)
class Bitsandbytes(DocumentedRule):
    name: str = "adamw-8bit"
    impl: str = "default"
    kind: str = "adamw"
    bits: int = 8
    paged: bool = False
    min_8bit_size: int = 4096
    embeddings: int | None = None  # bits of embedding states; None: as the rest

    def __post_init__(self) -> None:
        if self.embeddings not in (None, 8, 32):
            raise UserError(f"--optimizer {self.name}: embeddings={self.embeddings}: expected 8, 32 or none")

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        _, two, unorm = _KINDS[self.kind]
        books = 0
        for tape.tensor, p in in_order(tensors):
            eight = self.is_8bit(p)
            if first:
                if eight and not books:
                    books = 1 + two
                    for _ in range(books):
                        tape.state(CODE_BOOK)
                make_states(tape, p.numel, self.kind, eight=eight, paged=self.paged)
            if unorm and not eight:
                tape.flash(FP32 * p.numel if is_half(p) else 0, FP32)  # torch.norm(p.data.float())

    def is_8bit(self, p: OptimizerTensor) -> bool:
        bits = self.embeddings if self.embeddings is not None and is_embedding(p) else self.bits
        return bits == 8 and p.numel >= self.min_8bit_size


def make_states(tape: Tape, numel: int, kind: str, *, eight: bool, paged: bool, unorm: bool | None = None) -> None:
    """`init_state` for a parameter of `numel` elements."""
    wide, two, always_unorm = _KINDS[kind]
    tier = Tier.GPU_MANAGED if paged and numel >= PAGED_FROM else Tier.GPU
    for times in (wide, 1) if two else (wide,):
        tape.state(numel * times * (1 if eight else FP32), tier)
        if eight:
            tape.state(blocks_of(numel, BLOCK) * times * FP32)
    if always_unorm if unorm is None else unorm:
        tape.state(FP32)


def is_embedding(p: OptimizerTensor) -> bool:
    """Whether the parameter is the table of an `nn.Embedding` or of a subclass: these have `Embedding` in their class's name,
    and a two-dimensional `weight`."""
    return "Embedding" in p.module_class and p.name.endswith("weight") and len(p.shape) == 2


def _entry(kind: str, bits: int, paged: bool) -> Entry:
    times, two, unorm = _KINDS[kind]
    count = times + two
    name = f"{'paged-' if paged else ''}{kind}-{bits}bit"
    trainer = {
        "adamw-8bit": ("adamw_bnb_8bit",),
        "rmsprop-8bit": ("rmsprop_bnb_8bit",),
        "rmsprop-32bit": ("rmsprop_bnb", "rmsprop_bnb_32bit"),
        "ademamix-32bit": ("ademamix",),
        "paged-adamw-32bit": ("paged_adamw",),
    }.get(name, ())
    quantised = f"{count * (1 + FP32 / BLOCK):.6g} from 4096 elements on, {FP32 * count} below"
    return Entry(
        name,
        "bitsandbytes",
        "0.50.2",
        f"{'block-wise 8-bit' if bits == 8 else 'fp32'} states" + (" in managed memory" if paged else ""),
        quantised if bits == 8 else f"{FP32 * count}, whatever the parameter's dtype",
        "4*n where the state is fp32 and the parameter is 16-bit" if unorm else "none: the CUDA kernels work in place",
        f"bitsandbytes/optim/{kind}.py, optim/optimizer.py: init_state",
        rule=Bitsandbytes,
        fixed={"kind": kind, "bits": bits, "paged": paged}
        | ({"embeddings": None, "min_8bit_size": 4096} if bits == 32 else {}),
        not_with=(
            *(("transformers' Trainer keeps embeddings at 32 bits: ask with embeddings=32",) if bits == 8 else ()),
            "16-bit parameters have no fp32 master: updates are rounded into them",
            *(("managed memory needs CUDA, and may spill to the host",) if paged else ()),
            *(("plain SGD: it refuses momentum=0",) if kind == "sgd" else ()),
            *(
                ("its class AdEMAMix32bit, which has no room for the second average: AdEMAMix is meant",)
                if name[-14:] == "ademamix-32bit"
                else ()
            ),
        ),
        aliases=(name.replace("-", "_"), *trainer),
    )


ENTRIES = tuple(
    _entry(kind, bits, paged) for paged in (False, True) for kind in (_PAGED if paged else _KINDS) for bits in (8, 32)
)
