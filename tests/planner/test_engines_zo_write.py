"""The folders of MeZO, ZO2 and DistZO2: what their own programs are told, read back, and run."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from memplan.errors import CannotTell, UserError
from memplan.models.adapters import AdapterSettings
from memplan.planner.api import make_request
from memplan.planner.engines import zo_file
from memplan.planner.engines.detect import read_config
from memplan.planner.engines.imported import apply
from memplan.planner.engines.write import files_of, write_folder
from memplan.planner.engines.zo_write import ZO2_DTYPES, launch, zo2_config
from memplan.planner.strategies.zo_settings import ZoSettings, adapter_of

TINY = {"num_hidden_layers": "2", "hidden_size": "32", "ffn_dim": "64", "num_attention_heads": "4"}
TINY |= {"word_embed_proj_dim": "32", "vocab_size": "128", "tie_word_embeddings": "false"}
# zo2/config/mezo_sgd.py at 4bca25c: its dataclass fields, in order (max_zo_random_seed has no annotation and is none)
ZO2_FIELDS = ["zo_method", "lr", "weight_decay", "eps", "zo2", "offloading_blocks", "offloading_device", "working_device"]
ZO2_FIELDS += ["overlap", "compute_module_optimize_method", "compute_function_optimize_method", "communicate_optimize_method"]
ZO2_FIELDS += ["amp", "amp_precision", "precision_on_offloading_device", "precision_on_working_device"]
ZO2_FIELDS += ["amp_compress_method", "debug_mode"]
# large_models/run.py at 552cb1b, OurArguments: name -> type of what is added to TrainingArguments
MEZO_OWN = {"model_name": str, "task_name": str, "trainer": str, "zo_eps": float, "max_length": int, "num_train": int}
MEZO_OWN |= {"num_dev": int, "num_eval": int, "train_set_seed": int, "lora_r": int, "lora_alpha": int, "num_prefix": int}
MEZO_SWITCHES = ("load_float16", "load_bfloat16", "train_as_classification", "only_train_option", "lora", "prefix_tuning")
MEZO_SWITCHES += ("no_reparam", "prefix_init_by_real_act")


def asked(method="zo2", gpu="h100-80gb", model="facebook/opt-125m", **options):
    given = {"micro_batch_size": 2, "seq_len": 16, "precision": "fp32", "overrides": TINY, **options}
    return make_request(model, gpu, method=method, **given)


def distributed(**zo):
    settings = ZoSettings(**zo)
    return asked("distzo2", gpus=settings.gpus, zo=settings)


QUESTIONS = {
    "mezo": lambda: asked("mezo", zo=ZoSettings(use_cache=False)),
    "zo2": lambda: asked("zo2", zo=ZoSettings(offloading_blocks=1, bucket=True), precision="bf16"),
    "amp": lambda: asked("zo2", zo=ZoSettings(amp=True, precision_on_offloading_device="fp8"), precision="bf16-autocast"),
    "no overlap": lambda: asked("zo2", zo=ZoSettings(overlap=False), frozen=("model.decoder.embed_tokens",), attention="eager"),
    "lora": lambda: asked("mezo", adapter=adapter_of("lora", {"rank": 4})),
    "2d": lambda: distributed(zo_pert=2, zo_data=2, zo_slice=True),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_is_written_asks_the_same_question_when_it_is_read(tmp_path, name):
    request = QUESTIONS[name]()
    (tmp_path / "zo_run.json").write_text(files_of(request).texts["zo_run.json"])

    options = apply(read_config(tmp_path / "zo_run.json"), {})

    for key in ("method", "precision", "micro_batch_size", "seq_len", "gpus", "attention", "loss"):
        assert options[key] == getattr(request, key)
    assert options["zo"] == (request.zo or ZoSettings())
    assert options.get("frozen", ()) == request.frozen
    assert options["adapter"] == request.adapter_settings


@pytest.mark.parametrize("name", QUESTIONS)
def test_plan_json_of_the_folder_asks_the_same_question_too(tmp_path, name):
    write_folder(request := QUESTIONS[name](), tmp_path / "out")

    options = apply(read_config(tmp_path / "out" / "plan.json"), {})

    assert (options["method"], options.get("zo")) == (request.method, request.zo)
    assert options["adapter"] == request.adapter


@pytest.mark.parametrize("name", ["zo2", "amp", "no overlap"])
def test_the_fields_of_zo2_are_all_there_and_read_back_as_they_were(tmp_path, name):
    request = QUESTIONS[name]()
    written = json.loads(files_of(request).texts["zo2_config.json"])
    (tmp_path / "zo2_config.json").write_text(json.dumps(written))

    assert list(written) == ZO2_FIELDS
    assert apply(read_config(tmp_path / "zo2_config.json"), {})["zo"] == request.zo


def test_zo2_is_told_which_blocks_leave_and_in_which_dtype():
    run = zo_file.ZoFile.of(QUESTIONS["zo2"]())
    assert zo2_config(run)["offloading_blocks"] == [0]
    assert zo2_config(run)["communicate_optimize_method"] == "bucket"

    amp = zo2_config(zo_file.ZoFile.of(QUESTIONS["amp"]()))
    assert (amp["amp_precision"], amp["precision_on_offloading_device"]) == ("bfloat16", "float8_e4m3fn")
    assert amp["working_device"] == "cuda:0"  # without an index zo2 raises under amp


def test_every_type_of_zo2s_fields_is_one_of_torchs():
    config = zo2_config(zo_file.ZoFile.of(QUESTIONS["amp"]()))
    assert {type(getattr(torch, config[name])) for name in ZO2_DTYPES} == {torch.dtype}


def test_the_program_for_zo2_is_python_that_passes_exactly_its_fields():
    text = files_of(QUESTIONS["zo2"]()).texts["train.py"]

    tree = ast.parse(text)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "ZOConfig"]
    assert [k.arg for k in calls[0].keywords] == ["method", None]
    imports = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert imports.index("transformers") < imports.index("zo2")  # the other way round gives the plain class


def mezo_parser():
    """As HfArgumentParser makes it of OurArguments, for what is written."""
    import transformers

    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    for name, kind in MEZO_OWN.items():
        parser.add_argument(f"--{name}", type=kind)
    for name in MEZO_SWITCHES:
        parser.add_argument(f"--{name}", type=transformers.hf_argparser.string_to_bool, nargs="?", const=True)
    # transformers 4.28, which MeZO asks for, calls it so
    parser.add_argument("--evaluation_strategy")
    return parser


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"precision": "fp16", "loss": "shifted"}, {"load_float16": True, "only_train_option": True}),
        ({"precision": "bf16"}, {"load_bfloat16": True, "only_train_option": False}),
        ({"adapter": AdapterSettings(kind="lora", rank=4)}, {"lora": True, "lora_r": 4}),
        ({"adapter": AdapterSettings(kind="prefix-tuning")}, {"prefix_tuning": True, "num_prefix": 5}),
    ],
)
def test_mezos_script_passes_what_its_arguments_say(options, expected):
    texts = files_of(asked("mezo", **options)).texts
    arguments = json.loads(texts["mezo_args.json"])

    words = shlex.split(texts["mezo.sh"].partition("run.py")[2].replace("\\\n", " "))
    assert words.pop() == "$@"
    found, unknown = mezo_parser().parse_known_args(words)

    assert unknown == []
    assert {name: getattr(found, name) for name in arguments} == arguments
    assert arguments.items() >= {**expected, "per_device_train_batch_size": 2, "max_length": 16}.items()


@pytest.mark.parametrize(
    ("request_of", "said"),
    [
        (lambda: make_request("Qwen/Qwen2.5-0.5B", "h100-80gb", method="zo2"), "zo2 trains opt and qwen3 .* not qwen2"),
        (lambda: asked("mezo", gpus=2), "device_map='auto'"),
    ],
)
def test_what_the_programs_refuse_is_refused(request_of, said):
    with pytest.raises(CannotTell, match=said):
        files_of(request_of())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"zeroth_order": "zo3"}, "zeroth_order 'zo3' is not known"),
        ({"sequence": 1}, "the key 'sequence' is not known"),
        ({"gpus": 0}, "gpus 0: expected a whole number, 1 or more"),
        ({"eps": 0}, "eps 0: expected a positive number"),
        ({"zo": {"zo_pert": 3}}, "--zo-pert 3"),
        ({"zo": []}, "zo: expected an object"),
    ],
)
def test_a_file_that_was_edited_wrongly_is_refused_by_its_key(tmp_path, change, said):
    data = json.loads(files_of(asked("zo2")).texts["zo_run.json"])
    (tmp_path / "zo_run.json").write_text(json.dumps({**data, **change}))

    with pytest.raises(UserError, match=said):
        zo_file.read(tmp_path / "zo_run.json")


def start(command, folder, *words):
    """The command of the folder, inside it, with this Python's programs in front."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    full = [*shlex.split(command), "--steps", "2", "--random-weights", "--device", "cpu", *words]
    return subprocess.run(full, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)


def losses(text):
    return [float(line.split("loss ")[1].split(",")[0]) for line in text.splitlines() if line.startswith("step ")]


def in_process(folder, *words):
    from memplan.validator.runtimes.zo.__main__ import main

    return main([str(folder / "zo_run.json"), "--steps", "2", "--device", "cpu", *words])


@pytest.mark.parametrize("name", ["mezo", "zo2", "amp", "no overlap"])
def test_a_folder_of_one_gpu_trains_two_steps_and_saves_the_model(tmp_path, capsys, name):
    write_folder(QUESTIONS[name](), tmp_path / "out")

    assert in_process(tmp_path / "out", "--random-weights", "--save", str(tmp_path / "saved")) == 0

    found = losses(capsys.readouterr().out)
    assert len(found) == 2
    assert all(math.isfinite(loss) for loss in found)
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert sum(p.numel() for p in made.parameters()) == 90944


def test_the_folder_of_distzo2_runs_on_as_many_processes_and_has_the_losses_of_zo2(tmp_path, capsys):
    write_folder(request := distributed(zo_pert=2, zo_slice=True), tmp_path / "out")
    write_folder(asked("zo2"), tmp_path / "one")

    ran = start(launch(request), tmp_path / "out")
    assert in_process(tmp_path / "one", "--random-weights") == 0

    assert ran.returncode == 0, ran.stderr
    assert "2 x cpu" in ran.stdout
    assert losses(ran.stdout) == losses(capsys.readouterr().out) != []


def test_a_wrong_number_of_processes_is_said_with_the_command(tmp_path, monkeypatch, capsys):
    from memplan.validator.runtimes.zo.__main__ import main

    write_folder(distributed(zo_pert=2), tmp_path / "out")
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    assert main([str(tmp_path / "out" / "zo_run.json"), "--device", "cpu"]) == 2
    assert "--nproc-per-node 2" in capsys.readouterr().err


def test_data_from_a_file_is_what_is_trained_on(tmp_path):
    from memplan.validator.runtimes.zo import train as runtime
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(tmp_path / "model")
    write_folder(request := asked("mezo"), tmp_path / "out")
    file = dataclasses.replace(zo_file.ZoFile.of(request), model=str(tmp_path / "model"))
    (tmp_path / "text.jsonl").write_text('{"text": "b b b"}\n{"text": "b a"}\n')

    assert runtime._tokens(str(tmp_path / "text.jsonl"), file).tolist() == [1, 1, 1, 1, 0]
    (tmp_path / "text.jsonl").write_text('{"words": "b"}\n')
    with pytest.raises(UserError, match="no object with a key text"):
        runtime._tokens(str(tmp_path / "text.jsonl"), file)


def test_weights_that_are_not_there_are_said(tmp_path, capsys):
    from memplan.validator.runtimes.zo.__main__ import main

    write_folder(asked("mezo"), tmp_path / "out")
    data = json.loads((tmp_path / "out" / "zo_run.json").read_text())
    (tmp_path / "out" / "zo_run.json").write_text(json.dumps({**data, "model": str(tmp_path / "nothing")}))

    assert main([str(tmp_path / "out" / "zo_run.json"), "--steps", "1", "--device", "cpu"]) == 2
    assert "say --random-weights" in capsys.readouterr().err


def test_pretrained_weights_are_the_ones_that_train(tmp_path):
    from memplan.validator.runtimes.zo import train as runtime
    from transformers import AutoModelForCausalLM

    write_folder(request := asked("zo2"), tmp_path / "out")
    assert in_process(tmp_path / "out", "--random-weights", "--save", str(tmp_path / "saved")) == 0
    file = dataclasses.replace(zo_file.ZoFile.of(request), model=str(tmp_path / "saved"), seed=7)
    run = runtime.run_of(file, str(tmp_path / "out" / "zo_run.json"), steps=1, device="cpu")
    module = runtime._Trainer(file, run, 0, 0, runtime.Training(), print).module

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())
