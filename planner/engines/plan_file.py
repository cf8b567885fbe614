"""What a folder holds: its texts, how it is started, and plan.json, which says what was asked, predicted and written."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UserError
from ..plan_format import FORMAT, check_format
from ..strategies import ZEROTH_ORDER

if TYPE_CHECKING:
    from ..prediction import Prediction
    from ..request import Request
    from .imported import Imported

PLAN, README = "plan.json", "README.md"
MEZO_SCRIPT = "mezo.sh"
PROGRAM, ARGUMENTS = "train.py", "training_args.json"
KIND = "memplan fit"
_KINDS = (KIND, "memplan plan")
_NOT_SAID = ("model", "device", "loop", "defaults", "compiled", "adapter")


@dataclass(frozen=True)
class Files:
    """Names and texts, what the files cannot say, and how the program among them is started."""

    texts: dict[str, str]
    notes: tuple[str, ...] = ()
    launch: tuple[str, ...] = field(default=())
    """Words of the command, to be run inside the folder; () where no program is among the files."""


def launcher(request: Request) -> tuple[str, ...]:
    """What is put before `train.py`: one process a GPU."""
    if request.gpus == 1 and not request.strategy.startswith(("zero", "fsdp", "hsdp", "ddp")):
        return ("python",)
    nodes = ("--nnodes", str(request.nodes)) if request.nodes > 1 else ("--standalone",)
    return ("torchrun", *nodes, "--nproc-per-node", str(request.gpus // request.nodes))


def as_run(request: Request, files: Container[str]) -> Request:
    """The question with what the program among `files` adds to it: under the Trainer, FSDP2's units are accelerate's."""
    if request.strategy != "fsdp2" or PROGRAM not in files or ARGUMENTS not in files:
        return request
    from ..strategies.fsdp_settings import FsdpSettings

    settings = request.fsdp or FsdpSettings(version=2)
    return request if settings.wrap_embeddings else request.but(fsdp=replace(settings, wrap_embeddings=True))


def hashes(texts: Mapping[str, str]) -> dict[str, str]:
    """{name: SHA-256 of the text, in hex}."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def plan_text(request: Request, prediction: Prediction | None, files: Files) -> str:
    """plan.json of one question."""
    from ...version import __version__

    data = {
        "kind": KIND,
        "format": FORMAT,
        "memplan": __version__,
        "base": request.as_data(),
        "predicted": None if prediction is None else prediction.to_json(),
        "launch": list(files.launch),
        "files": hashes(files.texts),
    }
    return json.dumps(data, indent=2, default=str) + "\n"


def readme(title: str, folder: str, files: Files, size: str) -> str:
    """README.md: five lines.  `size`: batch and optimizer in words."""
    program = f"`{shlex.join(('cd', folder))} && {shlex.join(files.launch)}`" if files.launch else "your own program"
    own = " (MEZO=FOLDER before it says where MeZO's large_models lies; options of its run.py are passed on)"
    no_data = '"factory"' in files.texts.get("run.json", "")  # the user's function makes it
    usual = f" (--steps N, --random-weights{'' if no_data else ', --data FILE'})"
    more = own if MEZO_SCRIPT in files.launch else usual if files.launch else ""
    lines = [
        f"# {title}",
        f"Start: {program}{more}.",
        size,
        f"Check: `memplan validate --plan {shlex.quote(f'{folder}/{PLAN}')}`; {PLAN} holds every figure.",
        f"To do: {'; '.join(files.notes) if files.notes else 'nothing; the files say it all'}.",
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A plan.json, read: of a question or of a search."""

    source: str
    request: Request
    """As the folder's program runs it."""
    predicted: Mapping[str, Any] | None
    launch: tuple[str, ...]
    files: Mapping[str, str]
    """{name: SHA-256}."""

    def changed(self) -> list[str]:
        """Names of the files beside plan.json that are missing, or not as they were written."""
        folder = Path(self.source).parent
        found = []
        for name, digest in self.files.items():
            try:
                same = hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
            except OSError:
                same = False
            if not same:
                found.append(name)
        return found


def read_written(path: str | os.PathLike[str]) -> PlanFile:
    """A plan.json, or the one in a folder, of `memplan fit --write` or `memplan plan --write`.

    Raises UserError for another kind of file, a newer format, and what cannot be read.
    """
    place = Path(path)
    if place.is_dir():
        place = place / PLAN
    try:
        data = json.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {str(place)!r}: {error.strerror}", "Name a plan.json") from error
    except ValueError as error:
        raise UserError(f"{place}: is not JSON: {error}", "Name a plan.json") from error
    return written_of(data, str(place))


def written_of(data: Any, source: str) -> PlanFile:
    """The same from JSON data; `source`: where it was read."""
    from ..question import request_of

    if isinstance(data, Mapping) and data.get("kind") != KIND:
        from ..search.api import request_of_plan
        from ..search.plan import Plan

        plan = Plan.from_json(data, source)
        files = plan.files or {}
        request = as_run(request_of_plan(plan, source=source), files)
        return PlanFile(source=source, request=request, predicted=plan.predicted, launch=plan.launch, files=files)
    if not isinstance(data, Mapping):
        raise UserError(f"{source}: is no plan of memplan", "Name a plan.json that `memplan fit --write` has made")
    check_format(data, source, "memplan fit --write")
    for key, kind in (("base", Mapping), ("launch", list), ("files", Mapping)):
        if not isinstance(data.get(key), kind):
            raise UserError(f"{source}: {key} is missing or wrong", "Write the folder again with `memplan fit --write`")
    return PlanFile(
        source=source,
        request=as_run(request_of(data["base"], source), data["files"]),
        predicted=data.get("predicted"),
        launch=tuple(map(str, data["launch"])),
        files=dict(data["files"]),
    )


def is_plan(data: Mapping[str, Any]) -> bool:
    """Whether a file is a plan.json of memplan's."""
    return data.get("kind") in _KINDS


def imported(data: Mapping[str, Any], source: str) -> Imported:
    """A plan.json for `--from`: the whole question, with model and GPU."""
    from ...hardware.catalogue import resolve
    from .imported import Imported, Said

    request = written_of(data, source).request
    values = {f.name: getattr(request, f.name) for f in fields(request) if f.name not in _NOT_SAID}
    values |= {f.name: getattr(request.loop, f.name) for f in fields(request.loop) if f.name != "iterations"}
    values["gpu"] = request.device.key
    if request.device.total_bytes != resolve(request.device.key)[0].total_bytes:
        values["gpu_memory"] = request.device.total_bytes
    adapter = {} if request.adapter is None else {f.name: getattr(request.adapter, f.name) for f in fields(request.adapter)}
    adapter.pop("kind", None)
    if request.method in ZEROTH_ORDER:  # the method does not name its adapter
        values, adapter = {**values, "adapter": request.adapter}, {}
    return Imported(
        source=source,
        kind="plan",
        said={name: Said(value, name) for name, value in values.items() if value not in (None, False, (), "")},
        adapter={name: Said(value, f"adapter.{name}") for name, value in adapter.items() if value not in (None, ())},
        model=Said(request.model.reference or request.model.name, "base.reference"),
        spec=request.model,
    )
