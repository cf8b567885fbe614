"""accelerate's YAML, in: the settings are those that accelerate's own launcher and plugin make of the same file."""

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

yaml = pytest.importorskip("yaml")
BASE = {"compute_environment": "LOCAL_MACHINE", "num_processes": 4, "num_machines": 1, "machine_rank": 0}
FSDP = {**BASE, "distributed_type": "FSDP", "mixed_precision": "bf16"}
DEEPSPEED = {**BASE, "distributed_type": "DEEPSPEED", "mixed_precision": "bf16"}


@pytest.fixture(autouse=True)
def _environment():
    """transformers and accelerate leave variables behind."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def ask(tmp_path):
    def asked(data, config=None, **options):
        path = tmp_path / "acc.yaml"
        path.write_text(yaml.safe_dump(data))
        return apply(read_config(path), options, config)

    return asked


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """accelerate's own plugin, made as `accelerate launch` makes it."""
    pytest.importorskip("accelerate")
    from accelerate.commands import launch
    from accelerate.utils import FullyShardedDataParallelPlugin, dataclasses
    from accelerate.utils.launch import prepare_multi_gpu_env

    monkeypatch.setattr(dataclasses, "is_cuda_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)

    def made(data):
        path = tmp_path / "real.yaml"
        path.write_text(yaml.safe_dump(data))
        with warnings.catch_warnings(), mock.patch.dict(os.environ):
            warnings.simplefilter("ignore")
            args = launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
            args, _, _ = launch._validate_launch_command(args)
            environment = prepare_multi_gpu_env(args)
            os.environ.update({k: v for k, v in environment.items() if k.startswith("FSDP_")})
            real = FullyShardedDataParallelPlugin()
            if args.mixed_precision != "no":
                real.set_mixed_precision(args.mixed_precision)
            return real

    return made


WRAP = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
BLOCKS = [
    {},
    {"fsdp_version": 1},
    {"fsdp_version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"},
    {"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP", **WRAP},
    {"fsdp_version": 1, "fsdp_sharding_strategy": 4, **WRAP},
    {"fsdp_version": 1, "fsdp_sharding_strategy": "NO_SHARD", "fsdp_backward_prefetch": "BACKWARD_PRE", **WRAP},
    {"fsdp_version": 1, "fsdp_backward_prefetch": "BACKWARD_POST", "fsdp_forward_prefetch": True, **WRAP},
    {"fsdp_version": 1, "fsdp_backward_prefetch": "NO_PREFETCH", "fsdp_use_orig_params": False},
    {"fsdp_version": 1, "fsdp_offload_params": True, "fsdp_cpu_ram_efficient_loading": False, "fsdp_sync_module_states": False},
    {"fsdp_version": 1, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000},
    {"fsdp_version": 1, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"},
    {"fsdp_version": 2},
    {"fsdp_version": 2, "fsdp_reshard_after_forward": False, **WRAP},
    {"fsdp_version": 2, "fsdp_reshard_after_forward": "yes", "fsdp_transformer_layer_cls_to_wrap": "A,B", **WRAP},
    {"fsdp_version": 2, "fsdp_offload_params": True, "fsdp_activation_checkpointing": True, **WRAP},
    {
        "fsdp_version": 2,
        "fsdp_activation_checkpointing": True,
        "fsdp_activation_checkpointing_offload": True,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_ignored_modules": "lm_head",
        **WRAP,
    },
]


@pytest.mark.parametrize("mixed", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("block", BLOCKS, ids=json.dumps)
def test_the_settings_are_those_of_accelerates_plugin(ask, plugin, block, mixed):
    data = {**FSDP, "mixed_precision": mixed, "fsdp_config": block}
    real = plugin(data)

    ours = ask(data)["fsdp"]

    assert ours.version == real.fsdp_version
    if ours.version == 1:
        assert ours.sharding_strategy == real.sharding_strategy.name
        assert ours.backward_prefetch == (real.backward_prefetch and real.backward_prefetch.name)
        assert ours.forward_prefetch == real.forward_prefetch
        assert ours.limit_all_gathers == real.limit_all_gathers
        assert ours.use_orig_params == real.use_orig_params
        assert ours.sync_module_states == real.sync_module_states
        assert ours.cpu_offload == real.cpu_offload.offload_params
    else:
        assert ours.reshard_after_forward == real.reshard_after_forward
        assert ours.cpu_offload == (type(real.cpu_offload).__name__ == "CPUOffloadPolicy")
        assert ours.offload_pin_memory == getattr(real.cpu_offload, "pin_memory", True)
    policies = {"TRANSFORMER_BASED_WRAP": "transformer_auto_wrap_policy", "SIZE_BASED_WRAP": "size_based_auto_wrap_policy"}
    assert policies.get(ours.auto_wrap_policy) == getattr(real.auto_wrap_policy, "__name__", None)
    assert list(ours.transformer_layer_cls_to_wrap) == (real.transformer_cls_names_to_wrap or [])
    if ours.auto_wrap_policy == "SIZE_BASED_WRAP":
        assert ours.min_num_params == real.min_num_params
    assert ours.activation_checkpointing == real.activation_checkpointing
    assert ours.activation_checkpointing_offload == real.activation_checkpointing_offload
    assert ours.cpu_ram_efficient_loading == real.cpu_ram_efficient_loading
    assert ours.ignored_modules == real.ignored_modules
    policy = real.mixed_precision_policy
    for field in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
        theirs = getattr(policy, field, None)
        assert getattr(ours, field) == (theirs and str(theirs).removeprefix("torch.")), field


def test_every_key_of_the_plugin_is_known():
    pytest.importorskip("accelerate")
    import dataclasses

    from accelerate.commands.config.config_args import ClusterConfig
    from memplan.planner.engines import accelerate_yaml

    assert {f.name for f in dataclasses.fields(ClusterConfig)} <= accelerate_yaml.KEYS


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({**BASE, "distributed_type": "NO", "num_processes": 1}, {"strategy": "single", "gpus": 1}),
        (
            {**BASE, "distributed_type": "MULTI_GPU", "mixed_precision": "bf16"},
            {"strategy": "ddp", "precision": "bf16-autocast"},
        ),
        ({**BASE, "distributed_type": "MULTI_GPU", "mixed_precision": "no"}, {"strategy": "ddp", "gpus": 4, "nodes": 1}),
        ({**FSDP, "fsdp_config": {"fsdp_version": 2}}, {"strategy": "fsdp2", "precision": "bf16-mixed", "gpus": 4}),
        ({**FSDP, "fsdp_config": {"fsdp_version": 1}}, {"strategy": "fsdp1"}),
        ({**FSDP, "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": "HYBRID_SHARD"}}, {"strategy": "hsdp"}),
        ({**FSDP, "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}}, {"offload": ("optimizer", "param")}),
        ({**FSDP, "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}, {"recompute": "full"}),
        ({**DEEPSPEED, "deepspeed_config": {"zero_stage": 3}}, {"strategy": "zero3", "clip_grad_norm": True, "gpus": 4}),
        ({**DEEPSPEED, "deepspeed_config": {}}, {"strategy": "zero2", "precision": "bf16-mixed", "grad_accum_steps": 1}),
        (
            {
                **DEEPSPEED,
                "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu", "gradient_accumulation_steps": 4},
            },
            {"offload": ("optimizer",), "grad_accum_steps": 4},
        ),
        ({**BASE, "distributed_type": "MULTI_GPU", "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {"compiled": True}),
    ],
    ids=str,
)
def test_the_question_is_the_one_that_the_file_launches(ask, data, expected):
    asked = ask(data)

    assert {k: asked.get(k) for k in expected} == expected


def test_two_replicas_of_two_shards_are_a_mesh(ask):
    parallel = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}

    asked = ask({**FSDP, "fsdp_config": {"fsdp_version": 2}, "parallelism_config": parallel})

    assert asked["strategy"] == "hsdp"
    assert asked["fsdp"].replicas(nodes=1) == 2
    with pytest.raises(UserError, match="is not num_processes 8"):
        ask({**FSDP, "num_processes": 8, "fsdp_config": {"fsdp_version": 2}, "parallelism_config": parallel})


def test_reshard_after_forward_of_version_1_is_said_to_do_nothing(ask):
    asked = ask({**FSDP, "fsdp_config": {"fsdp_version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}})

    assert asked["fsdp"].reshards
    assert any("fsdp_reshard_after_forward has no effect under version 1" in note for note in asked["notes"])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({**BASE, "mixed_precision": "bf16"}, "distributed_type is missing"),
        ({**BASE, "distributed_type": "FSPD"}, "Did you mean FSDP"),
        ({**BASE, "distributed_type": "MULTI_GPU", "num_process": 2}, "Did you mean num_processes"),
        ({**BASE, "distributed_type": "MULTI_GPU", "mixed_precision": "bf17"}, "mixed_precision is"),
        ({**BASE, "distributed_type": "MULTI_GPU", "num_processes": 0}, "num_processes is 0"),
        ({**BASE, "distributed_type": "MULTI_GPU", "use_cpu": True}, "use_cpu"),
        ({**FSDP, "fsdp_config": {"fsdp_version": 3}}, "fsdp_config.fsdp_version is 3: expected 1 or 2"),
        ({**FSDP, "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL"}}, "Did you mean FULL_SHARD"),
        ({**FSDP, "fsdp_config": {"fsdp_sync_module_states": False}}, "needs"),
        (
            {**FSDP, "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing_offload": True}},
            "needs activation_checkpointing",
        ),
        ({**FSDP, "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "maybe"}}, "expected true or false"),
        ({**DEEPSPEED, "deepspeed_config": {"zero_stage": 2, "offload_param_device": "cpu"}}, "allowed at zero_stage 3 only"),
        ({**DEEPSPEED, "deepspeed_config": {"zero_stage": 3, "offload_param_device": "nvme"}}, "nvme_path"),
        (
            {**DEEPSPEED, "mixed_precision": None, "deepspeed_config": {"deepspeed_config_file": "none.json"}},
            "none.json: no such file",
        ),
    ],
    ids=str,
)
def test_mistakes_are_one_line(ask, data, said):
    with pytest.raises(UserError) as error:
        ask(data)

    assert said in str(error.value)


@pytest.mark.parametrize(
    "data",
    [
        {**BASE, "distributed_type": "MEGATRON_LM"},
        {**BASE, "distributed_type": "MULTI_GPU", "mixed_precision": "fp8"},
        {**FSDP, "fsdp_config": {"fsdp_version": 2}, "parallelism_config": {"parallelism_config_tp_size": 2}},
        {**DEEPSPEED, "deepspeed_config": {"zero_stage": 3, "deepspeed_moe_layer_cls_names": "MoeBlock"}},
    ],
    ids=str,
)
def test_what_is_not_modelled_has_no_answer(ask, data):
    with pytest.raises(CannotTell, match="not modelled yet"):
        ask(data)


def test_the_deepspeed_plugin_makes_the_same_file(ask, monkeypatch):
    """`DeepSpeedPlugin` with the same arguments: its dictionary, read alone, asks the same."""
    utils = pytest.importorskip("accelerate.utils")
    pytest.importorskip("deepspeed")
    from memplan.planner.engines.deepspeed_json import read

    keys = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu", "gradient_accumulation_steps": 2}
    real = utils.DeepSpeedPlugin(**keys, gradient_clipping=1.0)
    real.set_mixed_precision("bf16")

    asked = ask({**DEEPSPEED, "deepspeed_config": keys}, micro_batch_size=2)
    theirs = apply(read(json.loads(json.dumps(real.deepspeed_config)), "real"), {"micro_batch_size": 2, "gpus": 4})

    for key in ("strategy", "precision", "offload", "grad_accum_steps", "clip_grad_norm", "micro_batch_size", "deepspeed"):
        assert asked[key] == theirs[key], key


def test_a_deepspeed_file_that_the_yaml_names_is_read_from_beside_it(tmp_path, ask):
    data = {**BASE, "distributed_type": "DEEPSPEED"}
    ds = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(ds))

    asked = ask({**data, "deepspeed_config": {"deepspeed_config_file": "ds.json"}})

    assert (asked["strategy"], asked["precision"], asked["micro_batch_size"], asked["gpus"]) == ("zero1", "bf16-mixed", 2, 4)
    with pytest.raises(UserError, match=r"deepspeed_config\.zero_stage beside deepspeed_config_file"):
        ask({**data, "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero_stage": 3}})


def test_mixed_precision_beside_a_deepspeed_file_is_refused_as_accelerate_refuses_it(tmp_path, ask, monkeypatch):
    utils = pytest.importorskip("accelerate.utils")
    pytest.importorskip("deepspeed")
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 2}))
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,mixed_precision")  # as `accelerate launch` sets it

    with pytest.raises(ValueError, match="mixed_precision"):
        utils.DeepSpeedPlugin(hf_ds_config=str(tmp_path / "ds.json"))
    with pytest.raises(UserError, match="mixed_precision beside"):
        ask({**DEEPSPEED, "deepspeed_config": {"deepspeed_config_file": "ds.json"}})


def test_gpus_of_the_command_line_go_before_num_processes_and_that_is_said(ask):
    asked = ask({**FSDP, "fsdp_config": {}}, gpus=8)

    assert asked["gpus"] == 8
    assert any("--gpus 8 is taken, not num_processes 4 of the file" in note for note in asked["notes"])
