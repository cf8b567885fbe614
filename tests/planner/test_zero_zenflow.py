"""ZenFlow: what is read, written and refused, and how columns are counted.  The zero suite judges the bytes."""

import pytest
from memplan.errors import CannotTell, UserError
from memplan.hardware.catalogue import device as find_device
from memplan.models import load
from memplan.planner.engines.deepspeed_json import read
from memplan.planner.engines.deepspeed_write import engine_config
from memplan.planner.engines.imported import apply
from memplan.planner.loop import LoopFacts
from memplan.planner.request import Request
from memplan.planner.strategies.deepspeed_engine import check, said
from memplan.planner.strategies.deepspeed_settings import DeepSpeedSettings, OffloadOptimizer, ZenFlow
from memplan.planner.strategies.zero_zenflow import selected
from memplan.planner.trace.steptrace import TensorSlot
from memplan.validator import zero_cases, zero_suite

HOST = {"offload_optimizer": {"device": "cpu"}}


def config(stage=2, **zenflow):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **HOST, "zenflow": zenflow},
    }


def ask(data):
    return apply(read(data, "ds.json"), {}, None)


def request(strategy="zero2", grad_accum_steps=4, optimizer="adamw", **settings):
    known = {"offload_optimizer": OffloadOptimizer(), "zenflow": ZenFlow(update_interval=4), **settings}
    return Request(
        model=load("gpt2"), device=find_device("a100-80gb"), strategy=strategy, precision="bf16-mixed", gpus=2,
        optimizer=optimizer,
        loop=LoopFacts(grad_accum_steps=grad_accum_steps), deepspeed=DeepSpeedSettings(**known),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"update_interval": 4}, ZenFlow(update_interval=4)),
        (
            {
                "topk_ratio": 0.2,
                "select_strategy": "step",
                "select_interval": 8,
                "update_interval": 4,
                "full_warm_up_rounds": 2,
            },
            ZenFlow(topk_ratio=0.2, select_strategy="step", select_interval=8, update_interval=4, full_warm_up_rounds=2),
        ),
    ],
)
def test_what_is_written_is_read_again(asked, found):
    settings = ask(config(**asked))["deepspeed"]
    assert settings.zenflow == found
    written = engine_config(settings, 2, "bf16-mixed")["zero_optimization"]["zenflow"]
    assert ask(config(**written))["deepspeed"].zenflow == found


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"select_interval": 4}, "select_interval"),
        ({"select_strategy": "step"}, "select_interval"),
        ({"update_interval": 0}, "update_interval"),
        ({"topk_ratio": 1.0}, "topk_ratio"),
        ({"select_strategy": "often"}, "select_strategy"),
        ({"full_warm_up_rounds": "many"}, "full_warm_up_rounds"),
    ],
)
def test_what_deepspeed_refuses_is_refused(asked, words):
    with pytest.raises(UserError, match=words):
        ask(config(**asked))


@pytest.mark.parametrize(
    "asked",
    [{"update_interval": "auto"}, {"update_interval": 4, "overlap_step": True}, {"update_interval": 4, "offload": True}],
)
def test_what_is_not_modelled_is_said(asked):
    with pytest.raises(CannotTell, match=r"zero_optimization\.zenflow"):
        ask(config(**asked))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"offload_optimizer": None}, UserError, "without an offloaded optimizer"),
        ({"optimizer": "sgd"}, UserError, "own Adam"),
        ({"grad_accum_steps": 2}, UserError, "the same number"),
        ({"zenflow": ZenFlow(select_strategy="step", select_interval=2, update_interval=4)}, UserError, "multiple"),
        ({"strategy": "zero1"}, CannotTell, "stage 1"),
        ({"strategy": "zero3"}, CannotTell, "stage 3"),
        ({"overlap_comm": True}, CannotTell, "overlap_comm"),
        ({"reduce_scatter": False}, CannotTell, "reduce_scatter"),
    ],
    ids=str,
)
def test_a_question_that_cannot_be_answered(changes, error, words):
    with pytest.raises(error, match=words):
        check(request(**changes))


def test_the_answer_says_what_it_covers():
    check(request())
    assert any("ZenFlow" in line for line in said(request()))


def test_columns_are_counted_in_each_cut():
    """A matrix of 4 rows and 10 columns that two ranks share: 17 elements with 4 whole columns, and 23 with 5."""
    matrix = TensorSlot("w", (4, 10), "bfloat16", True, 0, 0)
    found = selected(matrix, [(0, 17), (1, 23)], 1, 0.5)
    assert found.columns == (2, 2)
    assert found.cuts == (8, 8)
    assert found.inside == 20
    assert selected(matrix, [(0, 2), (1, 38)], 0, 0.01).columns == (0, 1)
    assert selected(TensorSlot("b", (10,), "bfloat16", True, 0, 0), [(0, 4), (1, 6)], 0, 0.1).elements == 10


def test_what_is_kept_on_the_gpu(tmp_path):
    """Two states in the model's dtype, a step count, and the numbers of the columns: with one rank nothing is cut."""
    case = zero_cases.ZeroCase(
        stage=2, model="llama", world_size=1, own_adam=True,
        settings=DeepSpeedSettings(reduce_bucket_size=20_000, offload_optimizer=OffloadOptimizer(), zenflow=ZenFlow()),
    )  # fmt: skip
    zero_suite.write_models(tmp_path)
    trace = zero_suite.trace_of(case, tmp_path)
    kept = zero_suite.predicted_marks(zero_suite.ledger_of(case, trace))[-1].held["optimizer_state"]
    matrices = [p.shape for p in trace.params if len(p.shape) == 2]
    vectors = sum(p.numel for p in trace.params if len(p.shape) == 1)
    columns = [max(1, int(0.1 * width)) for _, width in matrices]
    elements = vectors + sum(rows * n for (rows, _), n in zip(matrices, columns, strict=True))
    assert kept == 2 * 2 * elements + 4 * len(trace.params) + 4 * sum(columns)
