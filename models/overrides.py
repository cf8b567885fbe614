"""`--set key=value`: changes to a config, checked against what the family knows."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import UserError, nearest

#: Standard name -> the family's own name, for the families whose config.json does not use the standard ones
#: (transformers calls this the config class's `attribute_map`; the copy here spares the import).
_GPT2 = {"hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
         "num_hidden_layers": "n_layer"}  # fmt: skip
_T5 = {"hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers", "head_dim": "d_kv"}
_MPT = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len"}  # fmt: skip
_DISTILBERT = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
_BLOOM = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
STANDARD_NAMES: dict[str, dict[str, str]] = {
    "gpt2": _GPT2, "gptj": _GPT2, "gpt_bigcode": _GPT2, "codegen": _GPT2,
    "t5": _T5, "mt5": _T5, "umt5": _T5, "mpt": _MPT, "distilbert": _DISTILBERT, "bloom": _BLOOM,
}  # fmt: skip
#: Lists with one entry a layer; they follow a changed layer count.
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "attention_layers", "num_attention_heads_per_layer")


def parse_settings(items: Iterable[str]) -> dict[str, str]:
    """["a=1", "b=x"] from repeated `--set` -> {"a": "1", "b": "x"}."""
    settings: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {item}: expected KEY=VALUE", "Write for example --set num_hidden_layers=2")
        settings[key.strip()] = value.strip()
    return settings


def parse_value(text: str) -> Any:
    """`text` as JSON where it is JSON (12, 0.1, true, null, [1, 2]), else the string itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)  # what people write who think in Python


def standard(config: Mapping[str, Any], key: str) -> Any:
    """`config[key]` under the family's own name for it, or None."""
    own = STANDARD_NAMES.get(str(config.get("model_type")), {}).get(key)
    return config.get(key, config.get(own) if own else None)


def apply(config: Mapping[str, Any], overrides: Mapping[str, str], where: str) -> dict[str, Any]:
    """A copy of `config` with `overrides` in it; raises UserError for a key that neither the config nor its family knows.

    Keys nest with dots (`text_config.num_hidden_layers`). transformers is imported only for a key that the config lacks.
    """
    changed = copy.deepcopy(dict(config))
    for dotted, text in overrides.items():
        value = parse_value(text) if isinstance(text, str) else text
        *path, key = dotted.strip().split(".")
        target: dict[str, Any] = changed
        for depth, part in enumerate(path):
            inner = target.get(part)
            if inner is None and part in _known_fields(target):
                inner = target[part] = {}
            if not isinstance(inner, dict):
                raise _unknown(
                    ".".join(path[: depth + 1]), [k for k, v in target.items() if isinstance(v, dict)], dotted, where
                )
            target = inner
        _set(target, key, value, prefix=".".join(path), dotted=dotted, where=where)
    return changed


def _set(target: dict[str, Any], key: str, value: Any, *, prefix: str, dotted: str, where: str) -> None:
    own = key
    if key not in target:
        own = STANDARD_NAMES.get(str(target.get("model_type")), {}).get(key, key)
    if own not in target:
        known = _known_fields(target)
        if known and own not in known:
            known_here = [f"{prefix}.{k}" if prefix else k for k in (*target, *known)]
            nested = [f"{k}.{inner}" for k, v in target.items() if isinstance(v, dict) for inner in v]
            raise _unknown(dotted, [*known_here, *nested], dotted, where)
        own = known.get(own, own)
    old = target.get(own)
    if isinstance(old, (int, float)) and not isinstance(old, bool) and isinstance(value, str):
        raise UserError(f"--set {dotted}={value}: {own} is a number ({old}) in {where}, got the text {value!r}",
                        f"Write for example --set {dotted}={old}")  # fmt: skip
    target[own] = value
    if own in {"num_hidden_layers", "n_layer", "n_layers", "num_layers"} and isinstance(value, int):
        if value < 1:
            raise UserError(f"--set {dotted}={value}: expected 1 layer or more", f"Write for example --set {dotted}=2")
        _fit_layer_lists(target, value)


def _fit_layer_lists(target: dict[str, Any], num_layers: int) -> None:
    for name in _PER_LAYER:
        per_layer = target.get(name)
        if isinstance(per_layer, list) and len(per_layer) > num_layers:
            target[name] = per_layer[:num_layers]
        elif isinstance(per_layer, list) and len(per_layer) < num_layers:
            del target[name]  # the family's own pattern for the new depth


def _known_fields(config: Mapping[str, Any]) -> dict[str, str]:
    """Every key that the family's config class takes -> its own name for it; empty where there is no class to ask."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return {}
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        cls = CONFIG_MAPPING[model_type]
    except KeyError:
        return {}
    own = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    own |= set(inspect.signature(cls.__init__).parameters) - {"self", "kwargs", "args"}
    own |= {"num_labels", "id2label", "label2id", "problem_type", "sliding_window_pattern", "rope_theta", "rope_scaling"}
    return {**{name: name for name in own if not name.startswith("_")}, **dict(getattr(cls, "attribute_map", {}))}


def _unknown(key: str, known: list[str], dotted: str, where: str) -> UserError:
    near = nearest(key, list(dict.fromkeys(known)))
    hint = f"Did you mean {', '.join(near)}?" if near else f"See its keys with: memplan models show {where}"
    return UserError(f"--set {dotted}: {where} has no config key {key!r}", hint)
