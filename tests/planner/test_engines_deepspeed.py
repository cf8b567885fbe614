"""ds_config.json, in: what is refused is what DeepSpeed refuses, and what is read is what its own classes read."""

from __future__ import annotations

import json
import logging

import pytest
from memplan.errors import CannotTell, UserError
from memplan.planner.engines import deepspeed_schema as schema
from memplan.planner.engines.deepspeed_json import read
from memplan.planner.engines.imported import apply
from memplan.planner.strategies.deepspeed_settings import DeepSpeedSettings, LeafModules, OffloadOptimizer, OffloadParam

BASE = {"train_micro_batch_size_per_gpu": 1}


def zero(**keys):
    return {**BASE, "zero_optimization": keys}


TRAINER = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


@pytest.fixture(scope="module")
def engine():
    """The real `DeepSpeedConfig`."""
    module = pytest.importorskip("deepspeed.runtime.config")
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield module.DeepSpeedConfig
    logging.disable(before)


def ask(data, config=None, **options):
    return apply(read(data, "ds.json"), options, config)


REFUSED_BY_BOTH = [
    {},
    zero(stage=4),
    zero(stage=-1),
    zero(stage=2.5),
    zero(stage=2, mics_shard_size=2),
    zero(stage=3, zeropp_loco_param={}),
    {**BASE, "amp": {"enabled": False}},
    {**BASE, "elasticity": {}},
    zero(stage=2, reduce_bucket_size=0),
    zero(stage=2, reduce_bucket_size="5e8"),
    zero(stage=2, reduce_bucket_size=12.5),
    zero(stage=2, redcue_bucket_size=1),
    zero(stage=2, allgather_bucket_size=-1),
    zero(stage=2, round_robin_gradients=None),
    zero(stage=3, offload_param={"device": "gpu"}),
    zero(stage=2, offload_optimizer={"device": "cpu", "pin": True}),
    zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
    zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 1.5}),
    zero(stage=2, cpu_offload=True, offload_optimizer={"device": "cpu"}),
    zero(stage=0, compute_grad_norm=False),
    zero(stage=3, max_live_parameters=1, stage3_max_live_parameters=2),
    {**BASE, "bf16": {"enabled": True}, "fp16": {"enabled": True}},
    {**BASE, "bf16": {"enabled": "maybe"}},
    {**BASE, "bf16": False},
    {**BASE, "fp16": None},
    {**BASE, "fp16": {"enabled": True, "loss_scale": -1}},
    {**BASE, "fp16": {"enabled": True, "initial_scale": 1}},
    {**BASE, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    {**zero(stage=2), "bf16": {"enabled": True, "bf16_optimizer_states": True}},
    {**BASE, "communication_data_type": "fp8"},
    {**BASE, "zero_optimization": None},
    {**BASE, "zero_optimization": [1]},
    {**BASE, "scheduler": None},
    {**BASE, "train_batch_size": 3, "gradient_accumulation_steps": 2},
    {"train_micro_batch_size_per_gpu": 0},
    {"train_micro_batch_size_per_gpu": "2"},
    {**BASE, "gradient_accumulation_steps": 0},
]
REFUSED_EARLIER = [  # DeepSpeedConfig takes these, and the engine fails on them or ignores them
    (zero(stage=2, offload_param={"device": "cpu"}), "zero_optimization.offload_param.device"),
    (zero(stage=0, offload_optimizer={"device": "cpu"}), "zero_optimization.offload_optimizer.device"),
    (zero(stage=3, offload_optimizer={"device": "nvme"}), "zero_optimization.offload_optimizer.nvme_path"),
    (zero(stage=3, offload_param={"device": "nvme"}), "zero_optimization.offload_param.nvme_path"),
    (zero(stage=2, offload_optimizer={"device": "cpu", "super_offload": True}), "super_offload"),
    (zero(stage=1, legacy_stage1=True), "legacy_stage1"),
    ({**BASE, "optimizer": {"type": "AdamX"}}, "optimizer.type"),
    ({**BASE, "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "gradient_clipping"),
    ({**BASE, "gradient_clipping": "x"}, "gradient_clipping"),
    ({**BASE, "torch_autocast": {"enabled": True, "dtype": "int8"}}, "torch_autocast.dtype"),
    ({**BASE, "data_types": {"grad_accum_dtype": "fp33"}}, "data_types.grad_accum_dtype"),
    ({**BASE, "bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}}, "data_types.param_dtype"),
    ({"train_micro_batch_size_per_gpu": 1.5}, "train_micro_batch_size_per_gpu"),
    ({**zero(stage=2), "optimizer": {"type": "SGD"}}, "zero_allow_untested_optimizer"),
    ({**BASE, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "data_types.grad_accum_dtype"),
]
TAKEN_BY_BOTH = [
    BASE,
    zero(stage="3"),
    zero(stage=2.0),
    zero(stage=2, reduce_bucket_size=5e8),
    zero(stage=2, reduce_bucket_size="5000"),
    zero(stage=2, overlap_comm="true"),
    zero(stage=2, overlap_comm=None),
    zero(stage=2, cpu_offload=True),
    zero(stage=3, cpu_offload=True, cpu_offload_param=True, cpu_offload_use_pin_memory=True),
    zero(stage=3, stage3_gather_fp16_weights_on_model_save=True),
    zero(stage=3, max_live_parameters=1e7, prefetch_bucket_size=3),
    zero(stage=3, stage3_max_live_parameters="auto", sub_group_size="auto"),
    zero(stage=3, offload_param={}, offload_optimizer=None),
    zero(stage=3, offload_param={"device": "nvme", "nvme_path": "/n", "buffer_size": 1e9, "max_in_cpu": 0}),
    zero(stage=3, offload_optimizer={"device": "nvme", "nvme_path": "/n", "fast_init": True, "pipeline_read": "yes"}),
    {**BASE, "zero_optimization": True, "allgather_size": 100},
    {**BASE, "bfloat16": {"enabled": True}},
    {**BASE, "bf16": {"enabled": "yes"}},
    {**BASE, "unknown_key": 1},
    {**BASE, "optimizer": {}},
    {**BASE, "communication_data_type": "FP32"},
    {**BASE, "gradient_clipping": 0.5, "torch_autocast": {"enabled": True, "dtype": "bf16"}},
]


@pytest.mark.parametrize("data", REFUSED_BY_BOTH, ids=json.dumps)
def test_what_deepspeed_refuses_is_refused_on_one_line(engine, data):
    with pytest.raises(Exception):  # noqa: B017, PT011  # DeepSpeed raises whatever its parts raise
        engine(dict(data))

    with pytest.raises(UserError) as error:
        ask(data)
    assert "\n" not in str(error.value)
    assert "ds.json" in str(error.value)


@pytest.mark.parametrize(("data", "key"), REFUSED_EARLIER, ids=str)
def test_what_the_engine_fails_on_later_is_refused_before_the_run(engine, data, key):
    engine(dict(data))

    with pytest.raises(UserError, match=key.replace(".", r"\.")):
        ask(data)


@pytest.mark.parametrize("data", TAKEN_BY_BOTH, ids=json.dumps)
def test_what_deepspeed_takes_is_read_with_the_values_that_it_reads(engine, data):
    real = engine(json.loads(json.dumps(data))).zero_config

    asked = ask(data)

    settings = asked["deepspeed"]
    assert asked["strategy"] == f"zero{int(real.stage)}"
    assert settings.overlaps(int(real.stage)) == real.overlap_comm
    for field in ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "contiguous_gradients", "reduce_scatter"):
        assert getattr(settings, field) == getattr(real, field), field
    for field in ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance"):
        assert getattr(settings, f"stage3_{field}") == getattr(real, field), field
    for part in ("offload_optimizer", "offload_param"):
        ours, theirs = getattr(settings, part), getattr(real, part)
        if ours is None:
            assert theirs is None or theirs.device == "none"
            continue
        assert ours.device == theirs.device
        for key in ("buffer_count", "pin_memory", "buffer_size", "max_in_cpu", "fast_init", "pipeline_read", "ratio"):
            assert getattr(ours, key, None) == getattr(theirs, key, None), key


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


def test_every_key_and_default_of_the_sections_is_that_of_deepspeed():
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    offload = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    precision = pytest.importorskip("deepspeed.runtime.precision_config")
    leaves = pytest.importorskip("deepspeed.runtime.zero.leaf_module_config")
    pairs = [
        (schema.ZeroSection, config.DeepSpeedZeroConfig),
        (schema.OffloadParamSection, offload.DeepSpeedZeroOffloadParamConfig),
        (schema.OffloadOptimizerSection, offload.DeepSpeedZeroOffloadOptimizerConfig),
        (schema.LeafModuleSection, leaves.DeepSpeedZeroLeafModuleConfig),
        (schema.Fp16Section, precision.DeepSpeedFP16Config),
        (schema.Bf16Section, precision.DeepSpeedBF16Config),
    ]
    for ours, theirs in pairs:
        assert set(ours.model_fields) == set(theirs.model_fields), ours
        for name, field in ours.model_fields.items():
            assert field.alias == theirs.model_fields[name].alias, name
            if name != "leaf_module":
                assert _plain(field.default) == _plain(theirs.model_fields[name].get_default(call_default_factory=True)), name


def test_every_removed_key_of_deepspeed_is_known_here():
    config = pytest.importorskip("deepspeed.runtime.config")

    assert set(schema.REMOVED) == set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert set(schema.REMOVED_ZERO) == set(config._REMOVED_ZERO_CONFIG_KEYS)


def test_defaults_of_the_settings_are_those_of_the_file():
    section = schema.ZeroSection()
    for field in DeepSpeedSettings.__dataclass_fields__:
        own = field.removeprefix("stage3_")
        if own in schema.ZeroSection.model_fields:
            default = LeafModules() if field == "leaf_module" else getattr(section, own)
            assert getattr(DeepSpeedSettings(), field) == default, field
    for made, part in ((OffloadOptimizer, schema.OffloadOptimizerSection), (OffloadParam, schema.OffloadParamSection)):
        for field in set(made.__dataclass_fields__) - {"device"}:
            assert getattr(made(), field) == getattr(part(), field), field


@pytest.mark.parametrize(
    ("sizes", "gpus", "expected"),
    [
        ({"train_batch_size": 64}, 8, (8, 1)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 8, (2, 4)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 8, (4, 2)),
        ({"train_micro_batch_size_per_gpu": 3}, 8, (3, 1)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, 8, (3, 5)),
        ({"train_batch_size": 48, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 8, (2, 3)),
        ({"train_batch_size": 64}, 6, None),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 3}, 8, None),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 8, None),
    ],
    ids=str,
)
def test_batch_sizes_are_split_as_deepspeed_splits_them(engine, monkeypatch, sizes, gpus, expected):
    from deepspeed.runtime import config

    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda: gpus)
    if expected is None:
        with pytest.raises(AssertionError):
            engine(dict(sizes))
        with pytest.raises(UserError, match=r"train_batch_size 64 .*--gpus"):
            ask(sizes, gpus=gpus)
        return
    real = engine(dict(sizes))

    asked = ask(sizes, gpus=gpus)

    assert (asked["micro_batch_size"], asked["grad_accum_steps"]) == expected
    assert expected == (real.train_micro_batch_size_per_gpu, real.gradient_accumulation_steps)


def test_auto_follows_the_hidden_size_as_the_trainer_fills_it():
    asked = ask(TRAINER, {"hidden_size": 64}, precision="bf16-mixed", micro_batch_size=2, gpus=4)

    settings = asked["deepspeed"]
    assert settings.reduce_bucket_size == 64 * 64
    assert settings.stage3_prefetch_bucket_size == int(0.9 * 64 * 64) == 3686
    assert settings.stage3_param_persistence_threshold == 640
    assert settings.zero_init
    assert settings.optimizer_groups == "decay"
    assert asked["clip_grad_norm"] is True
    assert (asked["micro_batch_size"], asked["grad_accum_steps"]) == (2, 1)


def test_below_stage_3_only_the_reduce_bucket_follows_the_hidden_size():
    data = {**TRAINER, "zero_optimization": {**TRAINER["zero_optimization"], "stage": 2}}

    settings = ask(data, {"hidden_size": 64}, micro_batch_size=1)["deepspeed"]

    assert settings.reduce_bucket_size == 4096
    assert settings.stage3_prefetch_bucket_size == 50_000_000
    assert not settings.zero_init


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"model_type": "gpt2", "n_embd": 768}, 768),
        ({"model_type": "t5", "d_model": 512}, 512),
        ({"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": 128}}, 128),
        ({"model_type": "segformer", "hidden_sizes": [32, 64, 256, 160]}, 256),
        ({"model_type": "bart", "d_model": 1024}, 1024),
        ({"model_type": "gpt2"}, 768),  # the family's default
    ],
)
def test_the_hidden_size_is_found_where_the_trainer_finds_it(config, width):
    assert ask(TRAINER, config, micro_batch_size=1)["deepspeed"].reduce_bucket_size == width * width


def test_auto_without_a_hidden_size_is_a_mistake_that_says_which_key():
    with pytest.raises(UserError, match=r"zero_optimization\.reduce_bucket_size .auto."):
        ask(TRAINER, None, micro_batch_size=1)


def test_auto_batch_sizes_are_those_of_the_trainer_and_said():
    asked = ask(TRAINER, {"hidden_size": 64})

    assert asked["micro_batch_size"] == 8
    assert any("per_device_train_batch_size" in note for note in asked["notes"])


def test_an_auto_that_nobody_fills_keeps_the_default_and_is_said():
    asked = ask(zero(stage=3, stage3_max_live_parameters="auto"))

    assert asked["deepspeed"].stage3_max_live_parameters == 1_000_000_000
    assert any("stage3_max_live_parameters" in note and "nobody fills it" in note for note in asked["notes"])


def test_an_unknown_top_level_key_is_a_warning_with_the_nearest_key():
    notes = ask({**BASE, "gradient_accumulation_step": 4})["notes"]

    assert any("'gradient_accumulation_step'" in note and "gradient_accumulation_steps" in note for note in notes)


@pytest.mark.parametrize(
    ("said", "leaves"),
    [
        (None, LeafModules()),
        ({}, LeafModules()),
        ({"classes": []}, LeafModules(classes=())),
        ({"classes": "MyBlock", "name_suffixes": ["mlp"]}, LeafModules(classes=("MyBlock",), name_suffixes=("mlp",))),
    ],
)
def test_leaf_modules_are_read_as_deepspeed_reads_them(said, leaves):
    assert ask(zero(stage=3, leaf_module=said))["deepspeed"].leaf_module == leaves


def test_muon_s_method_is_read_and_an_unknown_one_refused():
    def muon(**params):
        return ask({**zero(stage=2), "optimizer": {"type": "Muon", "params": params}})

    assert muon()["deepspeed"].muon == "gram"
    assert muon(ns_method="standard")["deepspeed"].muon == "standard"
    with pytest.raises(UserError, match=r"optimizer\.params\.ns_method"):
        muon(ns_method="newton")
    with pytest.raises(CannotTell, match="torch_adam of Muon"):
        muon(torch_adam=True)


@pytest.mark.parametrize("rest", [{}, {"gradient_clipping": 1.0}, {"gradient_clipping": "auto"}])
def test_without_norm_no_gradient_is_clipped(rest):
    with pytest.raises(UserError, match=r"compute_grad_norm is false: it needs gradient_clipping 0"):
        ask({**zero(stage=2, compute_grad_norm=False), **rest})

    off = {**zero(stage=2, compute_grad_norm=False), "gradient_clipping": 0}
    assert ask(off)["deepspeed"].compute_grad_norm is False


def test_an_unknown_key_of_leaf_modules_is_refused():
    with pytest.raises(UserError, match=r"zero_optimization\.leaf_module\.class"):
        ask(zero(stage=3, leaf_module={"class": ["x"]}))


def test_keys_without_effect_are_said_in_one_note():
    notes = ask({**BASE, "wall_clock_breakdown": True, "tensorboard": {"enabled": True}})["notes"]

    assert "ds.json: without effect on memory: wall_clock_breakdown, tensorboard" in notes


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (zero(stage=2, zenflow={"topk_ratio": 0.1}), "zero_optimization.zenflow.update_interval"),
        (zero(stage=3, zero_quantized_weights=True), "zero_optimization.zero_quantized_weights"),
        (zero(stage=3, offload_optimizer={"device": "cpu", "super_offload": True}), "super_offload"),
        ({**BASE, "tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"),
        ({**BASE, "sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({**BASE, "hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled"),
        (
            {
                **zero(stage=2, offload_optimizer={"device": "cpu"}),
                "optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": False}},
            },
            "optimizer.params.fp32_optimizer_states",
        ),
    ],
    ids=str,
)
def test_what_is_not_modelled_is_said_by_its_key_and_not_ignored(data, key):
    with pytest.raises(CannotTell, match=key.replace(".", r"\.")):
        ask(data)


@pytest.mark.parametrize(
    "data",
    [
        {**zero(stage=2), "optimizer": {"type": "Muon", "params": {"ns_method": "standard"}}},
        zero(stage=3, zero_quantized_weights=False, leaf_module=None),
        {**BASE, "tensor_parallel": {"autotp_size": 1}, "hybrid_engine": {"enabled": False}, "sequence_parallel_size": 1},
        {**BASE, "compile": {"deepcompile": False}, "data_efficiency": {"enabled": False}},
    ],
    ids=str,
)
def test_what_is_not_modelled_but_switched_off_is_no_obstacle(data):
    assert ask(data)["micro_batch_size"] == 1


@pytest.mark.parametrize(
    ("data", "options", "both"),
    [
        (zero(stage=3), {"strategy": "zero2"}, ("--strategy zero2", "zero_optimization.stage")),
        ({**BASE, "bf16": {"enabled": True}}, {"precision": "fp32"}, ("--precision fp32", "bf16.enabled")),
        ({**BASE, "bf16": {"enabled": False}}, {"precision": "bf16-mixed"}, ("--precision bf16-mixed", "bf16.enabled")),
        (zero(stage=2, offload_optimizer={"device": "none"}), {"offload": ("optimizer",)}, ("--offload optimizer", "offload_")),
    ],
    ids=str,
)
def test_an_option_against_what_the_engine_decides_is_a_mistake_naming_both(data, options, both):
    with pytest.raises(UserError) as error:
        ask(data, **options)

    assert all(part in str(error.value) for part in both), error.value


@pytest.mark.parametrize(
    ("data", "options", "both"),
    [
        (BASE, {"micro_batch_size": 4}, ("--micro-batch 4", "train_micro_batch_size_per_gpu 1")),
        ({**BASE, "gradient_clipping": 0}, {"clip_grad_norm": True}, ("--clip-grad-norm", "gradient_clipping")),
        ({**BASE, "optimizer": {"type": "Adam"}}, {"optimizer": "sgd"}, ("--optimizer sgd", "optimizer.type")),
    ],
    ids=str,
)
def test_any_other_option_goes_before_the_file_and_that_is_said(data, options, both):
    asked = ask(data, **options)

    assert all(asked[name] == value for name, value in options.items())
    assert any(all(part in note for part in both) for note in asked["notes"]), asked["notes"]


def test_another_micro_batch_keeps_the_samples_of_a_step():
    data = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}

    asked = ask(data, micro_batch_size=8, gpus=4)

    assert (asked["micro_batch_size"], asked["grad_accum_steps"]) == (8, 2)


def test_an_option_that_repeats_the_file_is_no_mistake():
    asked = ask({**zero(stage=3), "bf16": {"enabled": True}}, strategy="zero3", precision="bf16-mixed", micro_batch_size=1)

    assert (asked["strategy"], asked["precision"]) == ("zero3", "bf16-mixed")


def test_what_the_file_leaves_open_is_the_options():
    asked = ask(zero(stage=2), precision="fp16-mixed", optimizer="sgd", offload=("optimizer",), seq_len=128)

    assert (asked["precision"], asked["optimizer"], asked["offload"], asked["seq_len"]) == (
        "fp16-mixed",
        "sgd",
        ("optimizer",),
        128,
    )


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "Adam"}, ("adamw", "default")),  # DeepSpeed's own FusedAdam
        ({"type": "Adam", "params": {"adam_w_mode": False}}, ("adam", "default")),
        ({"type": "AdamW", "params": {"torch_adam": True}}, ("adamw", "foreach")),
        ({"type": "AdamW", "params": {"torch_adam": True, "fused": True}}, ("adamw", "fused")),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, ("sgd-momentum", None)),
        ({"type": "RMSprop"}, ("rmsprop", None)),
    ],
    ids=str,
)
def test_the_optimizer_is_the_one_that_the_engine_would_make(optimizer, expected):
    asked = ask({**BASE, "optimizer": optimizer})

    assert (asked["optimizer"], asked.get("optimizer_impl")) == expected


def test_torch_adam_on_the_host_is_not_deepspeeds_own():
    optimizer = {"type": "AdamW", "params": {"torch_adam": True, "foreach": False}}

    own = ask(zero(stage=2, offload_optimizer={"device": "cpu"}))
    torch = ask({**zero(stage=2, offload_optimizer={"device": "cpu"}), "optimizer": optimizer})

    assert (own.get("optimizer_impl"), own["deepspeed"].zero_force_ds_cpu_optimizer) == (None, True)
    assert (torch["optimizer_impl"], torch["deepspeed"].zero_force_ds_cpu_optimizer) == ("for-loop", False)


def test_an_optimizer_that_zero_has_not_tested_is_taken_where_the_file_allows_it():
    data = {**zero(stage=2), "optimizer": {"type": "SGD"}, "zero_allow_untested_optimizer": True}

    assert ask(data)["optimizer"] == "sgd"


def test_the_optimizers_that_zero_has_tested_are_those_of_deepspeed():
    utils = pytest.importorskip("deepspeed.runtime.zero.utils")
    tested = {kind.__name__.removeprefix("DeepSpeedCPU").removeprefix("ZenFlowCPU").removeprefix("Fused").lower()
              for kind in utils.ZERO_SUPPORTED_OPTIMIZERS}  # fmt: skip

    assert schema.TESTED_WITH_ZERO - {"muadam", "muadamw", "muon"} == tested - {"muonwithauxadam"}


def test_torch_autocast_keeps_fp32_parameters():
    assert ask({**BASE, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}})["precision"] == "bf16-autocast"


def test_nvme_below_stage_3_is_host_memory_as_the_engine_has_it():
    asked = ask(zero(stage=2, offload_optimizer={"device": "nvme", "nvme_path": "/n"}))

    assert asked["offload"] == ("optimizer",)
    assert asked["deepspeed"].offload_optimizer == OffloadOptimizer()
    assert any("host memory" in note for note in asked["notes"])


def test_hpz_must_divide_the_gpus():
    data = zero(stage=3, zero_hpz_partition_size=4)

    assert ask(data, gpus=8)["deepspeed"].zero_hpz_partition_size == 4
    with pytest.raises(UserError, match=r"zero_hpz_partition_size 4 does not divide the 6 GPUs"):
        ask(data, gpus=6)


def test_deprecated_keys_are_read_and_said():
    asked = ask(zero(stage=3, cpu_offload=True, cpu_offload_param=True))

    assert asked["offload"] == ("optimizer", "param")
    assert sum("is deprecated" in note for note in asked["notes"]) == 2
