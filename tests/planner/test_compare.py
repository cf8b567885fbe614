"""`memplan compare`: what each way keeps, makes and saves; published figures; what is refused and what is shared."""

from __future__ import annotations

import argparse
import json

import pytest
from memplan.errors import UserError
from memplan.planner.advice import max_micro_batch_size
from memplan.planner.api import make_request
from memplan.planner.compare import cli
from memplan.planner.compare.compare import compare
from memplan.planner.compare.sizes import transients
from memplan.planner.compare.table import WIDTH, render
from memplan.planner.compare.ways import RELEASES, optimizers_of, ways
from memplan.planner.ledger import Component, LedgerBuilder
from memplan.planner.optimizers.catalogue import entries
from memplan.planner.predict import predict
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import Phase
from memplan.units import GiB

GPU = "h200-sxm-141gb"
SMALL = {"micro_batch_size": 1, "seq_len": 64, "overrides": {"num_hidden_layers": "2"}}
GB = 10**9


@pytest.fixture(scope="module")
def traces():
    return TraceSource()


def compared(model, optimizers, traces, *, precisions=("bf16",), releases="both", methods=("full",), top=0, **options):
    bases = [make_request(model, GPU, precision=p, method=m, **(SMALL | options)) for m in methods for p in precisions]
    return compare(ways(bases, optimizers_of(optimizers), RELEASES[releases]), traces, top=top)


def row(found, optimizer, precision="bf16", released=False):
    (one,) = [
        r for r in found.rows if (r.way.optimizer, r.way.base.precision, r.way.released) == (optimizer, precision, released)
    ]
    return one


def each(one, num_bytes):
    return pytest.approx(one.per_parameter(num_bytes), rel=0.02)


# -- published figures -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(traces):
    whole = {"overrides": {}, "precisions": ("bf16-autocast", "bf16")}
    return compared("meta-llama/Llama-3.1-8B", "adamw,flash-adamw", traces, **whole)


def test_flashoptims_bytes_a_parameter_are_those_of_its_paper(llama):
    """arXiv 2602.23349, abstract: AdamW from 16 to 7 bytes, 5 with gradient release."""
    plain, flash = row(llama, "adamw", "bf16-autocast"), row(llama, "flash-adamw")
    released = row(llama, "flash-adamw", released=True)

    assert [each(plain, n) for n in (plain.kept.param_bytes, plain.kept.grad_bytes, plain.kept.state_bytes)] == [4, 4, 8]
    assert each(plain, plain.kept.total_bytes) == 16
    assert [
        each(flash, n) for n in (flash.kept.param_bytes, flash.kept.master_bytes, flash.kept.grad_bytes, flash.kept.state_bytes)
    ] == [2, 1, 2, 2.125]
    assert each(flash, flash.kept.total_bytes) == 7.125
    assert each(released, released.kept.total_bytes) == 5.125
    assert [round(one.per_parameter(one.kept.total_bytes)) for one in (plain, flash, released)] == [16, 7, 5]


def test_flashoptims_checkpoint_is_half_of_adamws(llama):
    """README of databricks/flashoptim, 0.1.4: 2 + 4.125 bytes with compress_state_dict, of 4 + 8."""
    plain, flash = row(llama, "adamw", "bf16-autocast"), row(llama, "flash-adamw")

    assert each(plain, plain.checkpoint_bytes) == 12
    assert each(flash, flash.checkpoint_bytes) == 6.125


def test_the_bars_of_flashoptims_figure_come_out(llama):
    """imgs/finetuning_memory_breakdown.png, Llama-3.1-8B, read from its pixels: parameters and optimizer in GiB."""
    plain, flash = row(llama, "adamw", "bf16-autocast").kept, row(llama, "flash-adamw").kept

    assert plain.param_bytes / GiB == pytest.approx(29.9, rel=0.02)
    assert plain.state_bytes / GiB == pytest.approx(59.8, rel=0.02)
    assert flash.param_bytes / GiB == pytest.approx(14.9, rel=0.02)
    assert (flash.master_bytes + flash.state_bytes) / GiB == pytest.approx(23.35, rel=0.02)


def test_savings_of_flashoptim_in_the_trainer_come_out(traces):
    """transformers, pull request 44438: peaks of bf16 AdamW (fused), FlashAdamW with 24 bits and without masters, 7B, in GB."""
    names = "adamw,flash-adamw,flash-adamw:master_weight_bits=none"
    found = compared("Qwen/Qwen2.5-7B", names, traces, overrides={}, releases="no", optimizer_impl="fused")
    plain, split, without = (row(found, name).kept.total_bytes for name in optimizers_of(names))

    assert (plain - split) / GB == pytest.approx(76.44 - 69.79, rel=0.02)
    assert (plain - without) / GB == pytest.approx(76.44 - 62.15, rel=0.02)


def test_savings_of_8_and_4_bit_states_come_out(traces):
    """README of torchao/optim, Llama-2-7B in bf16: peaks of AdamW 51.6, bitsandbytes 8-bit 39.3, torchao 4-bit 33.2 (GB as
    it says, GiB as torch counts)."""
    names = "adamw,adamw-8bit,torchao-adamw-4bit"
    found = compared("meta-llama/Llama-2-7b-hf", names, traces, overrides={}, releases="no")
    plain, bits8, bits4 = (row(found, name).kept.total_bytes for name in names.split(","))

    assert (plain - bits8) / GiB == pytest.approx(12.3, rel=0.02)
    assert (plain - bits4) / GiB == pytest.approx(18.4, rel=0.02)


# -- what a row says -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(traces):
    return compared("gpt2", "adamw,adam,flash-adamw,lomo,paged-adamw-8bit,sgd,badam,torchao-cpu-offload", traces, top=2)


def test_a_row_is_the_prediction_of_its_way(found, traces):
    one = row(found, "flash-adamw", released=True)
    request = make_request("gpt2", GPU, precision="bf16", optimizer="flash-adamw", strategy="release", **SMALL)

    assert one.prediction == predict(request, traces)


def test_ways_whose_runs_are_equal_are_answered_once_and_keep_their_names(found):
    adam, adamw = row(found, "adam"), row(found, "adamw")

    assert adam.prediction is adamw.prediction
    assert (adam.way.optimizer, adamw.way.optimizer) == ("adam", "adamw")


def test_the_table_says_of_how_many_rows_the_largest_batch_was_searched(found, traces):
    every = compared("gpt2", "adamw,sgd", traces, top=None)

    assert all(r.tried_batches for r in every.rows)
    assert "--top all" not in render(every)
    assert "searched for the first 2 rows (--top all: for every row)" in " ".join(render(found).split())


def test_rows_are_sorted_by_their_peak_and_the_first_have_a_largest_batch(found, traces):
    peaks = [r.prediction.reserved_peak_bytes for r in found.rows]

    assert peaks == sorted(peaks)
    assert [r.tried_batches for r in found.rows[:3]] == [True, True, False]
    assert found.rows[0].max_micro_batch_size == max_micro_batch_size(found.rows[0].way.request, traces)


def test_a_released_gradient_is_transient_and_not_kept(found):
    plain, released = row(found, "sgd"), row(found, "sgd", released=True)

    assert plain.kept.grad_bytes == pytest.approx(2 * plain.prediction.num_params, rel=0.02)
    assert plain.later_step_bytes == 0
    assert released.kept.grad_bytes == 0
    assert released.later_step_bytes == 2 * 50257 * 768  # the largest: that of GPT-2's embedding


def test_paged_state_is_counted_away_from_the_gpu(found):
    one = row(found, "paged-adamw-8bit")

    assert list(one.kept.away_bytes) == ["gpu_managed"]
    whole = one.kept.state_bytes + one.kept.away_bytes["gpu_managed"]
    assert one.per_parameter(whole) == pytest.approx(2 + 8 / 256, rel=0.02)
    assert one.optimizer_saved_bytes == whole


def test_a_checkpoint_of_cpu_offload_has_two_states_and_no_pinned_copies(found):
    one = row(found, "torchao-cpu-offload")

    assert one.optimizer_saved_bytes == pytest.approx(4 * one.prediction.num_params, rel=0.01)
    assert one.kept.away_bytes["host_pinned"] == pytest.approx(4 * one.prediction.num_params, rel=0.01)


def test_the_optimizers_temporaries_are_its_step(found):
    one = row(found, "adamw")  # foreach: a copy of every parameter

    assert one.later_step_bytes == pytest.approx(2 * one.prediction.num_params, rel=0.02)


def test_transients_of_the_first_step_are_apart_from_the_later_ones():
    builder = LedgerBuilder()
    builder.alloc(100, Component.PARAM, ("weight", "param"))
    for iteration, size in ((0, 40), (1, 30)):
        builder.now_phase, builder.now_iteration = int(Phase.BACKWARD), iteration
        grad = builder.alloc(7, Component.GRAD, ("weight", "grad"))
        other = builder.alloc(1000, Component.TEMP, ("", "matmul"))
        builder.free(other)
        builder.now_phase = int(Phase.STEP)
        temp = builder.alloc(size, Component.TEMP, ("weight", "optimizer step"))
        builder.free(temp)
        builder.free(grad)
    ledger = builder.finish(lambda key: key)

    assert transients(ledger, released=False) == (40, 30)
    assert transients(ledger, released=True) == (47, 37)


def test_with_an_adapter_the_checkpoint_is_the_adapter(traces):
    pytest.importorskip("peft")
    found = compared("gpt2", "adamw", traces, methods=("lora",), releases="no")
    (one,) = found.rows

    assert one.model_saved_bytes == 4 * one.prediction.num_trainable_params  # peft: fp32 beside a 16-bit model
    assert one.optimizer_saved_bytes == 8 * one.prediction.num_trainable_params


def test_zeroth_order_training_is_one_way_without_an_optimizer(traces):
    found = compared("gpt2", "adamw,sgd", traces, methods=("mezo",))
    (one,) = found.rows

    assert one.way.entry is None
    assert one.kept.grad_bytes == one.kept.state_bytes == one.optimizer_saved_bytes == 0


# -- what is refused -------------------------------------------------------------------------------------------------------


def test_what_a_library_refuses_is_impossible_and_what_has_no_model_is_not(found):
    said = {(r.way.optimizer, r.way.released): (r.impossible, r.reason) for r in found.refused}

    assert set(said) == {("lomo", False), ("badam", False), ("badam", True), ("torchao-cpu-offload", True)}
    assert said["lomo", False] == (True, "--optimizer lomo: it steps inside backward only. Add --grad-release")
    assert said["badam", False] == (True, "--optimizer badam: it trains one block of layers at a time. Use --method badam")
    assert "needs all gradients at once" in said["torchao-cpu-offload", True][1]


def test_release_with_accumulation_is_refused_with_the_reason(traces):
    found = compared("gpt2", "adamw", traces, grad_accum_steps=2)
    (refusal,) = found.refused

    assert refusal.way.released
    assert "each gradient is gone before the next" in refusal.reason


def test_fp8_states_need_a_card_that_has_float8(traces):
    base = make_request("gpt2", "a100-sxm-80gb", precision="bf16", **SMALL)
    found = compare(ways([base], ["torchao-adamw-fp8"], (False,)), traces)

    assert not found.rows
    assert "needs compute capability 8.9" in found.refused[0].reason


def test_every_optimizer_of_the_catalogue_is_a_row_or_is_refused_with_a_reason(traces):
    found = compared("gpt2", "all", traces)
    named = {r.way.optimizer for r in (*found.rows, *found.refused)}

    assert named == set(entries())
    assert len(found.rows) + len(found.refused) == 2 * len(entries())
    assert len(found.rows) > 120
    assert all(r.kept.param_bytes > 0 and r.prediction.reserved_peak_bytes > r.kept.total_bytes for r in found.rows)


def test_an_optimizer_keeps_its_options_between_the_commas():
    assert optimizers_of("flash-adamw:master_weight_bits=32,quantize=false,sgd,galore-adamw:rank=4") == [
        "flash-adamw:master_weight_bits=32,quantize=false",
        "sgd",
        "galore-adamw:rank=4",
    ]


@pytest.mark.parametrize(("text", "said"), [("adamww", "Did you mean adamw"), ("adamw,,sgd", "nothing between two commas")])
def test_a_misspelt_list_is_an_error(text, said):
    with pytest.raises(UserError, match=said):
        optimizers_of(text)


# -- the table and the command ---------------------------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_way_and_each_reason_once(found):
    text = render(found)

    assert max(map(len, text.splitlines())) <= WIDTH
    assert sum(line.startswith("flash-adamw ") for line in text.splitlines()) == 2
    assert text.count("it trains one block of layers at a time") == 1
    assert "badam (full, bf16; full, bf16, released): " in text
    assert "Impossible" in text


def test_methods_that_an_optimizer_is_meet_their_own_optimizers_only(traces):
    found = compared(
        "meta-llama/Llama-3.2-1B", "adamw,sgd,galore-adamw-8bit", traces, methods=("full", "galore", "badam", "lomo")
    )
    rows = {(r.way.base.method, r.way.optimizer, r.way.released) for r in found.rows}

    assert {row for row in rows if row[0] == "galore"} == {
        ("galore", name, released) for name in ("galore-adamw", "galore-adamw-8bit") for released in (False, True)
    }
    assert {row for row in rows if row[0] in ("badam", "lomo")} == {("badam", "badam", False), ("lomo", "lomo", True)}
    badam = next(r for r in found.rows if r.way.base.method == "badam")
    block = badam.prediction.num_trainable_params
    assert (badam.kept.grad_bytes, badam.kept.state_bytes) == (2 * block, 12 * block)  # README of badam: 2M + 16M/D, 4 of them
    # are fp32 gradients, which the step makes
    assert badam.later_step_bytes >= 4 * block


def test_a_reason_that_stops_every_optimizer_names_none(traces):
    text = render(compared("gpt2", "adamw,sgd", traces, grad_accum_steps=2))

    assert "every optimizer (full, bf16, released): " in text


def run(capsys, *words):
    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers(required=True))
    args = parser.parse_args(["compare", "gpt2", "--gpu", "rtx-4090", "--seq", "64", "--set", "num_hidden_layers=2", *words])
    code = args.run(args)
    return code, capsys.readouterr().out


def test_the_command_prints_json(capsys):
    code, out = run(
        capsys, "--precisions", "fp32,bf16", "--optimizers", "adamw", "--grad-release", "no", "--top", "1", "--json"
    )
    data = json.loads(out)

    assert code == 0
    assert [r["precision"] for r in data["rows"]] == ["bf16", "fp32"]
    assert data["rows"][1]["kept_per_parameter"] == pytest.approx(16, rel=0.01)
    assert data["rows"][0]["max_micro_batch_size"] > 1
    assert data["rows"][1]["max_micro_batch_size"] is None


def test_the_command_sorts_by_what_is_asked(capsys):
    _, out = run(capsys, "--precisions", "bf16", "--optimizers", "all", "--sort", "checkpoint", "--top", "0", "--json")
    sizes = [sum(r["checkpoint"].values()) for r in json.loads(out)["rows"]]

    assert sizes == sorted(sizes)


def test_options_of_adapters_go_to_the_methods_that_have_one(capsys):
    pytest.importorskip("peft")
    code, out = run(
        capsys,
        "--methods",
        "full,lora",
        "--lora-rank",
        "4",
        "--optimizers",
        "sgd",
        "--grad-release",
        "no",
        "--top",
        "0",
        "--json",
    )
    data = json.loads(out)

    assert code == 0
    assert {r["method"] for r in data["rows"]} == {"full", "lora"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--optimizer", "sgd"), "Use --optimizers A,B"),
        (("--strategy", "zero2"), "Use `memplan study`"),
        (("--top", "-1"), "a number of rows, or all"),
        (("--top", "few"), "a number of rows, or all"),
        (("--methods", "full,,lora"), "nothing between two commas"),
        (("--seq", "5000"), "has positions for 1024 tokens"),
        (("--precisions", "bf15"), "'bf15' is not known"),
    ],
)
def test_a_mistake_in_the_question_is_one_error(capsys, words, said):
    with pytest.raises(UserError, match=said):
        run(capsys, *words)


def test_nothing_that_can_be_answered_is_exit_code_2(capsys):
    code, out = run(capsys, "--precisions", "bf16-mixed", "--optimizers", "adamw")

    assert code == 2
    assert out.startswith("CANNOT TELL")
