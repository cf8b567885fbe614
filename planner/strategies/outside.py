"""Memory of a GPU outside PyTorch's allocator in a job of several: what NCCL takes beside the CUDA context.

NCCL loads its kernels once a process, and each communicator has buffers for every channel and peer.  torch makes a communicator
for each process group, when that is first used.  Both sizes are measured ones (`hardware/data/links.json`); how many channels a
communicator has depends on the links, the NCCL version and its variables, so that a figure is good to some hundred MiB.

A process group is used by: DDP, FSDP1 and FSDP2 (the default one: a mesh of all ranks takes it over), ZeRO-1 and 2 (a clone of
the default one, deepspeed/utils/groups.py `_clone_world_group`); ZeRO-3 (that, and the default one in its barriers,
deepspeed/runtime/zero/stage3.py); HSDP (one of the shards and one of the copies).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...hardware.catalogue import communicator_bytes, nccl_bytes
from ...units import gib

if TYPE_CHECKING:
    from ...hardware.profile import Device
    from ..request import Request

_TWO_GROUPS = ("zero3", "hsdp")
_MULTICASTS = (9, 0)  # NVLink SHARP: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, Hopper and later behind an NVSwitch
# src/transport/nvls.cc, `ncclNvlsBufferSetup`: 16 channels, 2 directions, 8 steps of 128 KiB, for each GPU of the machine
_NVLS_BYTES = 16 * 2 * 8 * 128 * 1024
_FEWEST_FOR_NVLS = 3


def communicators(strategy: str) -> int:
    """How many NCCL communicators a process has."""
    return 2 if strategy in _TWO_GROUPS else 1


def with_nccl(device: Device, gpus: int, strategy: str) -> Device:
    """`device` in a job of `gpus` GPUs."""
    return device.with_communicator(nccl_bytes(gpus, communicators(strategy))) if gpus > 1 else device


def moved_to(device: Device, gpus: int, before: str, after: str) -> Device:
    """`device` of a job with strategy `before`, with strategy `after`."""
    more = communicators(after) - communicators(before)
    return device.with_communicator(more * communicator_bytes(gpus)) if gpus > 1 and more else device


def said(request: Request) -> str:
    """What NCCL is taken to need, and how sure that is; "" for one GPU."""
    if request.gpus < 2:
        return ""
    count, each = communicators(request.strategy), communicator_bytes(request.gpus)
    text = f"NCCL takes {gib(nccl_bytes(request.gpus, count))} outside PyTorch: {gib(nccl_bytes(request.gpus, 0))} once"
    text += f", and {gib(each)} for {'its communicator' if count == 1 else f'each of {count} communicators'}"
    text += "; published figures of one communicator lie between 0.5 and 1.6 GiB with all of it"
    local = request.gpus // request.nodes
    device = request.device
    switched = device.nvlink is not None and not device.nvlink.pairs_only
    if switched and local >= _FEWEST_FOR_NVLS and (device.compute_capability or (0, 0)) >= _MULTICASTS:
        text += f", and NVLink SHARP, where NCCL chooses it, adds {gib(count * local * _NVLS_BYTES)} (NCCL_NVLS_ENABLE=0: none)"
    return text
