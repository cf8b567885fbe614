"""plan.json of a folder: read back it asks the same question, and what cannot be read is said in one line."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest
from memplan.errors import CannotTell, UserError
from memplan.models.adapters import AdapterSettings
from memplan.planner import cli
from memplan.planner.api import make_request
from memplan.planner.engines import adapter_write, write
from memplan.planner.engines.optimizer_write import optimizer_class
from memplan.planner.engines.plan_file import as_run, launcher, read_written
from memplan.planner.optimizers.catalogue import entries
from memplan.planner.options import request_from
from memplan.planner.plan_format import FORMAT
from memplan.planner.predict import predict
from memplan.planner.trace.source import TraceSource

MODEL = "openai-community/gpt2"


def base(**options):
    return make_request(MODEL, "a100-80gb", **{"precision": "fp32", "seq_len": 16, **options})


def asked(*words):
    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers())
    return request_from(parser.parse_args(["fit", *words]))


QUESTIONS = [
    {"precision": "bf16-autocast", "grad_accum_steps": 4, "clip_grad_norm": True, "recompute": "full"},
    {"strategy": "ddp", "gpus": 4, "optimizer": "sgd"},
    {"strategy": "fsdp2", "gpus": 8, "nodes": 2, "precision": "bf16-mixed", "micro_batch_size": 3},
    {"strategy": "zero3", "gpus": 4, "precision": "bf16-mixed", "offload": ("optimizer",)},
    {"strategy": "release", "optimizer": "sgd-momentum", "frozen": ("transformer.wte",)},
    {"method": "lora", "precision": "bf16", "adapter": AdapterSettings.of("lora", rank=4, alpha=8.0, modules_to_save=("wte",))},
    {"method": "qlora", "precision": "bf16", "optimizer": "paged-adamw-8bit"},
    {"method": "mezo", "precision": "fp16"},
]  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_a_folder_asks_the_question_that_it_was_written_for(tmp_path, question):
    request = base(**question)
    written = write.write_folder(request, tmp_path / "run")
    found = read_written(tmp_path / "run")

    run = as_run(request, written.texts).as_data()
    assert found.request.as_data() == run
    assert found.changed() == []
    assert asked("--from", str(tmp_path / "run")).as_data() == run
    assert found.launch == written.launch
    readme = (tmp_path / "run" / "README.md").read_text().splitlines()
    assert len(readme) == 5
    assert " ".join(found.launch) in readme[1]


@pytest.mark.parametrize(("stack", "apart"), [("trainer", True), ("loop", False)])
def test_a_folder_is_answered_for_with_the_units_that_its_program_makes(tmp_path, stack, apart):
    request = base(strategy="fsdp2", gpus=2, precision="bf16-mixed")
    asked = predict(request, TraceSource())

    files = write.write_folder(request, tmp_path / "run", prediction=asked, stack=stack)

    found = read_written(tmp_path / "run")
    assert bool(found.request.fsdp and found.request.fsdp.wrap_embeddings) is apart
    assert (found.predicted["allocated_peak_bytes"] == asked.allocated_peak_bytes) is not apart
    assert not files.notes


def test_a_card_with_its_own_memory_is_read_back(tmp_path):
    request = base(gpu_memory="40GiB")
    write.write_folder(request, tmp_path / "run")

    again = asked("--from", str(tmp_path / "run" / "plan.json"))

    assert again.device.total_bytes == 40 << 30 == request.device.total_bytes


def test_an_option_goes_before_the_plan_and_that_is_said(tmp_path):
    write.write_folder(base(micro_batch_size=2), tmp_path / "run")

    again = asked("--from", str(tmp_path / "run"), "--micro-batch", "4", "--gpu", "l4")

    assert (again.micro_batch_size, again.device.key) == (4, "l4")
    assert any("--micro-batch 4 is taken, not micro_batch_size 2" in said for said in again.defaults)


def test_a_file_that_was_changed_or_lost_is_named(tmp_path):
    write.write_folder(base(), tmp_path / "run")
    (tmp_path / "run" / "train.py").write_text("print('mine')")
    (tmp_path / "run" / "run.json").unlink()

    assert sorted(read_written(tmp_path / "run").changed()) == ["run.json", "train.py"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": FORMAT + 1}, "was written by a newer memplan"),
        ({"format": "one"}, "format 'one'"),
        ({"kind": "other"}, "is no plan of memplan"),
        ({"launch": None}, "launch is missing or wrong"),
        ({"base": {}}, "question.model: is missing"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_read_is_said_in_one_line(tmp_path, change, said):
    write.write_folder(base(), tmp_path / "run")
    place = tmp_path / "run" / "plan.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **change}))

    with pytest.raises(UserError, match=said):
        read_written(place)


def test_a_missing_plan_and_one_that_is_no_json_are_said(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_written(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        read_written(tmp_path)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({}, ("python",)),
        ({"strategy": "ddp", "gpus": 4}, ("torchrun", "--standalone", "--nproc-per-node", "4")),
        ({"strategy": "ddp", "gpus": 16, "nodes": 2}, ("torchrun", "--nnodes", "2", "--nproc-per-node", "8")),
    ],
    ids=str,
)
def test_one_process_a_gpu_is_started(question, words):
    assert launcher(base(**question)) == words


def test_the_allocators_settings_are_set_before_torch_is_imported():
    files = write.files_of(base(alloc_conf="expandable_segments:True"))

    program = files.texts[write.PROGRAM]
    assert json.loads(files.texts[write.RUN])["alloc_conf"] == "expandable_segments:True"
    assert program.index("PYTORCH_ALLOC_CONF") < program.index("import torch")


def test_no_program_says_what_a_file_says():
    request = base(micro_batch_size=3, grad_accum_steps=7, frozen=("transformer.wte",), clip_grad_norm=True)
    for stack in ("trainer", "loop"):
        program = write.files_of(request, stack).texts[write.PROGRAM]
        for copy in ("gpt2'", '"openai', "transformer.wte", " 16", " 7"):
            assert copy not in program.partition('"""\n')[2], copy
        compile(program, "train.py", "exec")


# -- adapters and optimizers, by their own libraries -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora", "oft", "ia3", "prompt-tuning", "adalora"])
def test_peft_reads_the_adapter_that_is_written(tmp_path, kind):
    peft = pytest.importorskip("peft")
    rank = {} if kind in ("ia3", "prompt-tuning") else {"rank": 4}
    request = base(method=kind, precision="bf16", adapter=AdapterSettings.of(kind, **rank))
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_write.adapter_config(request)))

    found = peft.PeftConfig.from_pretrained(tmp_path)

    assert found.task_type == "CAUSAL_LM"
    assert type(found).__name__ == adapter_write.KINDS[kind].config
    if kind in ("lora", "rslora", "dora"):
        assert (found.r, found.use_dora, found.use_rslora) == (4, kind == "dora", kind == "rslora")


@pytest.mark.parametrize("quant", ["nf4", "nf4-dq", "fp4", "fp4-dq"])
def test_bitsandbytes_configuration_is_taken_by_transformers(quant):
    transformers = pytest.importorskip("transformers")
    request = base(method="qlora", precision="bf16", adapter=AdapterSettings.of("qlora", base_quant=quant))

    found = transformers.BitsAndBytesConfig(**adapter_write.quantisation_config(request))

    assert found.load_in_4bit
    assert found.bnb_4bit_quant_type == quant[:3]
    assert found.bnb_4bit_use_double_quant == quant.endswith("-dq")
    assert str(found.bnb_4bit_compute_dtype) == "torch.bfloat16"


def test_a_base_that_was_quantised_beforehand_has_to_be_there():
    request = base(method="lora", precision="fp16", adapter=AdapterSettings.of("lora", base_quant="gptq"))

    with pytest.raises(CannotTell, match="quantised already"):
        adapter_write.quantisation_config(request)


@pytest.mark.parametrize(
    "name",
    [
        n
        for n, entry in entries().items()
        if entry.library in ("torch", "bitsandbytes", "lion-pytorch", "prodigyopt", "schedulefree") and n != "muon"
    ],
)
def test_an_optimizers_class_is_one_of_its_library_and_takes_the_arguments(name):
    import importlib

    torch = pytest.importorskip("torch")
    made = optimizer_class(name)
    module, _, kind = made["class"].rpartition(".")
    library = pytest.importorskip(module)

    optimizer = getattr(importlib.import_module(library.__name__), kind)(
        [torch.nn.Parameter(torch.ones(4))], **made["arguments"]
    )

    assert kind.lower().replace("paged", "").startswith(name.removeprefix("paged-").split("-")[0][:3])
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_flashoptims_options_are_its_arguments():
    made = optimizer_class("flash-adamw:master_weight_bits=32,quantize=false")

    assert made["class"] == "flashoptim.FlashAdamW"
    assert made["arguments"] == {"lr": 5e-5, "master_weight_bits": 32, "quantize": False}


def test_an_optimizer_of_another_library_is_left_to_its_documentation():
    with pytest.raises(CannotTell, match="how apex-lamb"):
        optimizer_class("apex-lamb")
    files = write.files_of(dataclasses.replace(base(), optimizer="apex-lamb"), "trainer")

    assert not files.launch
    assert any("apex-lamb" in note for note in files.notes)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("galore-adamw:rank=4,targets=attn", {
            "class": "galore_torch.GaLoreAdamW", "takes": "low-rank", "matrices": {"with": ["attn"]},
            "group": {"rank": 4, "update_proj_gap": 200, "proj_type": "std", "scale": 0.25},
        }),
        ("apollo-mini", {"class": "apollo_torch.APOLLOAdamW", "takes": "low-rank"}),
        ("muon", {"class": "torch.optim.Muon", "takes": "muon"}),
        ("badam", {"class": "badam.BlockOptimizer", "takes": "blocks"}),
        ("adam-mini:dim=64,n_heads=4", {
            "takes": "names", "arguments": {"lr": 5e-5, "dim": 64, "n_heads": 4, "verbose": False},
        }),
    ],
)  # fmt: skip
def test_what_an_optimizer_takes_of_the_model_is_said(name, said):
    made = optimizer_class(name)

    assert {key: made[key] for key in said} == said


def test_an_optimizer_that_takes_the_model_whole_is_not_written_for_shards():
    request = base(optimizer="galore-adamw", strategy="fsdp2", gpus=2)

    assert not write.files_of(request).launch
    with pytest.raises(CannotTell, match="Use --stack loop"):
        write.files_of(request, "trainer")
    with pytest.raises(CannotTell, match="use single or ddp"):
        write.files_of(request, "loop")


def test_every_reader_refuses_a_newer_file_in_the_same_words(tmp_path):
    from memplan.planner.show.cli import read

    write.write_folder(base(), tmp_path / "run")
    file = tmp_path / "run" / "plan.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": FORMAT + 1}))

    for reader in (read_written, read):
        with pytest.raises(UserError, match=f"format {FORMAT + 1} was written by a newer memplan"):
            reader(str(file))


def test_lomo_runs_under_the_trainer():
    files = write.files_of(base(method="lomo", precision="bf16"))

    assert json.loads(files.texts[write.ARGUMENTS])["optim"] == "lomo"
    assert files.launch == ("python", "train.py")
