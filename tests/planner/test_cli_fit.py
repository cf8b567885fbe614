"""`memplan fit`: exit codes, sentences for mistakes, stable keys and flags."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import memplan
import pytest
from memplan.errors import UserError
from memplan.planner import cli

ROOT = Path(memplan.__file__).resolve().parent
SMALL = ("openai-community/gpt2", "--set", "num_hidden_layers=1", "--set", "vocab_size=4096")
QUICK = (*SMALL, "--gpu", "l4", "--seq", "16", "--no-advice")
RUN = (
    "import argparse, sys; from memplan.planner import cli\n"
    "p = argparse.ArgumentParser(); cli.add_commands(p.add_subparsers())\n"
    "a = p.parse_args(['fit', *sys.argv[1:]]); sys.exit(a.run(a))"
)
KEYS = [
    "version",
    "verdict",
    "reason",
    "question",
    "gpu",
    "num_params",
    "num_trainable_params",
    "total_bytes",
    "context_bytes",
    "usable_bytes",
    "allocated_peak_bytes",
    "reserved_peak_bytes",
    "device_peak_bytes",
    "headroom_bytes",
    "fragmentation_bytes",
    "peak",
    "phases",
    "host",
    "failure",
    "num_alloc_retries",
    "flops_per_step",
    "time",
    "max_micro_batch_size",
    "max_seq_len",
    "error_bars",
    "remedies",
    "hints",
    "assumptions",
    "versions",
]
MODEL_FLAGS = {"--task", "--set", "--trust-remote-code", "--micro-batch", "--seq", "--target-len", "--image-size"}
HARDWARE_FLAGS = {"--gpu", "--gpu-memory", "--gpus", "--nodes", "--host-ram", "--nvme"}
RUN_FLAGS = {
    "--precision",
    "--from",
    "--grad-release",
    "--mode",
    "--method",
    "--strategy",
    "--optimizer",
    "--optimizer-impl",
    "--recompute",
    "--loss",
    "--tiled-mlp",
    "--use-cache",
    "--reentrant",
    "--attention",
    "--freeze",
    "--offload",
    "--rank",
    "--compile",
    "--assume-eager",
    "--grad-accum",
    "--zero-grad",
    "--keep-grads",
    "--l2l-stash",
    "--l2l-no-overlap",
    "--clip-grad-norm",
    "--keep-outputs",
    "--alloc-conf",
}
ZO_FLAGS = {
    f"--zo-{name}"
    for name in [
        "pert",
        "data",
        "slice",
        "eval-batch",
        "offload-blocks",
        "bucket",
        "amp",
        "host-precision",
        "no-overlap",
        "no-cache",
        "train",
    ]
}
ADAPTER_FLAGS = {
    f"--{name}" for name in ["lora-rank", "lora-alpha", "lora-dropout", "lora-targets", "modules-to-save", "virtual-tokens"]
}
ADAPTER_FLAGS |= {"--base-quant", "--no-upcast", "--adapter-16bit", "--no-autocast"}
COMMON_FLAGS = {"-h", "--help"} | MODEL_FLAGS | HARDWARE_FLAGS | RUN_FLAGS | ZO_FLAGS | ADAPTER_FLAGS


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="memplan")
    cli.add_commands(parser.add_subparsers(required=True))
    return parser


def run(*words: str) -> int:
    args = parser_of().parse_args(["fit", *words])
    return int(args.run(args))


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    code = run(*words, "--json")
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def peaks() -> dict:
    """The answer to QUICK, as JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run(*QUICK, "--json") == 0
    return json.loads(out.getvalue())


def test_a_run_that_fits_exits_with_0_and_says_so_first(capsys):
    assert run(*QUICK) == 0
    assert capsys.readouterr().out.startswith("FITS: ")


def test_a_run_that_does_not_fit_exits_with_1_and_says_so_first(capsys):
    assert run(*QUICK, "--gpu-memory", "400MiB") == 1
    assert capsys.readouterr().out.startswith("DOES NOT FIT: ")


def test_a_tight_fit_is_a_failure_only_with_strict(capsys, peaks):
    just = str(peaks["device_peak_bytes"] + 2**20)

    assert run(*QUICK, "--gpu-memory", just) == 0
    assert capsys.readouterr().out.startswith("TIGHT: ")
    assert run(*QUICK, "--gpu-memory", just, "--strict") == 1


@pytest.mark.parametrize(
    "words",
    [
        "--method lisa",
        "--strategy ddp --gpus 2 --offload optimizer",
        "--gpus 2",
        "--offload optimizer",
        "--precision bf16-mixed",
    ],
)
def test_what_is_not_modelled_exits_with_2_and_names_the_option(capsys, words):
    assert run(*QUICK, *words.split()) == 2

    verdict, reason = capsys.readouterr().out.splitlines()[:2]
    assert verdict == "CANNOT TELL"
    assert " ".join(words.split()[-2:]) in reason


def test_torch_compile_is_not_answered_unless_eager_is_assumed(capsys, peaks):
    code, told = answer(capsys, *QUICK, "--compile")
    assert (code, told["verdict"]) == (2, "unknown")

    code, told = answer(capsys, *QUICK, "--compile", "--assume-eager")
    assert code == 0
    assert told["reserved_peak_bytes"] == peaks["reserved_peak_bytes"]
    assert any("torch.compile" in text for text in told["assumptions"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpt2 --gpu rtx-9999", "Unknown GPU 'rtx-9999'. Did you mean rtx-"),
        ("gpt2 --gpu l4 --micro-batch 0", "--micro-batch 0: must be 1 or more"),
        ("gpt2 --gpu l4 --nodes 2", "--gpus 1 on --nodes 2: the GPUs do not divide over the machines"),
        ("gpt2 --gpu l4 --offload cpu", "--offload 'cpu' is not known. Choose one of optimizer, param, "),
        ("gpt2 --gpu l4 --strategy ddp --gpus 2 --rank 2", "--rank 2: expected 0 to 1"),
        ("gpt2 --gpu l4 --host-ram lots", "--host-ram"),
        ("gpt2 --gpu l4 --seq -3", "--seq -3: must be 1 or more"),
        ("t5-small --gpu l4 --target-len 0", "--target-len 0: must be 1 or more"),
        ("gpt2 --gpu l4 --grad-accum 0", "--grad-accum 0: must be 1 or more"),
        ("gpt2 --gpu l4 --seq 5000", "has positions for 1024 tokens, got 5000"),
        ("gpt2 --gpu l4 --optimizer adamx --seq 8", "--optimizer adamx: not known. Did you mean adamax"),
        ("gpt2 --gpu l4 --optimizer rprop --optimizer-impl fused --seq 8", "torch has no fused rprop"),
        ("gpt2 --gpu l4 --precision bf32", "--precision 'bf32' is not known. Did you mean"),
        ("gpt2 --gpu l4 --recompute some", "--recompute 'some' is not known"),
        ("gpt2 --gpu l4 --loss some", "--loss 'some' is not known"),
        ("gpt2 --gpu l4 --loss plain:3", "plain is not cut into parts"),
        ("gpt2 --gpu l4 --loss tiled:0", "expected a number of parts of 1 or more"),
        ("gpt2 --gpu l4 --gpu-memory lots", "--gpu-memory: 'lots' is not a size"),
        ("gpt2 --gpu l4 --set n_layer", "--set n_layer: expected KEY=VALUE"),
        ("gpt2 --gpu l4 --freeze nosuch --seq 8", "--freeze nosuch: no parameter begins with that"),
        ("./nosuch/config.json --gpu l4", "nosuch/config.json"),
    ],
)
def test_a_mistake_is_named_with_its_option(words, message):
    with pytest.raises(UserError) as raised:
        run(*words.split(), "--no-advice", *(("--set", "num_hidden_layers=1") if "--seq 8" in words else ()))

    assert message in str(raised.value)


def test_the_answer_as_json_has_the_documented_keys_in_order(peaks):
    assert list(peaks) == KEYS
    assert peaks["version"] == memplan.__version__


def test_a_question_without_an_answer_has_the_same_keys(capsys):
    code, told = answer(capsys, *QUICK, "--gpus", "8")

    assert code == 2
    assert list(told) == KEYS


def test_every_key_of_the_answer_is_documented():
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "json.md").read_text()))

    assert set(KEYS) <= documented


def test_figures_of_the_json_agree_with_one_another(peaks):
    assert sum(peaks["peak"]["components"].values()) == peaks["peak"]["requested_bytes"]
    assert peaks["peak"]["allocated_bytes"] == peaks["allocated_peak_bytes"]
    assert peaks["headroom_bytes"] == peaks["usable_bytes"] - peaks["reserved_peak_bytes"]
    assert peaks["device_peak_bytes"] == peaks["reserved_peak_bytes"] + peaks["context_bytes"]


def test_output_in_a_pipe_has_no_colour_and_stderr_stays_empty():
    done = subprocess.run([sys.executable, "-c", RUN, *QUICK], capture_output=True, text=True, timeout=300)

    assert done.stdout.startswith("FITS: ")
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_the_exit_code_is_the_answer_also_when_nobody_reads_the_output():
    command = '"$0" -c "$1" "${@:2}" --gpu-memory 400MiB | true; exit ${PIPESTATUS[0]}'
    done = subprocess.run(["bash", "-c", command, sys.executable, RUN, *QUICK], capture_output=True, text=True, timeout=300)

    assert done.returncode == 1, done.stderr


def test_more_loop_facts_reach_the_answer(capsys, peaks):
    _, told = answer(capsys, *QUICK, "--grad-accum", "2", "--keep-grads", "--clip-grad-norm", "--zero-grad", "before-forward")

    assert told["question"]["loop"] == {
        "grad_accum_steps": 2,
        "zero_grad": "before-forward",
        "set_to_none": False,
        "clip_grad_norm": True,
        "keep_outputs": False,
        "iterations": peaks["question"]["loop"]["iterations"],
    }
    assert told["flops_per_step"] == 2 * peaks["flops_per_step"]


def flags_of(command: str) -> set[str]:
    actions = next(a for a in parser_of()._actions if isinstance(a, argparse._SubParsersAction))
    return {flag for action in actions.choices[command]._actions for flag in action.option_strings}


def test_the_flags_of_fit_are_those_that_scripts_rely_on():
    assert flags_of("fit") == COMMON_FLAGS | {
        "--no-advice",
        "--strict",
        "--max-batch",
        "--max-seq",
        "--min-gpus",
        "--write",
        "--force",
        "--stack",
        "--html",
        "--figure",
        "--json",
    }


def test_the_flags_of_trace_are_those_that_scripts_rely_on():
    assert flags_of("trace") == COMMON_FLAGS | {
        "--target",
        "--out",
        "--snapshot",
        "--timeline",
        "--timeline-steps",
        "--params",
        "--top",
    }


def test_the_lanes_of_a_run_are_written_for_perfetto(tmp_path, capsys):
    place = tmp_path / "lanes.json"
    words = ["facebook/opt-125m", "--method", "zo2", "--precision", "fp16", "--gpu", "rtx-4090", "--seq", "64"]
    args = parser_of().parse_args(["trace", *words, "--timeline", str(place), "--timeline-steps", "2"])
    assert args.run(args) == 0

    events = json.loads(place.read_text())["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"compute", "h2d", "d2h"} <= lanes
    assert sum(e["ph"] == "X" and e["name"] == "h2d" for e in events) == 2 * 12  # every block, in both steps


def test_every_flag_has_a_help_text():
    actions = next(a for a in parser_of()._actions if isinstance(a, argparse._SubParsersAction))

    assert [a.dest for name in ("fit", "trace") for a in actions.choices[name]._actions if not a.help] == []
