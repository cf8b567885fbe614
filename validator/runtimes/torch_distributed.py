"""torch's own DDP and FSDP, run for real: on the CPU by one rank of a group of any size, or by N processes, one a rank.

Alone, the group is torch's *fake* one: every collective returns at once and moves nothing, so a single process is rank r of N
and allocates what that rank allocates.  With others (`validator.ranks`) it is gloo's on CPUs and NCCL's on GPUs; nothing else
differs.

Known limits: the fake group has no buffers of its own (gloo keeps its last message).  It hands over no result, so DDP gets a
communication hook there; with one, the reducer copies gradients into its buckets in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..cpu import (
    _PREFIX,
    Outputs,
    Profile,
    Recorded,
    Span,
    _inside,
    _random_state_on_host,
    _with_addresses,
    parse,
    usage,
)
from ..cuda import Meter
from ..loop import HOST, Mark, Running, _Held, _no_garbage_collection, _step, _to_device
from ..measurement import MOMENTS, Usage
from ..out_of_memory import explained
from ..tensors import component_bytes, plain_tensor_bytes

if TYPE_CHECKING:
    from ...planner.request import Request
    from ...planner.strategies.ddp import DistributedDataParallel
    from ...planner.strategies.fsdp1 import FullySharded
    from ...planner.strategies.fsdp2 import FullyShard

    Parallel = DistributedDataParallel | FullyShard | FullySharded

Backend = Literal["fake", "gloo", "nccl"]
# What these make and drop inside is the CPU kernels' own: CUDA's copy without a temporary (ATen/native/cuda/TensorShape.cu).
# What FSDP calls; the `single` ones are torch 2.13's names of the others.
_COLLECTIVES = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single", "all_reduce")
_PATIENCE_S = 1.0  # more than a thread needs to leave a message
_SENDS = "c10d::"  # the profiler's name of a collective, up to when it is on its way
_COPIES: Outputs = {"aten::_chunk_cat": [[]], "aten::split_with_sizes_copy": [[]], "aten::_foreach_copy_": [[]]}


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Which process of how many."""

    rank: int
    world_size: int
    backend: Backend = "fake"
    store: str = ""
    """A file that the processes of a group meet in."""
    local_rank: int = 0
    """The GPU of an nccl group."""

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"


def measure(request: Request, parallel: Parallel, outputs: Outputs, *, rank: int = 0, place: Rank | None = None) -> Usage:
    """Runs the steps of `request` as one rank under `parallel`'s settings.

    `outputs`: of the trace, see `cpu.leaf_outputs`.  `place`: this process among others; None: alone, as rank `rank`.
    Raises OutOfMemory where a GPU has no room, RuntimeError where the engine fails.
    """
    import torch

    place = place or Rank(rank=rank, world_size=parallel.world_size)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # some kernels allocate scratch per thread
    try:
        with _group(place):
            if place.device == "cuda":
                return _measure_on_gpu(request, parallel, place)
            recorded = record(request, parallel, place)
    finally:
        torch.set_num_threads(before)
    return usage(recorded.profile, recorded.components, {**outputs, **_COPIES}, constant_bytes=recorded.constant_bytes)


def _measure_on_gpu(request: Request, parallel: Parallel, place: Rank) -> Usage:
    running = Running()
    meter = Meter(running)
    with explained(running, lambda: meter.where, "cuda"):
        _run(request, parallel, place, meter.mark, running)
    return meter.usage()


@contextlib.contextmanager
def _group(place: Rank) -> Iterator[None]:
    import torch.distributed as dist

    if place.backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store: Any = FakeStore()
    else:
        store = dist.FileStore(place.store, place.world_size)
    if place.device == "cuda":
        import torch

        torch.cuda.set_device(place.local_rank)
    dist.init_process_group(place.backend, store=store, rank=place.rank, world_size=place.world_size)
    try:
        with _let_go() if place.backend == "gloo" else contextlib.nullcontext():
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _let_go() -> Iterator[None]:
    """Collectives return when gloo's threads hold none of their tensors any more.

    Else a thread can be the last to drop one, and what it drops the profiler does not see.
    """
    import torch
    import torch.distributed as dist

    def users(tensors: Sequence[Any]) -> list[int]:
        return [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in tensors]

    def patient(collective: Any) -> Any:
        @functools.wraps(collective)
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            before = users(tensors)
            result = collective(*args, **kwargs)
            until = time.monotonic() + _PATIENCE_S
            while result is None and users(tensors) != before and time.monotonic() < until:
                time.sleep(0)
            return result

        return call

    originals = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
    for name, collective in originals.items():
        setattr(dist, name, patient(collective))
    try:
        yield
    finally:
        for name, collective in originals.items():
            setattr(dist, name, collective)


def record(request: Request, parallel: Parallel, place: Rank) -> Recorded:
    """Runs the loop under the profiler; the process group exists."""
    import torch
    from torch.profiler import ProfilerActivity, record_function

    gc.collect()  # nothing made before may die inside
    running = Running()
    components: dict[str, dict[str, int]] = {}
    constant_bytes = 0
    last: list[str] = []

    def mark(phase: str, iteration: int) -> None:
        nonlocal constant_bytes
        if last and last[-1] == "build" and running.module is not None:
            constant_bytes = plain_tensor_bytes(running.module)
        if last and last[-1] in MOMENTS and running.module is not None:
            components[last[-1]] = component_bytes(running.module, running.optimizer)
        with record_function(f"{_PREFIX}{phase} {iteration}"):
            pass
        last.append(phase)

    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, _random_state_on_host():
        _run(request, parallel, place, mark, running)
    results = profiler.profiler.kineto_results
    events = results.events()
    profile = _with_addresses(parse(events), results.experimental_event_tree())
    sent = [Span(e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in events if e.name().startswith(_SENDS)]
    return Recorded(_without_messages(profile, sorted(sent, key=lambda s: s.start_ns)), components, constant_bytes)


def _without_messages(profile: Profile, sent: Sequence[Span]) -> Profile:
    """The profile without what a collective makes for itself: its results lie in tensors that it was given.

    gloo copies what it sends and drops the copy in a thread of its own, which the profiler does not see; NCCL copies nothing.
    """
    made: dict[int, int] = {}  # address of a message's copy -> bytes
    dropped: set[int] = set()
    inside = _inside(profile, sent)
    for index, event in enumerate(profile.events):
        if event.delta_bytes > 0:
            made.pop(event.address, None)  # dropped unseen: the address is another's now
            if index in inside:
                made[event.address] = event.delta_bytes
                dropped.add(index)
        elif made.get(event.address) == -event.delta_bytes:
            del made[event.address]
            dropped.add(index)
    return replace(profile, events=tuple(e for i, e in enumerate(profile.events) if i not in dropped))


def _run(request: Request, parallel: Parallel, place: Rank, mark: Mark, running: Running) -> None:
    """The loop of `validator.loop`, with the module wrapped, and without averaging in all but the last micro step."""
    import torch

    from ...planner.optimizers.traced import make_optimizer
    from ...planner.trace.options import AUTOCAST_DTYPE
    from ...planner.trace.prepare import ready
    from ...planner.trace.source import trace_options

    loop, device = request.loop, place.device
    torch.manual_seed(0)
    mark("build", 0)
    built = ready(request.model, trace_options(request, device), real=device == "cuda")
    running.module = built.module
    gc.collect()
    mark(HOST, 0)  # the mesh's table of ranks, 4 bytes each, lies on the host
    mesh = _mesh(place)
    mark("init", 0)
    module = _wrap(built.module, parallel, place, mesh)
    running.module = module
    optimizer = make_optimizer(request.optimizer, request.optimizer_impl, [p for p in module.parameters() if p.requires_grad])
    running.optimizer = optimizer
    mark(HOST, 0)
    host_batch = built.make_batch(
        request.micro_batch_size, request.seq_len, target_len=request.target_len, image_size=request.image_size
    )
    mark("init", 0)
    narrow = AUTOCAST_DTYPE.get(request.precision)
    held = _Held() if loop.keep_outputs else None
    if held is not None:
        module.register_forward_hook(held.take)
    with _no_garbage_collection() as collect:
        for iteration in range(loop.iterations):
            if loop.zero_grad == "before-forward":
                optimizer.zero_grad(set_to_none=loop.set_to_none)
            for micro_batch in range(loop.grad_accum_steps):
                last = micro_batch == loop.grad_accum_steps - 1
                mark("forward", iteration)
                batch = _to_device(host_batch, device)
                with _averaging(module, last or not parallel.settings.no_sync):
                    with torch.autocast(device, dtype=getattr(torch, narrow)) if narrow else contextlib.nullcontext():
                        loss = built.step(module, batch)
                    mark("backward", iteration)
                    if loop.zero_grad == "before-backward" and micro_batch == 0:
                        optimizer.zero_grad(set_to_none=loop.set_to_none)
                    loss.backward()
            mark("step", iteration)
            _step(module, optimizer, None, clip=loop.clip_grad_norm)
            if loop.zero_grad == "after-step":
                optimizer.zero_grad(set_to_none=loop.set_to_none)
            collect()
        mark("end", loop.iterations - 1)


def _mesh(place: Rank) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(place.device, (place.world_size,))


def _wrap(module: Any, parallel: Parallel, place: Rank, mesh: Any) -> Any:
    from ...planner.strategies.ddp import DistributedDataParallel
    from ...planner.strategies.fsdp1 import FullySharded

    if isinstance(parallel, DistributedDataParallel):
        return _ddp(module, parallel, place)
    return _fsdp1(module, parallel, place) if isinstance(parallel, FullySharded) else _fsdp2(module, parallel, mesh)


def _ddp(module: Any, parallel: DistributedDataParallel, place: Rank) -> Any:
    import torch

    from ...models.quantised import is_statistic

    settings = parallel.settings
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, [name for name, _ in module.named_buffers() if is_statistic(name)]
    )
    wrapped = torch.nn.parallel.DistributedDataParallel(
        module.to(place.device),
        device_ids=[place.local_rank] if place.device == "cuda" else None,
        bucket_cap_mb=settings.bucket_cap_mb,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        forward_sync_buffers=settings.broadcast_buffers,
        init_sync=place.backend != "gloo",  # whose threads drop the copies unseen; one seed made all ranks equal
    )
    if place.backend == "fake":
        wrapped.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))  # DDP refuses other annotations than its own
    return wrapped


def _done(result: Any) -> Any:
    import torch

    done: Any = torch.futures.Future()
    done.set_result(result)
    return done


def _fsdp2(module: Any, parallel: FullyShard, mesh: Any) -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    settings = parallel.settings
    dtypes = {
        name: getattr(torch, dtype)
        for name, dtype in (("param_dtype", settings.param_dtype), ("reduce_dtype", settings.reduce_dtype))
        if dtype is not None
    }
    how: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": settings.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(**dtypes),
    }
    names = parallel.block_fqns([(n, type(m).__name__) for n, m in module.named_modules()])
    for fqn in sorted(names, key=lambda name: -name.count(".")):  # a wrapped module takes what its wrapped parts left
        fully_shard(module.get_submodule(fqn), **how)
    if settings.embedding:
        fully_shard(module.get_submodule(settings.embedding), **how)
    if settings.head:
        fully_shard([module.get_submodule(fqn) for fqn in settings.head], **{**how, "reshard_after_forward": False})
    if settings.root_reshard_after_forward is not None:
        how["reshard_after_forward"] = settings.root_reshard_after_forward
    return fully_shard(module, **how)


def _fsdp1(module: Any, parallel: FullySharded, place: Rank) -> Any:
    import torch
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    from ...planner.strategies.fsdp_units import longest_list

    settings = parallel.settings
    classes = settings.transformer_layer_cls_to_wrap
    blocks = {m for n, m in module.named_modules() if n and type(m).__name__ in classes}
    if not classes:
        listed = longest_list([(n, type(m).__name__) for n, m in module.named_modules()])
        blocks = {module.get_submodule(n) for n in listed}

    def of_blocks(module: Any, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or module in blocks

    policy: Any = of_blocks

    if hasattr(module, "peft_config") and settings.auto_wrap_policy == "TRANSFORMER_BASED_WRAP":
        from peft.utils.other import fsdp_auto_wrap_policy

        policy = fsdp_auto_wrap_policy(module)
    names = ("param_dtype", "reduce_dtype", "buffer_dtype")
    dtypes: dict[str, Any] = {n: getattr(torch, d) for n in names if (d := getattr(settings, n)) is not None}
    narrow = MixedPrecision(**dtypes) if dtypes else None
    ahead = settings.backward_prefetch
    wrapped = FullyShardedDataParallel(
        module,
        sharding_strategy=ShardingStrategy[settings.sharding_strategy],
        auto_wrap_policy=policy if settings.auto_wrap_policy != "NO_WRAP" else None,
        backward_prefetch=BackwardPrefetch[ahead] if ahead else None,
        mixed_precision=narrow,
        device_id=torch.device("cuda", place.local_rank) if place.device == "cuda" else torch.device("cpu"),
        forward_prefetch=settings.forward_prefetch,
        limit_all_gathers=settings.limit_all_gathers,
        use_orig_params=settings.use_orig_params,
    )
    if settings.units_inside_checkpoints:
        _checkpoint_around(wrapped)
    return wrapped


def _checkpoint_around(module: Any) -> None:
    """Moves reentrant checkpoints from inside of FSDP's units to around them, where models of transformers 4 have them."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.utils.checkpoint import checkpoint

    def around(forward: Any) -> Any:
        return lambda hidden, *args, **more: checkpoint(functools.partial(forward, **more), hidden, *args, use_reentrant=True)

    for unit in module.modules():
        if isinstance(unit, FullyShardedDataParallel) and getattr(unit.module, "gradient_checkpointing", False):
            unit.module.gradient_checkpointing = False  # type: ignore[assignment]
            if unit is not module and hasattr(unit.module, "_gradient_checkpointing_func"):
                unit.forward = around(unit.forward)  # type: ignore[method-assign]


@contextlib.contextmanager
def _averaging(module: Any, on: bool) -> Iterator[None]:
    """Whether this micro step averages gradients over the ranks."""
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(on)
        yield
        return
    with contextlib.nullcontext() if on else module.no_sync():
        yield
