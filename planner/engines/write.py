"""A question as a folder of configuration files that run it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell, UserError
from ...files import write_for_user, write_whole
from .deepspeed_write import deepspeed_config
from .trainer_write import accelerate_config, training_arguments

if TYPE_CHECKING:
    from ..request import Request

ACCELERATE, ARGUMENTS = "accelerate.yaml", "training_args.json"
WRITABLE = ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "hsdp")
DEEPSPEED, DEEPSPEED_TRAINER = "ds_config.json", "ds_config_trainer.json"


@dataclass(frozen=True)
class Files:
    """Names and texts, and what the files cannot say."""

    texts: dict[str, str]
    notes: tuple[str, ...]


def files_of(request: Request, folder: str | os.PathLike[str] = ".") -> Files:
    """The files that run the question, `folder` being where they will lie, as a path from where the program starts.

    accelerate.yaml, training_args.json, and for ZeRO ds_config.json and ds_config_trainer.json.
    Raises CannotTell for what the engine has no words for.
    """
    if request.method != "full" or request.strategy not in WRITABLE:
        what = f"--method {request.method}" if request.method != "full" else f"--strategy {request.strategy}"
        raise CannotTell(f"{what} is a program of its own: accelerate, DeepSpeed and TrainingArguments have no words for it")
    texts: dict[str, str] = {}
    notes: list[str] = []
    zero = request.strategy.startswith("zero")
    if zero:
        for name, trainer in ((DEEPSPEED, False), (DEEPSPEED_TRAINER, True)):
            written = deepspeed_config(request, trainer=trainer)
            texts[name] = _json(written.config)
            notes += [f"{name}: {note}" for note in written.notes]
    launched = accelerate_config(request, str(Path(folder) / DEEPSPEED) if zero else None)
    arguments = training_arguments(request, str(Path(folder) / DEEPSPEED_TRAINER) if zero else None)
    texts[ACCELERATE], texts[ARGUMENTS] = _yaml(launched.config), _json(arguments.config)
    notes += [*launched.notes, *arguments.notes, *_left_to_the_program(request)]
    return Files(texts, tuple(dict.fromkeys(notes)))


def _left_to_the_program(request: Request) -> list[str]:
    """What the question says and no configuration file can."""
    said = {
        f"load the model with attn_implementation={request.attention!r}": request.attention != "sdpa",
        f"freeze the parameters that begin with {', '.join(request.frozen)}": bool(request.frozen),
        f"compute the loss as --loss {request.loss} does": request.loss != "model",
        f"start with PYTORCH_ALLOC_CONF={request.alloc_conf}": bool(request.alloc_conf),
        f"feed sequences of {request.seq_len} tokens": request.model.task != "image-classification",
    }
    return [f"in the program: {what}" for what, holds in said.items() if holds]


def check_folder(folder: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raises UserError where `write_folder` would refuse the folder: to be said before the work, not after it."""
    place = Path(folder)
    if place.exists() and not (force and place.is_dir()):
        raise UserError(f"{str(folder)!r} is there already", "Name a new folder, or say --force to write into it")
    if not place.absolute().parent.is_dir():
        raise UserError(f"cannot write {str(folder)!r}: there is no such folder to put it in", "Choose a folder that exists")


def write_folder(request: Request, folder: str | os.PathLike[str], *, force: bool = False) -> Files:
    """Writes `files_of(request)` into a new folder, whole or not at all; with `force` also into one that is there.

    Raises UserError where the folder is there, or cannot be made.
    """
    check_folder(folder, force=force)
    files = files_of(request, folder)
    write_texts(files.texts, folder, force=force)
    return files


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
    import importlib

    text: str = importlib.import_module("yaml").safe_dump(data, sort_keys=False)
    return text
