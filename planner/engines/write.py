"""A question as a folder that runs as it is: configuration files, a program, plan.json and README.md."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell, UserError
from ...files import write_for_user, write_whole
from ...models.adapters import ADAPTER_METHODS
from ..request import one_of
from ..strategies import ZEROTH_ORDER
from ..strategies.deepspeed_engine import settings_of
from .adapter_write import ADAPTER, QUANTISATION, adapter_config, quantisation_config
from .adapter_write import settings_of as adapter_of
from .deepspeed_write import deepspeed_config
from .factory_write import factory_of
from .loop_write import loop_autocast, loop_settings
from .loss_write import LOSS, loss_settings
from .loss_write import TEXT as LOSS_TEXT
from .model_write import model_of
from .optimizer_write import optimizer_class, takes_the_model
from .plan_file import ARGUMENTS, PLAN, PROGRAM, README, Files, as_run, launcher, plan_text, readme
from .recompute_write import RECOMPUTE, recompute_settings
from .recompute_write import TEXT as RECOMPUTE_TEXT
from .train_script import Program, text_of
from .trainer_write import accelerate_config, training_arguments
from .zo_write import launch as zo_launch
from .zo_write import zo_files

if TYPE_CHECKING:
    from ..prediction import Prediction
    from ..request import Request

_OF_AN_OPTIMIZER = ("galore", "apollo", "lomo", "badam")
_TAKES_IT_WHOLE = ("single", "ddp")  # strategies under which an optimizer finds the model's weights as they are
ACCELERATE = "accelerate.yaml"
TRAINER, LOOP, AUTO = "trainer", "loop", "auto"
STACKS = (AUTO, TRAINER, LOOP)
RELEASE = "release"
_WAYS = {
    (True, True): "transformers' Trainer and DeepSpeed",
    (True, False): "transformers' Trainer",
    (False, True): "DeepSpeed",
    (False, False): "a plain loop",
}
WRITABLE = ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "hsdp")
DEEPSPEED, DEEPSPEED_TRAINER = "ds_config.json", "ds_config_trainer.json"
RUN, CONFIG = "run.json", "config.json"


def files_of(request: Request, stack: str = AUTO) -> Files:
    """The files that run the question, in one folder: they name each other, and the program is started inside it.

    `stack`: of STACKS; auto takes transformers' Trainer where it can run the question, else a plain loop.
    accelerate.yaml, training_args.json; for ZeRO ds_config.json and ds_config_trainer.json; adapter_config.json and
    quantization.json of an adapter; and where the model is one of transformers' train.py with run.json and config.json.
    Raises CannotTell for what the engine has no words for.
    """
    check_stack(stack)
    if request.method == "lomo" and request.strategy == RELEASE:  # the Trainer's own loop gives it the loss
        request = request.but(method="full", strategy="single")
    if request.method in ZEROTH_ORDER:
        texts, notes = zo_files(request)
        return Files(texts, tuple(notes), tuple(shlex.split(zo_launch(request))))
    known = request.method in ("full", *ADAPTER_METHODS, *_OF_AN_OPTIMIZER) and request.strategy in (*WRITABLE, RELEASE)
    if not known or request.mode != "train":
        what = f"--method {request.method}, --strategy {request.strategy}, --mode {request.mode}"
        raise CannotTell(f"{what} is a program of its own: accelerate, DeepSpeed and TrainingArguments have no words for it")
    if stack == LOOP:
        return _for_a_loop(request)
    if stack == AUTO and not_for_the_trainer(request):
        try:
            return _for_a_loop(request)
        except CannotTell as error:
            if request.strategy == RELEASE:
                raise
            return _for_the_trainer(request, no_program=f"train.py: {error}")
    if stack == TRAINER and not_for_the_trainer(request):
        raise CannotTell(f"--stack trainer: {not_for_the_trainer(request)}. Use --stack loop")
    return _for_the_trainer(request)


def check_stack(stack: str) -> None:
    """Raises UserError for a word that is none of STACKS."""
    one_of("--stack", stack, STACKS)


def not_for_the_trainer(request: Request) -> str:
    """Why transformers' Trainer cannot run the question; "" where it can."""
    if request.model.factory is not None:
        return "the Trainer is for transformers' models, and this one is made by a function of yours"
    if takes_the_model(request.optimizer) and not request.strategy.startswith("zero"):  # there DeepSpeed may make it
        return f"the Trainer cannot make --optimizer {request.optimizer} by itself"
    if request.strategy in (RELEASE, "hsdp"):
        return f"the Trainer has no --strategy {request.strategy}"
    if request.strategy.startswith("zero") and request.precision.endswith("-autocast"):
        return f"the Trainer has no --precision {request.precision} beside DeepSpeed"
    return ""


def _for_the_trainer(request: Request, no_program: str = "") -> Files:
    """`no_program`: why there is no train.py; "" where there is one."""
    if not no_program:
        request = as_run(request, (ARGUMENTS, PROGRAM))
    texts: dict[str, str] = {}
    notes: list[str] = []
    said: dict[str, list[str]] = {DEEPSPEED: [], DEEPSPEED_TRAINER: []}
    zero = request.strategy.startswith("zero")
    if zero:
        for name, trainer in ((DEEPSPEED, False), (DEEPSPEED_TRAINER, True)):
            written = deepspeed_config(request, trainer=trainer)
            texts[name] = _json(written.config)
            said[name] = [f"{name}: {note}" for note in written.notes]
    launched = accelerate_config(request, DEEPSPEED if zero else None)
    arguments = training_arguments(request, DEEPSPEED_TRAINER if zero else None)
    texts[ACCELERATE], texts[ARGUMENTS] = _yaml(launched.config), _json(arguments.config)
    notes += [*said[DEEPSPEED_TRAINER], *launched.notes, *arguments.notes]
    launch: tuple[str, ...] = ()
    try:
        made = None
        if no_program:
            raise CannotTell(no_program)
        if "optim" not in arguments.config and not (zero and "optimizer" in json.loads(texts[DEEPSPEED_TRAINER])):
            made = optimizer_class(request.optimizer, request.optimizer_impl)
            if "takes" in made:
                raise CannotTell(
                    f"train.py: --optimizer {request.optimizer} with --strategy {request.strategy}: use single or ddp"
                )
            notes = [note for note in notes if request.optimizer not in note]  # the program passes it
        more: dict[str, Any] = {"optimizer": made} if made else {}
        if settings := recompute_settings(request):
            more["recompute"] = settings
            notes = [note for note in notes if request.recompute not in note]
        program, launch = _program(request, more, trainer=True)
        texts |= program
    except CannotTell as error:
        notes += [str(error), *said[DEEPSPEED]]
    notes += _left_to_the_program(request, written=bool(launch))
    return Files(texts, tuple(dict.fromkeys(notes)), launch)


def _for_a_loop(request: Request) -> Files:
    """The files of torch's own strategies and of `deepspeed.initialize`, with a plain loop."""
    if request.strategy == "fsdp1":
        raise CannotTell("--stack loop with --strategy fsdp1: it is written for the Trainer, or as fsdp2")
    texts: dict[str, str] = {}
    notes: list[str] = []
    more: dict[str, Any] = {}
    made: dict[str, Any] | None = None
    if request.strategy.startswith("zero"):
        written = deepspeed_config(request)
        texts[DEEPSPEED] = _json(written.config)
        notes += [note for note in written.notes if "zero.Init" not in note and request.optimizer not in note]
        more["zero_init"] = settings_of(request).zero_init
        if "optimizer" not in written.config:
            made = optimizer_class(request.optimizer, request.optimizer_impl)
    else:
        made = optimizer_class(request.optimizer, request.optimizer_impl)
        more |= {"micro_batch_size": request.micro_batch_size, "grad_accum_steps": request.loop.grad_accum_steps}
        if request.loop.clip_grad_norm:
            more["clip_grad_norm"] = 1.0
        dtype = loop_autocast(request)
        if dtype is not None:
            more["autocast"] = dtype
    if made is not None:
        if "takes" in made and request.strategy not in _TAKES_IT_WHOLE:
            raise CannotTell(f"train.py: --optimizer {request.optimizer} with --strategy {request.strategy}: use single or ddp")
        more["optimizer"] = made
    more |= loop_settings(request)
    if request.recompute == "full":
        by_itself: dict[str, Any] = {"reentrant": request.reentrant}
        more["recompute"] = by_itself if request.model.factory is None else {**by_itself, "every": 1}
    elif settings := recompute_settings(request):
        more["recompute"] = settings
    program, launch = _program(request, more, trainer=False)
    notes += _left_to_the_program(request, written=True)
    return Files({**texts, **program}, tuple(dict.fromkeys(notes)), launch)


def _program(request: Request, more: dict[str, Any], *, trainer: bool) -> tuple[dict[str, str], tuple[str, ...]]:
    """(train.py and what only it reads, how it is started); `more`: of run.json."""
    config, run = model_of(request) if request.model.factory is None else (None, factory_of(request))
    run |= more | (changed := loss_settings(request))
    launch = (*launcher(request), PROGRAM)
    texts = {} if config is None else {CONFIG: _json(config)}
    if request.alloc_conf:
        run["alloc_conf"] = request.alloc_conf
    adapter = adapter_of(request)
    packed = quantisation_config(request)
    if adapter is not None:
        texts[ADAPTER] = _json(adapter_config(request))
        run |= {"upcast": adapter.upcasts, "adapter_in_fp32": adapter.adapter_dtype is None}
    if packed:
        texts[QUANTISATION] = _json(packed)
    zero = request.strategy.startswith("zero")
    recompute = run.get("recompute", {})
    if changed:
        texts[LOSS] = LOSS_TEXT
    if by_file := len(recompute) > 1:  # beside `reentrant`, which the models' own recompute has too
        texts[RECOMPUTE] = RECOMPUTE_TEXT
    program = Program(
        title=f"Trains {request.model.name} with {_WAYS[trainer, zero]}.",
        launch=" ".join(launch),
        trainer=trainer,
        factory=config is None,
        frozen=bool(request.frozen),
        alloc_conf=bool(request.alloc_conf),
        adapter=adapter is not None,
        quantised=bool(packed),
        optimizer="optimizer" in run,
        optimizer_takes=run.get("optimizer", {}).get("takes", ""),
        optimizer_modes=run.get("optimizer", {}).get("class", "").startswith("schedulefree.") and not trainer,
        deepspeed=zero,
        processes=launch[0] != "python",
        trainer_fsdp=trainer and request.strategy.startswith("fsdp"),
        ddp=request.strategy == "ddp" and not trainer,
        fsdp2=request.strategy in ("fsdp2", "hsdp") and not trainer,
        release=request.strategy == RELEASE,
        own_loss=bool(changed),
        autocast="autocast" in run,
        clips="clip_grad_norm" in run,
        recompute_all=bool(recompute) and not by_file,
        recompute_some=by_file,
        recompute_whole=request.recompute == "full",
    )
    return {PROGRAM: text_of(program), RUN: _json(run), **texts}, launch


def _left_to_the_program(request: Request, *, written: bool) -> list[str]:
    """What the question says and no configuration file can; `written`: the program is here, and does its part."""
    said = {
        f"load the model with attn_implementation={request.attention!r}": request.attention != "sdpa" and not written,
        f"load the model in {request.precision}": request.precision in ("bf16", "fp16") and not written,
        f"freeze the parameters that begin with {', '.join(request.frozen)}": bool(request.frozen) and not written,
        "say --rdzv-backend c10d --rdzv-endpoint HOST:PORT to torchrun on each machine": request.nodes > 1 and written,
        f"compute the loss as --loss {request.loss} does": request.loss != "model" and not written,
        f"run the MLPs in tiles as --tiled-mlp {request.mlp_tiles} does": bool(request.mlp_tiles) and not written,
        f"start with PYTORCH_ALLOC_CONF={request.alloc_conf}": bool(request.alloc_conf) and not written,
        f"feed sequences of {request.seq_len} tokens": request.model.task != "image-classification" and not written,
    }
    return [f"{'in the program: ' * (not what.startswith('say '))}{what}" for what, holds in said.items() if holds]


def check_folder(folder: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raises UserError where `write_folder` would refuse the folder: to be said before the work, not after it."""
    place = Path(folder)
    if place.exists() and not (force and place.is_dir()):
        raise UserError(f"{str(folder)!r} is there already", "Name a new folder, or say --force to write into it")
    if not place.absolute().parent.is_dir():
        raise UserError(f"cannot write {str(folder)!r}: there is no such folder to put it in", "Choose a folder that exists")


def write_folder(
    request: Request,
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
    prediction: Prediction | None = None,
    stack: str = AUTO,
) -> Files:
    """Writes `files_of(request)`, README.md and plan.json into a new folder, whole or not at all; with `force` also into one
    that is there.  `prediction`: what plan.json says was predicted.

    Raises UserError where the folder is there, or cannot be made.
    """
    check_folder(folder, force=force)
    files = files_of(request, stack)
    texts = dict(files.texts)
    zo = request.method in ZEROTH_ORDER
    how = request.method if zo or (request.method != "full" and request.gpus == 1) else request.strategy
    where = f"{request.gpus} x " if request.gpus > 1 else ""
    size = (
        f"Micro batch {request.micro_batch_size}, {request.loop.grad_accum_steps} accumulated, "
        f"{request.method if zo else request.optimizer}, {request.precision}, sequence length {request.seq_len}."
    )
    texts[README] = readme(f"{request.model.name} on {where}{request.device.name}: {how}", str(folder), files, size)
    written = Files(texts, files.notes, files.launch)
    run = as_run(request, texts)
    if prediction is not None and run is not request:
        from ..predict import predict
        from ..trace.source import TraceSource

        prediction = predict(run, TraceSource())
    texts[PLAN] = plan_text(run, prediction, written)
    write_texts(texts, folder, force=force)
    return written


def write_texts(texts: Mapping[str, str], folder: str | os.PathLike[str], *, force: bool = False) -> None:
    """{name: text} as files of a new folder, whole or not at all; with `force` also of one that is there.

    Raises UserError where the folder is there, or cannot be made.
    """
    check_folder(folder, force=force)
    place = Path(folder)
    if place.exists():
        for name, text in texts.items():
            write_for_user(place / name, text)
        return
    try:
        made = tempfile.mkdtemp(dir=place.absolute().parent, prefix=f".{place.name}-")
    except OSError as error:
        raise UserError(f"cannot write {str(folder)!r}: {error.strerror}", "Choose a folder that can be written") from error
    try:
        for name, text in texts.items():
            write_whole(Path(made) / name, text)
        os.chmod(made, 0o777 & ~_umask())  # mkdtemp's folders are their owner's alone
        os.rename(made, place)
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(f"cannot write {str(folder)!r}: {error.strerror}", "Choose a folder that can be written") from error
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


def _yaml(data: dict[str, Any]) -> str:
    text: str = importlib.import_module("yaml").safe_dump(data, sort_keys=False)
    return text
