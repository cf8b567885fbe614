"""Adapters from the question to the answer: options, refusals, keys of traces, and what bitsandbytes' kernels take."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import memplan
import pytest
from memplan.errors import CannotTell, UserError
from memplan.hardware.catalogue import resolve
from memplan.models import load
from memplan.models.adapters import AdapterSettings
from memplan.planner import cli
from memplan.planner.api import make_request
from memplan.planner.kernels import Kernels
from memplan.planner.predict import ledger_of
from memplan.planner.strategies.fsdp_settings import FsdpSettings
from memplan.planner.strategies.fsdp_units import units_of
from memplan.planner.trace.source import TraceSource, trace_options
from memplan.planner.trace.steptrace import Signature, TensorInfo

SMALL = ("openai-community/gpt2", "--set", "num_hidden_layers=1", "--set", "vocab_size=4096")
QUICK = (*SMALL, "--gpu", "l4", "--seq", "16", "--no-advice", "--json")


def request_of(*words: str):
    from memplan.planner.options import request_from

    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers(required=True))
    return request_from(parser.parse_args(["fit", *SMALL, "--gpu", "l4", *words]))


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers(required=True))
    args = parser.parse_args(["fit", *QUICK, *words])
    args.run(args)
    return json.loads(capsys.readouterr().out)


def test_the_options_of_an_adapter_arrive_in_the_question():
    words = (
        "--method lora --lora-rank 16 --lora-alpha 32 --lora-dropout 0.1 --lora-targets c_attn,c_proj --modules-to-save lm_head"
    )
    more = "--base-quant nf4 --no-upcast --adapter-16bit --no-autocast"
    assert request_of(*words.split(), *more.split()).adapter == AdapterSettings(
        rank=16,
        alpha=32.0,
        dropout=0.1,
        targets=("c_attn", "c_proj"),
        modules_to_save=("lm_head",),
        base_quant="nf4",
        upcast=False,
        adapter_dtype="base",
        autocast=False,
    )


def test_a_method_alone_takes_its_own_defaults():
    request = request_of("--method", "qlora")
    assert request.adapter is None
    assert request.adapter_settings == AdapterSettings.of("qlora")
    assert request_of().adapter_settings is None


def test_an_option_of_adapters_without_an_adapter_method_is_refused():
    with pytest.raises(UserError, match="--lora-rank with --method full"):
        request_of("--lora-rank", "8")


TINY = {"n_layer": "2", "n_embd": "64", "n_head": "2", "vocab_size": "500"}


@pytest.mark.parametrize(("use_orig_params", "error"), [(False, UserError), (True, CannotTell)])
def test_fsdp1_refuses_units_of_frozen_and_trained_parameters(use_orig_params, error):
    settings = FsdpSettings(version=1, use_orig_params=use_orig_params)
    request = make_request(
        load("openai-community/gpt2", overrides=TINY), "l4", method="ia3", strategy="fsdp1", gpus=2, fsdp=settings, seq_len=16
    )
    with pytest.raises(error, match="has frozen and trained parameters"):
        ledger_of(request, TraceSource().step(request))


def test_each_trained_leaf_of_an_adapter_is_a_unit_of_fsdp1_and_the_base_keeps_no_wide_copy():
    spec = load("openai-community/gpt2", overrides=TINY)
    request = make_request(spec, "l4", method="lora", strategy="fsdp1", precision="bf16-mixed", gpus=2, seq_len=16)
    trace = TraceSource().step(request)
    units = [fqn for fqn, _ in units_of(trace, FsdpSettings(version=1)).values()]
    assert sum("lora_" in fqn for fqn in units) == sum(p.requires_grad for p in trace.params) == 4
    ledger = ledger_of(request, trace)
    kept = ledger.components_after(int(ledger.rows()[-1]))
    assert kept["param"] == sum(p.nbytes for p in trace.params) // 2
    trained = sum(p.numel for p in trace.params if p.requires_grad)
    assert kept["optimizer_state"] == 2 * 4 * trained // 2


def test_settings_of_an_adapter_do_not_go_with_a_method_that_has_none():
    request = make_request("openai-community/gpt2", "l4", adapter=AdapterSettings())
    with pytest.raises(UserError, match="--method full has no adapter"):
        request.check()


def test_prefix_tuning_with_checkpointed_blocks_is_refused():
    request = make_request("openai-community/gpt2", "l4", method="prefix-tuning", recompute="full")
    with pytest.raises(UserError, match="key-value cache"):
        request.check()


def test_an_adapter_is_part_of_the_key_of_a_trace():
    request = make_request("openai-community/gpt2", "l4", method="lora")
    keys = [
        trace_options(r).as_data()
        for r in (request, replace(request, method="full"), replace(request, adapter=AdapterSettings(rank=9)))
    ]
    assert keys[0] != keys[1] != keys[2] != keys[0]
    assert keys[0]["libraries"]["peft"]
    assert json.dumps(keys)


def test_lora_needs_less_than_full_training_and_says_what_trains(capsys):
    pytest.importorskip("peft")
    full = answer(capsys, "--precision", "bf16")
    lora = answer(capsys, "--precision", "bf16", "--method", "lora", "--lora-rank", "4", "--lora-targets", "c_attn")
    assert lora["num_trainable_params"] == 4 * (768 + 3 * 768)
    assert lora["allocated_peak_bytes"] < full["allocated_peak_bytes"]
    assert any("under bfloat16 autocast" in line for line in lora["assumptions"])
    assert lora["question"]["adapter"]["rank"] == 4


def test_a_base_in_4_bits_makes_the_weights_smaller(capsys):
    pytest.importorskip("bitsandbytes")
    words = ("--precision", "bf16", "--method", "lora", "--lora-targets", "c_attn")
    plain = answer(capsys, *words)["peak"]["components"]["param"]
    packed = answer(capsys, *words, "--base-quant", "nf4-dq", "--no-upcast")["peak"]["components"]["param"]
    assert plain - packed == 12 * 768 * 768 * 2 - 12 * 768 * 768 // 2


def test_a_4_bit_product_is_as_much_work_as_a_plain_one():
    pytest.importorskip("bitsandbytes")
    flops = {}
    for quant in ("none", "nf4"):
        settings = AdapterSettings(base_quant=quant, upcast=False, targets=("c_attn",), autocast=False)
        how = {"overrides": {"num_hidden_layers": "1"}, "method": "lora", "precision": "bf16", "micro_batch_size": 1}
        flops[quant] = memplan.trace("openai-community/gpt2", adapter=settings, seq_len=16, **how).flops
    assert flops["nf4"] == flops["none"]


def test_a_gptq_product_makes_the_weight_dense_in_forward_and_in_backward():
    pytest.importorskip("peft")
    trace = memplan.trace(
        "openai-community/gpt2",
        overrides={"num_hidden_layers": "1"},
        method="lora",
        precision="fp16",
        adapter=AdapterSettings(base_quant="gptq", upcast=False, targets=("c_attn",)),
        micro_batch_size=1,
        seq_len=16,
    )
    dense = 2 * 768 * 4 * 768  # of each of the two layers of the MLP
    assert trace.storage_bytes.tolist().count(dense) == 4


@pytest.mark.parametrize(("strategy", "precision"), [("single", "fp16"), ("zero2", "fp16-mixed"), ("fsdp2", "fp16")])
def test_gptq_is_taken_for_fp16_where_no_precision_is_given(strategy, precision):
    gpus = None if strategy == "single" else 2
    adapter = AdapterSettings(base_quant="gptq")
    request = make_request(SMALL[0], "l4", method="lora", strategy=strategy, gpus=gpus, adapter=adapter)
    assert request.precision == precision
    assert any("GPTQ's products are of fp16" in said for said in request.defaults)


def test_what_autocast_cannot_join_is_said_with_the_precision_that_can():
    pytest.importorskip("peft")
    overrides = {"num_hidden_layers": "1", "hidden_size": "64", "intermediate_size": "64", "vocab_size": "128"}
    request = make_request(
        "Qwen/Qwen2.5-0.5B", "l4", overrides={**overrides, "num_attention_heads": "2", "num_key_value_heads": "2"},
        method="lora", precision="bf16", adapter=AdapterSettings(base_quant="gptq"), seq_len=16,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"are of float16, and the precision is bf16\. Use --precision fp16-autocast"):
        TraceSource().step(request)


def test_without_peft_the_answer_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    from memplan.models.adapters import require

    with pytest.raises(UserError, match="pip install peft"):
        require("peft", "--method lora")


def info(*shape: int, dtype: str = "bfloat16") -> TensorInfo:
    stride = tuple(int(s) for s in (*[1] * (len(shape) - 1), 1))
    return TensorInfo(shape=shape, stride=stride, dtype=dtype)


def product(rows: int, *, double: bool) -> Signature:
    packed = info(4096 * 1024 // 2, 1, dtype="uint8")
    scales = (info(4096 * 1024 // 64), info(65536, dtype="uint8")) if double else (info(65536, dtype="float32"),)
    return Signature(
        op="bitsandbytes.gemm_4bit.default",
        inputs=(info(rows, 4096), packed, *scales),
        outputs=(info(rows, 1024),),
        scalars={},
        flops=0,
        moved_bytes=0,
    )


def test_a_4_bit_product_makes_the_whole_weight_dense_beside_its_scales():
    device, _ = resolve("a100-sxm-80gb")
    kernels = Kernels.for_device(device, "2.13.0")
    dense = 2 * 4096 * 1024
    assert kernels._expand(product(2048, double=False)).transient == (dense,)
    assert kernels._expand(product(2048, double=True)).transient == (4 * 65536, 4 * 65536, dense)


def test_a_4_bit_product_of_few_rows_dequantises_as_it_reads():
    device, _ = resolve("a100-sxm-80gb")
    assert Kernels.for_device(device, "2.13.0")._expand(product(4, double=True)).transient == ()


def test_fits_takes_an_adapter_from_python():
    pytest.importorskip("peft")
    answer = memplan.fits(
        "openai-community/gpt2",
        "l4",
        overrides={"num_hidden_layers": "1"},
        method="lora",
        adapter=AdapterSettings(rank=2, targets=("c_fc",)),
        seq_len=16,
        advice=False,
    )
    assert answer.num_trainable_params == 2 * (768 + 4 * 768)
