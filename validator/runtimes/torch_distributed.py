"""torch's own DDP and FSDP2 (`fully_shard`), run for real on the CPU by one rank of a group of any size.

The group is torch's *fake* one: every collective returns at once and moves nothing, so a single process is rank r of N and
allocates what that rank allocates.  `backend="gloo"` runs N processes that talk to each other, as a check of the fake group.

Known limits: the fake group has no buffers of its own (gloo keeps its last message).  It hands over no result, so DDP gets a
communication hook there; with one, the reducer copies gradients into its buckets in the same way.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..cpu import _PREFIX, Outputs, Recorded, _random_state_on_host, _with_addresses, parse, usage
from ..loop import HOST, _Held, _no_garbage_collection, _step, _to_device
from ..measurement import MOMENTS, Usage
from ..tensors import plain_tensor_bytes

if TYPE_CHECKING:
    from ...planner.request import Request
    from ...planner.strategies.ddp import DistributedDataParallel
    from ...planner.strategies.fsdp1 import FullySharded
    from ...planner.strategies.fsdp2 import FullyShard

    Parallel = DistributedDataParallel | FullyShard | FullySharded

Backend = Literal["fake", "gloo"]
# What these make and drop inside is the CPU kernels' own: CUDA's copy without a temporary (ATen/native/cuda/TensorShape.cu).
_COPIES: Outputs = {"aten::_chunk_cat": [[]], "aten::split_with_sizes_copy": [[]], "aten::_foreach_copy_": [[]]}


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Which process of how many."""

    rank: int
    world_size: int
    backend: Backend = "fake"
    store: str = ""
    """A file that the processes of a gloo group meet in."""


def measure(request: Request, parallel: Parallel, outputs: Outputs, *, rank: int = 0, backend: Backend = "fake") -> Usage:
    """Runs the steps of `request` as rank `rank` of `parallel.world_size` under `parallel`'s settings.

    `outputs`: of the trace, see `cpu.leaf_outputs`.  With gloo all ranks run, each in a process of its own.
    Raises RuntimeError where one of them fails.
    """
    if backend == "gloo":
        return _measure_all(request, parallel, outputs)[rank]
    return _measure_one(request, parallel, outputs, Rank(rank=rank, world_size=parallel.world_size))


def _measure_one(request: Request, parallel: Parallel, outputs: Outputs, place: Rank) -> Usage:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # some kernels allocate scratch per thread
    try:
        with _group(place):
            recorded = record(request, parallel, place)
    finally:
        torch.set_num_threads(before)
    return usage(recorded.profile, recorded.components, {**outputs, **_COPIES}, constant_bytes=recorded.constant_bytes)


def _measure_all(request: Request, parallel: Parallel, outputs: Outputs) -> list[Usage]:
    """One process a rank; they meet in a file."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="memplan-") as folder:
        store = os.path.join(folder, "store")
        ranks = [Rank(rank=r, world_size=parallel.world_size, backend="gloo", store=store) for r in range(parallel.world_size)]
        # not a Pool, which would start a rank that died again and again, for ever
        with ProcessPoolExecutor(len(ranks), mp_context=context) as pool:
            return [f.result() for f in [pool.submit(_measure_one, request, parallel, outputs, place) for place in ranks]]


@contextlib.contextmanager
def _group(place: Rank) -> Iterator[None]:
    import torch.distributed as dist

    if place.backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store: Any = FakeStore()
    else:
        store = dist.FileStore(place.store, place.world_size)
    dist.init_process_group(place.backend, store=store, rank=place.rank, world_size=place.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def record(request: Request, parallel: Parallel, place: Rank) -> Recorded:
    """Runs the loop under the profiler; the process group exists."""
    import torch
    from torch.profiler import ProfilerActivity, record_function

    gc.collect()  # nothing made before may die inside
    running: list[Any] = [None, None]  # module and optimizer
    components: dict[str, dict[str, int]] = {}
    constant_bytes = 0
    last: list[str] = []

    def mark(phase: str, iteration: int) -> None:
        nonlocal constant_bytes
        module, optimizer = running
        if last and last[-1] == "build" and module is not None:
            constant_bytes = plain_tensor_bytes(module)
        if last and last[-1] in MOMENTS and module is not None:
            components[last[-1]] = _component_bytes(module, optimizer)
        with record_function(f"{_PREFIX}{phase} {iteration}"):
            pass
        last.append(phase)

    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, _random_state_on_host():
        _run(request, parallel, place, mark, running)
    results = profiler.profiler.kineto_results
    return Recorded(_with_addresses(parse(results.events()), results.experimental_event_tree()), components, constant_bytes)


def _run(request: Request, parallel: Parallel, place: Rank, mark: Callable[[str, int], None], running: list[Any]) -> None:
    """The loop of `validator.loop`, with the module wrapped, and without averaging in all but the last micro step."""
    import torch

    from ...planner.optimizers.traced import make_optimizer
    from ...planner.trace.options import AUTOCAST_DTYPE
    from ...planner.trace.prepare import ready
    from ...planner.trace.source import trace_options

    loop = request.loop
    torch.manual_seed(0)
    mark("build", 0)
    built = ready(request.model, trace_options(request, "cpu"))
    running[0] = built.module
    gc.collect()
    mark(HOST, 0)  # the mesh's table of ranks, 4 bytes each, lies on the host
    mesh = _mesh(place)
    mark("init", 0)
    module = _wrap(built.module, parallel, place, mesh)
    running[0] = module
    optimizer = make_optimizer(request.optimizer, request.optimizer_impl, [p for p in module.parameters() if p.requires_grad])
    running[1] = optimizer
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
                batch = _to_device(host_batch, "cpu")
                with _averaging(module, last or not parallel.settings.no_sync):
                    with torch.autocast("cpu", dtype=getattr(torch, narrow)) if narrow else contextlib.nullcontext():
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

    return init_device_mesh("cpu", (place.world_size,))


def _wrap(module: Any, parallel: Parallel, place: Rank, mesh: Any) -> Any:
    from ...planner.strategies.ddp import DistributedDataParallel
    from ...planner.strategies.fsdp1 import FullySharded

    if isinstance(parallel, DistributedDataParallel):
        return _ddp(module, parallel, place)
    return _fsdp1(module, parallel) if isinstance(parallel, FullySharded) else _fsdp2(module, parallel, mesh)


def _ddp(module: Any, parallel: DistributedDataParallel, place: Rank) -> Any:
    import torch

    settings = parallel.settings
    wrapped = torch.nn.parallel.DistributedDataParallel(
        module,
        bucket_cap_mb=settings.bucket_cap_mb,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        forward_sync_buffers=settings.broadcast_buffers,
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
    if settings.root_reshard_after_forward is not None:
        how["reshard_after_forward"] = settings.root_reshard_after_forward
    return fully_shard(module, **how)


def _fsdp1(module: Any, parallel: FullySharded) -> Any:
    import torch
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    from ...planner.strategies.fsdp_units import longest_list

    settings = parallel.settings
    classes = settings.transformer_layer_cls_to_wrap
    blocks = {m for n, m in module.named_modules() if n and type(m).__name__ in classes}
    if not classes:
        listed = longest_list([(n, type(m).__name__) for n, m in module.named_modules()])
        blocks = {module.get_submodule(n) for n in listed}

    def policy(module: Any, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or module in blocks

    names = ("param_dtype", "reduce_dtype", "buffer_dtype")
    dtypes: dict[str, Any] = {n: getattr(torch, d) for n in names if (d := getattr(settings, n)) is not None}
    narrow = MixedPrecision(**dtypes) if dtypes else None
    ahead = settings.backward_prefetch
    return FullyShardedDataParallel(
        module,
        sharding_strategy=ShardingStrategy[settings.sharding_strategy],
        auto_wrap_policy=policy if settings.auto_wrap_policy != "NO_WRAP" else None,
        backward_prefetch=BackwardPrefetch[ahead] if ahead else None,
        mixed_precision=narrow,
        device_id=torch.device("cpu"),
        forward_prefetch=settings.forward_prefetch,
        limit_all_gathers=settings.limit_all_gathers,
        use_orig_params=settings.use_orig_params,
    )


@contextlib.contextmanager
def _averaging(module: Any, on: bool) -> Iterator[None]:
    """Whether this micro step averages gradients over the ranks."""
    if hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(on)
        yield
        return
    with contextlib.nullcontext() if on else module.no_sync():
        yield


def _component_bytes(module: Any, optimizer: Any) -> dict[str, int]:
    """COMPONENTS -> bytes, by `tensors.component_bytes`'s rule; a DTensor counts by the shard that lies here."""
    seen: set[int] = set()
    state = [v for s in (optimizer.state.values() if optimizer is not None else ()) for v in s.values()]
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    parts = (("param", module.parameters()), ("buffer", module.buffers()), ("grad", grads), ("optimizer_state", state))
    found = {}
    for name, tensors in parts:
        found[name] = 0
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            if hasattr(local, "untyped_storage") and local.untyped_storage()._cdata not in seen:
                seen.add(local.untyped_storage()._cdata)
                found[name] += local.untyped_storage().nbytes()
    return found
