"""How a block's parameters go to the device and back: tensor by tensor, as one flat bucket, or in slices over the ranks.

What a block leaves behind is freed: going up frees the host's copy, coming down makes a new one, as zo2 0.1.1 does
(optimizer/mezo_sgd/zo2.py: upload_impl, offload_impl).  With a transfer dtype the device computes in one dtype and the host
keeps another; the cast runs on the device, tensor by tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .blocks import Unit
from .measure import PAGEABLE, PINNED, Recorder


@dataclass
class Place:
    """Device and host, and copies between them.  On the CPU the device is a second copy in the same memory."""

    device: torch.device
    recorder: Recorder
    overlap: bool = True
    """Copies do not block and the host's copies are pinned, as torch makes the result of such a copy."""

    def to_device(self, tensor: Tensor) -> Tensor:
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        return new.copy_(tensor, non_blocking=self.overlap)

    def to_host(self, tensor: Tensor) -> Tensor:
        with self.recorder.tier(PINNED if self.overlap else PAGEABLE):
            pin = self.overlap and self.device.type == "cuda"
            new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
        return new.copy_(tensor, non_blocking=self.overlap)


class Streams:
    """zo2's three streams and who waits for whom; on the CPU, and without overlap, everything runs in order by itself.

    Unlike zo2, an upload waits for the offload before it: the allocator hands the memory of the block that leaves to the block
    that comes, while the copy out may still read it.
    """

    def __init__(self, place: Place) -> None:
        self._cuda = place.device.type == "cuda"
        self._on = self._cuda and place.overlap
        if self._on:
            self._upload, self._offload, self._compute = (torch.cuda.Stream(place.device) for _ in range(3))
            self._offloaded = torch.cuda.Event()

    def synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        with self._in("_upload"):
            if self._on:
                self._upload.wait_event(self._offloaded)
            yield

    @contextlib.contextmanager
    def offloading(self) -> Iterator[None]:
        if self._on:
            self._compute.synchronize()
        with self._in("_offload"):
            yield
            if self._on:
                self._offloaded.record(self._offload)

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        return self._in("_compute")

    def wait_for_upload(self) -> None:
        if self._on:
            self._upload.synchronize()

    def _in(self, stream: str) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(getattr(self, stream)) if self._on else contextlib.nullcontext()


class Transfer(Protocol):
    """Moves the parameters of a block."""

    def start(self, unit: Unit) -> None:
        """The block is on the host, as the model was built; puts it into the form in which it waits there."""
        ...

    def upload(self, unit: Unit) -> None: ...

    def offload(self, unit: Unit) -> None: ...


@dataclass
class Dtypes:
    """What the device computes in, and what the host keeps; None: the same."""

    compute: torch.dtype
    transfer: torch.dtype | None = None

    def widen(self, unit: Unit) -> None:
        if self.transfer is not None:
            _cast(unit, self.compute)

    def narrow(self, unit: Unit) -> None:
        if self.transfer is not None:
            _cast(unit, self.transfer)


@dataclass
class TensorByTensor:
    """Every tensor is copied by itself."""

    place: Place
    dtypes: Dtypes

    def start(self, unit: Unit) -> None:
        with self.place.recorder.tier(PAGEABLE):
            self.dtypes.narrow(unit)

    def upload(self, unit: Unit) -> None:
        for p in unit.tensors():
            p.data = self.place.to_device(p.data)
        self.dtypes.widen(unit)

    def offload(self, unit: Unit) -> None:
        self.dtypes.narrow(unit)
        for p in unit.tensors():
            p.data = self.place.to_host(p.data)


@dataclass
class Bucket:
    """The tensors of a block are joined to one flat tensor, which is copied; they are views of it then."""

    place: Place
    dtypes: Dtypes

    def start(self, unit: Unit) -> None:
        with self.place.recorder.tier(PAGEABLE):
            self.dtypes.narrow(unit)

    def upload(self, unit: Unit) -> None:
        with self.place.recorder.tier(PAGEABLE):
            flat = _joined(unit)
        flat = self.place.to_device(flat)
        _split(unit, flat, [p.shape for p in unit.tensors()])
        del flat  # with a transfer dtype the last tensor that is widened frees it
        self.dtypes.widen(unit)

    def offload(self, unit: Unit) -> None:
        self.dtypes.narrow(unit)
        flat = _joined(unit)
        flat = self.place.to_host(flat)
        _split(unit, flat, [p.shape for p in unit.tensors()])


@dataclass
class Sliced:
    """Every rank keeps one slice of the flat block on its host, uploads it, and gathers the others over the devices' links.

    The slice is uploaded to its place in the flat block and gathered from there, so that no other buffer is needed.  Blocks are
    padded to a multiple of the number of ranks.
    """

    place: Place
    dtypes: Dtypes
    rank: int
    world_size: int
    _slices: dict[str, Tensor] = field(default_factory=dict)
    _shapes: dict[str, list[torch.Size]] = field(default_factory=dict)

    def start(self, unit: Unit) -> None:
        self._shapes[unit.name] = [p.shape for p in unit.tensors()]
        with self.place.recorder.tier(PAGEABLE):
            self.dtypes.narrow(unit)
            own = self._slice_of(unit)
        self._wait_on_host(unit, own)

    def upload(self, unit: Unit) -> None:
        waiting = self._slices.pop(unit.name)
        flat = torch.empty(waiting.numel() * self.world_size, dtype=waiting.dtype, device=self.place.device)
        self._own(flat).copy_(waiting, non_blocking=self.place.overlap)
        del waiting
        _all_gather(flat, self._own(flat))
        _split(unit, flat, self._shapes[unit.name])
        del flat
        self.dtypes.widen(unit)

    def offload(self, unit: Unit) -> None:
        self.dtypes.narrow(unit)
        own = self._own(_whole(unit)) if self.dtypes.transfer is None else self._slice_of(unit)
        own = self.place.to_host(own)
        self._wait_on_host(unit, own)

    def _wait_on_host(self, unit: Unit, own: Tensor) -> None:
        """The block's tensors are empty until the next upload."""
        self._slices[unit.name] = own
        for p in unit.tensors():
            p.data = own.new_empty(0)

    def _slice_of(self, unit: Unit) -> Tensor:
        """This rank's slice of tensors that lie apart."""
        tensors = [p.data.reshape(-1) for p in unit.tensors()]
        size = -(-sum(t.numel() for t in tensors) // self.world_size)
        own, offset = tensors[0].new_zeros(size), -self.rank * size  # where the tensor begins, counted from the slice's start
        for tensor in tensors:
            first, end = max(offset, 0), min(offset + tensor.numel(), size)
            if first < end:
                own[first:end] = tensor[first - offset : end - offset]
            offset += tensor.numel()
        return own

    def _own(self, flat: Tensor) -> Tensor:
        return flat.chunk(self.world_size)[self.rank]


def _whole(unit: Unit) -> Tensor:
    """The flat tensor, padding included, whose views the unit's tensors are."""
    first = unit.tensors()[0].data
    return first.as_strided([first.untyped_storage().nbytes() // first.element_size()], [1], 0)


def _all_gather(flat: Tensor, own: Tensor) -> None:
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    gather(flat, own)


def _cast(unit: Unit, dtype: torch.dtype) -> None:
    for p in unit.tensors():
        if p.is_floating_point():
            p.data = p.data.to(dtype)


def _joined(unit: Unit) -> Tensor:
    return torch.cat([p.data.reshape(-1) for p in unit.tensors()])


def _split(unit: Unit, flat: Tensor, shapes: Sequence[torch.Size]) -> None:
    offset = 0
    for p, shape in zip(unit.tensors(), shapes, strict=True):
        p.data = flat[offset : offset + shape.numel()].view(shape)
        offset += shape.numel()


def place_on_device(place: Place, tensors: Sequence[Tensor]) -> None:
    """Moves tensors to the device for good."""
    for tensor in tensors:
        tensor.data = place.to_device(tensor.data)
