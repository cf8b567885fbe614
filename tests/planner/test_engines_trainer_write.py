"""accelerate's YAML and TrainingArguments, out: the real classes take them, and reading them back asks the same."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import warnings
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memplan.errors import CannotTell, UserError
from memplan.planner.api import make_request
from memplan.planner.engines import write
from memplan.planner.engines.accelerate_yaml import read as read_accelerate
from memplan.planner.engines.detect import read_config
from memplan.planner.engines.fsdp_config import strategy_of, with_mixed_precision
from memplan.planner.engines.imported import apply
from memplan.planner.engines.trainer_write import accelerate_config, fsdp_of, training_arguments
from memplan.planner.engines.training_args import read as read_arguments
from memplan.planner.strategies.deepspeed_settings import DeepSpeedSettings, OffloadOptimizer
from memplan.planner.strategies.fsdp_settings import FsdpSettings

yaml = pytest.importorskip("yaml")


@pytest.fixture(autouse=True)
def _environment():
    """transformers and accelerate leave variables behind."""
    with mock.patch.dict(os.environ):
        yield


def base(**options):
    return make_request("openai-community/gpt2", "a100-80gb", seq_len=16, **{"precision": "bf16-mixed", **options})


@st.composite
def _fsdp(draw):
    """Settings as accelerate can make them."""
    version = draw(st.sampled_from([1, 2]))
    first = version == 1
    wrap = draw(st.sampled_from(["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]))
    checkpointing, efficient = draw(st.booleans()), draw(st.booleans())
    made = FsdpSettings(
        version=version,
        sharding_strategy=draw(st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]))
        if first
        else "FULL_SHARD",
        reshard_after_forward=None if first else draw(st.booleans()),
        dp_replicate_size=None if first else draw(st.sampled_from([None, 2])),
        backward_prefetch=draw(st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", None])) if first else None,
        forward_prefetch=first and draw(st.booleans()),
        use_orig_params=draw(st.booleans()) if first else True,
        auto_wrap_policy=wrap,
        transformer_layer_cls_to_wrap=("Block", "Other") if wrap == "TRANSFORMER_BASED_WRAP" and draw(st.booleans()) else (),
        min_num_params=draw(st.integers(1, 10**9)) if wrap == "SIZE_BASED_WRAP" else 100_000_000,
        wrap_embeddings=not first,
        ignored_modules=draw(st.sampled_from([None, "lm_head"])),
        cpu_offload=draw(st.booleans()),
        cpu_ram_efficient_loading=efficient,
        sync_module_states=first and (efficient or draw(st.booleans())),
        activation_checkpointing=checkpointing,
        activation_checkpointing_offload=checkpointing and not first and draw(st.booleans()),
    )
    return with_mixed_precision(made, draw(st.sampled_from(["no", "bf16", "fp16"])))


def _precision(fsdp):
    return {None: "fp32", "bfloat16": "bf16-mixed", "float16": "fp16-mixed"}[fsdp.param_dtype]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fsdp=_fsdp())
def test_fsdp_in_accelerates_yaml_reads_back_to_the_same_settings(fsdp):
    request = base().but(strategy=strategy_of(fsdp), gpus=4, precision=_precision(fsdp), fsdp=fsdp)

    text = yaml.safe_dump(accelerate_config(request).config)

    asked = apply(read_accelerate(yaml.safe_load(text), "acc.yaml"), {})
    assert asked["fsdp"] == fsdp
    assert (asked["strategy"], asked["gpus"], asked.get("precision", "fp32")) == (request.strategy, 4, request.precision)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fsdp=_fsdp(), micro=st.integers(1, 64), steps=st.integers(1, 16), clip=st.booleans())
def test_fsdp_in_training_arguments_reads_back_to_the_same_settings(fsdp, micro, steps, clip):
    fsdp = dataclasses.replace(
        fsdp,
        sharding_strategy="FULL_SHARD",
        dp_replicate_size=None,
        ignored_modules=None,
        activation_checkpointing_offload=False,
    )
    if fsdp.auto_wrap_policy != "SIZE_BASED_WRAP":
        fsdp = dataclasses.replace(fsdp, min_num_params=0)
    request = base(micro_batch_size=micro, grad_accum_steps=steps, clip_grad_norm=clip, optimizer_impl="fused")
    request = request.but(strategy=strategy_of(fsdp), gpus=4, precision=_precision(fsdp), fsdp=fsdp)

    text = json.dumps(training_arguments(request).config)

    asked = apply(read_arguments(json.loads(text), "args.json"), {"gpus": 4})
    assert asked["fsdp"] == fsdp
    assert (asked["micro_batch_size"], asked["grad_accum_steps"], asked["clip_grad_norm"]) == (micro, steps, clip)
    assert (asked["optimizer"], asked["optimizer_impl"]) == ("adamw", "fused")


CONFIGURATIONS = (write.ACCELERATE, write.ARGUMENTS, write.DEEPSPEED, write.DEEPSPEED_TRAINER)
QUESTIONS = [
    {"strategy": "single", "precision": "fp32", "gpus": 1},
    {"strategy": "single", "precision": "bf16-autocast", "gpus": 1, "recompute": "full"},
    {"strategy": "ddp", "precision": "fp32", "gpus": 4, "optimizer": "sgd"},
    {"strategy": "fsdp2", "precision": "bf16-mixed", "gpus": 4, "recompute": "full"},
    {"strategy": "fsdp2", "precision": "fp32", "gpus": 8, "nodes": 2},
    {"strategy": "zero1", "precision": "fp16-mixed", "gpus": 4},
    {"strategy": "zero2", "precision": "bf16-mixed", "gpus": 4, "recompute": "selective-layer:2"},
    {
        "strategy": "zero3",
        "precision": "bf16-mixed",
        "gpus": 8,
        "deepspeed": DeepSpeedSettings(zero_init=True, reduce_bucket_size=10**6, offload_optimizer=OffloadOptimizer()),
        "offload": ("optimizer",),
    },
]


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_every_file_of_a_folder_asks_the_question_it_was_written_for(tmp_path, monkeypatch, question):
    monkeypatch.chdir(tmp_path)
    request = base(micro_batch_size=3, grad_accum_steps=2, clip_grad_norm=True).but(**question)

    files = write.write_folder(request, "plan")

    assert sorted(os.listdir("plan")) == sorted(files.texts)
    for name in (n for n in files.texts if n in CONFIGURATIONS):
        explicit = {"gpus": request.gpus, "precision": request.precision}
        if name in (write.ACCELERATE, write.DEEPSPEED_TRAINER):
            explicit |= {"micro_batch_size": 3, "grad_accum_steps": 2}
        asked = apply(read_config(os.path.join("plan", name)), explicit)
        assert asked["strategy"] == request.strategy, name
        assert asked.get("precision") == request.precision, name
        assert (asked["micro_batch_size"], asked["grad_accum_steps"]) == (3, 2), name
        if request.strategy.startswith("zero"):
            assert asked["deepspeed"].offload_optimizer == (request.deepspeed or DeepSpeedSettings()).offload_optimizer, name
            assert asked["deepspeed"].reduce_bucket_size == (request.deepspeed or DeepSpeedSettings()).reduce_bucket_size, name
        if name == write.ARGUMENTS and request.strategy != "fsdp2" and write.RECOMPUTE not in files.texts:
            assert asked.get("recompute", "none") == request.recompute


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_transformers_and_accelerate_take_what_is_written(tmp_path, monkeypatch, question):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    pytest.importorskip("deepspeed")
    from accelerate.commands.config.config_args import load_config_from_file

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    files = write.write_folder(base(micro_batch_size=3, grad_accum_steps=2).but(**question), "plan")
    arguments = json.loads(files.texts[write.ARGUMENTS])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments["fp16"] = False  # a CPU has none
            if "deepspeed" in arguments:
                arguments["deepspeed"] = os.path.join("plan", arguments["deepspeed"])
            real = transformers.TrainingArguments(use_cpu=True, **arguments)
        cluster = load_config_from_file(os.path.join("plan", write.ACCELERATE))
    finally:
        transformers.integrations.unset_hf_deepspeed_config()

    assert real.per_device_train_batch_size == 3
    assert (cluster.num_processes, cluster.num_machines) == (question["gpus"], question.get("nodes", 1))
    assert bool(real.deepspeed) == question["strategy"].startswith("zero")
    assert bool(real.fsdp) == question["strategy"].startswith("fsdp")


def test_a_folder_that_is_there_is_left_alone_unless_forced(tmp_path):
    request = base(gpus=4, strategy="ddp", precision="fp32")
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "mine.txt").write_text("mine")

    with pytest.raises(UserError, match="is there already"):
        write.write_folder(request, tmp_path / "plan")
    assert os.listdir(tmp_path / "plan") == ["mine.txt"]
    write.write_folder(request, tmp_path / "plan", force=True)

    assert (tmp_path / "plan" / "mine.txt").read_text() == "mine"
    assert (tmp_path / "plan" / write.ACCELERATE).exists()


def test_nothing_is_left_behind_where_a_folder_cannot_be_made(tmp_path):
    with pytest.raises(UserError, match="cannot write"):
        write.write_folder(base(gpus=4, strategy="ddp", precision="fp32"), tmp_path / "none" / "plan")
    assert os.listdir(tmp_path) == []


def test_nothing_is_written_where_the_engine_has_no_words(tmp_path):
    with pytest.raises(CannotTell):
        write.write_folder(base(gpus=4, strategy="zero2").but(precision="bf16"), tmp_path / "plan")
    assert os.listdir(tmp_path) == []


def test_what_the_trainer_cannot_do_is_a_plain_loop_or_refused_with_the_way_out():
    request = base(precision="fp32").but(strategy="release")

    assert write.ARGUMENTS not in write.files_of(request).texts
    with pytest.raises(CannotTell, match=r"the Trainer has no --strategy release\. Use --stack loop"):
        write.files_of(request, "trainer")
    with pytest.raises(UserError, match="--stack 'trainr' is not known"):
        write.files_of(request, "trainr")


def test_what_no_program_of_ours_can_do_leaves_the_configuration_and_says_so():
    files = write.files_of(base(precision="bf16-mixed", strategy="zero3", gpus=2, recompute="every-k:2"))

    assert write.ARGUMENTS in files.texts
    assert write.PROGRAM not in files.texts
    assert not files.launch
    assert any("every-k:2 runs several blocks as one, and --strategy zero3 gathers each by itself" in n for n in files.notes)


@pytest.mark.parametrize("stack", ["trainer", "loop"])
@pytest.mark.parametrize(
    ("recompute", "said"),
    [
        ("keep:0-1=nothing/2=aten.mm@0+aten.mm@3+attention@0/3-11=all",
         {"reentrant": False, "ranges": [
             {"blocks": [0, 1], "keep": {}},
             {"blocks": [2, 2], "keep": {"aten.mm": [0, 3], "attention": [0]}},
             {"blocks": [3, 11], "keep": "all"},
         ]}),
        ("selective-op:max", {"reentrant": False, "ops": {"aten.max": None}}),
        ("selective-layer:3", {"reentrant": False, "every": 3}),
        ("every-k:4", {"reentrant": False, "segment": 4}),
    ],
)  # fmt: skip
def test_what_blocks_keep_is_said_to_the_file_that_does_it(stack, recompute, said):
    files = write.files_of(base(precision="fp32", recompute=recompute), stack)

    assert json.loads(files.texts[write.RUN])["recompute"] == said
    assert 'recompute(model, RUN["recompute"])' in files.texts[write.PROGRAM]
    assert write.RECOMPUTE in files.texts
    assert not files.notes


def test_what_trains_nothing_has_no_program():
    with pytest.raises(CannotTell, match="--mode inference is a program of its own"):
        write.files_of(base(precision="fp32").but(mode="inference"))


def test_what_no_file_can_say_is_said():
    request = base(precision="fp32", attention="eager", frozen=("transformer.wte",))
    alone = dataclasses.replace(request, model=dataclasses.replace(request.model, task="auto"))

    notes = write.files_of(alone).notes

    assert "train.py: --task auto has no loss of its own. Name the task with --task" in notes
    assert "in the program: load the model with attn_implementation='eager'" in notes
    assert "in the program: freeze the parameters that begin with transformer.wte" in notes
    assert "in the program: feed sequences of 16 tokens" in notes
    assert not write.files_of(request).notes  # train.py does it all


def test_a_file_is_no_folder_even_by_force(tmp_path):
    (tmp_path / "plan").write_text("mine")

    with pytest.raises(UserError, match="is there already"):
        write.write_folder(base(gpus=4, strategy="ddp", precision="fp32"), tmp_path / "plan", force=True)
    assert (tmp_path / "plan").read_text() == "mine"


def test_types_that_accelerate_cannot_mix_are_said():
    fsdp = FsdpSettings(param_dtype="bfloat16", reduce_dtype="float32", stored_dtype="float32", wrap_embeddings=True)

    notes = accelerate_config(base().but(strategy="fsdp2", gpus=4, fsdp=fsdp)).notes

    assert any("reduce_dtype float32" in note and "bfloat16" in note for note in notes)


def test_the_plan_of_a_plain_fsdp2_question_shards_every_block():
    fsdp = fsdp_of(base().but(strategy="fsdp2", gpus=4))

    assert (fsdp.version, fsdp.auto_wrap_policy, fsdp.param_dtype, fsdp.stored_dtype) == (
        2,
        "TRANSFORMER_BASED_WRAP",
        "bfloat16",
        "float32",
    )


def test_what_accelerate_has_no_words_for_is_not_written():
    with pytest.raises(CannotTell, match="reshard_after_forward 2"):
        accelerate_config(base().but(strategy="fsdp2", gpus=4, fsdp=FsdpSettings(reshard_after_forward=2)))


@pytest.mark.parametrize("wrong", [{"dp_replicate_size": 0}, {"min_num_params": -1}, {"reshard_after_forward": -2}], ids=str)
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        FsdpSettings(**wrong)


@pytest.mark.parametrize(
    ("fsdp", "reshards", "copies"),
    [
        (FsdpSettings(), True, 1),
        (FsdpSettings(reshard_after_forward=False), False, 1),
        (FsdpSettings(version=1, sharding_strategy="SHARD_GRAD_OP"), False, 1),
        (FsdpSettings(version=1, sharding_strategy="HYBRID_SHARD"), True, 4),
        (FsdpSettings(version=1, sharding_strategy="HYBRID_SHARD", dp_replicate_size=2), True, 2),
        (FsdpSettings(dp_replicate_size=2), True, 2),
    ],
    ids=str,
)
def test_what_is_resharded_and_how_often_the_model_is_there(fsdp, reshards, copies):
    assert (fsdp.reshards, fsdp.replicas(nodes=4)) == (reshards, copies)
