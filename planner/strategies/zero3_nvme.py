"""ZeRO-3's swapping to NVMe: files, the page-locked buffers in front of them, and what is too small for a file.

Source: deepspeed 0.19.8, deepspeed/runtime/swap_tensor: partitioned_optimizer_swapper.py, pipelined_optimizer_swapper.py,
optimizer_utils.py, partitioned_param_swapper.py, utils.py.  A tensor is swapped when it has at least max(1 MiB, block_size)
bytes; files are padded to a = 1024 * intra_op_parallelism bytes.  With S elements of a sub-group, n of a parameter, c(n) of its
partition:

    optimizer   files        4 * S of the master, from the start; 4 * S of each state, from the first step
                             4 * c(n) of a gradient, its last (4 * c(n) mod a) bytes left out
                host, locked buffer_count * 4 * (largest S, padded)
                host         the states of a sub-group while its first step runs; with a pipeline until it is read again
                GPU          4 * c(n) of every gradient that is too small or no whole number of a, until its sub-group stepped
    param       files        e * c(n)
                host, locked buffer_count * buffer_size * e; and, if a sub-group stays on disk, e * the sum of n over the
                             largest sub-group
"""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import UserError
from ..ledger import Component, Tier
from ..optimizers.rule import StepEvent, StepKind
from ..simulate import Block, Simulation
from ..trace.steptrace import TensorSlot
from .deepspeed_settings import DeepSpeedSettings
from .zero_host import FP32

_MIN_BYTES = 1 << 20  # utils.py, MIN_AIO_BYTES
_TENSORS = 4  # of Adam, in memory at once
_ALIGNED_BYTES = 1024  # utils.py, AIO_ALIGNED_BYTES: for each thread


class _Files:
    """What goes to disk, and in which portions."""

    def __init__(self, sim: Simulation, settings: DeepSpeedSettings) -> None:
        self._sim = sim
        self._least = max(_MIN_BYTES, settings.aio_block_size)
        self._portion = _ALIGNED_BYTES * settings.aio_intra_op_parallelism
        self._sizes: dict[str, int] = {}

    def is_large(self, nbytes: int) -> bool:
        return nbytes >= self._least

    def padded(self, nbytes: int) -> int:
        return -(-nbytes // self._portion) * self._portion

    def whole(self, nbytes: int) -> int:
        """Without the part of a portion at the end."""
        return nbytes // self._portion * self._portion

    def write(self, name: str, nbytes: int, component: Component) -> None:
        if name not in self._sizes:
            self._sizes[name] = nbytes
            self._sim.alloc(component, nbytes, name, "file", Tier.NVME)
        self._sim.enqueue("nvme_write", nbytes)

    def read(self, nbytes: int) -> None:
        self._sim.enqueue("nvme_read", nbytes)


class NvmeOptimizer:
    """`PartitionedOptimizerSwapper`, or with `pipeline_*` the pipelined one.  `sizes`: S of every sub-group."""

    def __init__(self, sim: Simulation, settings: DeepSpeedSettings, sizes: list[int]) -> None:
        assert settings.offload_optimizer is not None
        self._sim = sim
        self._files = _Files(sim, settings)
        self._sizes = sizes
        self._pipelines = settings.offload_optimizer.pipeline_read or settings.offload_optimizer.pipeline_write
        self._waiting: list[tuple[int, TensorSlot, int, Block | None]] = []
        self._buffered: list[tuple[str, int]] = []  # gradients in the swap buffer that is filled now
        self._room = self._files.padded(max(sizes) * FP32)
        self._unswapped: dict[int, list[Block]] = {}  # of each sub-group: gradients in memory
        self._states: dict[int, list[Block]] = {}  # of each sub-group: states that are still in memory
        self._names: dict[int, list[tuple[str, int]]] = {}
        count = settings.offload_optimizer.buffer_count
        if any(self.takes(number) for number in range(len(sizes))) and count < _TENSORS:
            raise UserError(
                f"zero_optimization.offload_optimizer.buffer_count {count}: expected at least {_TENSORS}",
                "Adam needs a buffer for the master, its two states and the gradient",
            )
        for _ in range(count):
            nbytes = self._files.padded(max(sizes) * FP32)
            sim.alloc(Component.OFFLOAD_BUFFER, nbytes, what="swap buffer", tier=Tier.HOST_PINNED)

    def takes(self, number: int) -> bool:
        """Whether a sub-group is swapped."""
        return self._files.is_large(self._sizes[number] * FP32)

    def write_master(self, number: int) -> None:
        self._files.write(f"master {number}", self._files.padded(self._sizes[number] * FP32), Component.MASTER_WEIGHT)

    def collect(self, number: int, param: TensorSlot, inside: int, block: Block | None) -> None:
        """A gradient of the boundary; `block` is its fp32 tensor, None a view of what is kept anyhow."""
        self._waiting.append((number, param, inside, block))

    def swap_out_gradients(self) -> None:
        """`_swap_out_gradients`: what is large goes to its file; the rest of it keeps the tensor that it is a view of."""
        for number, param, inside, block in self._waiting:
            nbytes = inside * FP32
            if self._files.is_large(nbytes):
                self._buffer(f"gradient of {param.fqn}", self._files.whole(nbytes))
            if block is not None and self._files.is_large(nbytes) and self._files.whole(nbytes) == nbytes:
                self._sim.free(block)
            elif block is not None:
                self._unswapped.setdefault(number, []).append(block)
        self._waiting.clear()

    def _buffer(self, name: str, nbytes: int) -> None:
        """`AsyncTensorSwapper`: a swap buffer is written when the next gradient does not fit into it."""
        if sum(size for _, size in self._buffered) + nbytes > self._room:
            self._flush()
        self._buffered.append((name, nbytes))

    def _flush(self) -> None:
        for name, nbytes in self._buffered:
            self._files.write(name, nbytes, Component.GRAD)
        self._buffered.clear()

    def swap_in(self, number: int) -> None:
        self._flush()
        for name, nbytes in [
            (f"master {number}", self._files.padded(self._sizes[number] * FP32)),
            *self._names.get(number, []),
        ]:
            del name
            self._files.read(nbytes)
        for block in self._states.pop(number, []):  # their tensors are in the swap buffers now
            self._sim.free(block)

    def step(self, number: int, events: Iterable[StepEvent]) -> None:
        """The optimizer's events: what it keeps is made in pageable memory, and goes to files with the sub-group."""
        temporaries: dict[int, Block] = {}
        made = self._states.setdefault(number, [])
        for index, event in enumerate(events):
            if event.kind is StepKind.FREE:
                self._sim.free(temporaries.pop(event.slot))
            elif event.kind is StepKind.STATE:
                swapped = self._files.is_large(event.nbytes)
                component = Component.OPTIMIZER_STATE
                block = self._sim.alloc(component, event.nbytes, "fp32 partition", "optimizer state", Tier.HOST_PAGEABLE)
                if swapped:
                    made.append(block)
                    self._names.setdefault(number, []).append((f"state {index} of {number}", self._files.padded(event.nbytes)))
            elif event.kind is StepKind.TEMP:
                temporaries[event.slot] = self._sim.alloc(
                    Component.TEMP, event.nbytes, what="optimizer step", tier=Tier.HOST_PAGEABLE
                )
        for block in temporaries.values():
            self._sim.free(block)

    def swap_out(self, number: int) -> None:
        self.write_master(number)
        for name, nbytes in self._names.get(number, []):
            self._files.write(name, nbytes, Component.OPTIMIZER_STATE)
        if not self._pipelines:
            for block in self._states.pop(number, []):
                self._sim.free(block)
        for block in self._unswapped.pop(number, []):
            self._sim.free(block)


class NvmeParams:
    """`AsyncPartitionedParameterSwapper`."""

    def __init__(self, sim: Simulation, settings: DeepSpeedSettings, itemsize: int) -> None:
        assert settings.offload_param is not None
        self._sim, self._e = sim, itemsize
        self._config = settings.offload_param
        self._files = _Files(sim, settings)
        self._written: set[str] = set()
        self.stay_on_disk: set[int] = set()  # sub-groups without a flat buffer on the host
        self.max_in_cpu = self._config.max_in_cpu
        sim.alloc(Component.OFFLOAD_BUFFER, 2, what="stands for a parameter on NVMe", tier=Tier.HOST_PAGEABLE)  # fp16
        nbytes = self._files.padded(self._config.buffer_size * itemsize) * self._config.buffer_count
        untouched = sim.alloc(Component.OFFLOAD_BUFFER, nbytes, what="size of the swap buffers", tier=Tier.HOST_PAGEABLE)
        sim.alloc(Component.OFFLOAD_BUFFER, nbytes, what="swap buffers", tier=Tier.HOST_PINNED)
        sim.free(untouched)

    def takes(self, nbytes: int) -> bool:
        return self._files.is_large(nbytes)

    def holds(self, param: TensorSlot) -> bool:
        return param.fqn in self._written

    def write(self, param: TensorSlot, elements: int) -> None:
        if elements > self._config.buffer_size:
            raise UserError(
                f"zero_optimization.offload_param.buffer_size {self._config.buffer_size:,}: the partition of {param.fqn} has "
                f"{elements:,} elements",
                f"Set it to {elements:,} or more",
            )
        self._written.add(param.fqn)
        self._files.write(param.fqn, self._files.padded(elements * self._e), Component.PARAM)

    def check_room(self, elements: int) -> None:
        """`fast_init` reads a whole sub-group into one of the parameters' buffers."""
        room = self._files.padded(self._config.buffer_size * self._e) // self._e
        if elements > room:
            raise UserError(
                f"zero_optimization.offload_param.buffer_size {self._config.buffer_size:,} with offload_optimizer.fast_init: "
                f"the largest sub-group has {elements:,} elements",
                f"Set it to {elements:,} or more, or sub_group_size to less",
            )

    def reserve_swap_space(self, params: list[TensorSlot]) -> None:
        """`reserve_partitioned_swap_space`: for whole parameters, not for their partitions."""
        nbytes = sum(self._files.padded(p.numel * self._e) for p in params)
        self._sim.alloc(Component.OFFLOAD_BUFFER, nbytes, what="swap space", tier=Tier.HOST_PINNED)
