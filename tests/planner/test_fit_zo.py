"""Zeroth-order training through the front door: `--method mezo | zo2 | distzo2`."""

import argparse
import json

import pytest
from memplan import __main__ as command_line
from memplan.errors import UserError
from memplan.planner.api import make_request
from memplan.planner.predict import predict
from memplan.planner.strategies.zo_settings import ZoSettings
from memplan.planner.trace.source import TraceSource

TINY = {
    "num_hidden_layers": "4",
    "hidden_size": "128",
    "ffn_dim": "512",
    "num_attention_heads": "4",
    "word_embed_proj_dim": "128",
}
TINY |= {"vocab_size": "1024", "tie_word_embeddings": "false"}
MODEL = "facebook/opt-125m"


@pytest.fixture(scope="module")
def traces() -> TraceSource:
    return TraceSource()


def ask(**options):
    given = {"micro_batch_size": 2, "seq_len": 64, "precision": "fp16", "overrides": TINY, **options}
    return make_request(MODEL, options.pop("gpu", "h100-80gb"), **{k: v for k, v in given.items() if k != "gpu"})


def test_mezo_needs_no_gradient_and_no_optimizer_state(traces):
    found = predict(ask(method="mezo"), traces)

    assert found.fits
    assert not {"grad", "optimizer_state"} & set(found.peak.components)
    assert found.peak.components["param"] == 2 * found.num_params
    assert not any("torch.optim" in line for line in found.assumptions)


def test_zo2_keeps_every_block_on_the_host(traces):
    mezo, zo2 = (predict(ask(method=m), traces) for m in ("mezo", "zo2"))

    assert zo2.peak.components["param"] < mezo.peak.components["param"]
    assert zo2.host.pinned_reserved_bytes >= zo2.host.pinned_bytes > 0
    assert mezo.host.node_bytes == 0


def test_a_step_is_two_forwards(traces):
    zo2, plain = predict(ask(method="zo2"), traces), predict(ask(mode="inference"), traces)
    assert zo2.flops_per_step == 2 * plain.flops_per_step


def test_slices_need_the_host_less(traces):
    whole, sliced = (
        predict(ask(method="distzo2", gpus=4, zo=ZoSettings(zo_data=4, zo_slice=cut)), traces) for cut in (False, True)
    )
    assert sliced.host.pinned_bytes < whole.host.pinned_bytes


def test_a_host_that_is_too_small_is_a_verdict(traces):
    found = predict(ask(method="zo2", host_ram_bytes=1 << 18), traces)

    assert found.verdict == "does_not_fit"
    assert "host memory" in found.reason
    assert "pinned" in found.reason


BASE = ["fit", MODEL, "--gpu", "rtx-4090", "--precision", "fp16", "--seq", "64", "--no-advice"]
BASE += [part for key, value in TINY.items() for part in ("--set", f"{key}={value}")]


def test_the_command_fills_in_the_groups(capsys):
    assert command_line.main([*BASE, "--method", "distzo2", "--gpus", "4", "--zo-pert", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["question"]["zo"]["zo_data"] == 2


def test_zo2_on_several_gpus_says_that_all_but_one_stay_idle(capsys):
    assert command_line.main([*BASE, "--method", "zo2", "--gpus", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["question"]["gpus"] == 1
    assert "ZO2 runs on one GPU: 3 of the 4 stay idle. --method distzo2 uses them" in answer["assumptions"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--zo-bucket", "--zo-bucket with --method full: it belongs to zeroth-order training. Use --method zo2"),
        ("--zo-train lora", "--zo-train with --method full: it belongs to zeroth-order training. Use --method zo2"),
        ("--method mezo --zo-train lorra", "--zo-train 'lorra' is not known. Did you mean lora?"),
        ("--method mezo --lora-rank 4", "--lora-rank with --method mezo: it belongs to adapters"),
        ("--method zo2 --zo-offload-blocks some", "--zo-offload-blocks some: expected a number or all"),
        ("--method zo2 --zo-pert 3", "--zo-pert 3: a step has two perturbed forwards. Use 1 or 2"),
        ("--method distzo2 --gpus 3 --zo-pert 2", "An odd number of GPUs has no pairs: use --zo-pert 1"),
        ("--method distzo2 --gpus 2 --zo-slice", "there is no NVLink"),
        ("--method zo2 --zo-offload-blocks 5", "--zo-offload-blocks 5: the model has 4 blocks. Leave it out for all of them"),
        ("--method zo2 --optimizer adamw", "--optimizer: --method zo2 has no optimizer. Leave it out"),
        ("--method mezo --optimizer-impl fused", "--optimizer-impl: --method mezo has no optimizer. Leave it out"),
        ("--method zo2 --use-cache", "--use-cache: --method zo2 builds no key-value cache. Leave it out"),
        ("--method mezo --grad-accum 2", "--grad-accum 2: zeroth-order trainers take a step for every batch"),
        ("--method zo2 --zo-amp", "--zo-amp with --precision fp16: amp computes in autocast on fp32 parameters"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, words, said):
    assert command_line.main([*BASE, *words.split()]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_several_gpus_under_mezo_are_said_not_to_be_modelled(capsys):
    assert command_line.main([*BASE, "--method", "mezo", "--gpus", "2"]) == 2
    assert "device_map='auto'" in " ".join(capsys.readouterr().out.split())


def test_an_optimizer_is_refused_from_python_too(traces):
    with pytest.raises(UserError, match="--optimizer lion: --method zo2 has none"):
        predict(ask(method="zo2", optimizer="lion"), traces)


def test_a_model_without_a_list_of_blocks_cannot_be_told(capsys):
    assert (
        command_line.main(["fit", "t5-small", "--gpu", "rtx-4090", "--method", "zo2", "--precision", "fp16", "--seq", "64"])
        == 2
    )
    assert capsys.readouterr().out.startswith("CANNOT TELL\n")


def test_every_zo_option_is_listed_by_fit():
    parser = argparse.ArgumentParser()
    from memplan.planner.options import add_run_options

    add_run_options(parser)
    options = {o for action in parser._actions for o in action.option_strings if o.startswith("--zo-")}
    assert len(options) == len(ZoSettings.__dataclass_fields__) + 1  # --zo-train is an adapter


def test_an_adapter_is_asked_for_by_its_name(capsys):
    assert command_line.main([*BASE, "--method", "mezo", "--zo-train", "lora", "--lora-rank", "4", "--json"]) == 0

    told = json.loads(capsys.readouterr().out)
    assert (told["question"]["adapter"]["kind"], told["question"]["adapter"]["rank"]) == ("lora", 4)
    assert told["num_trainable_params"] == 4 * 2 * 4 * 2 * 128  # blocks, projections, rank, both matrices
    assert told["num_trainable_params"] < told["num_params"] / 50
