"""TrainingArguments, in: what is asked is what transformers' own class makes of the same file."""

from __future__ import annotations

import json
import logging
import os
import warnings
from unittest import mock

import pytest
from memplan.errors import CannotTell, UserError
from memplan.planner.engines.detect import read_config
from memplan.planner.engines.imported import apply

DS = {
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


@pytest.fixture(autouse=True)
def _environment():
    """transformers and accelerate leave variables behind."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def ask(tmp_path):
    def asked(data, config=None, **options):
        path = tmp_path / "args.json"
        path.write_text(json.dumps(data))
        return apply(read_config(path), options, config)

    return asked


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    """The plugin that the Trainer makes of its arguments."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from accelerate.utils import FullyShardedDataParallelPlugin, dataclasses

    monkeypatch.setattr(dataclasses, "is_cuda_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)

    def made(data):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = transformers.TrainingArguments(**json.loads(json.dumps(data)), use_cpu=True)
            return FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)

    return made


CONFIGS = [
    (True, {}),
    (True, {"reshard_after_forward": False, "activation_checkpointing": True}),
    (True, {"fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "fsdp_cpu_ram_efficient_loading": True}),
    (True, {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000}),
    (True, {"auto_wrap_policy": "NO_WRAP", "cpu_offload": True}),
    ("full_shard auto_wrap", {}),
    ("shard_grad_op auto_wrap offload", {}),
    ("shard_grad_op auto_wrap", {"version": 1, "backward_prefetch": "backward_pre", "forward_prefetch": True}),
    ("full_shard", {"version": 1, "limit_all_gathers": False, "use_orig_params": False, "transformer_layer_cls_to_wrap": "A"}),
]


@pytest.mark.parametrize(("fsdp", "block"), CONFIGS, ids=str)
def test_the_settings_are_those_of_the_trainers_plugin(ask, plugin, fsdp, block):
    data = {"output_dir": "x", "fsdp": fsdp, "fsdp_config": block}
    real = plugin(data)

    ours = ask({**data, "bf16": True}, gpus=4)["fsdp"]

    assert ours.version == real.fsdp_version
    if ours.version == 1:
        assert ours.sharding_strategy == real.sharding_strategy.name
        assert ours.backward_prefetch == (real.backward_prefetch and real.backward_prefetch.name)
        for field in ("forward_prefetch", "limit_all_gathers", "use_orig_params", "sync_module_states"):
            assert getattr(ours, field) == getattr(real, field), field
    else:
        assert ours.reshard_after_forward == real.reshard_after_forward
        assert ours.cpu_offload == (type(real.cpu_offload).__name__ == "CPUOffloadPolicy")
    policies = {"TRANSFORMER_BASED_WRAP": "transformer_auto_wrap_policy", "SIZE_BASED_WRAP": "size_based_auto_wrap_policy"}
    assert policies.get(ours.auto_wrap_policy) == getattr(real.auto_wrap_policy, "__name__", None)
    assert list(ours.transformer_layer_cls_to_wrap) == (real.transformer_cls_names_to_wrap or [])
    assert ours.activation_checkpointing == real.activation_checkpointing
    assert ours.cpu_ram_efficient_loading == real.cpu_ram_efficient_loading


def test_the_defaults_that_are_assumed_are_those_of_transformers(ask):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    real = transformers.TrainingArguments(output_dir="x", use_cpu=True)

    asked = ask({"output_dir": "x", "learning_rate": 1e-4})

    assert asked["micro_batch_size"] == real.per_device_train_batch_size
    assert asked["grad_accum_steps"] == real.gradient_accumulation_steps
    assert asked["clip_grad_norm"] == (real.max_grad_norm > 0)
    assert str(real.optim.value) == "adamw_torch_fused"
    assert (asked["optimizer"], asked["optimizer_impl"]) == ("adamw", "fused")


def test_every_field_by_which_a_file_is_known_is_or_was_one_of_transformers():
    transformers = pytest.importorskip("transformers")
    from memplan.planner.engines import training_args

    older = {"evaluation_strategy", "logging_dir", "overwrite_output_dir", "group_by_length", "warmup_ratio"}
    fields = set(transformers.TrainingArguments.__dataclass_fields__)
    assert fields >= training_args.READ
    assert not training_args.KNOWN - fields - older - {"hub_private_repo", "local_rank", "save_safetensors"}


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        ({"per_device_train_batch_size": 2, "bf16": True}, {"gpus": 4}, {"strategy": "ddp", "precision": "bf16-autocast"}),
        ({"per_device_train_batch_size": 2}, {}, {"strategy": "single", "micro_batch_size": 2}),
        ({"per_device_train_batch_size": 2, "max_grad_norm": 0}, {}, {"clip_grad_norm": False}),
        ({"per_device_train_batch_size": 2, "gradient_checkpointing": True}, {}, {"recompute": "full"}),
        (
            {"output_dir": "x", "activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
            {},
            {"recompute": "selective-layer:2"},
        ),
        (
            {"output_dir": "x", "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            {},
            {"reentrant": True},
        ),
        ({"output_dir": "x", "optim": "adamw_torch"}, {}, {"optimizer": "adamw", "optimizer_impl": "foreach"}),
        ({"output_dir": "x", "torch_compile": True}, {}, {"compiled": True}),
        ({"output_dir": "x", "fsdp": True, "bf16": True}, {"gpus": 2}, {"strategy": "fsdp2", "precision": "bf16-mixed"}),
        (
            {
                "output_dir": "x",
                "deepspeed": DS,
                "bf16": True,
                "per_device_train_batch_size": 3,
                "gradient_accumulation_steps": 4,
            },
            {"gpus": 2},
            {
                "strategy": "zero3",
                "precision": "bf16-mixed",
                "micro_batch_size": 3,
                "grad_accum_steps": 4,
                "clip_grad_norm": True,
            },
        ),
    ],
    ids=str,
)
def test_the_question_is_the_one_that_the_trainer_runs(ask, data, options, expected):
    asked = ask(data, {"hidden_size": 8}, **options)

    assert {k: asked.get(k) for k in expected} == expected


def test_the_deepspeed_block_is_filled_as_the_trainer_fills_it(ask, monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("deepspeed")
    pytest.importorskip("accelerate")
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    data = {
        "output_dir": "x",
        "bf16": True,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 4,
        "max_grad_norm": 0.0,
    }
    real = transformers.TrainingArguments(**data, deepspeed=json.loads(json.dumps(DS)), use_cpu=True).hf_deepspeed_config.config
    try:
        asked = ask({**data, "deepspeed": DS}, {"hidden_size": 8})
    finally:
        transformers.integrations.unset_hf_deepspeed_config()

    assert asked["micro_batch_size"] == real["train_micro_batch_size_per_gpu"] == 3
    assert asked["grad_accum_steps"] == real["gradient_accumulation_steps"] == 4
    assert asked["clip_grad_norm"] is (real["gradient_clipping"] > 0) is False
    assert (asked["precision"] == "bf16-mixed") is real["bf16"]["enabled"] is True


def test_a_deepspeed_file_that_disagrees_is_a_mistake_naming_both(ask, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({**DS, "train_micro_batch_size_per_gpu": 2}))

    with pytest.raises(UserError) as error:
        ask({"output_dir": "x", "deepspeed": str(tmp_path / "ds.json"), "per_device_train_batch_size": 4}, {"hidden_size": 8})

    assert "train_micro_batch_size_per_gpu 2" in str(error.value)
    assert "per_device_train_batch_size" in str(error.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"output_dir": "x", "bf16": True, "fp16": True}, "bf16 and fp16 are both true"),
        ({"output_dir": "x", "deepspeed": DS, "fsdp": True}, "deepspeed and fsdp are both there"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0"),
        ({"output_dir": "x", "max_grad_norm": -1}, "max_grad_norm is -1"),
        ({"output_dir": "x", "fsdp": "hybrid_shard"}, "under version 1 only"),
        ({"output_dir": "x", "fsdp": "fullshard"}, "Did you mean full_shard"),
        ({"output_dir": "x", "fsdp": [None]}, "expected words"),
        ({"output_dir": "x", "deepspeed": "none.json"}, "names none.json, and there is no such file"),
        ({"output_dir": "x", "use_cpu": True}, "use_cpu"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(ask, data, said):
    with pytest.raises(UserError) as error:
        ask(data)

    assert said in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_liger_kernel", True),
        ("optim", "galore_adamw"),
        ("optim", "adamw_torch_xla"),
        ("label_smoothing_factor", 0.1),
        ("parallelism_config", {"tp_size": 2}),
    ],
)
def test_what_is_not_modelled_has_no_answer(ask, key, value):
    with pytest.raises(CannotTell, match=key):
        ask({"output_dir": "x", key: value})


def test_every_optim_of_transformers_is_known_or_said_to_be_not_modelled(ask):
    names = pytest.importorskip("transformers.training_args").OptimizerNames
    from memplan.planner.engines import training_args
    from memplan.planner.optimizers.catalogue import entry_of

    known = 0
    for name in names:
        found = training_args.optimizer_of(name.value)
        if found is None:
            with pytest.raises(CannotTell, match=f"optim {name.value} is not modelled yet"):
                ask({"output_dir": "x", "optim": name.value})
            continue
        known += 1
        assert entry_of(found[0]).name == found[0]
        assert training_args.optimizer_of(training_args.optim_of(found[0], found[1] or "default")) == found
    assert known >= 30


def test_fsdp_config_alone_takes_its_types_from_the_precision(tmp_path):
    path = tmp_path / "fsdp_config.json"
    path.write_text(json.dumps({"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}))

    narrow = apply(read_config(path), {"gpus": 4, "precision": "bf16-mixed"})["fsdp"]
    wide = apply(read_config(path), {"gpus": 4})["fsdp"]

    assert (narrow.param_dtype, narrow.stored_dtype) == ("bfloat16", "float32")
    assert wide.param_dtype is None


@pytest.mark.parametrize("data", [{}, {"a": 1}, {"model_type": "llama", "hidden_size": 64}])
def test_a_file_of_another_kind_is_said_to_be_none(tmp_path, data):
    (tmp_path / "x.json").write_text(json.dumps(data))

    with pytest.raises(UserError, match="is no configuration that memplan knows"):
        read_config(tmp_path / "x.json")


def test_an_optim_that_transformers_has_not_is_a_mistake_with_the_nearest(ask):
    with pytest.raises(UserError, match=r"adamw_troch.*Did you mean adamw_torch"):
        ask({"output_dir": "x", "optim": "adamw_troch"})


def test_a_key_that_transformers_has_not_is_said_to_be_not_understood(ask):
    asked = ask({"output_dir": "x", "per_device_train_batchsize": 2})

    assert any("NOT UNDERSTOOD" in note and "per_device_train_batch_size" in note for note in asked["notes"])


def test_every_argument_of_transformers_is_known():
    from dataclasses import fields

    from memplan.planner.engines.training_args import KNOWN
    from transformers import TrainingArguments

    assert {field.name for field in fields(TrainingArguments)} <= KNOWN


def test_a_file_of_an_example_script_names_model_and_length(tmp_path):
    from memplan.planner.engines.detect import read_config

    data = {"model_name_or_path": "gpt2", "dataset_name": "wikitext", "dataset_config_name": "wikitext-2", "block_size": 512,
            "per_device_train_batch_size": 4, "output_dir": "x", "do_train": True, "torch_dtype": "float16"}  # fmt: skip
    (tmp_path / "run_clm.json").write_text(json.dumps(data))

    found = read_config(tmp_path / "run_clm.json")

    assert (found.kind, found.model.value, found.said["seq_len"].value) == ("training-arguments", "gpt2", 512)
    assert "recompute" not in found.said
    (note,) = (note for note in found.notes if "NOT UNDERSTOOD" in note)
    assert "torch_dtype" in note
