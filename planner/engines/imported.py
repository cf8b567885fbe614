"""What a configuration file says, and how it meets the options of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ...errors import CannotTell, UserError
from .keys import NOT_UNDERSTOOD
from .text import shown

if TYPE_CHECKING:
    from ...models import ModelSpec
    from ..strategies.fsdp_settings import FsdpSettings

Kind = Literal[
    "deepspeed",
    "accelerate",
    "fsdp",
    "training-arguments",
    "axolotl",
    "llamafactory",
    "trl",
    "torchtune",
    "zeroth-order",
    "plan",
]
AUTO = "auto"
# Files of a trainer that launches DDP by itself where several GPUs are there and no engine is named.
_TRAINERS = ("training-arguments", "axolotl", "llamafactory", "trl")
# What the configuration of an engine is about: an option that says otherwise asks for another engine.
_OF_THE_ENGINE = ("strategy", "precision", "offload")

# Option of `make_request` -> how it is typed.  For messages.
_FLAGS = {
    "micro_batch_size": "--micro-batch",
    "grad_accum_steps": "--grad-accum",
    "clip_grad_norm": "--clip-grad-norm",
    "optimizer_impl": "--optimizer-impl",
    "use_cache": "--use-cache",
    "compiled": "--compile",
}
_TRAINER_MICRO_BATCH = 8  # transformers 5.24, TrainingArguments.per_device_train_batch_size


@dataclass(frozen=True)
class Said:
    """A value, and the key of the file that says so."""

    value: Any
    key: str


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The three sizes of DeepSpeed's file; None where it says nothing, "auto" where the Trainer fills in."""

    train: int | Literal["auto"] | None = None
    micro: int | Literal["auto"] | None = None
    steps: int | Literal["auto"] | None = None


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A file, understood.  Option names are those of `planner.api.make_request`."""

    source: str
    kind: Kind
    said: Mapping[str, Said] = field(default_factory=dict)
    """Option -> what the file states.  An explicit option that says something else is a mistake of the user's."""
    taken: Mapping[str, Said] = field(default_factory=dict)
    """Option -> what holds where neither the file nor an explicit option says anything."""
    denied: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(option, value) -> the key of the file that rules it out."""
    notes: tuple[str, ...] = ()
    """What was assumed, warned about, or has no effect on memory."""
    unmodelled: tuple[str, ...] = ()
    """Why there is no answer, with the key: the file is fine, but memplan has no model for it."""
    deepspeed: Mapping[str, Any] | None = None
    """Fields of `DeepSpeedSettings`; None where DeepSpeed is not used."""
    hidden_size_keys: tuple[str, ...] = ()
    """Of those, the ones that are "auto" and follow the model's hidden size."""
    batches: Batches | None = None
    fsdp: FsdpSettings | None = None
    model: Said | None = None
    """The reference of the model that the file names."""
    spec: ModelSpec | None = None
    """That model as the file describes it, with its task and overrides."""
    adapter: Mapping[str, Said] = field(default_factory=dict)
    """Field of `AdapterSettings` -> what the file states."""

    def without(self, option: str) -> Imported:
        """The same without what the file states about an option."""
        return replace(self, said={name: value for name, value in self.said.items() if name != option})


def flag(option: str) -> str:
    """The option as it is typed."""
    return _FLAGS.get(option, "--" + option.replace("_", "-"))


def apply(imported: Imported, options: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The options of `make_request` that the file and the explicit `options` make together.

    `options`: as for `make_request`; None, False and () mean that nothing was said.  `adapter` may be a mapping: the fields of
    AdapterSettings that were said.  `config`: the model's config.json, for what follows its hidden size.  The file's settings
    come as `deepspeed` (a DeepSpeedSettings) and `fsdp` (an FsdpSettings), what was taken for granted as `notes` (sentences).

    An explicit option goes before the file, and that is a note; only what an engine's own configuration decides does not.
    Raises UserError where those two disagree, naming both; CannotTell for what is not modelled, naming the key.
    """
    if imported.unmodelled:
        raise CannotTell("; ".join(imported.unmodelled))
    given = {k: v for k, v in options.items() if v is not None and v is not False and v != () and v != {}}
    engine = imported.deepspeed is not None or imported.fsdp is not None
    notes = []
    made = dict(options)
    for option, said in imported.said.items():
        if option not in given:
            made[option] = said.value
        elif given[option] != said.value:
            if engine and option in _OF_THE_ENGINE:
                raise _conflict(option, given[option], said, imported.source)
            notes.append(f"{_option(option, given[option])} is taken, not {said.key} {shown(said.value)} of the file")
    for (option, value), key in imported.denied.items():
        if given.get(option) == value:
            if engine:
                raise _conflict(option, value, Said(False, key), imported.source)
            notes.append(f"{_option(option, value)} is taken, not {key} of the file")
    for option, said in imported.taken.items():
        if option not in given and option not in imported.said:
            made[option] = said.value
    notes += imported.notes
    notes += [f"{s.key}: {_option(o, s.value)} is assumed" for o, s in imported.taken.items() if o not in given]
    if imported.batches is not None:
        _batches(imported, given, made, notes)
    if imported.deepspeed is not None:
        made["deepspeed"] = settings = _settings(imported, config, notes)
        _must_divide(imported.source, int(made.get("gpus") or 1), settings.zero_hpz_partition_size)
    if imported.fsdp is not None:
        made["fsdp"] = _fsdp(imported.fsdp, made.get("precision"))
    if imported.kind in _TRAINERS and made.get("strategy") is None:
        made["strategy"] = "ddp" if (made.get("gpus") or 1) > 1 else "single"
        notes.append(f"neither deepspeed nor fsdp is there: --strategy {made['strategy']}")
    if imported.kind == "torchtune" and made.get("strategy") is None:
        _torchtune_strategy(made, notes)
    _chunked_loss(imported, given, made, notes)
    made["adapter"] = _adapter(imported, given, made.get("method"), notes)
    notes.sort(key=lambda note: not note.startswith(NOT_UNDERSTOOD))  # stable: these first
    made["notes"] = [f"{imported.source}: {note}" for note in dict.fromkeys(notes)]
    return made


def _chunked_loss(imported: Imported, given: Mapping[str, Any], made: dict[str, Any], notes: list[str]) -> None:
    """DDP and FSDP are modelled where the step runs the whole model once: a head that runs apart is counted with all logits."""
    said = imported.said.get("loss")
    if (
        said is None
        or said.value not in ("chunked", "liger")
        or "loss" in given
        or not str(made.get("strategy")).startswith(("ddp", "fsdp", "hsdp"))
    ):
        return
    made["loss"] = None
    notes.append(
        f"{said.key}: under --strategy {made['strategy']} all logits are counted at once, which keeps more: "
        "the peak is an upper bound"
    )


def _torchtune_strategy(made: dict[str, Any], notes: list[str]) -> None:
    """Which recipe runs a file is said on torchtune's command line, not in the file."""
    from ..strategies.fsdp_settings import FsdpSettings

    several = (made.get("gpus") or 1) > 1
    made["strategy"] = "fsdp2" if several else "single"
    if several:
        made["fsdp"] = FsdpSettings(version=2)
    recipe = "a distributed recipe (fully_shard)" if several else "a recipe for a single device"
    notes.append(f"--strategy {made['strategy']}: {recipe} is assumed; torchtune names it on its command line")


def _adapter(imported: Imported, given: Mapping[str, Any], method: str | None, notes: list[str]) -> Any:
    """The AdapterSettings of file and options together; None where nothing is said of them."""
    from ...models.adapters import ADAPTER_METHODS, AdapterSettings

    explicit = given.get("adapter")
    if isinstance(explicit, AdapterSettings):
        return explicit
    if "adapter" in imported.said:  # whole, as zo_run.json has it
        return imported.said["adapter"].value
    said = dict(imported.adapter)
    if "method" in given and said:
        if given["method"] not in ADAPTER_METHODS:
            notes.append(
                f"{', '.join(dict.fromkeys(s.key for s in said.values()))}: without effect under --method {given['method']}"
            )
            said = {}
        elif given["method"] != imported.said["method"].value:  # --method lora on a file of QLoRA: on a 16-bit base
            said = {name: value for name, value in said.items() if name not in ("base_quant", "upcast", "quant_storage")}
    fields = {name: value.value for name, value in said.items()}
    for name, value in (explicit or {}).items():
        if name in said and said[name].value != value:
            notes.append(f"{_adapter_option(name, value)} is taken, not {said[name].key} {shown(said[name].value)} of the file")
        fields[name] = value
    if not fields:
        return None
    if method not in ADAPTER_METHODS:
        raise UserError(f"{_adapter_option(*next(iter(fields.items())))} belongs to adapters", "Use --method lora")
    settings = AdapterSettings.of(str(method), **fields)
    settings.check()
    return settings


_ADAPTER_OPTIONS = {
    "modules_to_save": "--modules-to-save", "virtual_tokens": "--virtual-tokens", "base_quant": "--base-quant",
    "upcast": "--no-upcast", "adapter_dtype": "--adapter-16bit", "autocast": "--no-autocast",
}  # fmt: skip


def _adapter_option(name: str, value: Any) -> str:
    option = _ADAPTER_OPTIONS.get(name, f"--lora-{name}")
    return (
        option
        if option.startswith(("--no-", "--adapter"))
        else f"{option} {','.join(value) if isinstance(value, tuple) else value}"
    )


def _conflict(option: str, value: Any, said: Said, source: str) -> UserError:
    return UserError(
        f"{_option(option, value)} and {said.key} {shown(said.value)} of {source} do not agree",
        "Leave the option out, or change the file",
    )


def _option(option: str, value: Any) -> str:
    """The option with its value, as it is typed."""
    if isinstance(value, bool):
        return flag(option) if value else f"no {flag(option)}"
    return f"{flag(option)} {'+'.join(map(str, value)) if isinstance(value, tuple) else value}"


def _settings(imported: Imported, config: Mapping[str, Any] | None, notes: list[str]) -> Any:
    from ..strategies.deepspeed_settings import DeepSpeedSettings

    fields = dict(imported.deepspeed or {})
    if imported.hidden_size_keys:
        width = hidden_size(config)
        if width is None:
            raise UserError(
                f'{imported.source}: zero_optimization.{imported.hidden_size_keys[0]} "auto" follows the hidden size '
                "of a config, and this model has none",
                "Write a number there",
            )
        filled = {
            "reduce_bucket_size": width * width,
            "stage3_prefetch_bucket_size": int(0.9 * width * width),
            "stage3_param_persistence_threshold": 10 * width,
        }
        for key in imported.hidden_size_keys:
            fields[key] = filled[key]
            notes.append(f'zero_optimization.{key} "auto" is {filled[key]:,} for a hidden size of {width:,}')
    return DeepSpeedSettings(**fields)


def _fsdp(settings: FsdpSettings, precision: Any) -> FsdpSettings:
    """With the types of --precision, where the file is silent about them."""
    from .fsdp_config import with_mixed_precision

    mixed = str(precision or "").removesuffix("-mixed")
    return with_mixed_precision(settings, mixed) if str(precision).endswith("-mixed") else settings


def _must_divide(source: str, gpus: int, group: int) -> None:
    if group > 1 and gpus % group:
        raise UserError(
            f"{source}: zero_optimization.zero_hpz_partition_size {group} does not divide the {gpus} GPUs",
            "Say how many GPUs with --gpus, or change it",
        )


def hidden_size(config: Mapping[str, Any] | None) -> int | None:
    """As `HfTrainerDeepSpeedConfig.trainer_config_finalize` finds it (transformers/integrations/deepspeed.py)."""
    from ...models.overrides import standard

    if not config:
        return None
    if isinstance(width := standard(config, "hidden_size"), int):
        return width
    try:  # a config.json may leave out what is the family's default, or call it otherwise
        from transformers import AutoConfig

        made = AutoConfig.for_model(**config)
    except (ImportError, ValueError, KeyError, TypeError):
        return None
    for part in (made, getattr(made, "text_config", None)):
        width, widths = getattr(part, "hidden_size", None), getattr(part, "hidden_sizes", None)
        if isinstance(width, int):
            return width
        if widths:
            return int(max(widths))
    return None


def _batches(imported: Imported, given: Mapping[str, Any], made: dict[str, Any], notes: list[str]) -> None:
    """The rules of `DeepSpeedConfig._set_batch_related_parameters`, with explicit options as the Trainer's arguments."""
    sizes = imported.batches or Batches()
    world = int(made.get("gpus") or 1)
    where = imported.source
    asked = given.get("micro_batch_size"), given.get("grad_accum_steps")
    micro = _explicit(sizes.micro, asked[0])
    steps = _explicit(sizes.steps, asked[1])
    train = sizes.train if isinstance(sizes.train, int) else None
    if train is not None and any(asked) and not all(asked):  # the samples of a step stay; what was not asked for follows
        micro, steps = asked
    if sizes.micro == AUTO and micro is None and train is None and imported.kind != "accelerate":  # there: the data loader's
        micro = _TRAINER_MICRO_BATCH
        notes.append(
            f'train_micro_batch_size_per_gpu "auto": {micro} is assumed, the default of per_device_train_batch_size; '
            "say another with --micro-batch"
        )
    if sizes.steps == AUTO and steps is None:
        steps = 1
        notes.append('gradient_accumulation_steps "auto": 1 is assumed; say another with --grad-accum')
    if train is None:
        steps = 1 if steps is None else steps
    else:
        micro, steps = _split(train, micro, steps, world, where)
    if micro is not None:
        made["micro_batch_size"] = micro
    elif sizes.micro is None and imported.kind == "deepspeed" and sizes.train is None:
        raise UserError(
            f"{where}: neither train_batch_size nor train_micro_batch_size_per_gpu is there",
            "DeepSpeed needs one of them: write it, or say --micro-batch",
        )
    made["grad_accum_steps"] = steps


def _explicit(of_file: int | Literal["auto"] | None, of_option: int | None) -> int | None:
    if of_option is not None:
        return of_option
    return of_file if isinstance(of_file, int) else None


def _split(train: int, micro: int | None, steps: int | None, world: int, where: str) -> tuple[int, int]:
    """(micro batch, accumulation) of a `train_batch_size`; raises UserError where the three do not multiply."""
    parts = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    known = " x ".join(f"{value} ({name})" for name, value in parts.items() if value is not None)
    product = world * (micro or 1) * (steps or 1)
    exact = micro is not None and steps is not None
    if train % product or (exact and train != product):
        whole = f"{known} x {world} GPUs" if known else f"{world} GPUs"
        relation = f"is not {whole} = {product}" if exact else f"does not divide by {whole}"
        raise UserError(f"{where}: train_batch_size {train} {relation}", "Say how many GPUs with --gpus, or change one of them")
    left = train // product
    return (micro, steps) if micro is not None and steps is not None else (micro or left, steps or (left if micro else 1))
