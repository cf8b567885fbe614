"""The few numbers by which people know a model, read from its config without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .overrides import standard

_NESTED = ("text_config", "vision_config", "decoder", "encoder")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """`None` where the architecture has no such number (a ConvNet has no heads).  An encoder-decoder's layers are "12+12"."""

    layers: str | None
    hidden_size: int | None
    num_heads: int | None
    num_kv_heads: int | None
    vocab_size: int | None


def summarize(config: Mapping[str, Any]) -> Summary:
    """The numbers of `config`; those of the language model where several are nested."""
    main = config
    for part in _NESTED:
        if standard(main, "num_hidden_layers") is None and isinstance(config.get(part), Mapping):
            main = config[part]
            break
    widths = (standard(main, "hidden_size"), main.get("d_model"), main.get("embed_dim"), _last(main, "hidden_sizes"))
    return Summary(
        layers=_layers(main),
        hidden_size=_number(*widths),
        num_heads=_number(standard(main, "num_attention_heads"), main.get("num_heads"), main.get("encoder_attention_heads")),
        num_kv_heads=_number(main.get("num_key_value_heads"), main.get("num_kv_heads")),
        vocab_size=_number(main.get("vocab_size")),
    )


def _layers(config: Mapping[str, Any]) -> str | None:
    if config.get("encoder_layers") and config.get("decoder_layers"):
        return f"{config['encoder_layers']}+{config['decoder_layers']}"
    count = standard(config, "num_hidden_layers") or config.get("num_layers")
    if config.get("is_encoder_decoder") and count:
        return f"{count}+{config.get('num_decoder_layers') or count}"
    if count is None and isinstance(config.get("depths"), list):
        return str(sum(config["depths"]))
    return None if count is None else str(count)


def _last(config: Mapping[str, Any], key: str) -> Any:
    values = config.get(key)
    return values[-1] if isinstance(values, list) and values else None


def _number(*candidates: Any) -> int | None:
    return next((value for value in candidates if isinstance(value, int) and not isinstance(value, bool)), None)


def human_params(count: int | None) -> str:
    """8030261248 -> "8.03B", 37760640 -> "37.8M"; "?" for None.  Decimal, as parameters are counted."""
    if count is None:
        return "?"
    for unit, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= factor:
            size = count / factor
            return f"{size:.2f}{unit}" if size < 10 else f"{size:.1f}{unit}" if size < 100 else f"{size:.0f}{unit}"
    return str(count)
