"""What an optimizer cannot be combined with: one rule for every command that asks.

What its parameters decide (fp32 weights under FlashOptim's split masters, dimensions that AdaLomo has no factors for) is
refused by the rule itself, when it sees them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UserError
from .methods import OPTIMIZERS, method_of
from .traced import names as torch_names

if TYPE_CHECKING:
    from ..request import Request

_FP8_FROM = (8, 9)  # compute capability that has float8 (torchao/optim/subclass_fp8.py)
_WHOLE_MATRICES = ("galore-", "apollo-")  # they project the gradient of a whole matrix
_FSDP = ("fsdp1", "fsdp2", "hsdp")
_CUTS = ("zero1", "zero2", "zero3", "fsdp1", "fsdp2", "hsdp")  # where a rank steps a part of a parameter


def refuse(request: Request) -> None:
    """Raises UserError where the library of the request's optimizer refuses the rest of the question."""
    asked = request.optimizer
    own = OPTIMIZERS.get(request.method)
    if own is not None and asked.partition(":")[0] not in own.values():
        known = ", ".join(dict.fromkeys(own.values()))
        raise UserError(f"--method {request.method} with --optimizer {asked}: it is not its own", f"Use {known}")
    if not request.has_backward or asked in torch_names():  # torch's own go with everything; the others are not even imported
        return
    from .catalogue import entry_of, split_options

    entry = entry_of(split_options(asked)[0])
    method = method_of(entry.name)
    if method is not None and request.method != method:
        raise UserError(f"--optimizer {asked}: it trains one block of layers at a time", f"Use --method {method}")
    in_backward = entry.rule is not None and entry.rule.in_backward
    if in_backward and request.strategy == "single":
        raise UserError(f"--optimizer {asked}: it steps inside backward only", "Add --grad-release")
    if in_backward and request.strategy != "release":
        raise UserError(
            f"--optimizer {asked} with --strategy {request.strategy}: it steps inside backward, before gradients are reduced",
            "Use one GPU and --grad-release",
        )
    on_the_host = request.strategy.startswith("zero") and any(part.startswith("optimizer") for part in request.offload)
    if entry.name == "deepspeed-cpu-adam" and not on_the_host:
        raise UserError(
            f"--optimizer {asked}: it steps parameters that are on the host", "Use --strategy zero2 --offload optimizer"
        )
    if entry.name.startswith(_WHOLE_MATRICES) and request.strategy in _CUTS:
        raise UserError(
            f"--optimizer {asked} with --strategy {request.strategy}: it projects whole gradients, a rank has parts",
            "Use --strategy ddp, or another optimizer",
        )
    if entry.library == "bitsandbytes" and request.strategy in _FSDP and "optimizer" in request.offload:
        raise UserError(
            f"--optimizer {asked} with --strategy {request.strategy} --offload optimizer: it steps tensors of the GPU only",
            "Use --optimizer adamw",
        )
    capability = request.device.compute_capability
    if entry.name.endswith("-fp8") and capability is not None and capability < _FP8_FROM:
        raise UserError(
            f"--optimizer {asked}: it needs compute capability 8.9, {request.device.name} has {capability[0]}.{capability[1]}",
            "Use the 8-bit one",
        )
