"""Frozen weights in 4 bits, as transformers loads them with bitsandbytes.

transformers puts `bnb.nn.Linear4bit` in place of every linear layer but the head and what is tied to it
(integrations/bitsandbytes.py, replace_with_bnb_linear; quantizers/base.py, get_keys_to_not_convert).  So does this, with the
library's own modules.  Under a fake mode the packed weights are made by hand, since bitsandbytes would read values:

    packed weight   uint8 [ceil(n / 2), 1]
    absmax          fp32, one for 64 weights; with double quantisation uint8, and beside it
    nested absmax   fp32, one for 256 of these, a table of 256 fp32 and an offset
    code            16 fp32, of each layer

(bitsandbytes 0.50.2, functional.py, quantize_4bit).  The statistics are registered as buffers: like them, they move with the
model.  For bitsandbytes they are none: what sends a model's buffers to other ranks does not see them (`is_statistic`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .adapters import require

if TYPE_CHECKING:
    import torch
    from torch import nn

BLOCK = 64  # weights that share a scale
NESTED_BLOCK = 256  # scales that share one, with double quantisation
_CODE, _NESTED_CODE = 16, 256  # entries of the tables
_STATISTICS = (
    "weight_absmax", "weight_code", "weight_offset", "weight_nested_absmax", "weight_nested_code", "weight_scales",
)  # fmt: skip


def is_statistic(fqn: str) -> bool:
    """Whether a buffer of that path is bitsandbytes' own: scales and tables of packed weights, also in 8 bits."""
    return fqn.rpartition(".")[2] in _STATISTICS


def quantise(
    module: nn.Module,
    how: str,
    compute_dtype: torch.dtype,
    *,
    storage: str | None = None,
    as_parameters: bool = False,
    group_size: int | None = None,
) -> tuple[nn.Module, list[str]]:
    """(`module` with its linear layers in 4 bits, what was done in words).  `how`: nf4, nf4-dq, fp4, fp4-dq, gptq.

    `storage`, `as_parameters`, `group_size`: see `AdapterSettings`, quant_storage, packed_as_parameters and group_size.
    """
    if how != "gptq":
        require("bitsandbytes", f"--base-quant {how}")
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from transformers import BitsAndBytesConfig, PreTrainedModel
    from transformers.quantizers.base import get_keys_to_not_convert

    if not isinstance(module, PreTrainedModel):
        raise UserError(
            f"--base-quant {how}: only transformers models are loaded quantised", "Leave it out, or name such a model"
        )
    kept = sorted({*get_keys_to_not_convert(module), *(module._keep_in_fp32_modules or [])})
    if how == "gptq":
        from . import gptq

        return gptq.quantise(module, kept, as_parameters, group_size)
    if how == "int8":
        from . import int8

        return int8.quantise(module, kept)
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    old = dict(module.named_modules())
    quant_type, _, double = how.partition("-")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=bool(double),
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=storage,
    )
    with unset_fake_temporarily():
        replace_with_bnb_linear(module, modules_to_not_convert=kept, quantization_config=config)
    _count_products()
    replaced = 0
    for path, part in module.named_modules():
        before: Any = old.get(path)
        if part is before or before is None or type(part).__name__ != "Linear4bit":
            continue
        _pack(part, before)
        replaced += 1
    if not replaced:
        raise UserError(f"--base-quant {how}: {type(module).__name__} has no linear layer that transformers would quantise",
                        "Leave --base-quant out")  # fmt: skip
    module.is_loaded_in_4bit = True  # type: ignore[assignment]
    torch.nn.Module.train(module, module.training)
    words = f"{quant_type.upper()}{', double quantisation' if double else ''}"
    return module, [
        f"{replaced} linear layers are stored in 4 bits ({words}; bitsandbytes); embeddings, norms and the head are not",
        f"4-bit products are computed in {str(compute_dtype).removeprefix('torch.')}",
    ]


def _count_products() -> None:
    """Tells torch how much work a 4-bit product is, which bitsandbytes does not."""
    import bitsandbytes  # noqa: F401  # defines the op
    import torch
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    op = torch.ops.bitsandbytes.gemm_4bit
    if op in flop_registry:
        return

    def flops(rows: Any, packed: Any, weight: Any, *rest: Any, out_shape: Any = None, **more: Any) -> int:
        return 2 * int(torch.Size(rows[:-1]).numel()) * int(weight[0]) * int(weight[1])

    register_flop_formula(op)(flops)


def _pack(part: Any, before: Any) -> None:
    """Gives the 4-bit layer `part` the weights of `before`."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    from_conv = type(before).__name__ == "Conv1D"  # GPT-2's linear layers, stored the other way round
    weight = before.weight.detach()
    weight = weight.T if from_conv else weight
    if before.bias is not None:
        part.bias = torch.nn.Parameter(before.bias.detach(), requires_grad=False)
    packed = _fake_packed(weight, part.weight) if isinstance(weight, FakeTensor) else _packed(weight, part.weight)
    part.weight = packed
    part._forward_hooks.update(before._forward_hooks)  # what a factory hung on its layer
    state = part.quant_state = packed.quant_state
    for name, tensor in (
        ("weight_absmax", state.absmax),
        ("weight_code", state.code),
        ("weight_offset", state.offset),
        ("weight_nested_absmax", state.state2 and state.state2.absmax),
        ("weight_nested_code", state.state2 and state.state2.code),
    ):
        if tensor is not None:
            part.register_buffer(name, tensor, persistent=False)


def _packed(weight: torch.Tensor, like: Any) -> Any:
    """The real thing: bitsandbytes quantises the weight."""
    import bitsandbytes as bnb

    make: Any = bnb.nn.Params4bit
    return make(
        weight.contiguous(),
        requires_grad=False,
        compress_statistics=like.compress_statistics,
        quant_type=like.quant_type,
        quant_storage=like.quant_storage,
    ).to(weight.device)


def _fake_packed(weight: torch.Tensor, like: Any) -> Any:
    """Tensors of the same sizes without values."""
    import torch
    from bitsandbytes.functional import QuantState
    from torch._subclasses.fake_tensor import FakeTensor

    numel = weight.numel()
    blocks = -(-numel // BLOCK)
    double = like.compress_statistics
    nested = None
    if double:
        nested = QuantState(
            absmax=torch.empty(-(-blocks // NESTED_BLOCK)),
            blocksize=NESTED_BLOCK,
            code=torch.empty(_NESTED_CODE),
            dtype=torch.float32,
        )
    storage = like.quant_storage
    packed: Any = torch.nn.Parameter(torch.empty(-(-numel // (2 * storage.itemsize)), 1, dtype=storage), requires_grad=False)
    # peft and bitsandbytes know a 4-bit weight by the name of its class
    packed.__class__ = type("Params4bit", (FakeTensor,), {"__deepcopy__": lambda self, memo: self})  # DoRA copies, and reads
    packed.quant_state = QuantState(
        absmax=torch.empty(blocks, dtype=torch.uint8 if double else torch.float32),
        shape=weight.shape,
        code=torch.empty(_CODE),
        blocksize=BLOCK,
        quant_type=like.quant_type,
        dtype=weight.dtype,
        offset=torch.empty(()) if double else None,
        state2=nested,
    )
    packed.quant_type, packed.compress_statistics, packed.blocksize = like.quant_type, double, BLOCK
    packed.quant_storage, packed.bnb_quantized = storage, True
    return packed
