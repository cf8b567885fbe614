"""zo_run.json: one zeroth-order run, for memplan's own runtime (`python -m memplan.validator.runtimes.zo zo_run.json`).

The sizes that memory and time depend on are those of the question; the numbers that they do not depend on (learning rate, eps,
seed) have the values of the authors' full fine-tuning (princeton-nlp/MeZO, large_models/README.md) and are there to be edited.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell, UserError, did_you_mean
from ..strategies import ZEROTH_ORDER
from ..strategies.zo_settings import HOST_DTYPES, ZoSettings
from .text import read_file

if TYPE_CHECKING:
    from ...models.adapters import AdapterSettings
    from ..request import Request
    from .imported import Imported

RUN, CONFIG = "zo_run.json", "config.json"
MARK = "zeroth_order"  # the key that says what the file is
ZO2_MARK = "zo_method"  # that of zo2's own fields
_SHORT = {long: short for short, long in HOST_DTYPES.items()}


@dataclass(frozen=True, kw_only=True)
class ZoFile:
    """What the file holds.  The architecture is config.json beside it."""

    method: str
    model: str
    """Where weights and tokenizer are loaded from: a folder, or an id on the hub."""
    task: str
    precision: str
    micro_batch_size: int
    """Of one group of GPUs, as in the question."""
    seq_len: int
    gpus: int = 1
    attention: str = "sdpa"
    loss: str = "model"
    frozen: tuple[str, ...] = ()
    zo: ZoSettings = field(default_factory=ZoSettings)
    adapter: AdapterSettings | None = None
    """What trains where the model's own weights do not."""
    lr: float = 1e-6
    eps: float = 1e-3
    weight_decay: float = 0.0
    seed: int = 0

    @classmethod
    def of(cls, request: Request) -> ZoFile:
        """The question as a run.  Raises CannotTell for a model that comes from the user's own code."""
        spec = request.model
        if spec.config is None:
            raise CannotTell(f"{spec.name}: a folder holds a config.json, and a model of your own code has none")
        return cls(
            method=request.method,
            model=spec.reference or spec.name,
            task=spec.task,
            precision=request.precision,
            micro_batch_size=request.micro_batch_size,
            seq_len=request.seq_len,
            gpus=request.gpus,
            attention=request.attention,
            loss=request.loss,
            frozen=request.frozen,
            zo=request.zo or ZoSettings(),
            adapter=request.adapter_settings,
        )

    def text(self) -> str:
        data = {MARK: self.method, **dataclasses.asdict(self)}
        del data["method"]
        return json.dumps(data, indent=2) + "\n"


def read(path: str | os.PathLike[str]) -> ZoFile:
    """The run in the file.  Raises UserError with the key for what is wrong with it."""
    text = read_file(path)
    return parse(text.data, text.source)


def parse(data: Mapping[str, Any], source: str) -> ZoFile:
    """As `read`, of what was read already."""
    if MARK not in data:
        raise UserError(f"{source}: {MARK} is missing", f"Name a {RUN} as `memplan fit --method zo2 --write` leaves it")
    values = {"method": data[MARK], **{key: value for key, value in data.items() if key != MARK}}
    if values["method"] not in ZEROTH_ORDER:
        raise UserError(f"{source}: {MARK} {values['method']!r} is not known", f"Choose one of {', '.join(ZEROTH_ORDER)}")
    zo = _part(ZoSettings, values.pop("zo", {}), f"{source}: zo")
    adapter = values.pop("adapter", None)
    if adapter is not None:
        from ...models.adapters import AdapterSettings

        adapter = _part(AdapterSettings, adapter, f"{source}: adapter")
    found: ZoFile = _part(ZoFile, {**values, "zo": zo, "adapter": adapter}, source)
    for name, least in (("micro_batch_size", 1), ("seq_len", 1), ("gpus", 1)):
        value = getattr(found, name)
        if not isinstance(value, int) or value < least:
            raise UserError(f"{source}: {name} {value!r}: expected a whole number, {least} or more", "Correct it there")
    for name in ("lr", "eps", "weight_decay"):
        value = getattr(found, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0 or (name == "eps" and not value):
            raise UserError(f"{source}: {name} {value!r}: expected a positive number", "Correct it there")
    return found


def _part(kind: Any, values: Any, where: str) -> Any:
    """`values` as `kind`, a dataclass; lists are tuples there."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: expected an object, got {values!r}", "Correct it there")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in values:
        if key not in fields:
            raise UserError(f"{where}: the key {key!r} is not known", did_you_mean(str(key), fields) or "Leave it out")
    for name, one in fields.items():
        needed = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if needed and name not in values:
            raise UserError(f"{where}: {MARK if name == 'method' else name} is missing", "Add it")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def imported(data: Mapping[str, Any], source: str) -> Imported:
    """zo_run.json, or the fields of zo2's own configuration, for `memplan fit --from`."""
    if MARK not in data:
        return _imported_from_zo2(data, source)
    from .imported import Imported, Said

    run = parse(data, source)
    said = {
        "method": Said(run.method, MARK),
        "zo": Said(run.zo, "zo"),
        "frozen": Said(run.frozen, "frozen"),
        "adapter": Said(run.adapter, "adapter"),
        **{name: Said(getattr(run, name), name) for name in _SAME},
    }
    return Imported(
        source=source,
        kind="zeroth-order",
        said={name: one for name, one in said.items() if one.value not in (None, ())},
        notes=("lr, eps, weight_decay and seed change neither memory nor time",),
    )


def _imported_from_zo2(data: Mapping[str, Any], source: str) -> Imported:
    """The fields of zo2's `MeZOSGDConfig` as JSON, for `memplan fit --from`.  What the file leaves out has zo2's default."""
    from .imported import Imported, Said

    method = "zo2" if data.get("zo2", True) else "mezo"
    said = {"method": Said(method, "zo2")}
    if method == "zo2":
        said["zo"] = Said(_settings_of_zo2(data, source), ZO2_MARK)
    notes = ["it says nothing of the model's precision and batch: --precision and --micro-batch do"]
    return Imported(source=source, kind="zeroth-order", said=said, notes=tuple(notes))


def _settings_of_zo2(data: Mapping[str, Any], source: str) -> ZoSettings:
    """The same as the planner's words.  Raises CannotTell for what is not modelled."""
    blocks, kept = data.get("offloading_blocks"), str(data.get("precision_on_offloading_device", "float16"))
    amp = bool(data.get("amp", False))
    if blocks is not None and list(blocks) != list(range(len(blocks))):
        raise CannotTell(f"{source}: offloading_blocks {blocks}: only the first N blocks are modelled")
    if amp and kept.removeprefix("torch.") not in _SHORT:
        hint = did_you_mean(kept, _SHORT) or f"Use one of {', '.join(_SHORT)}"
        raise UserError(f"{source}: precision_on_offloading_device {kept!r} is not known", hint)
    return ZoSettings(
        overlap=bool(data.get("overlap", True)),
        offloading_blocks="all" if blocks is None else len(blocks),
        bucket=data.get("communicate_optimize_method", "") == "bucket",
        amp=amp,
        precision_on_offloading_device=_SHORT[kept.removeprefix("torch.")] if amp else None,  # type: ignore[arg-type]
    )


_SAME = ("precision", "micro_batch_size", "seq_len", "gpus", "attention", "loss")


def architecture(path: str | os.PathLike[str]) -> Path:
    """The config.json beside the file.  Raises UserError where there is none."""
    found = Path(path).with_name(CONFIG)
    if not found.is_file():
        raise UserError(f"{found}: no such file", f"{CONFIG} of the model belongs beside {Path(path).name}")
    return found
