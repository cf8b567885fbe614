"""A zeroth-order run from its description to its measurement: `run_zo`."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ....errors import UserError
from ....models import check_sizes
from ....planner.trace.options import AUTOCAST_DTYPE, PARAM_DTYPE, TraceOptions
from ....planner.trace.prepare import ready
from ...loop import _no_garbage_collection, _to_device
from .blocks import Unit, find_units
from .distzo2 import DistZo2, Layout, combine
from .measure import BOOKKEEPING, CudaRecorder, RankMeasurement, Recorder, StorageRecorder, ZoMeasurement
from .mezo import Mezo
from .perturb import BOTH, Step
from .transfer import Bucket, Dtypes, Place, Sliced, TensorByTensor, Transfer
from .zo2 import Zo2

if TYPE_CHECKING:
    from ....models import ModelSpec
    from ....models.adapters import AdapterSettings
    from ....planner.strategies.zo_settings import ZoSettings

_PROBE_TOKENS = 8  # of the forward pass that finds the order of the units
_PRECISIONS = ("fp32", "bf16", "fp16", "bf16-autocast", "fp16-autocast")


@dataclass(frozen=True, kw_only=True)
class ZoRun:
    """What is run.  All numbers are those of one rank unless they say otherwise."""

    model: ModelSpec
    method: Literal["mezo", "zo2", "distzo2"]
    layout: Layout = field(default_factory=Layout)
    """For distzo2."""
    precision: str = "fp32"
    """Of the device: fp32, bf16, fp16, or fp32 parameters under bf16-autocast or fp16-autocast."""
    transfer_dtype: Literal["float16", "bfloat16", "float8_e4m3fn"] | None = None
    """In which the host keeps blocks that the device computes in fp32; None: as on the device."""
    communication: Literal["tensor", "bucket"] = "tensor"
    """How a block is copied; slices are always flat."""
    offloaded_blocks: tuple[int, ...] | None = None
    """None: all."""
    overlap: bool = True
    """Copies run beside the computation, from and to pinned memory."""
    micro_batch_size: int = 1
    """Rows of one part of the batch; the global batch has `layout.data_size` times as many."""
    seq_len: int = 64
    steps: int = 3
    lr: float | tuple[float, ...] = 1e-3
    """One for all steps, or one a step."""
    eps: float = 1e-3
    weight_decay: float = 0.1
    """Of what is no bias and no layer norm, by name."""
    seed: int = 0
    """Of the weights; step k draws z from seed + 1 + k."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    loss: Literal["model", "plain", "shifted", "chunked"] = "model"
    use_cache: bool = False
    """The forward pass builds a key-value cache (config.use_cache), for mezo only."""
    rebind: bool = False
    """Changes make new tensors, as princeton-nlp/MeZO does; for mezo only."""
    frozen: tuple[str, ...] = ()
    """Prefixes of names of parameters that do not train."""
    adapter: AdapterSettings | None = None
    """Its parameters alone train."""
    evaluate: bool = False
    """An evaluation follows the last step."""
    keep_parameters: bool = False
    """The measurement has the trained parameters."""
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def world_size(self) -> int:
        return self.layout.world_size if self.method == "distzo2" else 1

    @classmethod
    def asked(cls, model: ModelSpec, method: str, zo: ZoSettings, **same: Any) -> ZoRun:
        """The run that the planner's words ask for; `same`: fields of this class."""
        count = zo.offloading_blocks
        return cls(
            model=model,
            method=method,  # type: ignore[arg-type]
            layout=Layout(pert_size=zo.zo_pert, data_size=zo.zo_data, sliced=zo.zo_slice),
            transfer_dtype=zo.host_dtype("float32") if zo.amp else None,  # type: ignore[arg-type]
            communication="bucket" if zo.bucket else "tensor",
            offloaded_blocks=None if count == "all" else tuple(range(count)),
            overlap=zo.overlap,
            use_cache=method == "mezo" and zo.use_cache,
            **same,
        )

    def learning_rate(self, step: int) -> float:
        return self.lr[step] if isinstance(self.lr, tuple) else self.lr

    def check(self) -> None:
        """Raises UserError for what does not go together."""
        check_sizes(self.model, self.micro_batch_size, self.seq_len)
        layout = self.layout
        if self.method == "distzo2":
            if layout.pert_size not in (1, 2) or layout.data_size < 1:
                raise UserError(
                    f"layout {layout.pert_size} x {layout.data_size}: expected 1 or 2 signs and at least 1 part of the batch",
                    "Use Layout(pert_size=2, data_size=N/2) or Layout(data_size=N)",
                )
        elif layout != Layout():
            raise UserError(f"method {self.method} runs on one GPU and takes no layout", "Use method distzo2")
        if self.precision not in _PRECISIONS:
            raise UserError(f"precision {self.precision!r}: expected one of {', '.join(_PRECISIONS)}", "Choose one of those")
        if self.transfer_dtype is not None and (self.method == "mezo" or PARAM_DTYPE[self.precision] != "float32"):
            raise UserError(
                f"transfer dtype {self.transfer_dtype} with {self.method}, {self.precision}: it is for blocks that the device "
                "computes in fp32 and the host keeps narrow",
                "Leave it out, or use zo2 or distzo2 with fp32 or an autocast precision",
            )
        if self.method != "mezo" and (self.use_cache or self.rebind):
            raise UserError(f"use_cache and rebind belong to mezo, not to {self.method}", "Leave them out")
        if layout.sliced and (self.communication != "tensor" or self.offloaded_blocks is not None):
            raise UserError("slices are flat and of all blocks", "Leave out communication and offloaded_blocks")
        if isinstance(self.lr, tuple) and len(self.lr) != self.steps:
            raise UserError(f"{len(self.lr)} learning rates for {self.steps} steps", "Give one, or one a step")
        if self.steps < 1:
            raise UserError(f"steps {self.steps}: must be at least 1", "Use 2, so that the update is measured too")
        if self.device == "cuda" and torch.cuda.device_count() < self.world_size:
            raise UserError(f"{self.world_size} GPUs are needed, torch finds {torch.cuda.device_count()}", "Use device cpu")


def run_zo(run: ZoRun) -> ZoMeasurement:
    """Runs the steps for real.  With several ranks each is a process: over gloo on the CPU, over NCCL on GPUs.

    Raises UserError for a run that does not go together and for models that are no decoders.
    """
    return run_zo_all([run])[0]


def run_zo_all(runs: Sequence[ZoRun]) -> list[ZoMeasurement]:
    """As `run_zo`, one after another; runs of as many ranks share their processes, which take longer to start than to run."""
    for run in runs:
        run.check()
    found: dict[int, ZoMeasurement] = {}
    kinds = {(run.world_size, run.device) for run in runs}
    for world_size, device in sorted(kinds):
        mine = [i for i, run in enumerate(runs) if (run.world_size, run.device) == (world_size, device)]
        asked = [runs[i] for i in mine]
        ranks = [[run_rank(run, 0) for run in asked]] if world_size == 1 else _in_processes(asked, world_size)
        for place, number in enumerate(mine):
            found[number] = ZoMeasurement(ranks=tuple(results[place] for results in ranks))
    return [found[i] for i in range(len(runs))]


def _in_processes(runs: Sequence[ZoRun], world_size: int) -> list[list[RankMeasurement]]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="memplan-") as folder:
        store = os.path.join(folder, "store")
        # not a Pool, which would start a rank that died again and again, for ever
        with ProcessPoolExecutor(world_size, mp_context=context) as pool:
            return [f.result() for f in [pool.submit(_run_all, runs, rank, store) for rank in range(world_size)]]


def _run_all(runs: Sequence[ZoRun], rank: int, store: str) -> list[RankMeasurement]:
    """In a process of its own: all runs as this rank, in one process group."""
    backend = "nccl" if runs[0].device == "cuda" else "gloo"
    world_size = runs[0].world_size
    dist.init_process_group(backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    try:
        return [run_rank(run, rank) for run in runs]
    finally:
        dist.destroy_process_group()


def run_rank(run: ZoRun, rank: int) -> RankMeasurement:
    """This process's part of the run; for several ranks the process group exists."""
    before = torch.get_num_threads()
    if run.device == "cpu":
        torch.set_num_threads(1)  # sums over another number of threads round in another way
    gc.collect()
    gc.freeze()  # the collections between steps look at what the run makes, not at all modules of this process
    try:
        return Rank(run, rank).measure()
    finally:
        gc.unfreeze()
        torch.set_num_threads(before)


class Rank:
    """One rank of a run: model, engine, batch."""

    def __init__(self, run: ZoRun, rank: int, recorder: Recorder | None = None, *, gpu: int | None = None) -> None:
        """`recorder`: None measures.  `gpu`: its number on this machine; None: the rank's."""
        self.run, self.rank = run, rank
        self.device = torch.device("cuda", rank if gpu is None else gpu) if run.device == "cuda" else torch.device("cpu")
        if run.device == "cuda":
            torch.cuda.set_device(self.device)  # streams and counters are those of the current device
        torch.manual_seed(run.seed)
        self.built = ready(
            run.model,
            TraceOptions(
                batch_size=run.micro_batch_size,
                seq_len=run.seq_len,
                precision=run.precision,
                mode="inference",  # no dropout: both signs must see the same function
                attention=run.attention,
                use_cache=run.use_cache,
                loss=run.loss,
                target="cpu",
                frozen=run.frozen,
                adapter=run.adapter,
            ),
        )
        self.recorder = recorder or (CudaRecorder() if run.device == "cuda" else StorageRecorder())
        self.losses: list[tuple[float, float]] = []
        self.grads: list[float] = []

    def measure(self) -> RankMeasurement:
        run, module = self.run, self.built.module
        units = self.units()
        self.recorder.adopt(module)
        with self.recorder.thread():
            with self.recorder.tier(BOOKKEEPING):
                whole = self.built.make_batch(run.micro_batch_size * run.layout.data_size, run.seq_len)
                host_batch = self.part(whole)
            engine = self.engine(units)
            try:
                eval_loss = self._steps(engine, host_batch)
            finally:
                engine.close()
        phases = tuple(self.recorder.phases)
        # copies on the host by name, in calling order, after the last update
        parameters = {n.name: n.parameter.detach().cpu().clone() for unit in engine.visit() for n in unit.params}
        return RankMeasurement(
            rank=self.rank,
            pert=run.layout.pert(self.rank),
            data=run.layout.data(self.rank),
            counter=self.recorder.counter,
            losses=tuple(self.losses),
            projected_grads=tuple(self.grads),
            eval_loss=eval_loss,
            phases=phases,
            events=tuple(e for e in self.recorder.events if e.phase < len(phases)),
            digest=digest_of(parameters),
            parameters=parameters if run.keep_parameters else {},
        )

    def units(self) -> tuple[Unit, ...]:
        probe = self.built.make_batch(1, min(_PROBE_TOKENS, self.run.seq_len))
        return find_units(self.built.module, lambda: self.built.step(self.built.module, probe))

    def part(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's rows of the global batch."""
        return _part(batch, self.run.layout.data(self.rank), self.run.layout.data_size)

    def _steps(self, engine: Mezo | Zo2 | DistZo2, host_batch: Mapping[str, Any]) -> float | None:
        run, module = self.run, self.built.module
        batch: dict[str, Any] = {}

        def loss() -> Tensor:
            return self.built.step(module, batch)

        eval_loss = None
        with _no_garbage_collection() as collect:
            for number in range(run.steps):
                self.recorder.begin_step(number)
                self.recorder.mark("batch")
                batch = _to_device(host_batch, str(self.device))
                step = Step(run.seed + 1 + number, run.learning_rate(number), run.eps, run.weight_decay)
                pair, grad = engine.step(loss, step)
                self.losses.append(pair)
                self.grads.append(grad)
                collect()
            if run.evaluate:
                eval_loss = engine.evaluate(loss)
            engine.flush()
            self.recorder.begin_step(run.steps)
        return eval_loss

    def engine(self, units: Sequence[Unit]) -> Mezo | Zo2 | DistZo2:
        """The method's runtime around the model."""
        run, module = self.run, self.built.module
        place = Place(self.device, self.recorder, run.overlap)
        if run.method == "mezo":
            return Mezo(module, units, place, context=self._context(), rebind=run.rebind)
        narrow = getattr(torch, run.transfer_dtype) if run.transfer_dtype else None
        dtypes = Dtypes(getattr(torch, PARAM_DTYPE[run.precision]), narrow)
        engine = Zo2(
            module,
            units,
            place,
            self._transfer(place, dtypes),
            context=self._context(),
            offloaded=run.offloaded_blocks,
            schedule=run.layout.schedule(self.rank) if run.method == "distzo2" else BOTH,
            combine=combine(run.layout, self.rank) if run.method == "distzo2" else None,
        )
        return DistZo2(engine, run.layout, self.rank) if run.method == "distzo2" else engine

    def _transfer(self, place: Place, dtypes: Dtypes) -> Transfer:
        if self.run.layout.sliced:
            return Sliced(place, dtypes, self.rank, self.run.layout.world_size)
        return Bucket(place, dtypes) if self.run.communication == "bucket" else TensorByTensor(place, dtypes)

    def _context(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        narrow = AUTOCAST_DTYPE.get(self.run.precision)
        if narrow is None:
            return contextlib.nullcontext
        dtype = getattr(torch, narrow)
        # its cache of narrow weights would serve the second forward pass with the first one's perturbation
        return lambda: torch.autocast(self.device.type, dtype=dtype, cache_enabled=False)


def digest_of(parameters: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) of the bytes of all tensors in their order."""
    digest = hashlib.sha256()
    for tensor in parameters.values():
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _part(batch: Mapping[str, Any], number: int, parts: int) -> dict[str, Any]:
    """The `number`th of `parts` equal parts of the rows."""
    return {name: value.chunk(parts)[number].clone() if isinstance(value, Tensor) else value for name, value in batch.items()}
