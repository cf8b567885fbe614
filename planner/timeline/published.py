"""Published training speeds (rows of `throughput.jsonl`) as questions to the planner; CannotTell says why one cannot be asked.

A row's fields: `source` (repo, path, table), `gpu` (catalogue key), `n_gpus`, `gpus_per_node`, `model` (name, family, n_params,
config), `task`, `precision`, `seq_len`, `micro_batch`, `grad_accum`, `global_batch`, `parallel` (data, dp, tp, pp, cp, ep),
`act_ckpt`, `offload`, `compile`, `framework`, and one or more measured figures: `tokens_per_s_per_gpu`, `tokens_per_s_total`,
`samples_per_s_total`, `step_time_s`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CannotTell, UserError

if TYPE_CHECKING:
    from ...models import ModelSpec
    from ..request import Request

_STRATEGY = {
    "none": "single", "ddp": "ddp", "fsdp-full": "fsdp2", "fsdp-grad-op": "fsdp2", "zero1": "zero1", "zero2": "zero2",
    "zero3": "zero3",
}  # fmt: skip
_PRECISION = {"bf16": "bf16", "bf16-pure": "bf16", "bf16-amp": "bf16", "fp16-amp": "fp16", "fp32": "fp32", "tf32": "fp32"}
_OFFLOAD: dict[str, tuple[str, ...]] = {
    "none": (), "optimizer-cpu": ("optimizer",), "params+optimizer-cpu": ("optimizer", "param"),
}  # fmt: skip
_OWN_KERNELS = ("llm.c",)  # which fuse attention and do not say so
_RECOMPUTE = {"none": "none", "full": "full", "selective-op": "selective-op"}
_CATALOGUE = {
    "bert-base-uncased": "bert-base-uncased", "bert-large-uncased": "bert-large-uncased", "resnet50": "microsoft/resnet-50",
    "llama3.1-8b": "llama-3.1-8b", "llama3-8b": "meta-llama/Meta-Llama-3-8B", "llama3.2-3b": "llama-3.2-3b",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "gpt2-124m": "gpt2", "gpt2-350m": "gpt2-medium",
    "llama3.1-70b": "llama-3.1-70b",
}  # fmt: skip
_FIELDS = {
    "id", "source", "scope", "gpu", "n_gpus", "model", "task", "precision", "parallel", "act_ckpt", "offload", "framework",
}  # fmt: skip
_TASKS = {"squad": "question-answering"}
_SHORTEST_TABLE = 2048  # positions of a described decoder: one model for all shorter lengths
# What the tables of bigscience name by size alone: GPT-3 XL, and 64 x 12 x 8192^2 = 51.5e9 weights in the blocks
_GPT_SHAPES = {"gpt-1.3b": (24, 2048, 16), "gpt-52b": (64, 8192, 64)}


@dataclass(frozen=True)
class Published:
    """A row as a question.  `rate` counts tokens (sequences or images where `counts_samples`) per second and GPU."""

    id: str
    group: tuple[str, str]  # source and GPU
    request: Request
    tf32: bool
    rate: float
    counts_samples: bool


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file.  Raises UserError for a line that is no JSON object."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {str(file)!r}: {error}", "Give a file of one JSON object a line") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{file}, line {number}: {error}", "Give one JSON object a line") from error
        if not isinstance(row, dict) or not row.keys() >= _FIELDS:
            missing = ", ".join(sorted(_FIELDS - set(row if isinstance(row, dict) else ())))
            raise UserError(f"{file}, line {number}: expected an object with {missing}", "Add the fields")
        rows.append(row)
    return rows


def in_scope(row: Mapping[str, Any]) -> bool:
    """Data parallel only, in 16 bits or more: what the timeline models."""
    parallel = row["parallel"]
    return parallel.get("tp", 1) == 1 and parallel.get("pp", 1) == 1 and "fp8" not in row["precision"]


def group_of(row: Mapping[str, Any]) -> tuple[str, str]:
    source = row["source"]
    return str(source.get("repo") or source.get("url")), str(row["gpu"])


def question_of(row: Mapping[str, Any], others: Mapping[tuple[str, str], int] | None = None) -> Published:
    """The row as a question.  `others` maps (model, GPU) to the batch of another row of the source, for rows that state none.

    Raises CannotTell with the reason where the row cannot be expressed.
    """
    from ...hardware.catalogue import resolve
    from ..loop import LoopFacts
    from ..request import Request
    from ..strategies.fsdp_settings import FsdpSettings

    _refuse(row)
    keeps = row["parallel"].get("data") == "fsdp-grad-op"  # parameters stay gathered from forward to backward
    gpus = int(row["n_gpus"])
    nodes = max(1, gpus // int(row.get("gpus_per_node") or min(gpus, 8)))
    spec = spec_of(row)
    seq = int(row.get("seq_len") or 1)
    batch, accum = _batch(row, gpus, others or {})
    request = Request(
        model=spec,
        device=resolve(row["gpu"])[0],
        micro_batch_size=batch,
        seq_len=seq,
        precision=_PRECISION[row["precision"]],
        strategy=_STRATEGY[row["parallel"]["data"]] if gpus > 1 else "single",
        recompute=_RECOMPUTE[row["act_ckpt"]],
        attention="eager" if _is_unfused(row) else "sdpa",
        gpus=gpus,
        fsdp=FsdpSettings(reshard_after_forward=False) if keeps else None,
        offload=_OFFLOAD[row["offload"]],
        nodes=nodes,
        optimizer_impl="fused",
        loop=LoopFacts(grad_accum_steps=accum),
        compiled=bool(row.get("compile")),
    )
    samples = "samples_per_s_total" in row
    return Published(row["id"], group_of(row), request, row["precision"] == "tf32", _rate(row, batch * accum, seq), samples)


def _refuse(row: Mapping[str, Any]) -> None:
    if row["scope"] != "step":
        raise CannotTell(f"the figure is of one {row['scope']}, not of a step")
    if row["precision"] not in _PRECISION:
        raise CannotTell(f"precision {row['precision']} is not modelled")
    if row["task"] in ("lora", "qlora"):
        raise CannotTell(f"method {row['task']}")
    if row["offload"] not in _OFFLOAD or (row["offload"] != "none" and not row["parallel"]["data"].startswith("zero")):
        raise CannotTell(f"offload {row['offload']}")
    if row["act_ckpt"] not in _RECOMPUTE:
        raise CannotTell("the source does not say what was recomputed")
    if row["n_gpus"] > 1 and row["parallel"].get("data") not in _STRATEGY:
        raise CannotTell(f"data parallelism {row['parallel'].get('data')!r} is not modelled")
    if "not packed" in str(row.get("note")):
        raise CannotTell("the sequences were not packed, so that their length is not known")


def _is_unfused(row: Mapping[str, Any]) -> bool:
    """Attention as products and a softmax: transformers, Megatron and NVIDIA's BERT until 2023, which say nothing about it."""
    return row.get("attention") is None and row["model"]["family"] != "resnet" and row["framework"] not in _OWN_KERNELS


def spec_of(row: Mapping[str, Any]) -> ModelSpec:
    from ...models import ModelSpec, load

    model = row["model"]
    name, config = model["name"], model.get("config") or {}
    if name in _CATALOGUE:
        return load(_CATALOGUE[name], task=_TASKS.get(row["task"]))
    if name in _GPT_SHAPES:
        layers, width, heads = _GPT_SHAPES[name]
        config = {"n_layers": layers, "d_model": width, "n_heads": heads, "vocab_size": 50304}
    if not {"n_layers", "d_model", "n_heads", "vocab_size"} <= config.keys():
        raise CannotTell(f"the shape of {name} is not known")
    positions = max(_SHORTEST_TABLE, int(row["seq_len"]))
    # a decoder with learned positions, tied embeddings and GELU: GPT-2's, which is also MPT's but for the biases
    gpt2 = {
        "model_type": "gpt2", "n_embd": config["d_model"], "n_layer": config["n_layers"], "n_head": config["n_heads"],
        "vocab_size": config["vocab_size"], "n_positions": positions,
    }  # fmt: skip
    if not str(row["framework"]).startswith("transformers"):  # there with dropout, and GELU by its parts
        gpt2 |= {"activation_function": "gelu", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return ModelSpec(
        name=name, source="catalogue", task="causal-lm", config=gpt2, max_seq_len=positions, stored_dtype="bfloat16"
    )


def _batch(row: Mapping[str, Any], gpus: int, others: Mapping[tuple[str, str], int]) -> tuple[int, int]:
    """(micro batch of one GPU, micro steps)."""
    batch, total = row.get("micro_batch"), row.get("global_batch")
    if "samples_per_s_total" in row:  # this source states the batch of all GPUs together
        if batch is None:  # fp32 rows: half of what fits in 16 bits
            stated = others.get((row["model"]["name"], row["gpu"]))
            if stated is None:
                raise CannotTell("the batch size is not stated")
            return max(1, stated // 2), 1
        return int(batch) // gpus, 1
    if batch is None:
        raise CannotTell("the batch size is not stated")
    accum = row.get("grad_accum") or (total // (batch * gpus) if total else 1)
    return int(batch), max(1, int(accum))


def stated_batches(rows: list[dict[str, Any]]) -> dict[tuple[str, str], int]:
    """(model, GPU) -> the batch of one GPU, of the rows of samples per second that state it."""
    found = {}
    for row in rows:
        if "samples_per_s_total" in row and row.get("micro_batch"):
            found[row["model"]["name"], row["gpu"]] = row["micro_batch"] // row["n_gpus"]
    return found


def _rate(row: Mapping[str, Any], samples: int, seq: int) -> float:
    if "samples_per_s_total" in row:
        return float(row["samples_per_s_total"]) / int(row["n_gpus"])
    for key, divisor in (("tokens_per_s_per_gpu", 1), ("tokens_per_s_total", int(row["n_gpus"]))):
        if row.get(key):
            return float(row[key]) / divisor
    if row.get("step_time_s"):
        return samples * seq / float(row["step_time_s"])
    raise CannotTell("no speed is stated, only a share of the peak")
