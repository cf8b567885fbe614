"""Which model a published row trained, as a `ModelSpec`; CannotTell where the project has no such class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CannotTell
from ..models import FactoryRef, ModelSpec
from ..models.spec import max_seq_len
from .accuracy_rows import Row
from .published.profiles import PROFILES, Profile

_PUBLISHED = Path(__file__).with_name("published")
_NO_PROFILE = Profile(stated="")
# Families that took the cross entropy of 16-bit logits as they were until they shared a loss in 4.50 (their modeling files at
# 4.48: `shift_logits = lm_logits[..., :-1, :].contiguous()` without `.float()`).
_NARROW_LOSS = frozenset({"gpt_bigcode", "gpt2", "opt", "bloom", "gpt_neox", "gptj", "codegen", "xglm"})
# Families whose blocks returned a key-value cache while they were checkpointed, where most switch it off (4.48,
# modeling_gpt_bigcode.py: no such guard): the module whose output the cache views.
_CACHE_DESPITE_CHECKPOINTS = {"gpt_bigcode": "c_attn"}
_SOFTMAX_KEEPS_OUTPUT_ONLY = (1, 11)  # before, softmax kept its input too (pytorch/pytorch pull request 65242)
_NO_SLICE_OF_A_COLON = (2, 9)  # before, `w[ids, :]` was a slice too (see `published.cs336.Embedding`)
_SHARED_LOSS = (4, 46)  # ForCausalLMLoss appears in transformers/loss/loss_utils.py
_UNSHIFTED_LOGITS = (4, 50)  # from here on the labels are shifted, not the logits


def profile_of(row: Row) -> Profile:
    """How the row's source ran its loop."""
    return PROFILES.get(row.group) or PROFILES.get(row.source.name, _NO_PROFILE)


def measured_bytes(row: Row) -> int | None:
    """The figure of a row, with its source's GB where that is none of 10^9 bytes."""
    figure = row.measured.bytes
    return None if figure is None else round(figure / 1e9 * profile_of(row).gb_bytes)


def version_of(row: Row, library: str) -> tuple[int, int] | None:
    """(major, minor) of `library` in the run; None where nobody says.  A nightly build counts as the version before its own."""
    found = re.search(rf"\b{library}\s+(\d+)\.(\d+)(\.\d+\.?dev)?", row.software)
    if found:
        return int(found[1]), int(found[2]) - bool(found[3])
    profile = profile_of(row)
    return profile.transformers if library == "transformers" else profile.torch


def spec_of(row: Row) -> ModelSpec:
    """The model, built as the run built it: its config, and the loss and the recompute that belong to its class."""
    if row.model.truncated_layers is not None and "num_hidden_layers" not in row.model.config:
        raise CannotTell("the source cut the model to fewer layers, in a family whose config counts them otherwise")
    if profile_of(row).variant == "torchtitan_llama":
        return _torchtitan(row)
    if profile_of(row).variant == "litgpt":
        return _litgpt(row)
    if row.workload.task == "loss-head-only":
        return _loss_head(row)
    if row.model.family == "custom":
        return _custom(row)
    if row.model.ref.startswith("torchvision/vit_"):
        return _factory(row, "torchvision_vit", _without(row.model.config, "num_labels", "custom_class"))
    if row.model.family in ("timm", "torchvision"):
        raise CannotTell(f"{row.model.family} models are not built from a config; give memplan a factory")
    return _transformers(row)


def _factory(row: Row, module: str, kwargs: Mapping[str, Any], longest: int | None = None) -> ModelSpec:
    ref = FactoryRef(path=_PUBLISHED / f"{module}.py", function="build", kwargs=dict(kwargs))
    return ModelSpec(name=row.model.ref, source="factory", task="custom", factory=ref, max_seq_len=longest)


def _without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in keys}


def _loss_head(row: Row) -> ModelSpec:
    loss = row.strategy.loss
    if loss not in ("standard", "liger-fused", "fused-ce-materialized"):
        raise CannotTell(f"a bare loss head with loss {loss!r} is not modelled")
    kwargs = {
        "rows": row.workload.micro_batch * row.workload.seq_len,
        "vocab_size": row.model.config.get("vocab_size"),
        "hidden_size": row.model.config.get("hidden_size"),
        "fused": loss != "standard",
    }
    return _factory(row, "loss_heads", kwargs)


def _custom(row: Row) -> ModelSpec:
    kind = row.model.config.get("custom_class")
    if kind != "cs336":
        raise CannotTell(f"the project has no class {kind!r}")
    config = _without(row.model.config, "custom_class", "tie_word_embeddings", "num_key_value_heads", "head_dim")
    profile = profile_of(row)
    module = profile.variant or "cs336"
    if module == "cs336":
        if row.workload.loss_fn == "cross-entropy-last-token":
            raise CannotTell("loss on the last token only is not part of this class")
        config["loss"] = "cross-entropy"
        config["blocks_per_checkpoint"] = _blocks_per_checkpoint(row)
        config.setdefault("max_position_embeddings", row.workload.seq_len)
        torch = version_of(row, "torch")
        config["full_slices"] = torch is not None and torch < _NO_SLICE_OF_A_COLON
    else:
        config.pop("max_position_embeddings", None)
    config |= profile.build
    if row.workload.phase in ("forward", "inference"):
        config |= profile.forward_only
    if row.workload.loss_fn == "mean-of-logits":
        config["loss"] = "mean"
    return _factory(row, module, config)


def _torchtitan(row: Row) -> ModelSpec:
    recompute = row.strategy.recompute or "none"
    if row.model.family != "llama" or recompute not in ("none", "full", "selective-op"):
        raise CannotTell(f"torchtitan's {row.model.family} with recompute {recompute} is not modelled")
    config = _without(row.model.config, "tie_word_embeddings", "max_position_embeddings")
    return _factory(row, "torchtitan_llama", {**config, "seq_len": row.workload.seq_len, "recompute": recompute})


def _litgpt(row: Row) -> ModelSpec:
    """Its own class with LoRA on query and value, as its resource tables have it."""
    adapter = row.strategy.adapter
    if row.model.family not in ("llama", "gpt_neox", "phi") or not row.id.startswith(("litgpt-rt-", "litgpt-lora-")):
        raise CannotTell(f"litgpt's {row.model.family} of this edition is not modelled")
    if adapter is None or adapter.kind != "lora" or adapter.base_quant not in ("none", "nf4", "nf4-dq"):
        raise CannotTell("litgpt without LoRA is not modelled")
    kwargs = {
        "family": row.model.family,
        "config": _without(row.model.config, "tie_word_embeddings", "max_position_embeddings"),
        "rank": adapter.rank,
        "dropout": adapter.dropout or 0.0,
        "seq_len": row.workload.seq_len,
        "quant": adapter.base_quant,
        "sharded": row.strategy.parallel.kind != "single",
    }
    return _factory(row, "litgpt", kwargs)


def _blocks_per_checkpoint(row: Row) -> int:
    recompute = row.strategy.recompute
    if recompute in (None, "none"):
        return 0
    if recompute == "full":
        return 1
    if recompute.startswith("every-k:"):
        return int(recompute.removeprefix("every-k:"))
    raise CannotTell(f"recompute {recompute} is not modelled")


def _transformers(row: Row) -> ModelSpec:
    said = _without(row.model.config, "custom_class")
    config: dict[str, Any] = {"model_type": row.model.family, **profile_of(row).config, **said}
    if row.model.truncated_layers is not None:
        config["num_hidden_layers"] = row.model.truncated_layers
    if row.workload.task == "preference":
        raise CannotTell("preference losses run two models or two halves of a batch, which is not modelled")
    longest = max_seq_len(config)
    if longest is not None and row.workload.seq_len > longest:
        longest = None  # it ran, so the figure was no limit; a table that is too short says so when it is read
    variant = _loss_variant(row)
    if variant:
        return _factory(row, "language_models", {"config": config, "attention": attention_of(row), **variant}, longest)
    torch = version_of(row, "torch")
    if torch is not None and torch < _SOFTMAX_KEEPS_OUTPUT_ONLY and attention_of(row) == "eager":
        return _factory(row, "older_torch", {"config": config, "task": row.workload.task}, longest)
    return ModelSpec(name=row.model.ref, source="folder", task=row.workload.task, config=config, max_seq_len=longest)


def attention_of(row: Row) -> str:
    """sdpa, eager or flash_attention_2, as a Request names it."""
    unknown = profile_of(row).attention or "sdpa"
    chosen = {"eager": "eager", "sdpa": "sdpa", "flash2": "flash_attention_2", "n/a": "sdpa", "unknown": unknown}
    if row.strategy.attention not in chosen:
        raise CannotTell(f"attention {row.strategy.attention} is not modelled")
    return chosen[row.strategy.attention]


def _loss_variant(row: Row) -> dict[str, Any]:
    """How `published.language_models` makes the run's loss; empty: as the installed transformers does."""
    loss, task = row.strategy.loss, row.workload.task
    stated = profile_of(row).logits
    if stated is not None and loss == "standard" and task == "causal-lm":
        return {"logits": stated, "kernel": "plain"}
    if row.workload.loss_fn not in ("cross-entropy", "task"):
        raise CannotTell(f"loss {row.workload.loss_fn} is not modelled for this family")
    if loss in ("chunked", "other-fused"):
        raise CannotTell(f"loss {loss} is not modelled")
    own = loss in ("standard", "unknown", "n/a")
    if task != "causal-lm":
        if own:
            return {}
        raise CannotTell(f"loss {loss} is modelled for causal language models only")
    version = version_of(row, "transformers")
    old = version is not None and version < _UNSHIFTED_LOGITS
    if own and not old:
        return {}
    variant: dict[str, Any] = {"logits": "whole", "kernel": "plain" if own else "in-place"}
    if loss == "liger-fused":
        variant = {"logits": "never"}
    elif version is not None and old:
        narrow = row.model.family in _NARROW_LOSS
        variant["logits"] = "shifted-narrow" if narrow else "shifted-by-function" if version >= _SHARED_LOSS else "shifted"
    if not own and profile_of(row).fused_norms:
        variant["fused_norms"] = True
    if old and row.strategy.recompute == "full" and row.model.family in _CACHE_DESPITE_CHECKPOINTS:
        variant["held"] = _CACHE_DESPITE_CHECKPOINTS[row.model.family]
    return variant
