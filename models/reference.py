"""`load`: a reference on the command line -> `ModelSpec`.  Tried in order: catalogue, folder, config.json, factory, hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UserError, did_you_mean, nearest
from . import catalogue, overrides, tasks
from .spec import FactoryRef, ModelSpec, max_seq_len

_FACTORY = re.compile(r"^(?P<place>.+?):(?P<function>[A-Za-z_]\w*)$")
_DOTTED = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")


def load(
    reference: str,
    *,
    task: str | None = None,
    overrides: Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
) -> ModelSpec:
    """The model that `reference` names.  Imports neither torch nor transformers, unless an override needs a key checked.

    `reference`: a catalogue name, a folder with a config.json, a path to a config.json, `file.py:factory`,
    `package.module:factory`, or an id on the Hugging Face hub (its cache first; honours HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE).
    `overrides`: config keys, or a factory's keyword arguments, as text (`--set`).
    Raises UserError for everything that a user can get wrong.
    """
    reference = reference.strip()
    if not reference:
        raise UserError(
            "model: the reference is empty", "Name a model, for example bert-base-uncased; memplan models list shows all"
        )
    changes = dict(overrides or {})
    spec = _found(reference, task, changes, trust_remote_code)
    return replace(spec, reference=_from_anywhere(reference, spec), overrides=changes)


def _from_anywhere(reference: str, spec: ModelSpec) -> str:
    """`reference` so that it names the same model from another folder."""
    if spec.source == "folder":
        return str(Path(reference).expanduser().resolve())
    if spec.factory is not None and spec.factory.module is None:
        return f"{spec.factory.path}:{spec.factory.function}"
    return spec.name if spec.source == "catalogue" else reference


def _found(reference: str, task: str | None, changes: Mapping[str, str], trust_remote_code: bool) -> ModelSpec:
    entry = catalogue.find(reference)
    if entry is not None:
        return _spec(entry.id, "catalogue", entry.config, task or entry.task, changes,
                     num_params=entry.num_params, stored_dtype=entry.dtype)  # fmt: skip
    path = Path(reference).expanduser()
    if path.is_dir():
        return _from_folder(path, task, changes, trust_remote_code)
    if path.suffix == ".json" and (path.is_file() or not _HUB_ID.match(reference) or reference.endswith("config.json")):
        if not path.is_file():
            raise UserError(f"model: no file {reference}", "Give the path of an existing config.json")
        return _from_config_file(path, path.parent.resolve().name or reference, task, changes, trust_remote_code)
    match = _FACTORY.match(reference)
    if match is not None:
        return _from_factory(match["place"], match["function"], task, changes)
    if path.suffix == ".py":
        raise UserError(f"model: {reference} names a Python file, but no function in it",
                        f"Write {reference}:NAME, where NAME(**kwargs) returns the module")  # fmt: skip
    if not _HUB_ID.match(reference):
        raise UserError(f"model: no such folder or file: {reference}", did_you_mean(reference, catalogue.names()))
    return _from_hub(reference, task, changes, trust_remote_code)


def _spec(
    name: str, source: Any, config: Mapping[str, Any], task: str | None, changes: Mapping[str, str], **more: Any
) -> ModelSpec:
    changed = overrides.apply(config, changes, name) if changes else dict(config)
    if changes:
        more["num_params"] = None  # what was published is another model now
    chosen = tasks.check_task(task, changed) if task is not None else tasks.default_task(changed)
    if chosen == tasks.CUSTOM:
        raise UserError("task: 'custom' is for a factory of your own", "Write --model FILE.py:FUNCTION, or choose another task")
    more.setdefault("stored_dtype", _stored_dtype(config))
    return ModelSpec(name=name, source=source, task=chosen, config=changed, max_seq_len=max_seq_len(changed), **more)


def _stored_dtype(config: Mapping[str, Any]) -> str:
    """What a config.json says of its weights: `dtype` since transformers 5, `torch_dtype` before."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def _from_folder(folder: Path, task: str | None, changes: Mapping[str, str], trust: bool) -> ModelSpec:
    file = folder / "config.json"
    if not file.is_file():
        adapter = folder / "adapter_config.json"
        if adapter.is_file():
            base = _read_json(adapter).get("base_model_name_or_path", "its base model")
            raise UserError(f"model: {folder} holds an adapter, not a model", f"Name {base}, and use --method lora")
        raise UserError(
            f"model: the folder {folder} has no config.json", "Give a folder written by save_pretrained, or a config.json"
        )
    return _from_config_file(file, folder.resolve().name or str(folder), task, changes, trust)


def _from_config_file(file: Path, name: str, task: str | None, changes: Mapping[str, str], trust: bool) -> ModelSpec:
    config = _read_json(file)
    _check_model_type(config, str(file), trust)
    num_params = _params_in_weights(file.parent)
    return _spec(name, "folder", config, task, changes, num_params=num_params, folder=file.parent.resolve(),
                 trust_remote_code=trust)  # fmt: skip


def _from_hub(repo_id: str, task: str | None, changes: Mapping[str, str], trust: bool) -> ModelSpec:
    from . import hub

    file = hub.fetch_config(repo_id)
    config = _read_json(file)
    _check_model_type(config, f"{repo_id} on the hub", trust)
    return _spec(repo_id, "hub", config, task, changes, num_params=hub.num_params(repo_id), folder=file.parent,
                 trust_remote_code=trust)  # fmt: skip


def _from_factory(place: str, function: str, task: str | None, changes: Mapping[str, str]) -> ModelSpec:
    from . import sources

    if task is not None and tasks.check_task(task) != tasks.CUSTOM:
        raise UserError(
            f"task: {place}:{function} decides itself what it trains; --task {task} cannot change it", "Leave --task out"
        )
    kwargs = {key: overrides.parse_value(value) if isinstance(value, str) else value for key, value in changes.items()}
    file, module = Path(place).expanduser(), None
    if place.endswith(".py") or "/" in place:
        if not file.is_file():
            raise UserError(f"model: no file {place}", "Give the path of the Python file that holds the factory")
    elif _DOTTED.match(place):
        found = sources.find_module(place)
        if found is None:
            raise UserError(f"model: no module {place} in this folder or on sys.path", _hint_for_module(place))
        file, module = found, place
    else:
        raise UserError(
            f"model: {place!r} is neither a Python file nor a module", "Write FILE.py:FUNCTION or package.module:FUNCTION"
        )
    ref = FactoryRef(path=file.resolve(), module=module, function=function, kwargs=kwargs)
    return ModelSpec(name=f"{place}:{function}", source="factory", task=tasks.CUSTOM, factory=ref)


def _hint_for_module(place: str) -> str:
    local = [p.stem for p in Path.cwd().glob("*.py")]
    return did_you_mean(place, local) or "Run memplan in the folder that holds it, or give FILE.py:FUNCTION"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{file}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}", "Mend that line"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: not a text file", "Give a config.json") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})", "Check the path and its permissions") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a JSON object, got a {type(content).__name__}", "Give a model's config.json")
    return content


def _check_model_type(config: Mapping[str, Any], where: str, trust: bool) -> None:
    model_type = config.get("model_type")
    own_code = isinstance(config.get("auto_map"), dict)
    if own_code and trust:
        return
    if not isinstance(model_type, str) or not model_type:
        classes = config.get("architectures")
        hint = f'Add "model_type", for example "llama"{f" (its class is {classes[0]})" if classes else ""}'
        raise UserError(f"{where}: the config has no model_type", hint)
    known = _known_model_types()
    if known and model_type not in known:
        if own_code:
            raise UserError(
                f"{where}: model_type {model_type!r} is code of the model's own", "Allow it to run: --trust-remote-code"
            )
        near = nearest(model_type, known)
        raise UserError(f"{where}: the installed transformers has no model_type {model_type!r}",
                        f"Did you mean {', '.join(near)}?" if near else "Upgrade transformers, or give a factory")  # fmt: skip


def _known_model_types() -> set[str]:
    """The installed transformers' families, read from its file of names: importing it would cost seconds and torch."""
    import importlib.util

    found = importlib.util.find_spec("transformers")  # a top-level find_spec imports nothing
    if found is None or found.origin is None:
        return set()
    auto = Path(found.origin).parent / "models" / "auto"
    names: set[str] = set()
    for file in ("configuration_auto.py", "auto_mappings.py"):
        if (auto / file).is_file():
            names |= set(re.findall(r'"([\w.-]+)"[,:]\s*"\w+Config"', (auto / file).read_text(encoding="utf-8")))
    return names


def _params_in_weights(folder: Path) -> int | None:
    """The parameter count that the safetensors index states, or that the headers of the weights add up to."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        content = _read_json(index)
        total = content.get("metadata", {}).get("total_parameters")
        if isinstance(total, int):
            return total
        shards = sorted({folder / name for name in content.get("weight_map", {}).values()})
        if shards and all(shard.is_file() for shard in shards):
            return sum(_params_in_header(shard) for shard in shards)
    elif single.is_file():
        return _params_in_header(single)
    return None


def _params_in_header(file: Path) -> int:
    """Elements of all tensors of one safetensors file: 8 bytes of little-endian header length, then a JSON header."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length if length < file.stat().st_size else 0))
    except (ValueError, OSError):
        raise UserError(
            f"{file}: not a safetensors file", "Copy it again, or remove it: memplan reads its header only"
        ) from None
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            count = 1
            for size in tensor["shape"]:
                count *= size
            total += count
    return total
