"""A tiny config of any family that transformers knows, made from the family's own defaults by the names of its fields.

Three sizes are offered, smallest first, because not every family can be cut everywhere:

* narrow: few layers, few experts, and small widths, vocabularies and images;
* shallow: few layers and experts, all else as the family's defaults have it;
* default: the family's defaults.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

SIZES = ("narrow", "shallow", "default")
_LAYERS = 2
_EXPERTS = 4
_WIDTH = 64
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 16
_FFN = 128
_VOCAB = 256
_IMAGE_PX = 64

_LAYER_COUNT = re.compile(r"(n_layers?|layers|depth|num_blocks|.*_num_layers|.*_depth|(?!max_window_|no_rope_).*_layers)")
# Counts of something else, or of layers that lists beside them describe one by one.
_NO_LAYER_COUNT = frozenset({
    "num_feat_extract_layers", "num_kv_shared_layers", "num_nextn_predict_layers", "num_adapter_layers", "iou_head_depth",
    "num_lstm_layers", "max_depth",
})  # fmt: skip
_STAGE_DEPTHS = re.compile(r"depths|stage_num_blocks|stage_numb_of_layers|blocks_per_stage|num_stage_blocks")
_LAYER_INDEX = re.compile(r".*(_index(es)?|_indices|_idx|_layers|_layer|_replace|layer_ids?)|indexes|indices")
_EXPERT_COUNT = re.compile(r"(moe_)?(num_|n_)(local_|routed_)?experts|moe_num_experts")
_WIDTH_KEY = re.compile(
    r"(.*_)?hidden_size|d_model|n_embd|dim|embed_dim|emb_dim|embedding_size|projection_dim|word_embed_proj_dim"
)
_WIDTHS = (
    (re.compile(r".*(intermediate_size|ffn_dim|ffn_hidden_size)|d_ff|mlp_dim|dim_feedforward|n_inner"), _FFN),
    (re.compile(r"(.*_)?num_key_value_heads|n_kv_heads?|num_kv_heads"), _KV_HEADS),
    (re.compile(r"(.*_)?(num_)?attention_heads|num_heads|n_heads?|.*_num_heads"), _HEADS),
    (re.compile(r"head_dim|d_kv|d_head|.*_head_dim"), _HEAD_DIM),
    (re.compile(r"rotary_dim"), _HEAD_DIM // 2),
    (re.compile(r".*_lora_rank"), 32),
    (_WIDTH_KEY, _WIDTH),
    (re.compile(r"(.*_)?vocab_size(_.*)?"), _VOCAB),
)  # fmt: skip
_MROPE = [4, 2, 2]  # sections of half a head's dimension
_DERIVED = ("out_features", "out_indices", "stage_names")  # a backbone's config makes them from the rest

_WINDOW = {"sliding_window": 32}
_STAGES = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_QWEN_VL = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}}}
_HEAD = {"head_dim": 16}
# What differs from the narrow config: where the family's defaults do not stand small sizes or are incomplete, and where they
# would hide what is special about the family (a sliding window longer than the sequence, for instance).
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "gemma2": _WINDOW,
    "gemma3_text": _WINDOW,
    "gpt_oss": _WINDOW,
    "cohere2": _WINDOW,
    "deepseek_v2": {"num_experts_per_tok": 2},
    "nemotron": {"num_key_value_heads": 2},
    "mamba2": {"num_heads": 8},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "zamba2": {"mamba_headdim": 16, "attention_hidden_size": 128, "attention_head_dim": 32},
    "funnel": {"block_sizes": [1, 1, 1]},
    "mobilebert": {"hidden_size": 128, "true_hidden_size": 64, "intra_bottleneck_size": 64},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "swin": _STAGES,
    "swinv2": _STAGES,
    "efficientnet": {"width_coefficient": 1.0, "depth_coefficient": 0.5, "hidden_dim": 1280},
    "wav2vec2-bert": {"vocab_size": 32, "max_source_positions": 100},
    "speech_to_text": {"max_source_positions": 400},
    "moonshine": {"pad_token_id": 0, "encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "siglip": {"text_config": {"projection_size": 64}},
    "vilt": {"max_position_embeddings": 128},
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "wav2vec2-conformer": {"vocab_size": 32},
    "ministral": _HEAD,
    "hunyuan_v1_dense": _HEAD,
    "hunyuan_v1_moe": _HEAD,
    "hunyuan_vl_text": _HEAD,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
}


def tiny_config(model_type: str, size: str = "narrow") -> dict[str, Any]:
    """The family's defaults at one of SIZES."""
    config = shrunk(default_config(model_type), size)
    return _merged(config, OVERRIDES.get(model_type, {})) if size == "narrow" else config


def default_config(model_type: str) -> dict[str, Any]:
    """The family's defaults as data.  Raises whatever transformers raises for a family that has none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config: dict[str, Any] = copy.deepcopy(CONFIG_MAPPING[model_type]().to_dict())
    config["model_type"] = model_type
    return config


def shrunk(config: Mapping[str, Any], size: str) -> dict[str, Any]:
    """`config` at one of SIZES; nothing grows, and nested configs shrink alike."""
    if size == "default":
        return copy.deepcopy(dict(config))
    ids: dict[int, int] = {}
    return _shrunk(config, narrow=size == "narrow", ids=ids)


def _merged(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(config.get(key), dict):
            _merged(config[key], value)
        else:
            config[key] = copy.deepcopy(value)
    return config


def _shrunk(config: Mapping[str, Any], *, narrow: bool, ids: dict[int, int]) -> dict[str, Any]:
    counts = {key: value for key, value in config.items() if _is_layer_count(key, value)}
    kept = _kept_layers(config, counts)
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in _DERIVED and "stage_names" in config:
            continue
        if isinstance(value, Mapping):
            found[key] = _shrunk(value, narrow=narrow, ids=ids)
        elif key in counts:
            found[key] = min(value, len(kept.get(value, range(_LAYERS))))
        elif isinstance(value, (list, tuple)):
            found[key] = _shrunk_list(key, list(value), kept, narrow=narrow, ids=ids)
        elif isinstance(value, int) and not isinstance(value, bool):
            found[key] = _shrunk_number(key, value, config, narrow=narrow, ids=ids)
        else:
            found[key] = value
    return found


def _is_layer_count(key: str, value: Any) -> bool:
    return type(value) is int and value > 0 and key not in _NO_LAYER_COUNT and _LAYER_COUNT.fullmatch(key) is not None


def _kept_layers(config: Mapping[str, Any], counts: Mapping[str, int]) -> dict[int, list[int]]:
    """Layer count -> the layers that stay: one of each kind where the config lists kinds, so that a hybrid stays one."""
    found = {}
    for count in set(counts.values()):
        kinds = config.get("layer_types") or config.get("layers_block_type") or config.get("block_types")
        firsts: dict[Any, int] = {}
        if isinstance(kinds, (list, tuple)) and len(kinds) == count:
            for index, kind in enumerate(kinds):
                firsts.setdefault(kind, index)
        layers = sorted(firsts.values())
        layers += [i for i in range(count) if i not in layers][: max(0, _LAYERS - len(layers))]
        found[count] = sorted(layers)
    return found


def _shrunk_list(key: str, values: list[Any], kept: Mapping[int, list[int]], *, narrow: bool, ids: dict[int, int]) -> list[Any]:
    if values and all(isinstance(v, Mapping) for v in values):
        return [_shrunk(v, narrow=narrow, ids=ids) for v in values]
    if _STAGE_DEPTHS.fullmatch(key) and all(type(v) is int for v in values):
        return [min(v, _LAYERS) for v in values]
    if len(values) in kept and len(values) > _LAYERS and ("layer" in key or "type" in key or "pattern" in key):
        return [values[i] for i in kept[len(values)]]
    if key == "mrope_section" and narrow:
        return _MROPE
    if key == "image_size" and narrow:
        return [min(v, _IMAGE_PX) for v in values]
    if key.endswith("_token_id") and narrow:
        return [_small_id(v, ids) for v in values]
    deepest = max((len(k) for k in kept.values()), default=None)
    if deepest is not None and _LAYER_INDEX.fullmatch(key) and all(type(v) is int for v in values):
        return sorted({min(v, deepest - 1) for v in values})
    return values


def _shrunk_number(key: str, value: int, config: Mapping[str, Any], *, narrow: bool, ids: dict[int, int]) -> int:
    if _EXPERT_COUNT.fullmatch(key):
        return min(value, _EXPERTS)
    if key in ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "n_group", "num_experts_per_token"):
        return min(value, 2)
    if key in ("topk_group", "first_k_dense_replace"):
        return min(value, 1)
    if not narrow:
        return value
    if key.endswith(("_token_id", "_token_index")):
        return _small_id(value, ids)
    if key == "image_size":
        patch = config.get("patch_size")
        patch = patch if isinstance(patch, int) and patch > 0 else 16
        return min(value, max(_IMAGE_PX // patch, 4) * patch)
    if key == "num_key_value_heads" and config.get("kv_lora_rank"):
        return min(value, _HEADS)  # latent attention: one key head for each head
    if _WIDTH_KEY.fullmatch(key) and isinstance(config.get("depths"), list):
        return value  # stages: lists describe their widths and heads, which this one must suit
    return next((min(value, small) for pattern, small in _WIDTHS if pattern.fullmatch(key)), value)


def _small_id(value: int, ids: dict[int, int]) -> int:
    """A special token's id inside the small vocabulary; different tokens stay different."""
    if value < _VOCAB - 64:
        return value
    return ids.setdefault(value, _VOCAB - 1 - len(ids) % 64)
