"""FlashOptim 0.1.4: 8-bit moments in groups of 32, and master weights split into a 16-bit parameter and its error bits.

State of a parameter of n elements; `master_weight_bits` is 24 (the default), 32 or none, and has an effect on 16-bit
parameters only:

    moment (Adam two, SGD with momentum and Lion one)    n bytes, and an fp16 scale for every 32 elements of the flat tensor
    the same with quantize=false                         n*s: in the parameter's dtype
    error bits                                           n bytes (24), 2*n bytes (32), nothing (none, or an fp32 parameter)

There is no smallest size: norms and biases are quantised too.  AdamW on bf16: 2 + 3.125 + 2 = 7.125 bytes a parameter with
its gradient (fp32 AdamW: 16), 5.125 when gradients are released.

The step is one Triton kernel for each parameter, in place.  The first step makes each moment as zeros of the parameter's size
and quantises it; Triton times the quantising kernel once for every distinct number of elements, with a buffer of 256 MiB
beside it. SGD without momentum, and fused=false, work in eager fp32 copies.  A state dictionary makes new tensors: see
`checkpoint_bytes`.
Sources: flashoptim/optimizers.py, `FlashOptimizer._ensure_state_initialized`, `_state_dict_for_param`, `_do_step` of each
class, `quantize`; triton/backends/nvidia/driver.py (3.9), `get_empty_cache_for_benchmark`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import UserError
from ..trace.steptrace import ITEMSIZE
from .entry import Entry
from .rule import OptimizerTensor
from .tape import FP32, DocumentedRule, Tape, blocks_of, in_order, is_half

GROUP = 32  # elements that share a scale
_FP16 = 2
AUTOTUNE_BUFFER = 256 * 2**20  # bytes that Triton clears to empty the L2 cache while it times a kernel
_MOMENTS = {"adam": 2, "momentum": 1, "lion": 1, "sgd": 0}


@dataclass(frozen=True)
class FlashOptim(DocumentedRule):
    name: str = "flash-adamw"
    impl: str = "default"
    kind: str = "adam"
    master_weight_bits: int | None = 24
    quantize: bool = True
    fused: bool = True

    def __post_init__(self) -> None:
        if self.master_weight_bits not in (None, 24, 32):
            raise UserError(f"--optimizer {self.name}: master_weight_bits={self.master_weight_bits}: expected 24, 32 or none")

    def check(self, tensors: Sequence[OptimizerTensor]) -> None:
        if self.master_weight_bits is not None and all(p.dtype == "float32" for p in tensors):
            raise UserError(
                f"--optimizer {self.name}: master_weight_bits={self.master_weight_bits} does nothing for fp32 parameters, "
                "and FlashOptim refuses it when there are no others",
                "Use --precision bf16, or master_weight_bits=none",
            )

    def error_bytes(self, p: OptimizerTensor) -> int:
        if self.master_weight_bits is None or not is_half(p):
            return 0
        return p.numel * (self.master_weight_bits // 8 - ITEMSIZE[p.dtype])

    def play(self, tape: Tape, tensors: Sequence[OptimizerTensor], *, first: bool) -> None:
        tuned: set[int] = set()
        for tape.tensor, p in in_order(tensors):
            if first:
                for _ in range(_MOMENTS[self.kind]):
                    self._make_moment(tape, p, tuned)
                tape.state(self.error_bytes(p))
            if not p.numel:
                continue
            if self.kind == "sgd":
                _sgd(tape, p, self.error_bytes(p))
            elif not self.fused:
                self._eager(tape, p)

    def _make_moment(self, tape: Tape, p: OptimizerTensor, tuned: set[int]) -> None:
        if not self.quantize:
            tape.state(p.nbytes)
            return
        tape.bind("zeros", p.nbytes)
        tape.state(p.numel)
        tape.state(blocks_of(p.numel, GROUP) * _FP16)
        if p.numel and p.numel not in tuned:
            tuned.add(p.numel)
            tape.flash(AUTOTUNE_BUFFER)
        tape.drop("zeros")

    def _eager(self, tape: Tape, p: OptimizerTensor) -> None:
        """`_do_step` with fused=false; locals of one call, so nothing outlives the parameter."""
        wide = FP32 * p.numel
        copy = wide if p.dtype != "float32" else 0  # `.to(float32)` of an fp32 tensor is the tensor
        moment = wide if self.quantize else copy
        if self.kind == "adam":
            names = {"exp_avg": moment, "exp_avg_sq": moment, "grad": copy, "param": copy, "average": wide, "square": wide}
            for name, nbytes in names.items():
                tape.bind(name, nbytes)
            tape.bind("denom", wide)
        elif self.kind == "lion":
            for name, nbytes in {"moment": moment, "grad": copy, "update": wide, "param": copy}.items():
                tape.bind(name, nbytes)
        else:
            for name, nbytes in {"grad": copy, "param": copy, "moment": moment}.items():
                tape.bind(name, nbytes)
        _write_back(tape, p, self.error_bytes(p))
        for _ in range(_MOMENTS[self.kind]):  # set_data quantises anew; the old block goes
            if self.quantize:
                tape.bind("quantized", p.numel)
                tape.bind("scales", blocks_of(p.numel, GROUP) * _FP16)
                tape.drop("quantized", "scales")
            elif copy:
                tape.flash(p.nbytes)
        tape.drop(*("exp_avg", "exp_avg_sq", "grad", "param", "average", "square", "denom", "moment", "update"))

    def checkpoint_bytes(self, tensors: Sequence[OptimizerTensor], *, compress: bool = True) -> int:
        """Bytes of the tensors of `state_dict()`, without the step counters.  A file holds the parameters beside these.

        compress_state_dict (the default): moments as they are; else fp32 moments.  Error bits of 8 bits are widened to 16.
        """
        total = 0
        for p in tensors:
            if not self.quantize:
                moment = p.nbytes
            elif compress:
                moment = p.numel + blocks_of(p.numel, GROUP) * _FP16
            else:
                moment = FP32 * p.numel
            total += _MOMENTS[self.kind] * moment + (p.nbytes if self.error_bytes(p) else 0)
        return total


def _sgd(tape: Tape, p: OptimizerTensor, error_bytes: int) -> None:
    """Without momentum the fused kernel cannot be used: eager fp32 copies of gradient and parameter."""
    copy = FP32 * p.numel if p.dtype != "float32" else 0
    tape.bind("grad", copy)
    tape.bind("param", copy)
    _write_back(tape, p, error_bytes)
    tape.drop("grad", "param")


def _write_back(tape: Tape, p: OptimizerTensor, error_bytes: int) -> None:
    if is_half(p):
        tape.flash(p.nbytes)  # param_f32.to(param.dtype)
    tape.flash(error_bytes)  # compute_ecc_bits


_NOT_WITH = (
    "a machine without CUDA and Triton",
    "FSDP1; and DDP or a GradScaler when gradients are released",
    "amsgrad, foreach, capturable, maximize",
    "an all-fp32 model, unless master_weight_bits=none",
)


def _entry(name: str, kind: str, summary: str, aliases: tuple[str, ...] = ()) -> Entry:
    moments = _MOMENTS[kind]
    kept = moments * (1 + _FP16 / GROUP)
    eager = "10*n of one 16-bit parameter: SGD without momentum has no fused kernel"
    return Entry(
        name,
        "flashoptim",
        "0.1.4",
        summary,
        f"16-bit: {kept + 1:g} (master 24), {kept + 2:g} (32), {kept:g} (none); fp32: {kept:g}",
        "none; the first step: the parameter's size and 256 MiB, while a kernel is tuned" if moments else eager,
        "flashoptim/optimizers.py: _ensure_state_initialized, _do_step",
        rule=FlashOptim,
        fixed={"kind": kind} | ({} if moments else {"quantize": True, "fused": True}),
        not_with=_NOT_WITH,
        aliases=aliases,
        checked="state and transient",
    )


ENTRIES = (
    _entry("flash-adamw", "adam", "AdamW with split masters and 8-bit moments", ("flashadamw", "flash_adamw")),
    _entry("flash-adam", "adam", "Adam with split masters and 8-bit moments", ("flashadam", "flash_adam")),
    _entry("flash-lion", "lion", "Lion with split masters and an 8-bit moment", ("flashlion", "flash_lion")),
    _entry("flash-sgd-momentum", "momentum", "SGD with split masters and 8-bit momentum"),
    _entry("flash-sgd", "sgd", "SGD with split masters (momentum=0, its default)", ("flashsgd", "flash_sgd")),
)
