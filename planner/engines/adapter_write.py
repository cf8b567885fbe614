"""An adapter as peft's adapter_config.json, and a quantised base as transformers' BitsAndBytesConfig."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import CannotTell
from ...models.adapters import ALL_LINEAR, KINDS, PATTERN, TASK_TYPES, AdapterSettings, require
from ..trace.options import AUTOCAST_DTYPE, PARAM_DTYPE

if TYPE_CHECKING:
    from ..request import Request

ADAPTER, QUANTISATION = "adapter_config.json", "quantization.json"
_TOKENS = 20  # of prompt, prefix and p-tuning, where the question gives none: what the answer takes


def settings_of(request: Request) -> AdapterSettings | None:
    """What is put on the model, as the question's strategy needs it; None where the model itself trains."""
    if not request.strategy.startswith(("fsdp", "hsdp")):
        return request.adapter_settings
    from ..strategies.fsdp_door import adapted

    return adapted(request, narrow_base=False).adapter_settings


def adapter_config(request: Request) -> dict[str, Any]:
    """adapter_config.json, as peft itself writes it for a config object.  Raises UserError where peft is missing."""
    settings = request.adapter_settings
    assert settings is not None
    require("peft", f"--method {settings.kind}")
    import peft

    kind = KINDS[settings.kind]
    given: dict[str, Any] = dict(kind.fixed)
    tokens = settings.virtual_tokens or (_TOKENS if kind.tokens else None)
    said = ((kind.rank, settings.rank), (kind.alpha, settings.alpha), (kind.dropout, settings.dropout), (kind.tokens, tokens))
    given |= {name: _whole(value) for name, value in said if name is not None and value is not None}
    if settings.kind == "adalora" and settings.rank is not None:
        given["target_r"] = settings.rank
    targets = _targets(settings, request.model.model_type)
    if kind.targets and targets is not None:
        given["target_modules"] = targets
        if settings.kind == "ia3":
            given["feedforward_modules"] = []
    if settings.modules_to_save:
        given["modules_to_save"] = list(settings.modules_to_save)
    config = getattr(peft, kind.config)(task_type=TASK_TYPES.get(request.model.task), **given)
    return {name: _plain(value) for name, value in config.to_dict().items() if value is not None}


def _targets(settings: AdapterSettings, model_type: str | None) -> Any:
    """Names, "all-linear", or None for what peft takes for the family."""
    from peft.utils import constants

    if settings.targets and settings.targets[0].startswith(PATTERN):
        return settings.targets[0].removeprefix(PATTERN)
    if settings.targets and settings.targets != (ALL_LINEAR,):
        return list(settings.targets)
    if settings.targets:
        return ALL_LINEAR
    names = {"ln-tuning": "LNTUNING", "ia3": "IA3"}.get(settings.kind, "LORA")
    known = getattr(constants, f"TRANSFORMERS_MODELS_TO_{names}_TARGET_MODULES_MAPPING", {})
    return None if model_type in known else ALL_LINEAR


def _whole(value: Any) -> Any:
    """peft takes 16, not 16.0, for an alpha."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else getattr(value, "value", value)


def quantisation_config(request: Request) -> dict[str, Any]:
    """The arguments of `transformers.BitsAndBytesConfig`; {} for a base that is not quantised.

    Raises CannotTell for weights that are quantised beforehand, and so have to be there.
    """
    settings = settings_of(request)
    if settings is None or settings.base_quant == "none":
        return {}
    if settings.base_quant == "int8":
        return {"load_in_8bit": True}
    if not settings.base_quant.startswith(("nf4", "fp4")):
        raise CannotTell(f"train.py: --base-quant {settings.base_quant}: name a checkpoint that is quantised already")
    quant_type, _, double = settings.base_quant.partition("-")
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": quant_type,
        "bnb_4bit_use_double_quant": bool(double),
        "bnb_4bit_compute_dtype": AUTOCAST_DTYPE.get(request.precision, PARAM_DTYPE[request.precision]),
        **({"bnb_4bit_quant_storage": settings.quant_storage} if settings.quant_storage else {}),
    }
