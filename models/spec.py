"""`ModelSpec`: everything that memplan knows about a model before torch is imported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import UserError

Source = Literal["catalogue", "hub", "folder", "factory"]

#: Config keys that hold a position limit, in the order in which they are believed.
_POSITION_KEYS = (
    "max_position_embeddings",
    "n_positions",  # GPT-2, GPT-J, CTRL
    "max_sequence_length",
    "max_seq_len",  # MPT
    "max_target_positions",  # Whisper, Speech2Text: the decoder's limit, which is what `seq_len` counts there
    "n_ctx",
)
#: Families whose config names a length that is no limit: relative buckets, ALiBi or a recurrence.
_NO_LIMIT = frozenset({"t5", "mt5", "umt5", "longt5", "switch_transformers", "bloom", "xlnet", "mamba", "mamba2", "rwkv"})
#: RoBERTa counts positions from padding_idx + 1, so two of its 514 rows can never be used (modeling_roberta.py).
_OFFSET_POSITIONS = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "data2vec-text", "xmod", "longformer",
     "mpnet", "esm", "ibert", "luke", "layoutlmv3", "lilt", "markuplm"}
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FactoryRef:
    """User code that makes the model: `train.py:build` or `package.module:build`."""

    path: Path  # the source file, absolute
    function: str
    module: str | None = None  # dotted name when the reference was `package.module:function`
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.module or self.path}:{self.function}"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model that can be built.

    `config` is the content of a config.json, model_type included and overrides applied; None for a factory.
    `num_params` is the published count, or what the safetensors files state; None where nobody said, and after an override.
    `max_seq_len` is the longest sequence, in tokens, that the position table (or RoPE's stated range) allows; None = no limit.
    """

    name: str
    source: Source
    task: str
    config: dict[str, Any] | None = field(default=None, hash=False)
    factory: FactoryRef | None = None
    num_params: int | None = None
    max_seq_len: int | None = None
    stored_dtype: str = "float32"  # how the published weights are stored, which is how `from_pretrained` loads them
    trust_remote_code: bool = False
    folder: Path | None = None  # where config.json lay; code named by `auto_map` is taken from there
    notes: tuple[str, ...] = ()
    reference: str = field(default="", compare=False)  # what `load` was given, paths made absolute
    overrides: Mapping[str, str] = field(default_factory=dict, compare=False)  # `--set`, as text

    @property
    def model_type(self) -> str | None:
        """transformers' name of the family, None for a factory."""
        return None if self.config is None else self.config.get("model_type")

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides what `build` makes: equal fingerprints, equal models.

        A config: its content and the task; with remote code also the folder's Python files.
        A factory: its file, the local files that it imports (transitively) and its keyword arguments.
        """
        digest = hashlib.sha256()
        if self.factory is not None:
            from .sources import local_sources

            head = {"function": self.factory.function, "kwargs": self.factory.kwargs}
            digest.update(json.dumps(head, sort_keys=True, default=repr).encode())
            files = local_sources(self.factory.path, self.factory.module)
        else:
            digest.update(json.dumps({"config": self.config, "task": self.task}, sort_keys=True).encode())
            files = sorted(self.folder.glob("*.py")) if self.trust_remote_code and self.folder is not None else []
        for file in files:
            digest.update(f"\0{file.name}\0".encode())
            digest.update(file.read_bytes())
        return digest.hexdigest()


def max_seq_len(config: Mapping[str, Any]) -> int | None:
    """The longest sequence in tokens that `config` allows; None when it names no limit (relative positions, ALiBi, images)."""
    model_type = config.get("model_type")
    if model_type in _NO_LIMIT or config.get("alibi") is True:
        return None
    attention = config.get("attn_config")
    if isinstance(attention, Mapping) and attention.get("alibi", model_type == "mpt"):
        return None
    for key in _POSITION_KEYS:
        limit = config.get(key)
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
            if model_type in _OFFSET_POSITIONS:
                pad = config.get("pad_token_id")
                limit -= (1 if pad is None else int(pad)) + 1
            return limit
    for part in ("text_config", "llm_config", "thinker_config", "decoder"):
        nested = config.get(part)
        if isinstance(nested, Mapping):
            return max_seq_len(nested)
    return None


def position_key(config: Mapping[str, Any]) -> str:
    """The key that a user must `--set` for a longer limit, dotted when nested."""
    for key in _POSITION_KEYS:
        if config.get(key) is not None:
            return key
    for part in ("text_config", "llm_config", "thinker_config", "decoder"):
        nested = config.get(part)
        if isinstance(nested, Mapping):
            return f"{part}.{position_key(nested)}"
    return _POSITION_KEYS[0]


def check_sizes(spec: ModelSpec, batch_size: int, seq_len: int) -> None:
    """Raises UserError unless `batch_size` (samples) and `seq_len` (tokens) are positive and within the model's limit."""
    for what, size, example in (("batch size", batch_size, "1"), ("sequence length", seq_len, "512")):
        if size <= 0:
            raise UserError(f"{what}: expected 1 or more, got {size}", f"Give for example {example}")
    if spec.max_seq_len is not None and seq_len > spec.max_seq_len:
        key, rows = position_key(spec.config or {}), seq_len
        if spec.model_type in _OFFSET_POSITIONS and spec.config is not None:
            rows += int(spec.config.get(key, 0)) - spec.max_seq_len
        raise UserError(
            f"sequence length: {spec.name} has positions for {spec.max_seq_len} tokens, got {seq_len}",
            f"Use {spec.max_seq_len} or fewer, or lengthen the model with --set {key}={rows}",
        )
