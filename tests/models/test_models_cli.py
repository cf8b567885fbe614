"""`memplan models list` and `memplan models show`."""

import argparse
import json
import subprocess
import sys

import pytest
from memplan.errors import UserError
from memplan.models import catalogue, cli
from memplan.models.summary import human_params, summarize


def run(*words):
    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers())
    args = parser.parse_args(["models", *words])
    return args.run(args)


def test_the_list_names_every_model_with_its_numbers(capsys):
    assert run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "params", "layers", "hidden", "heads", "vocab", "task"]
    row = next(line for line in lines if line.startswith("meta-llama/Llama-3.1-8B "))
    assert row.split()[1:] == ["8.03B", "32", "4096", "32", "128256", "causal-lm"]
    assert lines[-1].startswith(f"{len(catalogue.entries())} models.")


@pytest.mark.parametrize(
    ("family", "inside", "outside"), [("bert", "bert-base-uncased", "roberta-base"), ("vision", "resnet-50", "gpt2")]
)
def test_a_family_is_a_model_type_or_a_group(capsys, family, inside, outside):
    run("list", "--family", family)
    out = capsys.readouterr().out
    assert inside in out
    assert outside not in out


def test_an_unknown_family_offers_the_nearest():
    with pytest.raises(UserError, match=r"no models of the family 'lama' in the catalogue\. Did you mean llama"):
        run("list", "--family", "lama")


def test_the_list_as_json_holds_exact_numbers(capsys):
    run("list", "--family", "gpt2", "--json")
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["openai-community/gpt2"]["num_params"] == 124_439_808
    assert rows["openai-community/gpt2"]["layers"] == "12"


def test_listing_and_showing_a_known_model_import_no_torch():
    code = (
        "import argparse, sys\nfrom memplan.models import cli\n"
        "parser = argparse.ArgumentParser(); cli.add_commands(parser.add_subparsers())\n"
        "for words in (['list'], ['show', 'gpt2']):\n    args = parser.parse_args(['models', *words]); args.run(args)\n"
        "assert not {'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_show_tells_parameters_task_positions_and_source(capsys):
    run("show", "gpt2")
    out = capsys.readouterr().out
    for line in (
        "parameters  124,439,808 (124M)",
        "task        causal-lm",
        "positions   1024 tokens",
        "published   124M (openai/gpt-2",
        "shape       layers 12, hidden 768, heads 12, vocab 50257",
        "  n_layer = 12",
    ):
        assert line in out


def test_show_counts_a_changed_model_by_building_it(capsys):
    run("show", "gpt2", "--set", "num_hidden_layers=1", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert answer["config"]["n_layer"] == 1
    assert answer["num_params"] == 124_439_808 - 11 * 7_087_872  # one GPT-2 layer: 12 h^2 + 13 h, h = 768
    assert "published" not in answer


def test_show_counts_the_head_of_another_task(capsys):
    run("show", "bert-base-uncased", "--task", "seq-classification", "--json")
    assert (
        json.loads(capsys.readouterr().out)["num_params"] == 109_483_778
    )  # transformers' BertForSequenceClassification, 2 labels


def test_show_of_a_factory_counts_its_module(capsys, tmp_path):
    (tmp_path / "net.py").write_text("import torch\ndef build(width=3):\n    return torch.nn.Linear(width, 1), dict\n")
    run("show", f"{tmp_path / 'net.py'}:build", "--set", "width=10", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert (answer["num_params"], answer["task"], answer["factory"]["kwargs"]) == (11, "custom", {"width": 10})


@pytest.mark.parametrize(
    ("count", "text"), [(None, "?"), (999, "999"), (37_760_640, "37.8M"), (8_030_261_248, "8.03B"), (405_853_388_800, "406B")]
)
def test_parameter_counts_are_written_in_decimal_units(count, text):
    assert human_params(count) == text


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "vocab"),
    [
        ("openai/whisper-tiny", "4+4", 384, 51865),
        ("t5-small", "6+6", 512, 32128),
        ("microsoft/swin-tiny-patch4-window7-224", "12", 96, None),
        ("google/gemma-3-4b-pt", "34", 2560, 262208),
        ("mpt-7b", "32", 4096, 50432),
    ],
)
def test_the_summary_reads_each_familys_own_names(name, layers, hidden, vocab):
    facts = summarize(catalogue.find(name).config)
    assert (facts.layers, facts.hidden_size, facts.vocab_size) == (layers, hidden, vocab)
