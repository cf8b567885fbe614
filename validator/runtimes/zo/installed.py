"""zo2 itself, where it is installed, under the same questions and in the same form as this package's own runtime.

zo2 0.1.1 is on no package index, imports with transformers 4.51 alone, and runs on a GPU alone; its README says how to install
it.  It trains OPT and Qwen3 on one GPU.  Of a step it says the loss at +eps and the projected gradient.  Its zo2 method leaves
the last gradient unapplied, so that the parameters are those before it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....errors import CannotTell, UserError
from ....planner.trace.options import PARAM_DTYPE
from .measure import CudaRecorder, RankMeasurement, Recorder, ZoMeasurement
from .run import ZoRun, digest_of

if TYPE_CHECKING:
    from types import ModuleType

_CLASSES = {"opt": "OPTForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_HOME = "github.com/liangyuwang/zo2"


def run_installed(run: ZoRun) -> ZoMeasurement:
    """Runs the steps of `run` with zo2's own classes on this machine's first GPU.

    Raises UserError where zo2 or a GPU is missing, CannotTell for what zo2 cannot do.
    """
    kind = run.model.model_type
    if kind not in _CLASSES:
        raise CannotTell(f"zo2 trains {' and '.join(_CLASSES)}, not {kind or 'a factory'}. Use this package's own runtime")
    if run.method == "distzo2" or run.loss != "model" or run.rebind:
        raise CannotTell("zo2 runs mezo and zo2 on one GPU, with its own loss. Use this package's own runtime for the rest")
    modules = _modules(kind, run.method)
    if not torch.cuda.is_available():
        raise UserError("zo2 needs a GPU: torch finds none", "Use this package's own runtime, which also runs on the CPU")
    run.check()
    torch.cuda.set_device(0)  # zo2's streams and random states are those of the current device
    return _run(run, modules, CudaRecorder(), "cuda:0")


def _modules(kind: str, method: str) -> tuple[ModuleType, ModuleType]:
    """zo2's module of the model and of its configuration."""
    folder = "zo" if method == "mezo" else "zo2"
    try:
        config = importlib.import_module("zo2.config.mezo_sgd")
        return importlib.import_module(f"zo2.model.huggingface.{kind}.mezo_sgd.{folder}"), config
    except ImportError as error:
        raise UserError(f"zo2 cannot be imported: {error}", f"Install it as {_HOME} says, with transformers 4.51") from error


def _run(run: ZoRun, modules: tuple[ModuleType, ModuleType], recorder: Recorder, device: str) -> ZoMeasurement:
    model = _model(run, modules[0])
    settings = modules[1].MeZOSGDConfig(
        lr=run.learning_rate(0),
        weight_decay=run.weight_decay,
        eps=run.eps,
        zo2=run.method == "zo2",
        offloading_blocks=None if run.offloaded_blocks is None else list(run.offloaded_blocks),
        working_device=device,
        overlap=run.overlap,
        communicate_optimize_method="bucket" if run.communication == "bucket" else "",
        amp=run.transfer_dtype is not None,
        **({"precision_on_offloading_device": getattr(torch, run.transfer_dtype)} if run.transfer_dtype else {}),
    )
    recorder.adopt(model)
    with recorder.thread():
        recorder.mark("init")
        if run.method == "mezo":
            model.to(device)
        model.zo_init(settings)  # type: ignore[operator]
        model.zo_train()  # type: ignore[operator]
        losses, grads = _steps(run, model, recorder, device)
    named = {name: p.detach().cpu() for name, p in model.named_parameters()}
    found = RankMeasurement(
        rank=0,
        pert=0,
        data=0,
        counter=recorder.counter,
        losses=tuple(losses),
        projected_grads=tuple(grads),
        eval_loss=None,
        phases=tuple(recorder.phases),
        events=tuple(e for e in recorder.events if e.phase < len(recorder.phases)),
        digest=digest_of(named),
        parameters=named if run.keep_parameters else {},
    )
    return ZoMeasurement(ranks=(found,))


def _model(run: ZoRun, module: ModuleType) -> nn.Module:
    """zo2's class of the model, with random weights of the run's seed in the run's dtype on the host."""
    import transformers

    kind = str(run.model.model_type)
    values = {name: value for name, value in (run.model.config or {}).items() if name != "model_type"}
    config = transformers.CONFIG_MAPPING[kind](**values)
    config._attn_implementation = run.attention
    config.use_cache = run.use_cache
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, PARAM_DTYPE[run.precision]))
    torch.manual_seed(run.seed)
    try:
        built: nn.Module = getattr(module, _CLASSES[kind])(config)
    finally:
        torch.set_default_dtype(before)
    return built


def _steps(run: ZoRun, model: nn.Module, recorder: Recorder, device: str) -> tuple[list[tuple[float, float]], list[float]]:
    vocab_size = int((run.model.config or {})["vocab_size"])
    ids: Tensor = torch.randint(vocab_size, (run.micro_batch_size, run.seq_len)).to(device)
    # both forwards take their seed under another name
    seed_word = "zo_random_seed" if run.method == "mezo" else "seed"
    losses, grads = [], []
    engine: Any = model.opt
    for number in range(run.steps):
        recorder.begin_step(number)
        recorder.mark("forward")
        plus = float(model(input_ids=ids, labels=ids, **{seed_word: run.seed + 1 + number}))
        grad = float(engine.projected_grad)
        losses.append((plus, plus - 2 * run.eps * grad))  # it keeps the difference, not the loss at -eps
        grads.append(grad)
    recorder.begin_step(run.steps)
    return losses, grads
