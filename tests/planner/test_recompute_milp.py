"""Selective recompute: the program finds the best policy, the simulation holds it to its limit, and a real run agrees."""

import random
from dataclasses import replace
from itertools import product

import pytest
from memplan.errors import UserError
from memplan.planner.api import fits, make_request
from memplan.planner.predict import predict
from memplan.planner.recompute.blocks import Block, Call
from memplan.planner.recompute.milp import Moment, recompute_s, solve
from memplan.planner.recompute.policy import Policy
from memplan.planner.recompute.selective import resolve
from memplan.planner.trace.source import TraceSource
from memplan.validator.api import request_for, run
from memplan.validator.zoo import find

TEXT = "keep:0-1=nothing/2=aten.mm@0+attention@1/3=all"
TRACES = TraceSource()
EXPANDABLE = "expandable_segments:True"  # so that what is compared is tensors, not holes between them


def question(model, recompute="none", gpu="a100-80gb", **options):
    return make_request(
        model, gpu, recompute=recompute, **{"precision": "bf16", "micro_batch_size": 8, "seq_len": 512, **options}
    )


# -- the text of a policy ----------------------------------------------------------------------------------------------------


def test_a_policy_is_read_back_as_it_was_written():
    policy = Policy.parse(TEXT)
    assert policy.blocks == (frozenset(), frozenset(), frozenset({("aten.mm", 0), ("attention", 1)}), None)
    assert policy.text == TEXT


@pytest.mark.parametrize("text", ["keep:", "keep:1=all", "keep:0=all/2=all", "keep:0=mm", "keep:0-2", "selective:much"])
def test_a_policy_that_says_nothing_clear_is_refused_with_an_example(text):
    with pytest.raises(UserError) as error:
        question("openai-community/gpt2", text).check()
    assert "rite for example" in str(error.value)


def test_a_policy_for_another_number_of_blocks_is_refused():
    with pytest.raises(UserError, match=r"it speaks of 4 blocks, and transformer\.h has 12"):
        fits("openai-community/gpt2", "a100-80gb", recompute=TEXT, seq_len=64, advice=False)


# -- the program -------------------------------------------------------------------------------------------------------------


def small_problem(seed):
    chance = random.Random(seed)
    calls = tuple(Call((f"aten.op{i}", 0), chance.randint(1, 9), float(chance.randint(1, 9)), True) for i in range(2))
    blocks = [Block(chance.randint(8, 20), calls)] * 3
    if seed % 2:
        blocks[1] = replace(blocks[1], saved_bytes=blocks[1].saved_bytes + 3)
    moments = [
        Moment(3, -1, chance.randint(1, 5), 0),
        *(Moment(b, b, chance.randint(1, 20), chance.randint(-3, 15)) for b in range(3)),
    ]
    return blocks, moments, chance.randint(20, 60)


def bytes_at(moment, blocks, kept):
    held = 0
    for block, keeps in zip(blocks[: moment.above], kept, strict=False):
        held += block.saved_bytes if keeps is None else sum(c.nbytes for c in block.calls if c.op in keeps)
    own = moment.own >= 0 and kept[moment.own] is not None
    return moment.fixed_bytes + held + (moment.extra_bytes if own else 0)


@pytest.mark.parametrize("seed", range(25))
def test_no_other_policy_is_cheaper(seed):
    blocks, moments, limit = small_problem(seed)
    ways = [
        None,
        *(
            frozenset(c.op for c, yes in zip(blocks[0].calls, chosen, strict=True) if yes)
            for chosen in product((0, 1), repeat=2)
        ),
    ]
    allowed = [kept for kept in product(ways, repeat=3) if all(bytes_at(m, blocks, kept) <= limit for m in moments)]
    found = solve(blocks, moments, limit)
    if not allowed:
        assert found is None
        return
    assert all(bytes_at(m, blocks, found.policy.blocks) <= limit for m in moments)
    assert found.seconds == pytest.approx(min(recompute_s(blocks, Policy(kept)) for kept in allowed))


# -- models ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        "openai-community/gpt2",
        pytest.param("google-bert/bert-base-uncased", marks=pytest.mark.slow),
        pytest.param("google/vit-base-patch16-224", marks=pytest.mark.slow),
    ],
)
def test_it_is_faster_than_every_second_block_recomputed_at_equal_memory(model):
    sizes = {"alloc_conf": EXPANDABLE, **({"micro_batch_size": 32} if "vit" in model else {})}
    uniform = predict(question(model, "selective-layer:2", **sizes), TRACES)
    chosen = resolve(question(model, f"selective:{uniform.reserved_peak_bytes / 2**30}", **sizes), TRACES)
    assert chosen.prediction.reserved_peak_bytes <= uniform.reserved_peak_bytes
    assert chosen.prediction.time.seconds < uniform.time.seconds


LLAMA_8B = {"gpu": "h200-141gb", "micro_batch_size": 4, "seq_len": 4096}
BERT_LARGE = {"micro_batch_size": 16}


@pytest.mark.parametrize(
    ("model", "sizes", "every"),
    [
        ("openai-community/gpt2", {}, 2),
        ("openai-community/gpt2", {}, 4),
        ("google-bert/bert-large-uncased", BERT_LARGE, 2),
        ("google-bert/bert-large-uncased", BERT_LARGE, 4),
        pytest.param("meta-llama/Llama-3.1-8B", LLAMA_8B, 2, marks=pytest.mark.slow),
    ],
)
def test_it_is_faster_than_segments_of_blocks_at_equal_memory(model, sizes, every):
    sizes = {"alloc_conf": EXPANDABLE, **sizes}
    uniform = predict(question(model, f"every-k:{every}", **sizes), TRACES)
    chosen = resolve(question(model, f"selective:{uniform.reserved_peak_bytes / 2**30}", **sizes), TRACES)
    assert chosen.prediction.reserved_peak_bytes <= uniform.reserved_peak_bytes
    assert chosen.prediction.time.seconds < uniform.time.seconds
    assert chosen.recompute_s < 0.99 * chosen.full_s  # segments recompute all


def test_below_what_a_full_recompute_needs_blocks_are_recomputed_two_by_two():
    uniform = predict(question("openai-community/gpt2", "every-k:2"), TRACES)
    chosen = resolve(question("openai-community/gpt2", f"selective:{uniform.reserved_peak_bytes / 2**30}"), TRACES)
    assert chosen.request.recompute == "every-k:2"


def test_room_for_everything_recomputes_nothing():
    assert resolve(question("openai-community/gpt2", "selective"), TRACES).request.recompute == "none"


def test_less_than_a_full_recompute_needs_is_refused_with_what_it_needs():
    with pytest.raises(UserError, match="with every block recomputed it needs"):
        resolve(question("openai-community/gpt2", "selective:1"), TRACES)


def test_the_answer_says_which_policy_was_chosen():
    sizes = {"micro_batch_size": 8, "seq_len": 512, "precision": "bf16"}
    answer = fits("openai-community/gpt2", "a100-80gb", recompute="selective:4.5", traces=TRACES, advice=False, **sizes)
    assert answer.question["recompute"].startswith("keep:0")
    assert any("selective recompute: of 12 blocks" in said for said in answer.assumptions)
    assert answer.reserved_peak_bytes <= 4.5 * 2**30


@pytest.mark.parametrize(
    ("family", "precision"),
    [pytest.param("llama", "fp32", marks=pytest.mark.slow), ("bert", "bf16-autocast"), ("gpt2", "fp32")],
)
def test_a_real_run_of_the_chosen_policy_has_the_predicted_peak(family, precision):
    spec = find(family).spec()
    sizes = {"micro_batch_size": 64, "seq_len": 64, "precision": precision, "alloc_conf": EXPANDABLE}
    none, full = (predict(question(spec, recompute, **sizes), TRACES).reserved_peak_bytes for recompute in ("none", "full"))
    chosen = resolve(question(spec, f"selective:{(none + full) / 2**31}", **sizes), TRACES)
    assert chosen.request.recompute.startswith("keep:")
    comparison = run(
        request_for(spec, "cpu", **{**sizes, "recompute": chosen.request.recompute, "alloc_conf": ""}),
        "cpu",
        isolated=False,
        traces=TRACES,
    )
    assert comparison.agrees, str(comparison)
