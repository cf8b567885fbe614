"""What one optimizer step takes: the ops of the trace on the GPU, and what the strategy enqueued beside them.

The lanes: `host` (issues the ops), `compute`, `nvlink` | `pcie` | `network` (collectives, in the order of issue), `h2d`, `d2h`,
`nvme` and `cpu_optimizer`.  Compute is cut where the strategy enqueued something, and waits

* for what a strategy names with `Simulation.wait` (its `after` then says how early the work may begin);
* else for what brings parameters (all-gather, copies to the GPU): before the ops that follow its place in the program.  It may
  begin one such place earlier, as runtimes prefetch by one;
* for all of them before the optimizer step.

What takes results away (reduce-scatter, all-reduce, copies to the host) begins when the ops before its place are over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...errors import CannotTell
from ...hardware.profile import Device, Host
from ..ledger import DEFAULT_STREAM, Ledger, Tier
from ..simulate import ARITHMETIC, HOST, WAIT, Work, WorkLog
from ..trace.steptrace import EventKind, Phase, StepTrace
from .collectives import KINDS, Group, host_copy_bytes_per_s
from .engine import Engine, Task, totals
from .roofline import NOTHING, Coefficients, OpTable, coefficients, typical_error

if TYPE_CHECKING:
    from ..request import Request

_FETCHES = frozenset({"all_gather", "broadcast", "h2d", "nvme_read"})
_DDP_BUCKET_BYTES = 25 << 20  # nn/parallel/distributed.py, _DEFAULT_BUCKET_CAP_MB
# DeepSpeed's CPU Adam, parameters a second of one node: 1.8e9 on two sockets of 8 A100 (deepspeedai/DeepSpeed, issue 6834); 8e9
# on Grace (pull request 8365).  hardware/data/hosts.json holds the figures.
_CPU_ADAM_PER_S, _GRACE_ADAM_PER_S = 1.8e9, 8.0e9
# NVMe of a node without a figure of its own, read and write: four PCIe 4 drives (DeepNVMe, hosts.json).
_NVME_READ_BYTES_PER_S, _NVME_WRITE_BYTES_PER_S = 10e9, 5e9
# Passes over memory of an optimizer step, in readings or writings of the state: a fused kernel reads and writes everything
# once; torch's foreach Adam takes 9 list operations over 2 to 3 tensors each, 22 passes where the fused one has 7.
_PASSES = {"fused": 1.0, "default": 22 / 7, "foreach": 22 / 7, "for-loop": 22 / 7}
_MOST_GPUS_OF_A_MACHINE = 16  # of those in hardware/data/hosts.json; racks of 72 are machines of 4 there
_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One optimizer step in the steady state.  Lanes are those of the module's docstring."""

    seconds: float
    tokens_per_s: float
    """Of all GPUs together; samples for models of images and sound (`counts_samples`)."""
    counts_samples: bool = False
    bound_by: str = ""
    """The lane with the largest part of the critical path."""
    busy_s: dict[str, float] = field(default_factory=dict)
    critical_s: dict[str, float] = field(default_factory=dict)
    compute_s: dict[str, float] = field(default_factory=dict)
    """The compute lane by kind of op: matmul, attention, memory ..., optimizer."""
    typical_error: float = 0.0
    """The median error over published speeds that the coefficients were not fitted on, as a share."""
    assumptions: tuple[str, ...] = ()


def step_time(
    request: Request,
    trace: StepTrace,
    ledger: Ledger,
    work: WorkLog,
    *,
    host: Host | None = None,
    tf32: bool = False,
    c: Coefficients | None = None,
) -> StepTime:
    """The time of one optimizer step of `request`; `ledger` and `work` are what `simulate` returned.

    `host` is the node that the GPUs are in; None: a usual one of that GPU, which `assumptions` names.
    Raises CannotTell where the network between nodes is not known.
    """
    plan = StepPlan(request, trace, ledger, work, host=host, tf32=tf32, c=c)
    found = totals(Engine().run(plan.tasks()))
    replicas = request.gpus // (1 if request.zo is None else request.zo.zo_pert)  # GPUs that perturb share their batch
    samples = request.micro_batch_size * request.loop.grad_accum_steps * replicas
    counts_samples = request.seq_len <= 1 or request.model.task == "image-classification"
    units = samples if counts_samples else samples * request.seq_len
    return StepTime(
        seconds=found.seconds,
        tokens_per_s=units / found.seconds if found.seconds else 0.0,
        counts_samples=counts_samples,
        bound_by=found.bound_by,
        busy_s=found.busy_s,
        critical_s=found.critical_s,
        compute_s=plan.compute_s(),
        typical_error=typical_error(),
        assumptions=plan.assumptions,
    )


def cpu_adam_per_s(device: Device, per_node: int) -> float:
    """Parameters a second of one rank's CPU Adam, with `per_node` ranks on a machine."""
    return (_GRACE_ADAM_PER_S if device.c2c is not None else _CPU_ADAM_PER_S) / per_node


class StepPlan:
    """One optimizer step as tasks for the engine."""

    def __init__(
        self,
        request: Request,
        trace: StepTrace,
        ledger: Ledger,
        work: WorkLog,
        *,
        host: Host | None = None,
        tf32: bool = False,
        c: Coefficients | None = None,
    ) -> None:
        from ...hardware.catalogue import usual_host
        from ..predict import optimizer_impl

        self._impl = optimizer_impl(request)
        self._request, self._tf32 = request, tf32
        nodes = request.nodes if request.nodes > 1 else _least_nodes(request, host)
        if request.gpus // nodes > _MOST_GPUS_OF_A_MACHINE:
            raise CannotTell(f"{request.gpus // nodes} GPUs in one machine: none is known. Say with --nodes how many there are")
        self.host = host or usual_host(request.device, request.gpus // nodes)
        self._group = Group(self.host, request.device, request.gpus, nodes)
        self._last = max((r.iteration for r in work.runs), default=0)
        self._runs = [(number, ran.run.segment) for number, ran in enumerate(work.runs) if ran.iteration == self._last]
        self._work = [(ticket, w) for ticket, w in enumerate(work) if w.iteration == self._last and w.phase != Phase.INIT]
        self._waited = {ticket for w in work if w.kind == WAIT and w.stream != HOST for ticket in w.after}
        self._table = OpTable(trace)
        self._is_op = trace.event_kind == EventKind.OP
        self._signature = trace.op_signature[trace.event_arg[self._is_op]]
        kernels = np.zeros(len(self._is_op) + 1)
        kernels[1:][self._is_op] = self._table.kind[self._signature] != NOTHING
        self._until_ops = np.cumsum(kernels)
        self._steps = _step_sizes(trace, ledger) if request.mode == "train" else _StepSizes()
        self.price(c or coefficients())
        self.assumptions = self._assumptions(host is None)

    def price(self, c: Coefficients) -> None:
        """Takes these coefficients from here on."""
        self._c = c
        self._costs: dict[tuple[str, int, int, int], tuple[str, float]] = {}  # the same few sizes come again and again
        device, compiled = self._request.device, self._request.compiled
        self._op_s = self._table.seconds(device, c, tf32=self._tf32, compiled=compiled)
        seconds = np.zeros(len(self._is_op) + 1)
        seconds[1:][self._is_op] = self._op_s[self._signature]
        self._until_s = np.cumsum(seconds)

    def seconds(self) -> float:
        """The time of the step."""
        return totals(Engine().run(self.tasks())).seconds

    def _assumptions(self, chosen: bool) -> tuple[str, ...]:
        said = []
        if self._request.gpus > 1:
            nodes = f"{self._group.nodes} nodes" if self._group.nodes > 1 else "a node"
            said.append(f"{nodes} as {self.host.name}" + (" (not given)" if chosen else ""))
        return tuple(said)

    # -- tasks -----------------------------------------------------------------------------------------------------------

    def tasks(self, first_key: int = 0) -> Iterator[Task]:
        """The tasks of one step; keys count from `first_key`."""
        self._key = first_key
        self._keys: dict[int, int] = {}  # ticket -> key of its task
        self._compute = -1  # key of the last compute task
        self._pending: list[int] = []  # keys that the next compute task waits for
        self._held: dict[int, list[int]] = {}  # stream -> keys that its next work waits for
        self._open: list[int] = []  # keys of work that the optimizer step waits for
        self._fetched_at = -1  # compute task before the last fetch: how early the next one may begin
        self._bucket = 0  # bytes that DDP has gathered
        waiting = iter(self._work)
        upcoming = next(waiting, None)
        for number, segment in self._runs:
            at = segment.start
            while upcoming is not None and upcoming[1].run <= number and upcoming[1].phase != Phase.STEP:
                inside = upcoming[1].run == number  # else: between the run before and this one
                event = min(max(upcoming[1].event, at), segment.stop) if inside else at
                yield from self._ops(at, event)
                at = event
                yield from self._enqueued(*upcoming)
                upcoming = next(waiting, None)
            yield from self._ops(at, segment.stop)
        yield from self._flush()
        yield from self._optimizer()
        while upcoming is not None:  # of the step: DeepSpeed and FSDP do one thing after the other there
            yield from self._enqueued(*upcoming)
            upcoming = next(waiting, None)
        yield from self._flush()

    def _task(self, lane: str, seconds: float, name: str, after: tuple[int, ...] = ()) -> Task:
        task = Task(self._key, lane, seconds, name, tuple(key for key in after if key >= 0))
        self._key += 1
        return task

    def _ops(self, start: int, stop: int) -> Iterator[Task]:
        ops = self._until_ops[stop] - self._until_ops[start]
        if not ops:
            return
        yield from self._issued("ops", int(ops), float(self._until_s[stop] - self._until_s[start]), tuple(self._pending))
        self._pending.clear()

    def _issued(self, name: str, ops: int, seconds: float, after: tuple[int, ...]) -> Iterator[Task]:
        """Ops that begin when the host has issued the first of them; it goes on with the others while they run."""
        first = self._task("host", self._c.host_op, f"issue {name}")
        yield first
        run = self._task("compute", seconds, name, (first.key, *after))
        self._compute = run.key
        yield run
        if ops > 1:
            yield self._task("host", (ops - 1) * self._c.host_op, f"issue {name}")

    def _enqueued(self, ticket: int, work: Work) -> Iterator[Task]:
        if work.kind == WAIT and work.stream == HOST:
            yield self._task("host", 0.0, "wait", tuple(self._keys[t] for t in work.after if t in self._keys))
            return
        if work.kind == WAIT:
            waiting = self._held.setdefault(work.stream, []) if work.stream != DEFAULT_STREAM else self._pending
            waiting += [self._keys[t] for t in work.after if t in self._keys]
            return
        if work.kind == ARITHMETIC:
            before = (*self._pending, *(self._keys[t] for t in work.after if t in self._keys))
            self._pending.clear()
            gaps = work.ops * self._c.gap if work.nbytes else 0.0  # without work: a place in the stream
            yield from self._issued(ARITHMETIC, work.ops, self.cost(work)[1] + gaps, before)
            self._keys[ticket] = self._compute
            return
        if work.kind == "all_reduce" and self._request.strategy == "ddp":
            self._bucket += work.nbytes
            if self._bucket < _DDP_BUCKET_BYTES:
                return
            yield from self._flush()
            return
        yield from self._piece(ticket, work)

    def _flush(self) -> Iterator[Task]:
        """DDP's bucket goes: full, or the last one."""
        nbytes, self._bucket = self._bucket, 0
        if nbytes:
            yield from self._piece(-1, Work("all_reduce", 0, nbytes, 0))

    def _piece(self, ticket: int, work: Work) -> Iterator[Task]:
        fetches = work.kind in _FETCHES
        before: tuple[int, ...]
        if work.phase == Phase.STEP:
            before = (self._compute, *self._open, *self._pending)
            self._open.clear()
            self._pending.clear()
        elif work.after or ticket in self._waited:
            before = tuple(self._keys[t] for t in work.after if t in self._keys)
        elif fetches:
            before = (self._fetched_at,)
            self._fetched_at = self._compute
        else:
            before = (self._compute,)
        lane, seconds = self.cost(work)
        after = (*before, *self._held.pop(work.stream, ()))
        if work.ops > 1:  # tensor by tensor: it begins when the host has issued the first
            issued = self._task("host", self._c.host_op, f"issue {work.kind}")
            yield issued
            after = (issued.key, *after)
        task = self._task(lane, seconds, work.kind, after)
        yield task
        if work.ops > 1:
            yield self._task("host", (work.ops - 1) * self._c.host_op, f"issue {work.kind}")
        self._keys[ticket] = task.key
        if fetches and ticket not in self._waited:
            self._pending.append(task.key)
        else:
            self._open.append(task.key)

    def _optimizer(self) -> Iterator[Task]:
        """Waits for everything; then the GPU's part and the host's part run one after the other."""
        before = (*self._open, *self._pending)
        self._open.clear()
        self._pending.clear()
        gpu, cpu = self.optimizer_s()
        if cpu and not any(w.kind == "host_step" for _, w in self._work):  # else the strategy says when
            task = self._task("cpu_optimizer", cpu, "optimizer step", (self._compute, *before))
            yield task
            before = (task.key,)
        if gpu or before:
            yield from self._issued("optimizer step", 1, gpu, before)
            self._fetched_at = self._compute

    # -- costs -----------------------------------------------------------------------------------------------------------

    def cost(self, work: Work) -> tuple[str, float]:
        """(lane, seconds) of something enqueued.  Raises CannotTell for a kind without a cost."""
        key = work.kind, work.nbytes, work.ranks, work.stride
        if key not in self._costs:
            self._costs[key] = self._cost_of(work)
        return self._costs[key]

    def _cost_of(self, work: Work) -> tuple[str, float]:
        kind, nbytes = work.kind, work.nbytes
        if kind in KINDS:
            group = self._group.part(work.ranks, work.stride)
            lane = "network" if group.nodes > 1 else group.inner_kind
            return lane, group.seconds(kind, nbytes) / self._c.collective
        if kind in ("h2d", "d2h"):
            return kind, nbytes / host_copy_bytes_per_s(self._group, kind)
        if kind in ("nvme_read", "nvme_write"):
            return "nvme", nbytes / (self._nvme(kind) / self._group.per_node)
        if kind == ARITHMETIC:
            return "compute", nbytes / (self._request.device.memory_bandwidth_bytes_per_s * self._c.memory)
        if kind == "host_step":
            return "cpu_optimizer", nbytes / _FP32 / self._adam_per_s()
        raise CannotTell(f"the time of {kind} is not modelled")

    def _nvme(self, kind: str) -> float:
        disk = self.host.disk
        if kind == "nvme_read":
            return (disk and disk.read_bytes_per_s) or _NVME_READ_BYTES_PER_S
        return (disk and disk.write_bytes_per_s) or _NVME_WRITE_BYTES_PER_S

    def _adam_per_s(self) -> float:
        return cpu_adam_per_s(self._request.device, self._group.per_node)

    def optimizer_s(self) -> tuple[float, float]:
        """Seconds of the optimizer step on (GPU, host)."""
        sizes, device = self._steps, self._request.device
        cpu = sizes.host_elements / self._adam_per_s()
        traffic = sizes.gpu_bytes * _PASSES.get(self._impl, 1.0)
        return traffic / (device.memory_bandwidth_bytes_per_s * self._c.memory), cpu

    def compute_s(self) -> dict[str, float]:
        """The compute lane by kind of op."""
        ops_before = np.concatenate([[0], np.cumsum(self._is_op)])
        counts = np.zeros(len(self._op_s))
        for _, segment in self._runs:
            inside = self._signature[ops_before[segment.start] : ops_before[segment.stop]]
            counts += np.bincount(inside, minlength=len(counts))
        found = dict(self._table.kinds_s(self._op_s, counts))
        gpu, _ = self.optimizer_s()
        return {**found, "optimizer": gpu} if gpu else found


def _least_nodes(request: Request, host: Host | None) -> int:
    """How many nodes the GPUs need, where nobody says: more than one when no node of the catalogue holds them all."""
    from ...hardware.catalogue import hosts

    kinds = [host] if host is not None else [h for h in hosts() if h.gpu == request.device.key]
    largest = max((h.num_gpus for h in kinds), default=request.gpus)
    nodes = -(-request.gpus // largest)
    return nodes if request.gpus % nodes == 0 else 1


@dataclass(frozen=True)
class _StepSizes:
    gpu_bytes: float = 0.0  # that one pass of the optimizer reads and writes on the GPU
    host_elements: float = 0.0  # that it steps on the host


_HOST_TIERS = (Tier.HOST_PINNED, Tier.HOST_PAGEABLE, Tier.NVME)


def _step_sizes(trace: StepTrace, ledger: Ledger) -> _StepSizes:
    """What a step touches, from what the ledger says this rank keeps: weights and state twice, gradients once."""
    end = len(ledger) - 1
    on_gpu = ledger.components_after(end)
    on_host: dict[str, int] = {}
    for tier in _HOST_TIERS:
        for name, nbytes in ledger.components_after(end, tier).items():
            on_host[name] = on_host.get(name, 0) + nbytes
    trained = sum(trace.params[i].nbytes for i in trace.params_with_grad)
    weights = on_gpu.get("master_weight", 0) or min(trained, on_gpu.get("param", 0))
    state = on_gpu.get("optimizer_state", 0)
    stepped_on_host = on_host.get("master_weight", 0) or on_host.get("optimizer_state", 0) / 2  # of Adam: two states
    if stepped_on_host and not state:
        return _StepSizes(0.0, stepped_on_host / _FP32)
    return _StepSizes(3.0 * weights + 2.0 * state, stepped_on_host / _FP32)
