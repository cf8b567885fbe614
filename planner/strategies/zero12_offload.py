"""`offload_optimizer` of ZeRO stages 1 and 2: masters, states and their gradients on the host.

Source: deepspeed 0.19.8, deepspeed/runtime/zero/stage_1_and_2.py, the `cpu_offload` branches of `DeepSpeedZeroOptimizer`.  The
device is not asked: nvme is done as cpu.  Per optimizer group of partition ps, with e bytes of the model's dtype and the
largest parameter of m elements, for fp32 masters (with bf16 ones 2 for every 4):

    host, pinned      4 * ps masters, e * ps staging of the updated parameters, 4 * ps gradients, e * m one gradient
    host, pageable    states
    host, pinned      e * numel of every parameter that touches the partition: stage 2 with accumulation, g = e
    GPU               e * m one gradient; per parameter at the boundary 8 * (its elements inside) for the norm, then 4 *
"""

from __future__ import annotations

from ..ledger import Component, Tier
from ..optimizers.rule import StepEvents
from ..simulate import Block, Simulation
from ..trace.steptrace import ITEMSIZE, TensorSlot
from .flat import FlatGroup
from .zero_host import FP64, Adam, HostTensors, play


class HostOptimizer:
    """The host's side of one rank."""

    def __init__(self, sim: Simulation, pins: bool, dtype: str, adam: Adam) -> None:
        self._sim = sim
        self._tensors = HostTensors(sim, pins)
        self._dtype, self._e = dtype, ITEMSIZE[dtype]
        self._m = adam.itemsize
        self._adam = adam
        self._norms: list[Block] = []  # `norm_for_param_grads`
        self._accumulated: set[str] = set()  # `accumulated_grads_in_cpu`, which are never dropped
        self._steps = 0

    def add_group(self, group: FlatGroup, clone: Block) -> None:
        """Masters from `clone`, the copy of this rank's partition on the GPU, which goes; and the staging buffer."""
        sim, size = self._sim, group.partition
        if self._dtype == self._adam.dtype and sim.target == "cpu":
            sim.free(clone)  # `.to` changes nothing: the clone is the master
            self._tensors.make(Component.MASTER_WEIGHT, size * self._m, "fp32 partition")
        else:
            moved = sim.alloc(Component.TEMP, size * self._m, what="fp32 partition", tier=Tier.HOST_PAGEABLE)
            if self._dtype != self._adam.dtype and sim.target != "cpu":  # copied as it is, converted on the host
                copied = sim.alloc(Component.TEMP, size * self._e, what="partition copied", tier=Tier.HOST_PAGEABLE)
                sim.free(copied)
            sim.free(moved)
            self._tensors.make(Component.MASTER_WEIGHT, size * self._m, "fp32 partition")
            sim.free(clone)
        sim.enqueue("d2h", size * self._e)
        self._tensors.make(Component.OFFLOAD_BUFFER, size * self._e, "staging of updated parameters", name="temp_buffer_bit16")

    def finish_init(self, groups: list[FlatGroup]) -> None:
        """One gradient on each side, and the fp32 gradients."""
        largest = max(p.numel for group in groups for p in group.params)
        self._tensors.make(Component.OFFLOAD_BUFFER, largest * self._e, "one gradient")
        self._sim.alloc(Component.OFFLOAD_BUFFER, largest * self._e, what="one gradient")
        for group in groups:
            self._tensors.make(Component.GRAD, group.partition * self._m, "fp32 gradients", name="single_grad_partition")
        self._tensors.drop("temp_buffer_bit16", "single_grad_partition")
        for group in groups:
            play(self._sim, self._adam.events(self._sim, group.partition).init, Tier.HOST_PAGEABLE)

    def accumulate(self, param: TensorSlot, inside: int) -> None:
        """`async_accumulate_grad_in_cpu_via_gpu`: the whole gradient goes to the host, and comes back to be added to; with
        16-bit masters only what is inside, into the gradients that are there."""
        if self._adam.dtype != "float32":
            self._sim.enqueue("d2h", inside * self._m)
            return
        nbytes = param.numel * self._e
        if param.fqn in self._accumulated:
            self._sim.enqueue("h2d", nbytes)
        else:
            self._accumulated.add(param.fqn)
            self._tensors.make(Component.GRAD, nbytes, param.fqn)
        self._sim.enqueue("d2h", nbytes)

    def take(self, inside: int, dtype: str) -> None:
        """At the boundary: the norm of `inside` elements of `dtype`, and their copy into the fp32 gradients."""
        self._sim.run_temporary(inside * FP64, "gradient in fp64 for the norm")
        self._norms.append(self._sim.alloc(Component.TEMP, FP64, what="norm of the gradient"))
        if dtype != self._adam.dtype:
            self._sim.run_temporary(inside * self._m, "gradient in fp32")
        self._sim.enqueue("d2h", inside * self._m)

    def step_group(self, group: FlatGroup, events: StepEvents) -> None:
        """The optimizer steps on the host; the updated partition comes back through the staging buffer."""
        sim = self._sim
        sim.enqueue("host_step", group.partition * self._m)
        play(sim, events.later if self._steps else events.first, Tier.HOST_PAGEABLE)
        sim.enqueue("h2d", group.partition * self._e)

    def end_of_step(self) -> None:
        for norm in self._norms:
            self._sim.free(norm)
        self._norms.clear()
        self._steps += 1
