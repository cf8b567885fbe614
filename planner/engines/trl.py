"""TRL's YAML (`trl sft --config config.yaml`), read as TRL 1.0 reads it: TrainingArguments, SFTConfig and ModelConfig in one.

Sources: trl/trainer/base_config.py and sft_config.py (keys and defaults that differ from transformers'), model_config.py,
scripts/sft.py, scripts/utils.py (`ScriptArguments`, `DatasetMixtureConfig`), trainer/sft_trainer.py (dtypes, the loss).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import UserError
from ...models.adapters import targets_of
from . import training_args
from .imported import Imported, Said
from .keys import Keys
from .text import Text

MARKS = (
    "use_peft", "lora_target_modules", "max_length", "max_seq_length", "packing", "padding_free", "dataset_text_field",
    "attn_implementation", "dataset_mixer", "dataset_name", "dtype", "torch_dtype", "assistant_only_loss",
    "completion_only_loss", "load_in_4bit", "load_in_8bit", "use_bnb_nested_quant", "bnb_4bit_quant_type", "lora_r",
    "lora_task_type", "lora_modules_to_save", "dataset_train_split", "model_revision", "chat_template_path",
)  # fmt: skip
SILENT = frozenset({
    "model_revision", "trust_remote_code", "lora_task_type", "dataset_name", "dataset_config", "dataset_train_split",
    "dataset_test_split", "dataset_streaming", "ignore_bias_buffers", "datasets", "streaming", "test_split_size", "env",
    "model_init_kwargs", "router_aux_loss_coef", "chat_template_path", "dataset_text_field", "dataset_kwargs",
    "dataset_num_proc", "eos_token", "truncation_mode", "shuffle_dataset", "packing_strategy", "pad_to_multiple_of",
    "eval_packing", "completion_only_loss", "assistant_only_loss", "pad_token", "dataset_mixer", "dataset_splits",
    "dataset_configs", "chat_template", "preprocessing_num_workers", "auto_insert_empty_system_msg", "tokenizer_name_or_path",
    "dataset_batch_size", "num_of_sequences", "chars_per_token", "use_auth_token", "benchmarks", "callbacks",
    "system_prompt", "overwrite_hub_revision", "hub_model_revision", "push_to_hub_revision", "wandb_entity", "wandb_project",
    "wandb_log_unique_prompts", "packing", "padding_free", "config",
})  # fmt: skip
_NOT_MODELLED = {
    "lora_target_parameters": "adapters on parameters, not modules",
    "activation_offloading": "activations that wait on the host",
}
#: Keys by which a file is one of another trainer of TRL.
_OTHERS = {
    "beta": "preference training keeps two forwards, of two models",
    "num_generations": "training by generated samples",
    "reward_model_name_or_path": "training by a reward model",
    "reward_funcs": "training by generated samples",
    "reward_model": "training by a reward model",
    "precompute_ref_log_probs": "preference training keeps two forwards, of two models",
    "center_rewards_coefficient": "a reward model has another head",
    "teacher_model_name_or_path": "distillation keeps two models",
    "desirable_weight": "preference training keeps several forwards",
    "max_completion_length": "training by generated samples",
    "max_prompt_length": "preference training keeps two forwards, of two models",
}
_DTYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "auto": "auto",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
}
_ATTENTION = {
    "eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash_attention_2", "flash_attention_3": "flash_attention_2",
    "kernels-community/flash-attn2": "flash_attention_2", "kernels-community/flash-attn3": "flash_attention_2",
    "kernels-community/vllm-flash-attn3": "flash_attention_2",
}  # fmt: skip
_DEFAULT_LENGTH = 1024


def read(text: Text) -> Imported:
    """What the file says.  Raises UserError for what TRL refuses, with the line."""
    keys = Keys(text)
    notes: list[str] = []
    reasons = keys.unmodelled({**_NOT_MODELLED, **_OTHERS})
    found = training_args.read(_arguments(keys), text.source)
    said, taken = dict(found.said), dict(found.taken)
    _length(keys, said, notes)
    adapter = _adapter(keys, said)
    _precision(keys, found, said, taken, notes)
    attention = keys.get("attn_implementation")
    if keys.flag("use_flash_attention_2"):
        attention = attention or "flash_attention_2"
    if attention is not None:
        if str(attention) not in _ATTENTION:
            reasons.append(f"{keys.at('attn_implementation')}: attention by {attention} is not modelled yet")
        else:
            said["attention"] = Said(_ATTENTION[str(attention)], "attn_implementation")
    _loss(keys, said, reasons, notes)
    notes += keys.less({"use_liger_kernel": "its kernels of norms and activations keep less"})
    base = keys.text_of("model_name_or_path")
    notes += keys.not_understood(SILENT | training_args.KNOWN, "TRL")
    return replace(
        found,
        kind="trl",
        said=said,
        taken={option: value for option, value in taken.items() if option not in said},
        notes=(*found.notes, *notes),
        unmodelled=(*found.unmodelled, *reasons),
        model=Said(base, "model_name_or_path") if base else None,
        adapter=adapter,
    )


def _arguments(keys: Keys) -> dict[str, Any]:
    """TrainingArguments with TRL's own defaults: bf16, and activations that are recomputed."""
    arguments = {key: keys.get(key) for key in keys.data if key in training_args.KNOWN and key != "use_liger_kernel"}
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if (number := keys.number(key)) is not None:
            arguments[key] = number
    if (clip := keys.real("max_grad_norm")) is not None:
        arguments["max_grad_norm"] = clip
    if keys.flag("bf16") and keys.flag("fp16"):
        raise keys.both("bf16", "fp16", "a run has one of them")
    if keys.is_on("deepspeed") and keys.is_on("fsdp"):
        raise keys.both("deepspeed", "fsdp", "a run has one of them")
    arguments["bf16"] = keys.flag("bf16", not keys.flag("fp16"))
    arguments["gradient_checkpointing"] = keys.flag("gradient_checkpointing", True)
    return {key: value for key, value in arguments.items() if value is not None}


def _length(keys: Keys, said: dict[str, Said], notes: list[str]) -> None:
    new, old = keys.number("max_length"), keys.number("max_seq_length")
    if new is not None and old is not None and new != old:
        raise keys.both("max_length", "max_seq_length", "both are the length of a sample")
    key = "max_length" if new is not None else "max_seq_length"
    if new is None and old is None:
        key = "the default of max_length"
        if "max_length" in keys.data:  # null: nothing is cut
            notes.append("max_length null: no sample is cut; say the longest with --seq")
            return
    said["seq_len"] = Said(new or old or _DEFAULT_LENGTH, key)
    if keys.is_on("packing"):
        notes.append("packing: every sample is full")
    else:
        notes.append(f"{key}: a batch of samples of that length is answered for; shorter ones need less")


def _targets(words: tuple[str, ...]) -> tuple[str, ...]:
    """A list of one is given to peft as a text, which may be a pattern."""
    return targets_of(words[0]) if len(words) == 1 else words


def _adapter(keys: Keys, said: dict[str, Said]) -> dict[str, Said]:
    in4, in8 = keys.flag("load_in_4bit"), keys.flag("load_in_8bit")
    if in4 and in8:
        raise keys.both("load_in_4bit", "load_in_8bit", "weights have one size")
    fields = {
        "rank": (keys.number("lora_r") or 16, "lora_r"),
        "alpha": (keys.real("lora_alpha") or 32.0, "lora_alpha"),
        "dropout": (0.05 if (drop := keys.real("lora_dropout")) is None else drop, "lora_dropout"),
        "targets": (_targets(keys.words("lora_target_modules")), "lora_target_modules"),
        "modules_to_save": (keys.words("lora_modules_to_save"), "lora_modules_to_save"),
    }
    dora, rslora = keys.flag("use_dora"), keys.flag("use_rslora")
    quant = keys.choice("bnb_4bit_quant_type", ("nf4", "fp4")) or "nf4"
    double = keys.flag("use_bnb_nested_quant")
    storage = keys.choice("bnb_4bit_quant_storage", ("uint8", "float16", "bfloat16", "float32"))
    if not keys.flag("use_peft"):
        for key in ("load_in_4bit", "load_in_8bit"):
            if keys.flag(key):
                raise UserError(
                    f"{keys.at(key)}: {key} without use_peft: quantised weights do not train", "Write use_peft: true"
                )
        return {}
    key = "use_dora" if dora else "use_rslora" if rslora else "load_in_4bit" if in4 else "use_peft"
    said["method"] = Said("dora" if dora else "rslora" if rslora else "qlora" if in4 else "lora", key)
    adapter = {name: Said(value, key) for name, (value, key) in fields.items() if value != ()}
    if in4 or in8:
        key = "load_in_4bit" if in4 else "load_in_8bit"
        adapter["base_quant"] = Said(quant + ("-dq" if double else "") if in4 else "int8", key)
        adapter["upcast"] = Said(False, key)  # prepare_model_for_kbit_training is not called
        if in4 and storage is not None:
            adapter["quant_storage"] = Said(storage, "bnb_4bit_quant_storage")
        adapter["adapter_dtype"] = Said("base", key)  # adapters are cast to bf16 (sft_trainer.py)
    return adapter


def _precision(keys: Keys, found: Imported, said: dict[str, Said], taken: dict[str, Said], notes: list[str]) -> None:
    """The weights are loaded as `dtype` says, in fp32 unless told otherwise, and the step runs under autocast."""
    new, old = keys.get("dtype"), keys.get("torch_dtype")
    if new is not None and old is not None and new != old:
        raise keys.both("dtype", "torch_dtype", "both are the type of the weights")
    key = "dtype" if new is not None else "torch_dtype" if old is not None else "the default of dtype"
    name = str(new or old or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise keys.wrong(key, f"expected one of {', '.join(_DTYPES)}")
    dtype = _DTYPES[name]
    mixed = "fp16" if keys.flag("fp16") else "bf16" if keys.flag("bf16", True) else ""
    if "precision" in said or found.deepspeed is not None or found.fsdp is not None:
        return
    taken.pop("precision", None)
    if dtype == "auto":
        notes.append(f"{key} auto: the weights train as they are stored; say otherwise with --precision")
    else:
        said["precision"] = Said(f"{mixed}-autocast" if dtype == "fp32" and mixed else dtype, key)


def _loss(keys: Keys, said: dict[str, Said], reasons: list[str], notes: list[str]) -> None:
    """TRL computes head and loss in chunks of 256 tokens that it recomputes, unless told otherwise."""
    kind = keys.choice("loss_type", ("nll", "dft", "chunked_nll"))
    if kind is None:
        kind = "nll" if keys.flag("use_liger_kernel") else "chunked_nll"
    if kind == "chunked_nll" and keys.flag("use_liger_kernel"):
        raise keys.both("loss_type", "use_liger_kernel", "TRL takes one of them")
    if keys.flag("use_liger_kernel"):
        said["loss"] = Said("liger", "use_liger_kernel")
    if kind == "dft":
        reasons.append(f"{keys.at('loss_type')}: loss_type dft is not modelled yet")
    if kind == "chunked_nll":
        key = "loss_type" if "loss_type" in keys else "the default of loss_type"
        said["loss"] = Said("chunked", key)
        notes.append(f"{key}: chunked_nll is answered as --loss chunked, which keeps more: the peak is an upper bound")
