"""The moment before training: what the GPU holds while a checkpoint is quantised on its way in.

transformers 5.24 loads one tensor after the other when it quantises (core_model_loading.py,
`convert_and_load_state_dict_in_model`: no worker threads then), sorted by name with numbers as numbers.  A weight arrives on
the GPU in the dtype of the model, beside everything packed before it:

    4 bits   the 16-bit weight, its packed form and one fp32 scale for 64 weights; with double quantisation these scales again,
             less their mean, and their 8-bit form                           (bitsandbytes 0.50.2, functional.py, quantize_4bit)
    8 bits   the 16-bit weight, a copy in fp16, its packed form and one fp32 scale a row      (nn/modules.py, Int8Params)

`prepare_model_for_kbit_training` then turns what stayed in 16 bits into fp32, one parameter after the other: old and new are
both there for a moment.  A checkpoint that was quantised before has no such moment.
DeepSpeed in 16 bits then casts all of it back, one parameter after the other, and the adapters, which peft has made in fp32;
at stage 3 too a quantised model is whole on every GPU by then.
Under FSDP the first process loads on its CPU and the others on `meta` (accelerate's cpu_ram_efficient_loading), so the GPU sees
nothing of it.  A model that is not quantised is made on the host first and moved by `.to(device)`, so it is the host that must
have room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..models.quantised import BLOCK, NESTED_BLOCK
from .trace.options import PARAM_DTYPE
from .trace.steptrace import ITEMSIZE

if TYPE_CHECKING:
    from .request import Request
    from .trace.steptrace import StepTrace, TensorSlot

_GPU_BLOCK = 512  # bytes to which torch's caching allocator rounds (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)
_FP32, _FP16 = 4, 2
_BITS = {"nf4": 4, "nf4-dq": 4, "fp4": 4, "fp4-dq": 4, "int8": 8}
_WRAPPERS = ((".base_layer.", "."), (".original_module.", "."))  # what peft puts into the path of a module
_HOST_FIRST = ("single", "release", "ddp")  # strategies before which the model is whole on the host of each process
_DEEPSPEED = ("zero0", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Step:
    """One tensor of the checkpoint: `made` on the way, of which `kept` stay; sizes in bytes."""

    fqn: str
    what: str
    made: tuple[int, ...]
    kept: tuple[int, ...]
    gone: tuple[int, ...] = ()
    """What was kept before and goes now."""


@dataclass(frozen=True)
class LoadingPeak:
    """Where loading holds most."""

    nbytes: int
    fqn: str
    what: str


def loading_peak(request: Request, trace: StepTrace, *, block_bytes: int = _GPU_BLOCK) -> LoadingPeak | None:
    """The moment of loading when the GPU holds most, in blocks of `block_bytes`; None where nothing is quantised on the way."""
    settings = request.adapter_settings
    if settings is None or settings.base_quant not in _BITS or request.strategy not in _HOST_FIRST + _DEEPSPEED:
        return None

    def size(parts: tuple[int, ...]) -> int:
        return sum(-(-part // block_bytes) * block_bytes for part in parts)

    live, best = 0, LoadingPeak(0, "", "")
    for step in steps(request, trace):
        there = live + size(step.made)
        if there > best.nbytes:
            best = LoadingPeak(there, step.fqn, step.what)
        live += size(step.kept) - size(step.gone)
    return best


def host_bytes(request: Request, trace: StepTrace) -> int:
    """What each process holds on the host before the model moves to the GPU; 0 where it is not made there.

    `from_pretrained` maps the file and casts each tensor, so a checkpoint in fp32 costs no more than the model's own dtype.
    """
    settings = request.adapter_settings
    if request.model.factory is not None or request.strategy not in _HOST_FIRST or request.method in ("zo2", "distzo2"):
        return 0
    if settings is not None and settings.base_quant != "none":
        return 0
    return sum(slot.nbytes for slot in trace.params if settings is None or not slot.requires_grad)


def steps(request: Request, trace: StepTrace) -> Iterator[Step]:
    """Loading, tensor by tensor, and what `prepare_model_for_kbit_training` does then."""
    settings = request.adapter_settings
    assert settings is not None
    narrow = ITEMSIZE[PARAM_DTYPE[request.precision]]
    base = [slot for slot in trace.params if not slot.requires_grad]
    beside: dict[str, list[int]] = {}
    for buffer in trace.buffers:
        beside.setdefault(buffer.fqn.rpartition(".")[0], []).append(buffer.nbytes)
    packed: Callable[[TensorSlot, list[int], int], Step] = _in_8_bits if settings.base_quant == "int8" else _in_4_bits
    plain = []
    for slot in sorted(base, key=_natural):
        path, _, name = slot.fqn.rpartition(".")
        if name == "weight" and slot.nbytes < slot.numel * narrow + 1 and path in beside:
            yield packed(slot, beside.pop(path), narrow)
            continue
        plain.append(slot)
        own = slot.numel * narrow if settings.upcasts else slot.nbytes
        yield Step(slot.fqn, "a weight that stays as it is", (own,), (own,))
    yield Step("", "buffers", (), tuple(size for sizes in beside.values() for size in sizes))
    if settings.upcasts:
        for slot in base:
            if slot in plain and narrow < _FP32:
                old, wide = slot.numel * narrow, slot.numel * _FP32
                yield Step(slot.fqn, "its fp32 form beside the 16-bit one", (wide,), (wide,), gone=(old,))
    if request.strategy in _DEEPSPEED and narrow < _FP32:
        wide_adapters = [slot for slot in trace.params if slot.requires_grad and settings.adapter_dtype is None]
        yield from _cast_back(wide_adapters, plain if settings.upcasts else [], narrow)


def _cast_back(adapters: list[TensorSlot], widened: list[TensorSlot], narrow: int) -> Iterator[Step]:
    """DeepSpeed's cast of what is in fp32 (0.19.8, runtime/engine.py, `_cast_module_mixed_precision`)."""
    for slot in adapters:
        yield Step(slot.fqn, "an adapter in fp32", (slot.numel * _FP32,), (slot.numel * _FP32,))
    for slot in (*widened, *adapters):
        wide, new = slot.numel * _FP32, slot.numel * narrow
        yield Step(slot.fqn, "its 16-bit form beside the fp32 one", (new,), (new,), gone=(wide,))


def _in_4_bits(slot: TensorSlot, statistics: list[int], narrow: int) -> Step:
    numel = 2 * slot.nbytes
    blocks = -(-numel // BLOCK)
    scales: tuple[int, ...] = (_FP32 * blocks,)
    if blocks in statistics:  # 8-bit scales: double quantisation
        scales = (*scales, _FP32, _FP32 * blocks, blocks, _FP32 * -(-blocks // NESTED_BLOCK))
    return Step(
        slot.fqn, "a 16-bit weight beside its 4-bit form", (narrow * numel, slot.nbytes, *scales), (slot.nbytes, *statistics)
    )


def _in_8_bits(slot: TensorSlot, statistics: list[int], narrow: int) -> Step:
    numel = slot.nbytes
    made = (narrow * numel, _FP16 * numel, numel, *statistics)
    return Step(slot.fqn, "a 16-bit weight, its fp16 copy and its 8-bit form", made, (numel, *statistics))


def _natural(slot: TensorSlot) -> list[tuple[int, int, str, int]]:
    """The order of the checkpoint's names: "layers.2" before "layers.10" (core_model_loading.py, `dot_natural_key`)."""
    name = slot.fqn.removeprefix("base_model.model.")
    for wrapped, plain in _WRAPPERS:
        name = name.replace(wrapped, plain)
    key = []
    for part in name.split("."):
        text = part.rstrip("0123456789")
        number = part[len(text) :]
        key.append((0, int(number), "", 0) if not text else (1, 0, text, int(number or -1)))
    return key
