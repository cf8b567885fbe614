"""Where ZeRO-3 keeps a rank's share: partitions, masters, gradients and states, on the GPU, on the host or on NVMe.

Source: deepspeed 0.19.8, deepspeed/runtime/zero/stage3.py (`_create_fp16_partitions_with_defragmentation`,
`_create_fp32_partitions`, `initialize_optimizer_states`, `partition_grads`, `step`) and partition_parameters.py
(`_partition_param`).  With c(n) elements of each parameter on a rank, S their sum over a sub-group, e / g bytes of the model's
and the accumulation's dtype:

    offload_optimizer cpu   host, pageable: 4 * S masters, states.  host, pinned: 4 * S fp32 gradients, g * S gradients
                            GPU: per parameter, at the boundary 8 * c(n) in pieces of 250 million elements, then 4 * c(n)
              ratio < 1     the first int((1 - ratio) * sub-groups) keep masters, fp32 gradients and states on the GPU
              nvme          see `zero3_nvme`
    offload_param cpu       host, pinned: e * S in one buffer a group, whatever pin_memory says; before it, one a parameter
                            GPU: the partitions of what is gathered, while they are copied there

Copies between GPU and host that also convert do so on the host, in a pageable tensor of the other dtype
(ATen/native/cuda/Copy.cu, `copy_kernel_cuda`, blocking).
"""

from __future__ import annotations

from ..ledger import Component, Tier
from ..optimizers.rule import OptimizerTensor, StepEvents
from ..optimizers.traced import traced_rule
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE, TensorSlot
from .deepspeed_settings import DeepSpeedSettings
from .zero3_muon import Muon3
from .zero3_nvme import NvmeOptimizer, NvmeParams
from .zero_host import FP64, Adam, HostTensors, host_tier, play
from .zero_muon import is_muon_group

_NORM_PIECE = 250_000_000  # elements; stage3.py, `_constant_buffered_norm2`


class Store:
    """`sub_groups` are stepped one after the other; `part(p)` is c(p)."""

    def __init__(
        self,
        sim: Simulation,
        settings: DeepSpeedSettings,
        groups: list[list[TensorSlot]],
        world_size: int,
        dtype: str,
        adam: Adam,
    ) -> None:
        self._sim, self._settings, self._adam = sim, settings, adam
        self._world_size = world_size
        self._groups = groups
        self._dtype, self._e, self._m = dtype, ITEMSIZE[dtype], adam.itemsize
        self._accum_dtype = settings.grad_accum_dtype or dtype
        self._g = ITEMSIZE[self._accum_dtype]
        self.sub_groups: list[list[TensorSlot]] = []
        for group in groups:
            self.sub_groups += _cut(group, [self.part(p) for p in group], settings.sub_group_size)
        self._number = {p.fqn: number for number, params in enumerate(self.sub_groups) for p in params}
        optimizer, param = settings.offload_optimizer, settings.offload_param
        self.offloads_optimizer, self.offloads_params = optimizer is not None, param is not None
        self.pins = optimizer is not None and optimizer.pin_memory
        self._host = HostTensors(sim, self.pins)
        on_gpu = int((1 - optimizer.ratio) * len(self.sub_groups)) if optimizer is not None else len(self.sub_groups)
        self._steps_on_gpu = [number < on_gpu for number in range(len(self.sub_groups))]
        self._nvme_params = NvmeParams(sim, settings, self._e) if param is not None and param.device == "nvme" else None
        self._nvme: NvmeOptimizer | None = None
        self.muon: Muon3 | None = None
        self._norms: list[Block] = []  # `norm_for_param_grads`
        self._steps = 0

    @property
    def _is_one_memory(self) -> bool:
        """Without a GPU, what moves from the device to the host stays where it is."""
        return self._sim.target == "cpu"

    def part(self, param: TensorSlot) -> int:
        """c(n): elements of one rank's partition (`_partition_param`)."""
        return -(-param.numel // self._world_size)

    def size(self, number: int) -> int:
        """S of a sub-group."""
        return sum(self.part(p) for p in self.sub_groups[number])

    # -- initialisation ------------------------------------------------------------------------------------------------------

    def partition(self, param: TensorSlot, whole: Block, *, persists: bool) -> Block:
        """The partition of one parameter; the whole one goes.  Where it lies at first."""
        nbytes = self.part(param) * ITEMSIZE[param.dtype]
        if self._nvme_params is not None and self._nvme_params.takes(nbytes):
            self._nvme_params.write(param, self.part(param))
            part = self._sim.alloc(Component.PARAM, 0, param.fqn, "partition on NVMe", Tier.HOST_PINNED)
        elif not self.offloads_params or persists:
            part = self._sim.alloc(Component.PARAM, nbytes, param.fqn, "partition")
        else:
            assert self._settings.offload_param is not None
            part = self._host.make(Component.PARAM, nbytes, param.fqn, pins=self._settings.offload_param.pin_memory)
            self._sim.enqueue("d2h", nbytes)
        self._sim.free(whole)
        return part

    def make(self, parts: dict[str, Block]) -> None:
        """Everything that is kept, from the partitions of all parameters; those of trainable ones move into flat buffers."""
        if self.offloads_params:
            self._flatten_on_host(parts)
        else:
            self._defragment([parts[p.fqn] for params in self.sub_groups for p in params])
        optimizer = self._settings.offload_optimizer
        if optimizer is not None and optimizer.device == "nvme":
            sizes = [self.size(number) for number in range(len(self.sub_groups))]
            self._nvme = NvmeOptimizer(self._sim, self._settings, sizes)
        self._masters()
        self._fp32_gradients()
        for number in range(len(self.sub_groups)):
            events = self._events(number).init
            play(self._sim, events, self._tier(number), "fp32 partition")

    def make_gradients(self) -> None:
        """`grad_partitions_flat_buffer`, which comes after the reduce bucket."""
        total = sum(self.size(number) for number in range(len(self.sub_groups)))
        if self.offloads_optimizer:
            self._host.make(Component.GRAD, total * self._g, "gradient partitions")
        else:
            self._sim.alloc(Component.GRAD, total * self._g, what="gradient partitions")

    def _defragment(self, parts: list[Block]) -> None:
        """`defragment`: trainable partitions move through the host into one flat buffer."""
        sim, nbytes = self._sim, sum(part.nbytes for part in parts)
        if self._is_one_memory:  # the host's buffer is the device's
            sim.alloc(Component.PARAM, nbytes, what="flat partitions")
            for part in parts:
                sim.free(part)
            return
        host = sim.alloc(Component.OFFLOAD_BUFFER, nbytes, what="defragmentation", tier=Tier.HOST_PAGEABLE)
        for part in parts:
            sim.free(part)
        sim.alloc(Component.PARAM, nbytes, what="flat partitions")
        sim.free(host)

    def _flatten_on_host(self, parts: dict[str, Block]) -> None:
        """`_create_param_groups_fp16_flat_cpu_memory`, `_move_to_flat_buffer`."""
        room = self._nvme_params.max_in_cpu if self._nvme_params is not None else None
        flat_sizes, taken = [], 0
        for group in self._groups:
            elements = sum(self.part(p) for p in group)
            fits = room is None or taken + elements <= room
            flat = elements if fits else max(0, (room or 0) - taken)
            taken += elements
            flat_sizes.append(flat)
            if flat:
                self._host.make(Component.PARAM, flat * self._e, "flat partitions", pins=True)
            else:
                self._sim.alloc(Component.PARAM, self._e, what="no flat partitions", tier=Tier.HOST_PAGEABLE)
        number = 0
        for group, flat in zip(self._groups, flat_sizes, strict=True):
            offset = 0
            for _ in _cut(group, [self.part(p) for p in group], self._settings.sub_group_size):
                if self._nvme_params is None or offset + self.size(number) <= flat:
                    for param in self.sub_groups[number]:
                        if self._nvme_params is None or not self._nvme_params.holds(param):
                            self._sim.free(parts[param.fqn])
                else:
                    self._nvme_params.stay_on_disk.add(number)
                offset += self.size(number)
                number += 1
        if self._nvme_params is not None and self._nvme_params.stay_on_disk:
            self._nvme_params.reserve_swap_space(max(self.sub_groups, key=lambda params: sum(self.part(p) for p in params)))

    def is_muons(self, number: int) -> bool:
        """Whether Muon steps the sub-group."""
        return self.muon is not None and is_muon_group(self.sub_groups[number])

    def _events(self, number: int) -> StepEvents:
        """Of the optimizer's step of a sub-group.  Muon has its update already, and adds it in place."""
        return StepEvents((), ()) if self.is_muons(number) else self._adam.events(self._sim, self.size(number))

    def orthogonalise(self) -> None:
        """Muon's updates, before the norm."""
        if self.muon is None:
            return
        if self.offloads_optimizer:
            self._norms += self.muon.orthogonalise_on_host(self.sub_groups)
        else:
            self.muon.orthogonalise(self.sub_groups)

    def _tier(self, number: int) -> Tier:
        """Where the optimizer steps a sub-group."""
        return Tier.GPU if self._steps_on_gpu[number] else Tier.HOST_PAGEABLE

    def _lp_tier(self, number: int) -> Tier:
        return host_tier(pins=True) if self.offloads_params else Tier.GPU

    def _converts(self, number: int) -> bool:
        """Whether `partition.to(device, float32)` makes a new tensor."""
        moves = not self._is_one_memory and (self._lp_tier(number) is Tier.GPU) != (self._tier(number) is Tier.GPU)
        return self._dtype != self._adam.dtype or moves

    def _masters(self) -> None:
        """`_create_fp32_partitions`: a converted copy and its clone; the copy lives until the next one exists."""
        sim = self._sim
        converted: Block | None = None
        unpinned: Block | None = None
        swapped: list[int] = []
        for number in range(len(self.sub_groups)):
            size, tier = self.size(number), self._tier(number)
            from_disk = self._nvme_params is not None and number in self._nvme_params.stay_on_disk
            if self._nvme is not None and self._nvme.takes(number):
                if not from_disk:
                    swapped.append(number)
                    continue
                if self._settings.offload_optimizer is not None and self._settings.offload_optimizer.fast_init:
                    assert self._nvme_params is not None
                    self._nvme_params.check_room(max(self.size(n) for n in range(len(self.sub_groups))))
                    self._nvme.write_master(number)
                    continue
                previous, unpinned = unpinned, sim.alloc(Component.TEMP, size * self._m, what="read from NVMe", tier=tier)
                if previous is not None:
                    sim.free(previous)
                self._nvme.write_master(number)
                continue
            if from_disk:
                sim.alloc(Component.MASTER_WEIGHT, size * self._m, what="fp32 partition", tier=tier)
                if unpinned is not None:
                    sim.free(unpinned)
                    unpinned = None
                continue
            if self._converts(number):
                previous, converted = converted, sim.alloc(Component.TEMP, size * self._m, what="converted to fp32", tier=tier)
                self._copy_converting(number, to_device=tier)
                if previous is not None:
                    sim.free(previous)
            sim.alloc(Component.MASTER_WEIGHT, size * self._m, what="fp32 partition", tier=tier)
            if self.is_muons(number):
                assert self.muon is not None
                self.muon.make_momentum(self.sub_groups[number], tier)
        for number in swapped:
            assert self._nvme is not None
            self._copy_converting(number, to_device=Tier.HOST_PAGEABLE)
            self._nvme.write_master(number)
        for block in (converted, unpinned):
            if block is not None:
                sim.free(block)

    def _copy_converting(self, number: int, *, to_device: Tier) -> None:
        """The pageable tensor in which a copy from the partition to the master, on the other side, is converted."""
        lp_on_gpu = self._lp_tier(number) is Tier.GPU
        if self._is_one_memory or self._dtype == self._adam.dtype or lp_on_gpu == (to_device is Tier.GPU):
            return
        itemsize = self._e if lp_on_gpu else self._m  # down: the partition as it is; up: converted before
        self._temporary_on_host(self.size(number) * itemsize)

    def _temporary_on_host(self, nbytes: int) -> None:
        self._sim.free(self._sim.alloc(Component.TEMP, nbytes, what="conversion of a copy", tier=Tier.HOST_PAGEABLE))

    def _fp32_gradients(self) -> None:
        """`initialize_optimizer_states`: zeros, which stay where the optimizer is offloaded."""
        sim = self._sim
        largest = max(self.size(number) for number in range(len(self.sub_groups)))
        device = Tier.HOST_PAGEABLE if self.offloads_optimizer else Tier.GPU
        zeros = sim.alloc(Component.TEMP, largest * self._m, what="zero gradient", tier=device)
        for number in range(len(self.sub_groups)):
            if not self.offloads_optimizer or (self._nvme is not None and self._nvme.takes(number)):
                continue
            nbytes = self.size(number) * self._m
            if self._steps_on_gpu[number] and not self._is_one_memory:
                moved = self._host.make(Component.TEMP, nbytes, "fp32 gradients")
                sim.alloc(Component.GRAD, nbytes, what="fp32 gradients")
                sim.free(moved)
            elif self._steps_on_gpu[number]:
                tier = host_tier(self.pins)  # one memory: the tensor that was pinned is the gradient
                sim.alloc(Component.GRAD, nbytes, what="fp32 gradients", tier=tier)
            else:
                self._host.make(Component.GRAD, nbytes, "fp32 gradients", name="subgroup_gradient_buffer")
        self._host.drop("subgroup_gradient_buffer")
        sim.free(zeros)

    # -- gradients -------------------------------------------------------------------------------------------------------------

    def keep_gradient(self, param: TensorSlot, inside: int, *, at_boundary: bool) -> None:
        """`partition_grads`: `inside` elements go into the gradient partitions, and at the boundary to the optimizer."""
        if not self.offloads_optimizer:
            return
        sim = self._sim
        sim.enqueue("d2h", inside * self._g)
        on_gpu = None
        if not self._is_one_memory:  # it comes back, for what follows
            on_gpu = sim.alloc(Component.TEMP, inside * self._g, param.fqn, "gradient on the GPU")
            sim.enqueue("h2d", inside * self._g)
        if at_boundary:
            sim.run_temporary(min(inside, _NORM_PIECE) * FP64, "gradient in fp64 for the norm")
            self._norms.append(sim.alloc(Component.TEMP, FP64, param.fqn, "norm of the gradient"))
            number = self._number[param.fqn]
            if self._nvme is not None and self._nvme.takes(number):
                block = None
                if self._accum_dtype != self._adam.dtype:
                    block = sim.alloc(Component.GRAD, inside * self._m, param.fqn, "gradient in fp32")
                elif on_gpu is not None:
                    block, on_gpu = on_gpu, None
                self._nvme.collect(number, param, inside, block)
            elif self._accum_dtype != self._adam.dtype:
                sim.run_temporary(inside * self._m, "gradient in fp32")
            sim.enqueue("d2h", inside * self._m)
        if on_gpu is not None:
            sim.free(on_gpu)

    def swap_out_gradients(self) -> None:
        """The end of `partition_grads`."""
        if self._nvme is not None:
            self._nvme.swap_out_gradients()

    # -- the step ------------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """`step`, sub-group by sub-group, after the norms."""
        sim = self._sim
        for number in range(len(self.sub_groups)):
            self._step_sub_group(number)
        for norm in self._norms:
            sim.free(norm)
        self._norms.clear()
        self._steps += 1

    def _step_sub_group(self, number: int) -> None:
        sim, size, tier = self._sim, self.size(number), self._tier(number)
        swaps = self._nvme is not None and self._nvme.takes(number)
        if swaps:
            assert self._nvme is not None
            self._nvme.swap_in(number)
        gradient = None if self.offloads_optimizer else self._gather_gradient(number)
        if self.offloads_optimizer and tier is Tier.GPU and not self._is_one_memory:  # torch's AdamW, as it comes
            events = traced_rule("adamw", target=sim.target).step(self._tensors(number))
        else:
            events = self._events(number)
        if tier is not Tier.GPU:
            sim.enqueue("host_step", size * self._m)
        states = events.later if self._steps else events.first
        if swaps:
            assert self._nvme is not None
            self._nvme.step(number, states)
        else:
            play(sim, states, tier, "fp32 partition")
        self._write_back(number)
        if gradient is not None:
            sim.free(gradient)
        if swaps:
            assert self._nvme is not None
            self._nvme.swap_out(number)

    def _gather_gradient(self, number: int) -> Block | None:
        """`_prepare_fp32_grad_for_sub_group`."""
        sim, size = self._sim, self.size(number)
        gradient = None
        if len(self.sub_groups[number]) > 1:
            gradient = sim.alloc(Component.GRAD, size * self._g, what="flat gradients")
        if self._accum_dtype != self._adam.dtype:
            flat, gradient = gradient, sim.alloc(Component.GRAD, size * self._m, what="fp32 gradients")
            if flat is not None:
                sim.free(flat)
        return gradient

    def _write_back(self, number: int) -> None:
        """`_reassign_or_swap_out_partitioned_parameters`: the master goes into the partition."""
        sim, nbytes = self._sim, self.size(number) * self._e
        lp_on_gpu, master_on_gpu = self._lp_tier(number) is Tier.GPU, self._tier(number) is Tier.GPU
        if self._nvme_params is not None and number in self._nvme_params.stay_on_disk:
            sim.enqueue("nvme_write", nbytes)
            return
        if lp_on_gpu != master_on_gpu:
            sim.enqueue("h2d" if lp_on_gpu else "d2h", nbytes)
            if not self._is_one_memory and self._dtype != self._adam.dtype:  # up: converted before; down: the master as it is
                self._temporary_on_host(nbytes if lp_on_gpu else self.size(number) * self._m)

    def _tensors(self, number: int) -> list[OptimizerTensor]:
        return [OptimizerTensor((self.size(number),), self._adam.dtype)]


def _cut(params: list[TensorSlot], sizes: list[int], limit: int) -> list[list[TensorSlot]]:
    """`_create_fp16_sub_groups`: a sub-group is closed by the parameter that brings it to `limit` elements."""
    if limit >= sum(sizes):
        return [params]
    found: list[list[TensorSlot]] = []
    open_group: list[TensorSlot] = []
    elements = 0
    for param, size in zip(params, sizes, strict=True):
        open_group.append(param)
        elements += size
        if elements >= limit or param is params[-1]:
            found.append(open_group)
            open_group, elements = [], 0
    return found
