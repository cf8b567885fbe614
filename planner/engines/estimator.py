"""DeepSpeed's own estimate of model states, beside ours: what its documentation tells people to expect.

Closed forms of deepspeed 0.19.8, `estimate_zero3_model_states_mem_needs` (runtime/zero/stage3.py) and
`estimate_zero2_model_states_mem_needs` (runtime/zero/stage_1_and_2.py).  They count 18 bytes a parameter, divided over the
ranks, and know no buckets, no gathered parameters beyond one layer, no activations and no temporaries of the step; all is
taken for 16-bit training with Adam.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...units import gib
from ..strategies.deepspeed_engine import settings_of

if TYPE_CHECKING:
    from ..request import Request
    from ..trace.steptrace import StepTrace

_BUFFER_FACTOR = 1.5  # additional_buffer_factor, of the host's figures
_FP16, _FP32, _ALL = 2, 4, 18  # bytes a parameter: 16-bit weights, fp32 weights, and weights, gradients, masters, Adam together


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What DeepSpeed's estimator prints: bytes of one GPU, and of the memory of one machine."""

    stage: int
    gpu_bytes: int
    cpu_bytes: int
    total_params: int
    largest_layer_params: int
    """Parameters that one module holds itself; a tied tensor counts for its first module only."""


def estimator(request: Request, trace: StepTrace) -> Estimate | None:
    """DeepSpeed's estimate for the question; None for strategies that it has no estimator for (it has one for 2 and 3)."""
    if request.strategy not in ("zero2", "zero3"):
        return None
    total, largest = params_of(trace)
    settings = settings_of(request)
    per_node, nodes = request.gpus // request.nodes, request.nodes
    offload = settings.offload_optimizer is not None
    if request.strategy == "zero2":
        cpu, gpu = zero2(total, per_node, nodes, cpu_offload=offload)
    else:
        params = settings.offload_param is not None
        cpu, gpu = zero3(
            total, largest, per_node, nodes, cpu_offload=offload, cpu_offload_params=params, zero_init=settings.zero_init
        )
    return Estimate(
        stage=int(request.strategy[-1]), gpu_bytes=gpu, cpu_bytes=cpu, total_params=total, largest_layer_params=largest
    )


def in_words(estimate: Estimate) -> str:
    """One sentence for a report."""
    gpu, host = gib(estimate.gpu_bytes), gib(estimate.cpu_bytes)
    return (
        f"DeepSpeed's own estimator says {gpu} for a GPU and {host} for a machine's memory: "
        "it counts 18 bytes a parameter, and no buckets, gathered parameters, activations or temporaries"
    )


def params_of(trace: StepTrace) -> tuple[int, int]:
    """(parameters in all, most parameters of one module), as `model_to_params` counts them."""
    layers: dict[int, int] = {}
    for slot in trace.params:
        layers[slot.module] = layers.get(slot.module, 0) + slot.numel
    return sum(slot.numel for slot in trace.params), max(layers.values(), default=0)


def zero2(total_params: int, gpus_per_node: int, nodes: int, *, cpu_offload: bool) -> tuple[int, int]:
    """(bytes of a machine's memory, bytes of a GPU)."""
    gpus = gpus_per_node * nodes
    if cpu_offload:
        return int(total_params * max(_FP32 * gpus, 16) * _BUFFER_FACTOR), _FP16 * total_params
    return (
        int(total_params * _FP32 * gpus_per_node * _BUFFER_FACTOR),
        _FP16 * total_params + int(_ALL * total_params / gpus),
    )


def zero3(
    total_params: int,
    largest_layer_params: int,
    gpus_per_node: int,
    nodes: int,
    *,
    cpu_offload: bool,
    cpu_offload_params: bool,
    zero_init: bool,
) -> tuple[int, int]:
    """(bytes of a machine's memory, bytes of a GPU).  Offloaded parameters count only beside an offloaded optimizer."""
    gpus, share = gpus_per_node * nodes, 1 / nodes
    layer = _FP32 * largest_layer_params
    if not cpu_offload:
        held = largest_layer_params if zero_init else total_params
        return int(held * _FP32 * gpus_per_node * _BUFFER_FACTOR), layer + int(_ALL * total_params / gpus)
    on_host = _ALL if cpu_offload_params else _ALL - _FP16
    on_gpu = 0 if cpu_offload_params else int(_FP16 * total_params / gpus)
    # multiplied in DeepSpeed's order: the last digit depends on it
    cpu = total_params * on_host * share if zero_init else total_params * max(_FP32 * gpus_per_node, on_host * share)
    return int(cpu * _BUFFER_FACTOR), layer + on_gpu
