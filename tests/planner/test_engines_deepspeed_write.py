"""ds_config.json, out: the real DeepSpeed reads the same numbers, and reading it back asks the same question."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memplan.errors import CannotTell
from memplan.planner.api import make_request
from memplan.planner.engines.deepspeed_json import read
from memplan.planner.engines.deepspeed_write import deepspeed_config, engine_config
from memplan.planner.engines.imported import apply
from memplan.planner.predict import optimizer_impl
from memplan.planner.strategies.deepspeed_settings import DeepSpeedSettings, LeafModules, OffloadOptimizer, OffloadParam

_ELEMENTS = st.integers(1, 10**10)
_DTYPES = st.sampled_from([None, "float32", "bfloat16", "float16"])


def base(**options):
    return make_request("openai-community/gpt2", "a100-80gb", seq_len=16, **{"precision": "bf16-mixed", **options})


@pytest.fixture(autouse=True)
def _environment():
    """transformers and accelerate leave variables behind."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module")
def real():
    """The real `DeepSpeedConfig` in a world of 4."""
    config = pytest.importorskip("deepspeed.runtime.config")
    patch = pytest.MonkeyPatch()
    patch.setattr(config.dist, "get_rank", lambda: 0)
    patch.setattr(config.dist, "get_world_size", lambda: 4)
    patch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    yield config.DeepSpeedConfig
    patch.undo()


def _device(nvme):
    return {"device": "nvme", "nvme_path": "/n"} if nvme else {"device": "cpu", "nvme_path": None}


@st.composite
def _questions(draw):
    stage = draw(st.integers(0, 3))
    precision = draw(st.sampled_from(["fp32", "bf16-mixed", "fp16-mixed"]))
    masters = stage > 0 and precision == "bf16-mixed" and draw(st.booleans())
    optimizer = param = None
    if stage and draw(st.booleans()):
        optimizer = OffloadOptimizer(
            **_device(stage == 3 and draw(st.booleans())),
            buffer_count=draw(st.integers(0, 9)),
            pin_memory=draw(st.booleans()),
            pipeline_read=draw(st.booleans()),
            pipeline_write=draw(st.booleans()),
            fast_init=draw(st.booleans()),
            ratio=draw(st.sampled_from([1.0, 0.25])) if stage == 3 else 1.0,
        )
    if stage == 3 and draw(st.booleans()):
        param = OffloadParam(
            **_device(draw(st.booleans())),
            buffer_count=draw(st.integers(0, 9)),
            buffer_size=draw(_ELEMENTS),
            max_in_cpu=draw(_ELEMENTS),
        )
    names = ["adamw", "adam", "adamw-amsgrad", "sgd", "sgd-momentum", "rmsprop-momentum", "adagrad"]
    name = draw(st.sampled_from(names))
    knobs = DeepSpeedSettings(
        reduce_bucket_size=draw(_ELEMENTS),
        allgather_bucket_size=draw(_ELEMENTS),
        overlap_comm=draw(st.sampled_from([None, True, False])),
        contiguous_gradients=draw(st.booleans()),
        reduce_scatter=draw(st.booleans()),
        round_robin_gradients=draw(st.booleans()),
        sub_group_size=draw(_ELEMENTS),
        stage3_prefetch_bucket_size=draw(_ELEMENTS),
        stage3_max_live_parameters=draw(_ELEMENTS),
        stage3_max_reuse_distance=draw(_ELEMENTS),
        stage3_param_persistence_threshold=draw(_ELEMENTS),
        stage3_model_persistence_threshold=draw(st.sampled_from([sys.maxsize, 10**6])),
        zero_hpz_partition_size=draw(st.sampled_from([1, 2])),
        use_multi_rank_bucket_allreduce=draw(st.booleans()),
        parameter_alignment=draw(st.booleans()),
        stage3_allgather_sequential=draw(st.booleans()),
        stage3_use_all_reduce_for_fetch_params=draw(st.booleans()),
        memory_efficient_linear=draw(st.booleans()),
        leaf_module=draw(st.sampled_from([LeafModules(), LeafModules(classes=(), names=("model.layers.0",))])),
        offload_optimizer=optimizer,
        offload_param=param,
        grad_accum_dtype=draw(_DTYPES) if stage else None,  # there DeepSpeed takes the model's own alone
        communication_data_type=draw(_DTYPES),
        bf16_master_weights_and_grads=masters,
        bf16_optimizer_states=masters and draw(st.booleans()),
        zero_force_ds_cpu_optimizer=optimizer is None or name != "adamw-amsgrad",  # DeepSpeedCPUAdam has no amsgrad
    )
    return {
        "strategy": f"zero{stage}",
        "precision": precision,
        "deepspeed": knobs,
        "micro_batch_size": draw(st.integers(1, 64)),
        "grad_accum_steps": draw(st.integers(1, 16)),
        "clip_grad_norm": draw(st.booleans()),
        "optimizer": name,
        "optimizer_impl": draw(st.sampled_from(["default", "foreach", "for-loop"])),
    }


def _kernels(request):
    impl = optimizer_impl(request)
    return "foreach" if impl == "default" else impl  # torch's own choice on a GPU


def _offload(knobs):
    parts = (("optimizer", knobs.offload_optimizer), ("param", knobs.offload_param))
    return tuple(name + (":nvme" if section.device == "nvme" else "") for name, section in parts if section is not None)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(question=_questions())
def test_what_is_written_is_read_by_deepspeed_and_read_back_to_the_same_question(real, question):
    request = base().but(**question, gpus=4, offload=_offload(question["deepspeed"]))

    text = json.dumps(deepspeed_config(request).config)

    theirs = real(json.loads(text))
    assert theirs.train_micro_batch_size_per_gpu == request.micro_batch_size
    assert theirs.gradient_accumulation_steps == request.loop.grad_accum_steps
    assert theirs.bfloat16_config.enabled == (request.precision == "bf16-mixed")
    assert theirs.float16_config.enabled == (request.precision == "fp16-mixed")
    assert theirs.zero_config.overlap_comm == request.deepspeed.overlaps(int(request.strategy[-1]))
    assert theirs.zero_config.param_persistence_threshold == request.deepspeed.stage3_param_persistence_threshold
    asked = apply(read(json.loads(text), "ds.json"), {"gpus": 4})
    back = base().but(
        **{
            k: asked[k]
            for k in ("strategy", "deepspeed", "micro_batch_size", "grad_accum_steps", "clip_grad_norm", "optimizer")
        },
        gpus=4,
        precision=asked.get("precision", "fp32"),
        offload=asked.get("offload", ()),
        optimizer_impl=asked.get("optimizer_impl", "default"),
    )
    assert back.deepspeed == request.deepspeed
    same = ("strategy", "precision", "micro_batch_size", "offload", "optimizer", "loop")
    assert {k: getattr(back, k) for k in same} == {k: getattr(request, k) for k in same}
    if not request.offload:
        assert _kernels(back) == _kernels(request)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(question=_questions())
def test_the_trainers_file_with_the_same_options_asks_the_same(question):
    knobs = dataclasses.replace(question["deepspeed"], zero_init=question["strategy"] == "zero3")
    request = base().but(**{**question, "deepspeed": knobs}, gpus=4, offload=_offload(knobs))

    config = deepspeed_config(request, trainer=True).config

    explicit = {k: question[k] for k in ("precision", "micro_batch_size", "grad_accum_steps")}
    asked = apply(read(config, "ds.json"), {**explicit, "gpus": 4})
    assert asked["deepspeed"] == knobs
    assert {k: asked[k] for k in explicit} == explicit
    assert "auto" not in json.dumps(config["zero_optimization"])


@pytest.mark.parametrize("groups", ["one", "decay"])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_trainer_itself_fills_the_file_and_deepspeed_reads_the_result(real, tmp_path, stage, groups):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    knobs = DeepSpeedSettings(reduce_bucket_size=1000, optimizer_groups=groups, zero_init=stage == 3)
    request = base(micro_batch_size=3, grad_accum_steps=2).but(strategy=f"zero{stage}", deepspeed=knobs, gpus=4)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(deepspeed_config(request, trainer=True).config))
    try:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            bf16=True,
            use_cpu=True,
            deepspeed=str(path),
        )
        filled = arguments.hf_deepspeed_config
        filled.config.pop("train_batch_size")  # of a world of 1 here
        filled.trainer_config_finalize(arguments, type("Model", (), {"config": None})(), 10)
        theirs = real(filled.config)
    finally:
        transformers.integrations.unset_hf_deepspeed_config()

    assert theirs.zero_config.reduce_bucket_size == 1000
    assert (theirs.train_micro_batch_size_per_gpu, theirs.gradient_accumulation_steps) == (3, 2)
    assert theirs.bfloat16_config.enabled
    assert (theirs.optimizer_name is None) == (groups == "decay")


def test_offload_of_the_command_line_is_written_with_deepspeeds_defaults():
    request = base().but(strategy="zero3", gpus=4, offload=("optimizer", "param:nvme"))

    zero = deepspeed_config(request).config["zero_optimization"]

    assert zero["offload_optimizer"]["device"] == "cpu"
    assert zero["offload_param"]["device"] == "nvme"
    assert zero["offload_param"]["nvme_path"]
    assert zero["offload_param"]["max_in_cpu"] == 1_000_000_000


def test_an_optimizer_that_deepspeed_does_not_make_is_left_to_the_program_and_said():
    written = deepspeed_config(base().but(strategy="zero2", gpus=4, optimizer="adafactor"))

    assert "optimizer" not in written.config
    assert any("adafactor" in note for note in written.notes)


@pytest.mark.parametrize(
    ("changes", "said"), [({"precision": "bf16"}, "fp32 masters"), ({"strategy": "fsdp2"}, "no ds_config")]
)
def test_what_deepspeed_has_no_words_for_is_not_written(changes, said):
    with pytest.raises(CannotTell, match=said):
        deepspeed_config(base().but(strategy="zero2", gpus=4).but(**changes))


def test_configurations_that_the_real_engine_judges_read_to_the_settings_that_the_prediction_takes():
    cases = pytest.importorskip("memplan.validator.zero_cases").CASES
    assert len(cases) > 20
    for case in cases:
        data = {**case.config(), "train_micro_batch_size_per_gpu": 1}
        for part in ("offload_optimizer", "offload_param"):
            if data["zero_optimization"].get(part, {}).get("device") == "nvme":
                data["zero_optimization"][part]["nvme_path"] = "/n"
        asked = apply(read(data, case.name), {"gpus": case.world_size})
        expected = {"fp32": None, "bf16": "bf16-mixed", "fp16": "fp16-mixed"}[case.precision]

        assert (asked["strategy"], asked.get("precision")) == (f"zero{case.stage}", expected), case.name
        assert _without_code(asked["deepspeed"]) == _without_code(case.settings), case.name
        again = {**engine_config(case.settings, case.stage, expected or "fp32"), "train_micro_batch_size_per_gpu": 1}
        again["gradient_clipping"] = 0.0
        if case.settings.muon:
            again["optimizer"] = data["optimizer"]
        if "nvme" not in json.dumps(again):
            assert _without_code(apply(read(again, case.name), {"gpus": case.world_size})["deepspeed"]) == _without_code(
                case.settings
            )


def _without_code(knobs):
    """What a file can say: who makes the model and the optimizer decides the rest; and the NVMe folder is the engine's own."""
    parts = {
        part: dataclasses.replace(section, nvme_path=None)
        for part in ("offload_optimizer", "offload_param")
        if (section := getattr(knobs, part)) is not None
    }
    return dataclasses.replace(knobs, zero_init=False, optimizer_groups="one", **parts)


@pytest.mark.slow
def test_the_real_engine_starts_with_what_is_written_and_makes_the_buckets_it_names(tmp_path):
    pytest.importorskip("deepspeed")
    from memplan.validator.runtimes.deepspeed import EngineCase, run_cases

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 101}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    knobs = [
        (1, DeepSpeedSettings(reduce_bucket_size=20_000, overlap_comm=True)),
        (2, DeepSpeedSettings(reduce_bucket_size=20_000, grad_accum_dtype="float32", round_robin_gradients=True)),
        (3, DeepSpeedSettings(reduce_bucket_size=20_000, sub_group_size=5_000, communication_data_type="float32")),
        (3, DeepSpeedSettings(reduce_bucket_size=30_000, offload_param=OffloadParam())),
    ]
    cases = [
        EngineCase(reference=str(tmp_path), config=engine_config(settings, stage, "bf16-mixed")) for stage, settings in knobs
    ]

    at_start = [marks[0].held for marks in run_cases(cases)]

    assert [held.get("comm_buffer", 0) for held in at_start] == [0, 0, 4 * 20_000, 2 * 30_000]  # stage 3 makes it at once
    assert "pinned param" in at_start[3]
    assert "param" not in at_start[3]
