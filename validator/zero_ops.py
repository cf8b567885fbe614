"""What the real DeepSpeed needs a compiler or a driver for, in Python: its Adam kernels, asynchronous files, pinned memory.

The kernels compute nothing: they own no memory, and with torch's fake process group all values are garbage.  Files are
written and read in full.  What DeepSpeed asks to be page-locked is remembered by storage, since the CPU locks nothing.

Read for: deepspeed 0.19.8, ops/adam/cpu_adam.py and fused_adam.py, runtime/swap_tensor (the handle that they call).
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from typing import Any


class Storages:
    """Some storages, as long as they live."""

    def __init__(self) -> None:
        self._keys: dict[int, Any] = {}

    def add(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._keys[key] = weakref.ref(storage, lambda _: self._keys.pop(key, None))
        return tensor

    def __contains__(self, storage_key: int) -> bool:
        return storage_key in self._keys

    def live(self) -> list[Any]:
        """Those that still live."""
        return [storage for reference in list(self._keys.values()) if (storage := reference()) is not None]


class _Kernels:
    """The functions of `cpu_adam` and `fused_adam`, which work in place."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def _file_handle(pinned: Storages) -> type:
    class AioHandle:
        """`aio_handle` of the async_io extension; every request is done at once."""

        def __init__(self, **_: Any) -> None:
            self._pending = 0

        def new_cpu_locked_tensor(self, numel: int, example: Any) -> Any:
            import torch

            return pinned.add(torch.empty(int(numel), dtype=example.dtype))

        def free_cpu_locked_tensor(self, tensor: Any) -> bool:
            return True

        def is_pinned(self, tensor: Any) -> bool:
            return tensor.untyped_storage()._cdata in pinned

        def async_pwrite(self, tensor: Any, path: str, offset: int) -> int:
            with open(path, "wb") as stream:
                stream.write(_bytes_of(tensor))
            self._pending += 1
            return 0

        def async_pread(self, tensor: Any, path: str, offset: int) -> int:
            wanted = _bytes_of(tensor)
            if os.path.getsize(path) < len(wanted):
                return -1
            with open(path, "rb") as stream:
                stream.readinto(wanted)
            self._pending += 1
            return 0

        def wait(self) -> int:
            done, self._pending = self._pending, 0
            return done

    return AioHandle


def _bytes_of(tensor: Any) -> memoryview:
    import ctypes

    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


@dataclass(frozen=True)
class Watched:
    """What cannot be told from the engine's structures at a mark."""

    pinned: Storages  # what DeepSpeed asked to be page-locked
    buckets: Storages  # reduce buckets of stages 1 and 2, also when only gradients hold them still
    gathered: Storages = field(default_factory=Storages)  # stage 3's whole parameters, also when only autograd holds them still


def install() -> Watched:
    """Puts all of it in the place of the real ones, in this process.  Call before an engine or optimizer is made."""
    import deepspeed
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, FusedAdamBuilder
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    pinned, buckets, gathered = Storages(), Storages(), Storages()
    for builder in (CPUAdamBuilder, FusedAdamBuilder):
        builder.load = lambda self, verbose=True: _Kernels()
    extension = type("async_io", (), {"aio_handle": _file_handle(pinned)})
    AsyncIOBuilder.load = lambda self, verbose=True: extension
    accelerator = type(deepspeed.accelerator.get_accelerator())
    accelerator.pin_memory = lambda self, tensor, **_: pinned.add(tensor)
    accelerator.is_pinned = lambda self, tensor: tensor.untyped_storage()._cdata in pinned
    sets_up = DeepSpeedZeroOptimizer.setup_buckets

    def setup_buckets(self: Any) -> None:
        sets_up(self)
        for bucket in self.ipg_buckets.values():
            for buffer in bucket.buffer:
                buckets.add(buffer)

    DeepSpeedZeroOptimizer.setup_buckets = setup_buckets
    fetches = PartitionedParameterCoordinator.fetch_sub_module

    def fetch_sub_module(self: Any, current_submodule: Any, forward: bool) -> None:
        fetches(self, current_submodule, forward)
        for param in current_submodule.parameters():
            if param.numel() and param.data.untyped_storage().nbytes():
                gathered.add(param.data)

    PartitionedParameterCoordinator.fetch_sub_module = fetch_sub_module
    return Watched(pinned, buckets, gathered)
