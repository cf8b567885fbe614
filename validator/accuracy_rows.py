"""Published measurements as typed rows: one JSON object a line, unknown fields forbidden, every size in bytes.

A row says what ran, on what, and what was measured; nothing in it has to be parsed from free text (`location`, `software`,
`assumed` and `notes` are for people).  A field that is left out or null is not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..errors import UserError, did_you_mean

Dtype = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4"]
Metric = Literal[
    "allocated_peak", "active_peak", "reserved_peak", "nvml_peak", "reserved_minus_init", "allocated_after", "fits", "oom",
    "unspecified",
]  # fmt: skip
ADAPTER_METHODS = ("lora", "qlora", "dora", "peft-other", "qpeft-other")

#: What `model.config` may name: arguments of transformers' configs, and of the classes in `published`.
ARCHITECTURE_KEYS = frozenset(
    {"custom_class", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "num_key_value_heads", "head_dim", "tie_word_embeddings", "max_position_embeddings", "num_experts", "num_local_experts",
     "num_experts_per_tok", "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "ffn_dim", "word_embed_proj_dim",
     "multi_query", "new_decoder_architecture", "num_kv_heads", "parallel_attn", "bias", "alibi", "use_qkv_bias",
     "use_parallel_residual", "d_model", "d_kv", "d_ff", "num_layers", "num_heads", "feed_forward_proj", "encoder_layers",
     "decoder_layers", "encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim",
     "type_vocab_size", "relative_attention", "position_biased_input", "pos_att_type", "share_att_key", "conv_kernel_size",
     "position_buckets", "max_relative_positions", "norm_rel_ebd", "attention_head_size", "pooler_hidden_size", "image_size",
     "patch_size", "mlp_ratio", "use_swiglu_ffn", "num_labels", "dim", "hidden_dim", "n_layers", "n_heads"}
)  # fmt: skip


class Part(BaseModel):
    """Base of every part of a row: a misspelt field and a value of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Source(Part):
    """Where the figure was published."""

    name: str = Field(min_length=1)
    ref: str
    location: str = ""


class Hardware(Part):
    gpu: str = Field(min_length=1)  # a name of the catalogue, "generic-24gb" or "unspecified"
    gpu_memory_gib: float | None = Field(default=None, gt=0)  # nominal, or usable where the source says so
    num_gpus: int = Field(ge=1)


class Model(Part):
    ref: str
    family: str  # transformers' model_type, "custom", "timm" or "torchvision"
    config: dict[str, bool | int | float | str | list[str] | None]
    n_params: int | None = Field(default=None, ge=0)  # of the model as it ran, adapters excluded
    n_params_check: str = ""
    truncated_layers: int | None = None

    @field_validator("config")
    @classmethod
    def _known_keys(cls, config: dict[str, Any]) -> dict[str, Any]:
        for key in config:
            if key not in ARCHITECTURE_KEYS:
                raise ValueError(f"unknown key {key!r}. {did_you_mean(key, ARCHITECTURE_KEYS)}".strip())
        return {k: v for k, v in config.items() if v is not None}


class Workload(Part):
    task: Literal[
        "causal-lm", "seq2seq-lm", "seq-classification", "masked-lm", "question-answering", "image-classification",
        "loss-head-only", "preference",
    ]  # fmt: skip
    preference_loss: str | None = None
    loss_fn: Literal["cross-entropy", "mean-of-logits", "cross-entropy-last-token", "task"] = "cross-entropy"
    phase: Literal["train", "forward", "forward-backward", "inference"]
    micro_batch: int = Field(ge=1)
    seq_len: int = Field(ge=0)  # 0: images without tokens
    target_len: int | None = None
    image_size: int | None = None
    grad_accum: int = Field(ge=1)
    padded_or_packed: Literal["packed", "padded-full", "longest-sample", "assumed-full", "random-full"]


class Adapter(Part):
    kind: str
    rank: int | None = None
    alpha: float | None = None
    dropout: float | None = None
    targets: list[str] = Field(default_factory=list)
    target_roles: list[str] = Field(default_factory=list)
    modules_to_save: list[str] = Field(default_factory=list)
    num_virtual_tokens: int | None = None
    num_trainable_params: int | None = None
    base_quant: str = "none"
    adapter_dtype: Dtype | None = None


class Precision(Part):
    param_dtype: Dtype | None = None
    autocast: Literal["none", "bf16", "fp16"]
    master_weights: Literal["none", "fp32", "bf16"] | None = None
    grad_dtype: Dtype | None = None
    low_precision_linears: Literal["none", "fp8", "mxfp8", "nvfp4"] = "none"
    nonquantised_upcast_fp32: bool | None = None


class Optimizer(Part):
    name: str
    impl: str
    state_dtype: Dtype | None = None
    in_backward: bool = False
    rank: int | None = None
    momentum: bool | None = None


class Parallel(Part):
    kind: Literal["single", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "fsdp-own", "hsdp", "tp", "naive-pp"]
    dp: int = Field(ge=1)
    tp: int = Field(ge=1)
    pp: int = Field(ge=1)
    cp: int = Field(ge=1)
    ep: int = Field(default=1, ge=1)
    reshard_after_forward: bool | None = None
    mixed_precision_param_dtype: Dtype | None = None


class Offload(Part):
    optimizer: Literal["none", "cpu", "nvme"] | None = None
    param: Literal["none", "cpu", "nvme"] | None = None
    activation: Literal["none", "cpu"] | None = None
    grad: Literal["none", "cpu"] | None = "none"

    @property
    def any(self) -> bool:
        return any(v not in (None, "none") for v in (self.optimizer, self.param, self.activation, self.grad))


class Strategy(Part):
    method: str
    trainable_layers: int | None = None
    adapter: Adapter | None = None
    precision: Precision
    optimizer: Optimizer
    parallel: Parallel
    offload: Offload
    recompute: str | None = Field(default=None, pattern=r"^(none|full|selective|selective-op|selective-layer:\d+|every-k:\d+)$")
    recompute_reentrant: bool | None = None
    attention: Literal["eager", "sdpa", "flash2", "flash3", "xformers", "unknown", "n/a"]
    loss: Literal["standard", "chunked", "liger-fused", "other-fused", "fused-ce-materialized", "unknown", "n/a"]
    compile: bool = False
    compiler: Literal["none", "inductor", "thunder", "thunderfx"] = "none"


class Measured(Part):
    metric: Metric
    bytes: int | None = Field(default=None, gt=0)
    scope: Literal["per-gpu", "mean-over-gpus", "total"] = "per-gpu"
    phases: dict[str, int] = Field(default_factory=dict)
    next_failed_micro_batch: int | None = None

    @model_validator(mode="after")
    def _bytes_where_there_are_any(self) -> Measured:
        if (self.metric in ("fits", "oom")) != (self.bytes is None):
            raise ValueError("fits and oom carry no bytes" if self.bytes is not None else f"{self.metric} needs bytes")
        return self


class Row(Part):
    """One measurement."""

    id: str = Field(min_length=1)
    source: Source
    hardware: Hardware
    model: Model
    workload: Workload
    strategy: Strategy
    measured: Measured
    completeness: Literal["A", "B"]  # A: all that a prediction needs is stated; B: `assumed` was filled in
    assumed: list[str] = Field(default_factory=list)
    group: str = ""
    software: str = ""
    notes: str = ""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Row:
        p, method = self.strategy.parallel, self.strategy.method
        if p.dp * p.tp * p.pp * p.cp != self.hardware.num_gpus:
            raise ValueError(f"dp x tp x pp x cp is {p.dp * p.tp * p.pp * p.cp}, but num_gpus is {self.hardware.num_gpus}")
        if p.kind == "single" and self.hardware.num_gpus != 1:
            raise ValueError("parallel.kind is single, but num_gpus is not 1")
        if self.measured.metric in ("fits", "oom") and self.hardware.gpu_memory_gib is None:
            raise ValueError("fits and oom need hardware.gpu_memory_gib")
        if method in ADAPTER_METHODS and self.strategy.adapter is None:
            raise ValueError(f"method {method} needs strategy.adapter")
        return self


@dataclass(frozen=True)
class Problem:
    """A line that is no row."""

    line: int
    field: str
    what: str

    def __str__(self) -> str:
        where = f"line {self.line}" + (f", {self.field}" if self.field else "")
        return f"{where}: {self.what}"


def read_rows(path: str | Path) -> tuple[list[Row], list[Problem]]:
    """The rows of a file, and what is wrong with the other lines.  Raises UserError for a file that cannot be read."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{file}: not a text file", "Give a file with one JSON object a line") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})", "Check the path and its permissions") from None
    rows: list[Row] = []
    problems: list[Problem] = []
    line_of: dict[str, int] = {}
    for number, row in _parsed(text):
        if isinstance(row, Problem):
            problems.append(row)
        elif row.id in line_of:
            problems.append(Problem(number, "id", f"{row.id!r} is the id of line {line_of[row.id]} too"))
        else:
            line_of[row.id] = number
            rows.append(row)
    return rows, problems


def _parsed(text: str) -> Iterator[tuple[int, Row | Problem]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, Row.model_validate(json.loads(line))
        except json.JSONDecodeError as error:
            yield number, Problem(number, "", f"not valid JSON at column {error.colno}: {error.msg}")
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            yield number, Problem(number, field, _in_words(first, error.error_count()))


def _in_words(error: Any, count: int) -> str:
    given = error.get("input")
    if error["type"] == "missing":
        said = "is missing"
    elif error["type"] == "extra_forbidden":
        said = "is no field of a row"
    elif error["type"] == "value_error":
        said = str(error["ctx"]["error"])
    else:
        wanted = error["msg"].removeprefix("Input should be ")
        said = f"expected {wanted}, got {json.dumps(given, default=str)[:60]}"
    return said + (f" (and {count - 1} more)" if count > 1 else "")
