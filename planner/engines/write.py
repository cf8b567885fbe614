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
from ..strategies import ZEROTH_ORDER
from .deepspeed_write import deepspeed_config
from .model_write import model_of
from .plan_file import PLAN, README, Files, launcher, plan_text, readme
from .train_script import Program, text_of
from .trainer_write import accelerate_config, training_arguments
from .zo_write import launch as zo_launch
from .zo_write import zo_files

if TYPE_CHECKING:
    from ..prediction import Prediction
    from ..request import Request

ACCELERATE, ARGUMENTS = "accelerate.yaml", "training_args.json"
WRITABLE = ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "hsdp")
DEEPSPEED, DEEPSPEED_TRAINER = "ds_config.json", "ds_config_trainer.json"
PROGRAM, RUN, CONFIG = "train.py", "run.json", "config.json"


def files_of(request: Request) -> Files:
    """The files that run the question, in one folder: they name each other, and the program is started inside it.

    accelerate.yaml, training_args.json; for ZeRO ds_config.json and ds_config_trainer.json; and where the model is one of
    transformers' train.py with what it reads: run.json and config.json.
    Raises CannotTell for what the engine has no words for.
    """
    if request.method in ZEROTH_ORDER:
        texts, notes = zo_files(request)
        return Files(texts, tuple(notes), tuple(shlex.split(zo_launch(request))))
    if request.method != "full" or request.strategy not in WRITABLE:
        what = f"--method {request.method}" if request.method != "full" else f"--strategy {request.strategy}"
        raise CannotTell(f"{what} is a program of its own: accelerate, DeepSpeed and TrainingArguments have no words for it")
    texts, notes = {}, []
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
        program, launch = _program(request)
        texts |= program
    except CannotTell as error:
        notes += [str(error), *said[DEEPSPEED]]
    notes += _left_to_the_program(request, written=bool(launch))
    return Files(texts, tuple(dict.fromkeys(notes)), launch)


def _program(request: Request) -> tuple[dict[str, str], tuple[str, ...]]:
    """(train.py and what only it reads, how it is started)."""
    config, run = model_of(request)
    launch = (*launcher(request), PROGRAM)
    if request.alloc_conf:
        run["alloc_conf"] = request.alloc_conf
    program = Program(
        title=f"Trains {request.model.name} with transformers' Trainer.",
        launch=" ".join(launch),
        frozen=bool(request.frozen),
        alloc_conf=bool(request.alloc_conf),
        deepspeed=request.strategy.startswith("zero"),
    )
    return {PROGRAM: text_of(program), RUN: _json(run), CONFIG: _json(config)}, launch


def _left_to_the_program(request: Request, *, written: bool) -> list[str]:
    """What the question says and no configuration file can; `written`: the program is here, and does its part."""
    said = {
        f"load the model with attn_implementation={request.attention!r}": request.attention != "sdpa" and not written,
        f"freeze the parameters that begin with {', '.join(request.frozen)}": bool(request.frozen) and not written,
        f"compute the loss as --loss {request.loss} does": request.loss != "model",
        f"start with PYTORCH_ALLOC_CONF={request.alloc_conf}": bool(request.alloc_conf) and not written,
        f"feed sequences of {request.seq_len} tokens": request.model.task != "image-classification" and not written,
    }
    return [f"in the program: {what}" for what, holds in said.items() if holds]


def check_folder(folder: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raises UserError where `write_folder` would refuse the folder: to be said before the work, not after it."""
    place = Path(folder)
    if place.exists() and not (force and place.is_dir()):
        raise UserError(f"{str(folder)!r} is there already", "Name a new folder, or say --force to write into it")
    if not place.absolute().parent.is_dir():
        raise UserError(f"cannot write {str(folder)!r}: there is no such folder to put it in", "Choose a folder that exists")


def write_folder(
    request: Request, folder: str | os.PathLike[str], *, force: bool = False, prediction: Prediction | None = None
) -> Files:
    """Writes `files_of(request)`, README.md and plan.json into a new folder, whole or not at all; with `force` also into one
    that is there.  `prediction`: what plan.json says was predicted.

    Raises UserError where the folder is there, or cannot be made.
    """
    check_folder(folder, force=force)
    files = files_of(request)
    texts = dict(files.texts)
    many = (
        f" on {request.gpus} x {request.device.name}: {request.strategy}" if request.gpus > 1 else f" on {request.device.name}"
    )
    size = (
        f"Micro batch {request.micro_batch_size}, {request.loop.grad_accum_steps} accumulated, {request.optimizer}, "
        f"{request.precision}, sequence length {request.seq_len}."
    )
    texts[README] = readme(request.model.name + many, str(folder), files, size)
    written = Files(texts, files.notes, files.launch)
    texts[PLAN] = plan_text(request, prediction, written)
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
