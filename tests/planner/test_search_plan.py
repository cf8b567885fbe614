"""plan.json, the table, the command and the folder that it leaves."""

from __future__ import annotations

import argparse
import json

import pytest
from memplan.errors import UserError
from memplan.planner.api import make_request
from memplan.planner.plan_format import FORMAT
from memplan.planner.prediction import Verdict
from memplan.planner.search import cli
from memplan.planner.search.api import best_request, request_of_plan
from memplan.planner.search.plan import Candidate, Plan, Refused, read_plan
from memplan.planner.search.table import command, render

MODEL = "openai-community/gpt2"
SMALL = ("--set", "n_layer=2", "--set", "vocab_size=1024", "--set", "n_embd=256", "--set", "n_head=4", "--seq", "128")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMPLAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def candidate(**changes) -> Candidate:
    values = {
        "method": "full", "strategy": "zero3", "precision": "bf16-mixed", "optimizer": "adamw", "optimizer_impl": "default",
        "recompute": "full", "offload": ("optimizer",), "gpus": 8, "nodes": 1, "micro_batch_size": 2, "grad_accum_steps": 4,
        "verdict": Verdict.FITS, "reserved_peak_bytes": 60 << 30, "headroom_bytes": 17 << 30, "host_bytes": 100 << 30,
        "nvme_bytes": 0, "step_s": 2.0, "tokens_per_s": 12345.0, "bound_by": "compute",
        "why_not_more": "micro batch 4 needs 90.00 GiB of 77.00 GiB",
    }  # fmt: skip
    return Candidate(**{**values, **changes})


def plan(*candidates: Candidate, **changes) -> Plan:
    values = {
        "question": {"model": MODEL, "task": "causal-lm", "gpu": "a100-sxm-80gb", "gpus": 8, "nodes": 1},
        "base": {}, "gpu": "A100 SXM4 80GB", "usable_bytes": 77 << 30,
        "global_batch_size": 64, "seq_len": 1024, "objective": "throughput",
        "candidates": candidates, "notes": ("a node as DGX",), "num_considered": 72, "num_simulated": 6,
        "refused": (Refused(name="ddp, bf16-autocast", micro_batch_size=8, needs_bytes=120 << 30, simulated=False,
                            reason="needs at least 120.00 GiB of 77.00 GiB"),),
    }  # fmt: skip
    return Plan(**{**values, **changes})


def test_a_row_of_a_plan_is_read_back_as_the_question_that_it_answers():
    base = make_request(MODEL, "a100-80gb", gpus=8, precision="fp32", seq_len=1024)
    made = plan(candidate(), candidate(strategy="fsdp2", offload=()), base=base.as_data())
    again = request_of_plan(Plan.from_json(json.loads(made.text())), 1)
    assert again.as_data() == best_request(made.candidates[1], base).as_data()
    with pytest.raises(UserError, match="no row 3"):
        request_of_plan(made, 2)


def test_a_plan_survives_its_file():
    made = plan(candidate(), candidate(strategy="fsdp2", step_s=None, tokens_per_s=None))
    assert Plan.from_json(json.loads(made.text())) == made


def test_a_plan_without_a_candidate_survives_its_file():
    closest = Refused(name="zero3", micro_batch_size=1, needs_bytes=90 << 30, simulated=True, reason="needs 90")
    made = plan(closest=closest, would_fit=("16 GPUs of this kind",))
    assert Plan.from_json(json.loads(made.text())) == made


def test_a_newer_format_is_refused_with_the_way_out():
    data = {**plan(candidate()).to_json(), "format": FORMAT + 1}
    with pytest.raises(UserError, match=r"written by a newer memplan .*\. Upgrade memplan"):
        Plan.from_json(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"kind": "other"}, "is no plan"), ({"format": "1"}, "expected a number"), ({"colour": 1}, "'colour' is not known"),
     ({"candidates": [{"verdict": "perhaps"}]}, "perhaps"), ({"candidates": 3}, "plan.json")],
)  # fmt: skip
def test_what_is_no_plan_is_a_mistake(change, words):
    with pytest.raises(UserError, match=words):
        Plan.from_json({**plan(candidate()).to_json(), **change})


def test_a_missing_key_is_named():
    data = plan(candidate()).to_json()
    del data["objective"]
    with pytest.raises(UserError, match="objective"):
        Plan.from_json(data)


def test_a_plan_is_read_from_its_folder(tmp_path):
    made = plan(candidate())
    (tmp_path / "plan.json").write_text(made.text())
    assert read_plan(tmp_path) == made


def test_a_missing_plan_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_plan(tmp_path / "none.json")


def test_the_table_says_what_to_run_and_why_not_more():
    text = render(plan(candidate(), candidate(verdict=Verdict.TIGHT, gives_up=("adamw-8bit in the place of adamw",))))
    assert text.startswith("RUN zero3, offload optimizer, bf16-mixed, recompute full; micro batch 2, 4 accumulated")
    assert "12,345" in text
    assert "tight" in text
    assert "gives up adamw-8bit in the place of adamw" in text
    assert "why not more: micro batch 4 needs 90.00 GiB of 77.00 GiB" in text
    assert "ddp, bf16-autocast, micro batch 8: needs at least 120.00 GiB" in text
    assert "72 configurations considered, 6 simulated" in text


def test_the_table_says_what_the_closest_needs_and_what_would_fit():
    closest = Refused(name="zero3", micro_batch_size=1, needs_bytes=90 << 30, simulated=True, reason="needs 90.00 GiB")
    text = render(plan(closest=closest, would_fit=("16 GPUs of this kind (zero3)",), refused=()))
    assert text.startswith("NO PLAN FITS: the closest needs 90.00 GiB, you have 77.00 GiB")
    assert "16 GPUs of this kind" in text


def test_the_command_of_a_row_repeats_it():
    text = command(plan(candidate()), candidate(alloc_conf="expandable_segments:True"))
    for part in ("--strategy zero3", "--offload optimizer", "--recompute full", "--micro-batch 2", "--grad-accum 4",
                 "--alloc-conf expandable_segments:True", "--gpus 8", "--precision bf16-mixed"):  # fmt: skip
        assert part in text


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers())
    args = parser.parse_args(["plan", MODEL, *SMALL, *words])
    return args.run(args)


def test_the_command_prints_a_plan_as_json(capsys):
    assert _run("--gpu", "rtx-4090", "--global-batch", "4", "--json") == 0
    made = Plan.from_json(json.loads(capsys.readouterr().out))
    assert made.best is not None
    assert made.best.micro_batch_size * made.best.grad_accum_steps == 4


def test_the_command_ends_with_1_where_nothing_fits(capsys):
    words = ("--gpu", "rtx-4090", "--gpu-memory", "380MiB", "--global-batch", "1", "--method", "full", "--offload", "none")
    assert _run(*words) == 1
    assert capsys.readouterr().out.startswith("NO PLAN FITS")


def test_write_leaves_a_folder_that_says_how_to_start(tmp_path, capsys):
    folder = tmp_path / "run"
    words = ("--gpu", "a100-80gb", "--gpus", "2", "--global-batch", "8", "--strategy", "zero2", "--write", str(folder))
    assert _run(*words) == 0
    names = {path.name for path in folder.iterdir()}
    assert {"plan.json", "README.md", "train.py", "accelerate.yaml", "ds_config.json", "training_args.json"} <= names
    made = read_plan(folder)
    settings = json.loads((folder / "ds_config.json").read_text())
    assert made.best is not None
    assert settings["train_micro_batch_size_per_gpu"] == made.best.micro_batch_size
    assert settings["gradient_accumulation_steps"] == made.best.grad_accum_steps
    readme = (folder / "README.md").read_text()
    assert len(readme.splitlines()) == 5
    assert "torchrun --standalone --nproc-per-node 2 train.py" in readme
    assert made.predicted is not None
    assert made.predicted["reserved_peak_bytes"] == made.best.reserved_peak_bytes
    assert set(made.files or {}) == names - {"plan.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_write_refuses_a_folder_that_is_there_before_it_works(tmp_path):
    with pytest.raises(UserError, match="is there already"):
        _run("--gpu", "rtx-4090", "--global-batch", "4", "--write", str(tmp_path))


def test_write_replaces_files_of_a_folder_with_force(tmp_path, capsys):
    (tmp_path / "plan.json").write_text("old")
    (tmp_path / "mine.txt").write_text("kept")
    assert _run("--gpu", "rtx-4090", "--global-batch", "4", "--offload", "none", "--write", str(tmp_path), "--force") == 0
    assert read_plan(tmp_path).fits
    assert (tmp_path / "mine.txt").read_text() == "kept"


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--method", "lorra"), "--method 'lorra' is not known"), (("--strategy", "zero9"), "--strategy 'zero9' is not known"),
     (("--precision", "bf17"), "--precision 'bf17'"), (("--optimizer", "adamx"), "--optimizer adamx"),
     (("--offload", "ram"), "--offload 'ram'"), (("--recompute", "some"), "--recompute .some"),
     (("--objective", "speed"), "--objective 'speed'"), (("--strategy", "zero2,,ddp"), "between two commas"),
     (("--global-batch", "0"), "--global-batch 0"), (("--top", "0"), "--top 0")],
)  # fmt: skip
def test_a_word_that_does_not_exist_is_a_mistake_with_its_option(words, said):
    with pytest.raises(UserError, match=said):
        _run("--gpu", "rtx-4090", *words)


def test_choices_that_no_configuration_has_are_a_mistake():
    with pytest.raises(UserError, match="no configuration answers"):
        _run("--gpu", "rtx-4090", "--strategy", "single", "--precision", "bf16-mixed", "--method", "full")


@pytest.mark.parametrize(("method", "says"), [("mezo", "MEZO=FOLDER before it"), ("distzo2", "--random-weights")])
def test_a_folder_without_gradients_speaks_of_no_optimizer_and_of_its_own_options(method, says, tmp_path):
    gpus = ("--gpus", "2") if method == "distzo2" else ()
    words = ("--gpu", "rtx-4090", *gpus, "--global-batch", "2", "--precision", "fp16", "--method", method)
    assert _run(*words, "--write", str(tmp_path / "out")) == 0
    readme = (tmp_path / "out" / "README.md").read_text()
    assert f"the SGD of {method}" in readme
    assert "adamw" not in readme
    assert says in readme.splitlines()[1]
    assert ("--steps" in readme) == (method != "mezo")


def test_methods_that_an_optimizer_is_stand_beside_full_training(capsys):
    words = ("--method", "full,galore,hift,lomo", "--precision", "bf16", "--recompute", "none", "--top", "9", "--json")
    assert _run("--gpu", "rtx-4090", "--global-batch", "4", *words) == 0
    rows = Plan.from_json(json.loads(capsys.readouterr().out)).candidates
    assert {(row.method, row.optimizer) for row in rows} >= {("full", "adamw"), ("galore", "galore-adamw"), ("hift", "hift"),
                                                             ("lomo", "lomo")}  # fmt: skip
    assert "galore, bf16" in {row.name for row in rows}
    layerwise = next(row for row in rows if row.method == "hift")
    assert layerwise.gives_up == ("hift: one block of layers trains at a time", "no fp32 masters: all in bf16")


def test_a_method_that_does_not_go_with_the_machine_is_named_beside_those_that_do(capsys):
    assert _run("--gpu", "rtx-4090", "--gpus", "2", "--global-batch", "4", "--method", "full,hift") == 0
    assert "--method hift is not among them" in " ".join(capsys.readouterr().out.split())


def test_an_optimizer_that_a_method_has_not_is_refused_with_those_that_it_has():
    with pytest.raises(UserError, match="--method lomo with --optimizer adamw: it has none of that name"):
        _run("--gpu", "rtx-4090", "--method", "lomo", "--optimizer", "adamw")


def test_a_tight_row_holds_what_there_is_and_says_why_it_is_tight():
    tight = candidate(verdict=Verdict.TIGHT, reserved_peak_bytes=83 << 30, headroom_bytes=-6 << 30)
    text = " ".join(render(plan(candidate(), tight)).split())
    assert "tight 0.00 77.00" in text
    assert "PyTorch would hold 83.00 GiB and has to empty its cache, which costs time" in text
    assert "tight ones last" in text


def test_a_model_that_no_configuration_can_be_answered_for_is_a_mistake_and_not_too_large():
    with pytest.raises(UserError, match="no configuration can be answered for: --method badam: it finds no layers"):
        _run("--gpu", "rtx-4090", "--global-batch", "4", "--method", "badam")
