"""Counts the bytes of a running DeepSpeed engine: every storage that ops make, and what the engine's structures hold.

Read for: deepspeed 0.19.8, runtime/zero (stage_1_and_2.py, stage3.py, partition_parameters.py), runtime/bf16_optimizer.py,
runtime/fp16 (both wrappers), runtime/swap_tensor.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from .zero_ops import Watched

PINNED, HOST = "pinned ", "host "  # before a component's name: page-locked, and other memory of the host
# Masters: stage 1 and 2; stage 3; BF16_Optimizer; FP16_Optimizer; FP16_UnfusedOptimizer.
_MASTERS = (
    "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "fp32_groups_flat",
    "fp32_groups",
)  # fmt: skip
# What keeps gradients between the passes: stage 1 and 2, BF16_Optimizer; then on the host.
_GRADIENTS = ("averaged_gradients", "all_grad_tensors", "grads_in_partition", "fp32_groups_gradients_flat")
_PARTITIONED_GRADIENTS = ("grad_partitions_flat_buffer", "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition")
# Of an offloaded optimizer: 16-bit staging and one gradient on the host; one gradient on the GPU.
_STAGING = ("param_buffer_of_bit16_for_cpu_offload_groups", "temp_grad_buffer_for_cpu_offload")

_OF_A_PARAMETER = ("grad_accum", "selected_grad")  # gradients
_SELECTED = ("selected_indices", "partition_selected_indices")  # ZenFlow's columns


class Registry:
    """Live bytes of all storages that ops make, each counted once whatever views it."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, Any] = {}

    def see(self, value: Any) -> None:
        import torch

        if isinstance(value, (list, tuple)):
            for item in value:
                self.see(item)
        elif isinstance(value, torch.Tensor) and value.device.type == "cpu":
            storage = value.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key in self._known:
                return

            def died(_: Any) -> None:
                del self._known[key]
                self.live_bytes -= nbytes

            self._known[key] = weakref.ref(storage, died)
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        from torch.utils._python_dispatch import TorchDispatchMode

        registry = self

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                registry.see(out)
                return out

        with Watch():
            yield


def _storages(values: Iterable[Any]) -> dict[int, int]:
    """Bytes by storage, of tensors and of storages; what is neither is skipped."""
    found = {}
    for value in values:
        storage = value.untyped_storage() if hasattr(value, "untyped_storage") else value
        if hasattr(storage, "_cdata"):
            found[storage._cdata] = storage.nbytes()
    return found


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, dict):
            yield from _flat(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _flat(value)
            yield getattr(value, "flat_partition", None)
        else:
            yield value


def _named(owner: Any, names: Iterable[str]) -> list[Any]:
    """The tensors in the attributes of these names, whatever they are nested in."""
    return [value for value in _flat([getattr(owner, name, None) for name in names]) if value is not None]


def held_bytes(engine: Any, watched: Watched) -> dict[str, int]:
    """Bytes that the engine's structures hold, by component and place; a storage counts in the first that holds it."""
    wrapper = engine.optimizer
    offloads = bool(getattr(wrapper, "cpu_offload", False) or getattr(wrapper, "offload_optimizer", False))
    optimizer_at = HOST if offloads else ""
    params = list(engine.module.parameters())
    masters = _named(wrapper, _MASTERS)
    # Twin-Flow steps the first sub-groups on the GPU (stage3.py, `_create_fp32_partitions`)
    on_gpu = int((1 - wrapper.partial_offload) * len(masters)) if getattr(wrapper, "offload_optimizer", False) else 0
    grads = [grad for p in params for grad in (p.grad, *(getattr(p, name, None) for name in _OF_A_PARAMETER))]
    partitions, param_at = [], ""
    gathered: list[Any] = []
    if hasattr(wrapper, "fp16_partitioned_groups"):  # stage 3: a parameter's own tensor is what is gathered now
        gathered = [*(p.data for p in params), *(getattr(p, "ds_secondary_tensor", None) for p in params)]
        gathered += _in_flight(engine.module)
        params = [p.ds_tensor for p in params]
        param_at = HOST if getattr(wrapper, "offload_param", False) else ""
        partitions = [*_named(wrapper, ["param_groups_fp16_flat_cpu_memory"])]
    state = getattr(getattr(wrapper, "optimizer", wrapper), "state", {})
    parts: list[tuple[str, str, Iterable[Any]]] = [
        ("offload_buffer", HOST, [*_named(wrapper, _STAGING), *_swap_buffers(wrapper)]),
        ("offload_buffer", "", [getattr(wrapper, "temp_grad_buffer_for_gpu_offload", None)]),
        ("param", param_at, [*params, *partitions, *_named(wrapper, ["bf16_groups_flat", "bit16_groups_flat"])]),
        ("comm_buffer", "", [
            *gathered, *_buckets(wrapper), *watched.gathered.live(), *_named(wrapper, ["_muon_allgather_buffers"]),
        ]),
        ("buffer", "", engine.module.buffers()),
        ("master_weight", "", masters[:on_gpu]),
        ("master_weight", optimizer_at, masters[on_gpu:]),
        ("optimizer_state", "", _flat(state.get(m) for m in masters[:on_gpu])),
        ("optimizer_state", "", _named(wrapper, ["_muon_pending_momentum"])),
        ("optimizer_state", "", _flat(getattr(getattr(wrapper, "selective_optimizer", None), "state", {}).values())),
        ("optimizer_state", "", [tensor for p in params for tensor in _named(p, _SELECTED)]),
        ("optimizer_state", optimizer_at, _flat(state.values())),
        ("grad", optimizer_at, [
            *(getattr(m, "grad", None) for m in masters), *_named(wrapper, _PARTITIONED_GRADIENTS),
            *_named(wrapper, ["accumulated_grads_in_cpu"]),
        ]),
        ("grad", "", [*grads, *_named(wrapper, _GRADIENTS), *_unswapped_gradients(wrapper)]),
    ]  # fmt: skip
    seen: set[int] = set()
    found: dict[str, int] = {}
    for component, place, values in parts:
        for key, nbytes in _storages(values).items():
            if key not in seen and nbytes:
                seen.add(key)
                name = "comm_buffer" if key in watched.buckets else (PINNED if key in watched.pinned else place) + component
                found[name] = found.get(name, 0) + nbytes
    return found


def _swap_buffers(wrapper: Any) -> list[Any]:
    """Page-locked buffers of the NVMe swappers."""
    found = []
    if (swapper := getattr(wrapper, "optimizer_swapper", None)) is not None:
        found += swapper.swap_buffer_manager.all_buffers
    for param in (p for group in getattr(wrapper, "fp16_groups", ()) for p in group):
        if (swapper := getattr(param, "nvme_swapper", None)) is not None:
            return [*found, swapper.buffers, swapper.partitioned_swap_buffer, swapper.invalid_buffer]
    return found


def _in_flight(module: Any) -> list[Any]:
    """Flat buffers of gathers that nobody has waited for yet (partition_parameters.py, `AllGatherCoalescedHandle`)."""
    handles = {id(handle): handle for handle in getattr(module, "ds_inflight_param_registry", {}).values()}
    inner = [part for handle in handles.values() for part in getattr(handle, "handles", [handle])]
    return [tensor for handle in inner for tensor in getattr(handle, "partitions", ())]


def _unswapped_gradients(wrapper: Any) -> list[Any]:
    """Those that are too small for a file, or the ends of others."""
    swapper = getattr(wrapper, "optimizer_swapper", None)
    infos = swapper.swap_params_info.values() if swapper is not None else ()
    return [gradient for info in infos for gradient in info.unswapped_gradients.values()]


def _buckets(wrapper: Any) -> list[Any]:
    found: list[Any] = []
    for bucket in getattr(wrapper, "ipg_buckets", {}).values():
        found += bucket.buffer if isinstance(bucket.buffer, (list, tuple)) else [bucket.buffer]
    return found


def file_bytes(folder: str) -> int:
    """Bytes of all files below a folder."""
    return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names)
