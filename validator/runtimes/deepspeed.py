"""Runs the real DeepSpeed engine on the CPU, as any rank of any world, in one process, and counts its bytes.

torch's fake process group stands in for the other ranks: collectives return at once, so values are garbage while every size
is real.  No compiler is needed, no GPU, no second process.  Two counts are taken at every mark (after the engine is made, after
each forward, backward and step):

* **by structure**: the storages that the engine holds as parameters, masters, gradients, optimizer state and buckets;
* **by registry**: every storage that any op has made since the model was built and that still lives, and the phase's peak.

Read for: deepspeed 0.19.8 (deepspeed/runtime/zero/stage_1_and_2.py and stage3.py), torch 2.13.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell

if TYPE_CHECKING:
    from ..cuda import Meter

_TIMEOUT_S = 600
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",  # Muon's steps are compiled; sizes are those of the ops as written
}


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """One run: a model, a DeepSpeed configuration, and which rank of how many is played."""

    reference: str  # of the model, as `models.load` takes it
    config: Mapping[str, Any]  # the DeepSpeed JSON, without batch sizes
    task: str | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    precision: str = "bf16"  # of the stored parameters: fp32 | bf16 | fp16
    batch_size: int = 2
    seq_len: int = 16
    recompute: str = "none"
    reentrant: bool = False
    frozen: tuple[str, ...] = ()
    adapter: Mapping[str, Any] | None = None  # fields of `AdapterSettings`
    world_size: int = 2
    rank: int = 0
    grad_accum_steps: int = 1
    optimizer: str = "adamw"  # by the names of `planner.optimizers.traced`; deepspeed: its own Adam, for where it steps;
    # config: what `optimizer` of the JSON says
    optimizer_impl: str = "for-loop"
    groups: str = "one"  # one: all parameters; decay: the two groups of transformers' Trainer
    zero_init: bool = False  # the model is made under `deepspeed.zero.Init`
    iterations: int = 2
    backend: str = "fake"  # fake: alone; gloo or nccl: one of `world_size` processes, which meet in `store`
    store: str = ""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What is live when a phase has ended."""

    phase: str  # init | forward | backward | step
    iteration: int
    micro_batch: int
    held: dict[str, int]  # bytes by component and place ("grad", "host grad", "pinned grad"), by the engine's own structures
    live_bytes: int  # of the registry
    peak_bytes: int  # of the registry, since the mark before
    file_bytes: int = 0  # of what is swapped to NVMe


def run_cases(cases: Sequence[EngineCase], *, timeout_s: float = _TIMEOUT_S) -> list[list[Mark]]:
    """The marks of every case, in order.  One interpreter imports DeepSpeed once; each case runs in a fork of it.

    Raises CannotTell when DeepSpeed is missing or a case fails, with the last line of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        question, answer = os.path.join(folder, "cases.json"), os.path.join(folder, "marks.json")
        with open(question, "w", encoding="utf-8") as stream:
            json.dump([asdict(case) for case in cases], stream)
        done = subprocess.run(
            [sys.executable, "-m", __name__, question, answer],
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if not os.path.exists(answer):
            raise CannotTell(
                f"the DeepSpeed worker ended with {done.returncode}: {_last_line(done.stderr)}", "Is deepspeed 0.19 installed?"
            )
        with open(answer, encoding="utf-8") as stream:
            answers = json.load(stream)
    found = []
    for case, result in zip(cases, answers, strict=True):
        if "error" in result:
            raise CannotTell(
                f"DeepSpeed, {case.reference}, rank {case.rank} of {case.world_size}: {result['error']}", "Run that case alone"
            )
        found.append([Mark(**mark) for mark in result["marks"]])
    return found


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


# -- inside the worker ---------------------------------------------------------------------------------------------------


def run_here(case: EngineCase, *, meter: Meter | None = None) -> list[Mark]:
    """Runs one case in this process, which can do no other afterwards: the process group stays.

    `meter`: reads the GPU as phases begin, for a case of the nccl backend; the marks then count the host alone.
    """
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    _join_group(case)
    if case.backend == "fake":
        _play_alone()
    import deepspeed

    from ...models import load
    from ...models.gptq import standing_in
    from ...planner.trace.options import TraceOptions
    from ...planner.trace.prepare import ready
    from ..loop import _to_device
    from ..zero_held import Registry, file_bytes, held_bytes
    from ..zero_ops import Storages, Watched, install

    watched = install() if meter is None else Watched(Storages(), Storages())  # a GPU's machine has the real kernels
    swapped = tempfile.mkdtemp()
    config = {
        **_with_folder(case.config, swapped),
        "train_micro_batch_size_per_gpu": case.batch_size,
        "gradient_accumulation_steps": case.grad_accum_steps,
        "zero_allow_untested_optimizer": True,
    }

    spec = load(case.reference, task=case.task, overrides=dict(case.overrides))
    options = TraceOptions(
        batch_size=case.batch_size, seq_len=case.seq_len, precision=case.precision, recompute=case.recompute, target="cpu",
        reentrant=case.reentrant, frozen=tuple(case.frozen), adapter=_adapter(case),
    )  # fmt: skip
    _make_tables(options.adapter)
    registry = Registry()
    marks: list[Mark] = []
    with registry.watching():
        # no name may hold the context, which has swap buffers of its own; GPTQ's layers have buffers only, which will do here
        with (
            deepspeed.zero.Init(config_dict_or_path=config, enabled=case.zero_init, dtype=_dtype(case.precision)),
            standing_in(),
        ):
            built = ready(spec, options)
        module = built.module
        if not case.zero_init:
            registry.see([*module.parameters(), *module.buffers()])  # those that no op made (a view from a generator's fill)
        optimizer = _optimizer(case, module)
        registry.peak_bytes = registry.live_bytes
        groups = _groups(case, module) if optimizer is None else None
        engine, _, _, _ = deepspeed.initialize(model=module, optimizer=optimizer, model_parameters=groups, config=config)
        del optimizer, module, groups

        def mark(phase: str, iteration: int, micro_batch: int) -> None:
            live, peak = registry.live_bytes, registry.peak_bytes
            marks.append(Mark(phase=phase, iteration=iteration, micro_batch=micro_batch, held=held_bytes(engine, watched),
                              live_bytes=live, peak_bytes=peak, file_bytes=file_bytes(swapped)))  # fmt: skip
            registry.peak_bytes = live

        def begin(phase: str, iteration: int) -> None:
            if meter is not None:
                meter.running.module, meter.running.optimizer = engine.module, engine.optimizer
                meter.mark(phase, iteration)

        mark("init", 0, 0)
        for iteration in range(case.iterations):
            for micro_batch in range(case.grad_accum_steps):
                begin("forward", iteration)
                batch = built.make_batch(case.batch_size, case.seq_len)
                if meter is not None:
                    batch = _to_device(batch, "cuda")
                registry.see(list(batch.values()))
                loss = built.step(engine, batch)
                mark("forward", iteration, micro_batch)
                begin("backward", iteration)
                engine.backward(loss)
                mark("backward", iteration, micro_batch)
                begin("step", iteration)
                engine.step()
            mark("step", iteration, case.grad_accum_steps - 1)
        begin("end", case.iterations - 1)
    shutil.rmtree(swapped)
    return marks


def _with_folder(config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """`config`, its NVMe paths in `folder`."""
    zero = {
        key: {**value, "nvme_path": folder} if isinstance(value, Mapping) and value.get("device") == "nvme" else value
        for key, value in config.get("zero_optimization", {}).items()
    }
    return {**config, "zero_optimization": zero} if zero else dict(config)


def _adapter(case: EngineCase) -> Any:
    from ...models.adapters import AdapterSettings

    if case.adapter is None:
        return None
    given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in case.adapter.items()}
    return AdapterSettings(**given)


def _make_tables(adapter: Any) -> None:
    """What bitsandbytes makes once for all layers of all models, with the first weight that it packs (`name2qmap`)."""
    if adapter is not None and adapter.base_quant.endswith("-dq"):
        import torch
        from bitsandbytes.functional import quantize_4bit

        quantize_4bit(torch.zeros(64, 64), compress_statistics=True)


def _dtype(precision: str) -> Any:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def _groups(case: EngineCase, module: Any) -> list[dict[str, Any]]:
    """The optimizer's groups, as a training script makes them."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    groups: list[dict[str, Any]] = [{"params": list(named.values())}]
    if case.groups == "decay":
        from transformers import Trainer

        decayed = set(Trainer.get_decay_parameter_names(None, module))  # type: ignore[arg-type]
        groups = [
            {"params": [p for name, p in named.items() if name in decayed]},
            {"params": [p for name, p in named.items() if name not in decayed]},
        ]
    return groups


def _optimizer(case: EngineCase, module: Any) -> Any:
    """What a training script hands to `deepspeed.initialize`; None: the engine makes what the JSON says."""
    from ...planner.optimizers.traced import make_optimizer

    if case.optimizer == "config":
        return None
    groups = _groups(case, module)
    if case.optimizer != "deepspeed":
        return make_optimizer(case.optimizer, case.optimizer_impl, groups)
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam, ZenFlowCPUAdam

    if "zenflow" in case.config.get("zero_optimization", {}):
        return ZenFlowCPUAdam(groups)
    if "offload_optimizer" not in case.config.get("zero_optimization", {}):
        return FusedAdam(groups)
    return DeepSpeedCPUAdam(groups, fp32_optimizer_states=not case.config.get("bf16", {}).get("bf16_optimizer_states", False))


def _join_group(case: EngineCase) -> None:
    import deepspeed
    import torch.distributed
    from deepspeed.ops import __compatible_ops__

    os.environ.update(RANK=str(case.rank), LOCAL_RANK=str(case.rank), WORLD_SIZE=str(case.world_size))
    if case.backend == "nccl":
        _meet(case)
        return
    __compatible_ops__["deepspeed_shm_comm"] = False  # else the CPU accelerator compiles it
    # DeepSpeed asks whether the CPU has fast 16-bit matmuls; torch computes without them, and sizes are the same
    accelerator = type(deepspeed.accelerator.get_accelerator())
    accelerator.is_fp16_supported = accelerator.is_bf16_supported = lambda self: True
    if case.backend != "fake":
        _meet(case)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=case.rank, world_size=case.world_size, store=FakeStore())
    deepspeed.init_distributed("fake")


def _meet(case: EngineCase) -> None:
    """One of several processes: they find each other in a file."""
    import deepspeed
    import torch.distributed as dist

    store = dist.FileStore(case.store, case.world_size)
    dist.init_process_group(case.backend, store=store, rank=case.rank, world_size=case.world_size)
    deepspeed.init_distributed(case.backend)


def _play_alone() -> None:
    """What the missing ranks would do: agree with the recorded order of modules, have finite gradients, select columns.

    What is gathered from them is whatever lay in memory, and a step whose norm is no number would be skipped.
    """
    import torch
    from deepspeed import comm
    from deepspeed.runtime.zero import partitioned_param_coordinator, stage3, stage_1_and_2

    sends = comm.broadcast

    def broadcast(tensor: Any, src: int, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.int32 and src != comm.get_rank():  # ZenFlow's selected columns
            tensor.zero_()
        return sends(tensor, src, *args, **kwargs)

    comm.broadcast = broadcast
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda *_: None
    for module, optimizer in (
        (stage3, stage3.DeepSpeedZeroOptimizer_Stage3),
        (stage_1_and_2, stage_1_and_2.DeepSpeedZeroOptimizer),
    ):
        module.is_invalid_grad_norm = lambda _: False
        looks = optimizer.has_overflow

        def has_overflow(self: Any, *args: Any, looks: Any = looks, **kwargs: Any) -> bool:
            looks(self, *args, **kwargs)  # for what it allocates
            return False

        optimizer.has_overflow = has_overflow


def _in_fork(case: EngineCase) -> dict[str, Any]:
    """One case in a forked process, since a process can join one world only."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            answer: dict[str, Any] = {"marks": [asdict(mark) for mark in run_here(case)]}
        except BaseException as error:
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"}
        with os.fdopen(writer, "w") as stream:
            json.dump(answer, stream)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return dict(json.loads(text)) if text else {"error": "the process died"}


def import_once() -> None:
    """What takes seconds, and what must not be imported in the middle of a run."""
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  by the first reduction
    import transformers.modeling_utils  # noqa: F401

    from ...models import builder  # noqa: F401
    from ...planner.trace import prepare  # noqa: F401


def main(question: str, answer: str) -> None:
    import_once()  # before the forks
    with open(question, encoding="utf-8") as stream:
        cases = [EngineCase(**{**case, "frozen": tuple(case["frozen"])}) for case in json.load(stream)]
    results = [_in_fork(case) for case in cases]
    with open(answer + ".part", "w", encoding="utf-8") as stream:
        json.dump(results, stream)
    os.replace(answer + ".part", answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
