"""Adapters: which small parts of a model train while the rest stays as it was loaded, through the real peft modules.

`AdapterSettings` says what a script says: the kind of adapter, its rank and targets, and how the base model was loaded
(`quantised`).  `apply` does what the script does: quantise, `prepare_model_for_kbit_training`, `get_peft_model`.  It works
under a fake mode, where no weight is loaded, and for real.  Read in peft 0.21.2: adapters of a 16-bit base are made in fp32
(`autocast_adapter_dtype`, tuners_utils.py, cast_adapter_dtype), those of a 4-bit base as well.

Free of torch and peft until `apply` is called.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import CannotTell, UserError, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import nn

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How peft spells one kind of adapter: its config class, and that class's names for what the options say.

    None: it has no such thing.  `fixed`: what else is passed on.
    """

    config: str
    rank: str | None = "r"
    alpha: str | None = None
    dropout: str | None = None
    tokens: str | None = None
    targets: bool = True
    saves: bool = True
    fixed: Mapping[str, Any] = field(default_factory=dict)


_LORA: dict[str, Any] = {"config": "LoraConfig", "alpha": "lora_alpha", "dropout": "lora_dropout"}
_TOKENS: dict[str, Any] = {"rank": None, "tokens": "num_virtual_tokens", "targets": False}
KINDS: dict[str, Kind] = {
    "lora": Kind(**_LORA),
    "rslora": Kind(**_LORA, fixed={"use_rslora": True}),
    "dora": Kind(**_LORA, fixed={"use_dora": True}),
    "adalora": Kind(
        config="AdaLoraConfig", rank="init_r", alpha="lora_alpha", dropout="lora_dropout", fixed={"total_step": 1000}
    ),
    "oft": Kind(config="OFTConfig", rank="oft_block_size", dropout="module_dropout"),
    "hra": Kind(config="HRAConfig"),
    "ia3": Kind(config="IA3Config", rank=None),
    "loha": Kind(config="LoHaConfig", alpha="alpha", dropout="module_dropout"),
    "lokr": Kind(config="LoKrConfig", alpha="alpha", dropout="module_dropout"),
    "vera": Kind(config="VeraConfig", dropout="vera_dropout"),
    "randlora": Kind(config="RandLoraConfig", alpha="randlora_alpha", dropout="randlora_dropout"),
    "miss": Kind(config="MissConfig", dropout="miss_dropout"),
    "delora": Kind(config="DeloraConfig", dropout="module_dropout"),
    "gralora": Kind(config="GraloraConfig", alpha="alpha", dropout="gralora_dropout"),
    "beft": Kind(config="BeftConfig", rank=None),
    "c3a": Kind(config="C3AConfig", rank="block_size"),
    "deft": Kind(config="DeftConfig"),
    "fourierft": Kind(config="FourierFTConfig", rank="n_frequency"),
    "glora": Kind(config="GloraConfig"),
    "hira": Kind(config="HiraConfig"),
    "lily": Kind(config="LilyConfig"),
    "peanut": Kind(config="PeanutConfig"),
    "psoft": Kind(config="PsoftConfig"),
    "pvera": Kind(config="PveraConfig"),
    "road": Kind(config="RoadConfig", rank=None),
    "tinylora": Kind(config="TinyLoraConfig"),
    "vblora": Kind(config="VBLoRAConfig"),
    "ln-tuning": Kind(config="LNTuningConfig", rank=None),
    "prefix-tuning": Kind(config="PrefixTuningConfig", **_TOKENS),
    "prompt-tuning": Kind(config="PromptTuningConfig", **_TOKENS),
    "p-tuning": Kind(config="PromptEncoderConfig", **_TOKENS),
}
QLORA = "qlora"  # a method of its own in people's words: LoRA on a 4-bit base
ADAPTER_METHODS = ("lora", QLORA, *(kind for kind in KINDS if kind != "lora"))
BASE_QUANTS = ("none", "nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "gptq")
_DEFAULT_TOKENS = 20  # where a kind needs a number of virtual tokens and none is given: the one of peft's own examples
PATTERN = "re:"  # before a regular expression in the place of names
_OF_PATTERNS = "*[]()|^$+?\\"
TASK_TYPES = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "seq-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "question-answering": "QUESTION_ANS",
}


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """What an adapter is made of, as a training script says it; None and () leave it to peft."""

    kind: str = "lora"
    rank: int | None = None
    """LoRA's r; for OFT and C3A the size of a block, for FourierFT the number of frequencies."""
    alpha: float | None = None
    dropout: float | None = None
    targets: tuple[str, ...] = ()
    """Names of modules, as a path or its end, ("all-linear",), or ("re:PATTERN",), which the whole path of a module has to
    match.  (): what peft takes for the family."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that train in full beside the adapter."""
    virtual_tokens: int | None = None
    base_quant: str = "none"
    """How the frozen weights are stored: nf4, fp4, each also with double quantisation (-dq); gptq."""
    quant_storage: str | None = None
    """Of 4-bit weights: the type in which the packed bytes lie (bnb_4bit_quant_storage); None: uint8.  Sharding by
    flattening needs that of the other weights."""
    group_size: int | None = None
    """GPTQ: weights of a column that share a scale and a zero; None: 128; -1: the whole column."""
    packed_as_parameters: bool = False
    """GPTQ's packed weights are parameters instead of buffers, which FSDP shards (fms-acceleration does so)."""
    upcast: bool | None = None
    """`prepare_model_for_kbit_training`: what stays in 16 bits becomes fp32.  None: for a quantised base."""
    adapter_dtype: str | None = None
    """"base": adapters in the dtype of the base (autocast_adapter_dtype=False).  None: fp32 for 16-bit bases."""
    autocast: bool = True
    """With a 16-bit precision: the step runs under autocast, as transformers' Trainer does with bf16=True."""

    @classmethod
    def of(cls, method: str, **given: Any) -> AdapterSettings:
        """The settings of a method's name; `given` are fields."""
        if method == QLORA:
            return cls(**{"kind": "lora", "base_quant": "nf4-dq", **given})
        return cls(kind=method, **given)

    def check(self) -> None:
        """Raises UserError for values that no adapter can have."""
        if self.kind not in KINDS:
            raise UserError(
                f"adapter {self.kind!r} is not known", did_you_mean(self.kind, KINDS) or f"Known: {', '.join(KINDS)}"
            )
        if self.base_quant not in BASE_QUANTS:
            hint = did_you_mean(self.base_quant, BASE_QUANTS)
            raise UserError(f"--base-quant {self.base_quant!r} is not known", f"{hint} Choose one of {', '.join(BASE_QUANTS)}")
        kind = KINDS[self.kind]
        for option, number in (("--lora-rank", self.rank), ("--virtual-tokens", self.virtual_tokens)):
            if number is not None and number < 1:
                raise UserError(f"{option} {number}: must be at least 1", "Leave it out for peft's default")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise UserError(f"--lora-dropout {self.dropout:g}: expected 0 or more and less than 1", "Write for example 0.05")
        if self.adapter_dtype not in (None, "base"):
            raise UserError(f"adapter dtype {self.adapter_dtype!r} is not known", 'Use "base", or leave it out for fp32')
        said: tuple[tuple[str, Any, str | bool | None], ...] = (
            ("--lora-rank", self.rank, kind.rank),
            ("--lora-alpha", self.alpha, kind.alpha),
            ("--lora-dropout", self.dropout, kind.dropout),
            ("--lora-targets", self.targets, kind.targets),
            ("--virtual-tokens", self.virtual_tokens, kind.tokens),
        )
        for option, value, has in said:
            if value not in (None, ()) and not has:
                raise UserError(f"{option}: {self.kind} has no such setting", "Leave it out")

    @property
    def upcasts(self) -> bool:
        """Whether `prepare_model_for_kbit_training` runs."""
        return self.base_quant != "none" if self.upcast is None else self.upcast

    def apply(self, module: nn.Module, *, task: str, compute_dtype: torch.dtype) -> tuple[nn.Module, list[str]]:
        """(the adapted module, what was done in words).  `module` is changed.  `compute_dtype`: of 4-bit products.

        Raises UserError where peft is missing or the settings do not go with the module, CannotTell where an adapter cannot
        be made without the weights' values.
        """
        require("peft", f"--method {self.kind}")
        import peft

        from .builder import casts_in_place

        self.check()
        said: list[str] = []
        with casts_in_place():
            if self.base_quant != "none":
                from .quantised import quantise

                module, notes = quantise(
                    module,
                    self.base_quant,
                    compute_dtype,
                    storage=self.quant_storage,
                    as_parameters=self.packed_as_parameters,
                    group_size=self.group_size,
                )
                said += notes
            if self.upcasts:
                _prepare(module)
                said.append("prepare_model_for_kbit_training: weights that stay in 16 bits (embeddings, head, norms) are fp32")
            config, notes = self._config(module, task)
            said += notes
            if self.base_quant == "gptq":
                _let_adapt_gptq(self.kind, config)
            try:
                adapted = peft.get_peft_model(module, config, autocast_adapter_dtype=self.adapter_dtype is None)  # type: ignore[arg-type]
            except Exception as error:
                raise _refused(self.kind, error) from error
        if isinstance(next(module.parameters()), _fake_tensor()):
            _never_drop(adapted)
        return adapted, said

    def _config(self, module: nn.Module, task: str) -> tuple[Any, list[str]]:
        import peft

        kind = KINDS[self.kind]
        cls = getattr(peft, kind.config, None)
        if cls is None:
            raise UserError(f"--method {self.kind}: the installed peft {peft.__version__} has no {kind.config}", "Update peft")
        said, given = [f"adapter: {self.kind} of peft {peft.__version__}"], dict(kind.fixed)
        tokens = self.virtual_tokens
        if kind.tokens and tokens is None:
            tokens = _DEFAULT_TOKENS
            said.append(f"{tokens} virtual tokens (not given)")
        for name, value in (
            (kind.rank, self.rank),
            (kind.alpha, self.alpha),
            (kind.dropout, self.dropout),
            (kind.tokens, tokens),
        ):
            if name is not None and value is not None:
                given[name] = value
        if self.kind == "adalora" and self.rank is not None:
            given["target_r"] = self.rank  # never above what it starts with
        if kind.targets:
            targets, note = _targets(module, self.targets, self.kind)
            said += note
            if targets is not None:
                given["target_modules"] = targets
                if self.kind == "ia3":
                    given["feedforward_modules"] = []
        if self.modules_to_save:
            given["modules_to_save"] = _known(module, self.modules_to_save, "--modules-to-save")
        if isinstance(getattr(module, "config", None), _pretrained_config()):
            given["task_type"] = TASK_TYPES.get(task)
        try:
            return cls(**given), said
        except (TypeError, ValueError) as error:
            raise _refused(self.kind, error) from error


def require(package: str, wanted_by: str) -> None:
    """Raises UserError where a package that an option needs is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{wanted_by}: the package {package} is not installed", f"Install it: pip install {package}")


def library_versions(settings: AdapterSettings | None) -> dict[str, str]:
    """Versions of the packages whose modules an adapted model is made of: a trace holds for these only."""
    from importlib.metadata import PackageNotFoundError, version

    if settings is None:
        return {}
    found = {}
    for package in ("peft", "bitsandbytes") if settings.base_quant not in ("none", "gptq") else ("peft",):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def base_of(module: nn.Module) -> Any:
    """The model inside peft's wrapper, or `module` itself."""
    inner = getattr(module, "get_base_model", None)
    return inner() if callable(inner) and hasattr(module, "peft_config") else module


def _pretrained_config() -> Any:
    from transformers import PretrainedConfig

    return PretrainedConfig


def _prepare(module: nn.Module) -> None:
    """peft's `prepare_model_for_kbit_training`, whose activation checkpointing is --recompute here."""
    import peft

    peft.prepare_model_for_kbit_training(module, use_gradient_checkpointing=False)


class _Never:
    """A chance that no random number is below: what `torch.rand(1) > p` is compared with."""

    def __lt__(self, number: Any) -> bool:
        return True


def _never_drop(module: nn.Module) -> None:
    """Layers that flip a coin whether they run (LoHa, LoKr: module dropout) do run: it is that step that must fit."""
    for part in module.modules():
        chances = getattr(part, "module_dropout", None)
        if isinstance(chances, dict):
            for name in chances:
                chances[name] = _Never()


def _fake_tensor() -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def _let_adapt_gptq(kind: str, config: Any) -> None:
    """peft's own LoRA layer for GPTQ, on our stand-in for a GPTQ layer."""
    if KINDS[kind].config != "LoraConfig" or kind == "dora":
        raise UserError(f"--method {kind} on a base that GPTQ quantised: peft does not support it", "Use --method lora")
    from peft.tuners.lora.gptq import GPTQLoraLinear

    from .gptq import GptqLinear

    config._register_custom_module({GptqLinear: GPTQLoraLinear})


def _targets(module: nn.Module, wanted: tuple[str, ...], kind: str) -> tuple[Any, list[str]]:
    """(target_modules for peft, None for its own choice; notes)."""
    from peft.utils import constants

    if wanted and wanted[0].startswith(PATTERN):
        return _matching(module, wanted[0].removeprefix(PATTERN), "--lora-targets"), []
    if wanted and wanted != (ALL_LINEAR,):
        return _known(module, wanted, "--lora-targets"), []
    if not wanted:
        names = "LNTUNING" if kind == "ln-tuning" else "IA3" if kind == "ia3" else "LORA"
        mapping = getattr(constants, f"TRANSFORMERS_MODELS_TO_{names}_TARGET_MODULES_MAPPING", {})
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        if model_type in mapping:
            return None, [f"adapter targets: {', '.join(mapping[model_type])}, which peft takes for {model_type} (not given)"]
        if kind == "ln-tuning":
            raise UserError(f"--method ln-tuning: peft knows no norms of {model_type}", "Name them with --lora-targets")
        return _every_linear(module), ["adapter targets: every linear layer but the head (not given)"]
    return _every_linear(module), []


def _every_linear(module: nn.Module) -> list[str]:
    """Paths of the linear layers, without the head: what peft's all-linear takes of a transformers model."""
    from torch import nn

    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None  # type: ignore[operator]
    classes: tuple[type, ...] = (nn.Linear,)
    try:
        from transformers.pytorch_utils import Conv1D

        classes = (nn.Linear, Conv1D)
    except ImportError:
        pass
    skipped = ("score", "classifier")  # a classification head trains in full
    names = [
        name
        for name, part in module.named_modules()
        if isinstance(part, classes) and part is not head and name and name.split(".")[-1] not in skipped
    ]
    if not names:
        raise UserError("--lora-targets all-linear: the model has no linear layer", "Name modules with --lora-targets")
    return names


def targets_of(text: str) -> tuple[str, ...]:
    """What `target_modules` of peft, given as one text, says: a name, "all-linear", or a pattern."""
    return (f"{PATTERN}{text}",) if any(char in text for char in _OF_PATTERNS) else (text,)


def _matching(module: nn.Module, pattern: str, option: str) -> str:
    """The pattern, of which `re.fullmatch` finds a module: peft's own rule.  Raises UserError."""
    try:
        found = any(re.fullmatch(pattern, path) for path, _ in module.named_modules())
    except re.error as error:
        raise UserError(f"{option} {PATTERN}{pattern}: is no regular expression: {error}", "Write names, or mend it") from error
    if not found:
        raise UserError(
            f"{option} {PATTERN}{pattern}: the path of no module of {type(module).__name__} matches it as a whole",
            "Begin it with .* for a path of any depth",
        )
    return pattern


def _known(module: nn.Module, wanted: Iterable[str], option: str) -> list[str]:
    """`wanted`, of which each is the path of a module or its end.  Raises UserError with the nearest names."""
    paths = [name for name, _ in module.named_modules() if name]
    for name in wanted:
        if not any(path == name or path.endswith("." + name) for path in paths):
            leaves = {leaf for path in paths if not (leaf := path.rpartition(".")[2]).isdecimal()}
            hint = did_you_mean(name, leaves) or f"Modules: {', '.join(sorted(leaves)[:12])}"
            raise UserError(f"{option} {name}: {type(module).__name__} has no module of that name", hint)
    return list(wanted)


def _refused(kind: str, error: Exception) -> Exception:
    """peft's own refusal as ours."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    line = " ".join(str(error).split())[:240] or type(error).__name__
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return CannotTell(f"--method {kind}: peft makes it from the values of the weights, which no trace knows ({line})")
    return UserError(f"--method {kind}: peft refuses: {line}", "Change the targets or the rank")
