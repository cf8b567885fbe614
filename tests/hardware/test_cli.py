from __future__ import annotations

import argparse
import json

import pytest
from memplan.errors import UserError
from memplan.hardware import catalogue, cli, detect
from memplan.units import GiB


@pytest.fixture
def run():
    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers(required=True))

    def call(*words: str) -> int:
        args = parser.parse_args(["hardware", *words])
        return args.run(args)

    return call


def test_list_shows_every_card_on_a_line_with_its_usable_memory(run, capsys):
    assert run("list") == 0

    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert set(catalogue.keys()) <= set(lines)
    assert f"{catalogue.device('rtx-4090').usable_bytes / GiB:.2f}" in lines["rtx-4090"]


def test_list_can_be_limited_to_a_vendor(run, capsys):
    assert run("list", "--vendor", "amd", "--json") == 0

    assert {row["vendor"] for row in json.loads(capsys.readouterr().out)} == {"amd"}


def test_show_names_the_card_and_the_source_of_its_figures(run, capsys):
    assert run("show", "a100-80gb") == 0

    out = capsys.readouterr().out
    assert "A100 SXM4 80GB (a100-sxm-80gb)" in out
    assert "79.14 GiB" in out
    assert "the PCIe card is a100-pcie-80gb" in out
    assert catalogue.device("a100-sxm-80gb").sources["total_bytes"] in out


def test_show_prints_the_whole_record_as_json(run, capsys):
    assert run("show", "gb200", "--json") == 0

    record = json.loads(capsys.readouterr().out)
    assert record["usable_bytes"] == catalogue.device("gb200").usable_bytes
    assert record["resolved_note"] is None


@pytest.mark.parametrize("key", catalogue.keys())
def test_every_card_can_be_shown(run, capsys, key):
    assert run("show", key) == 0
    assert key in capsys.readouterr().out


def test_an_unknown_card_is_the_users_mistake(run):
    with pytest.raises(UserError, match="Unknown GPU 'rtx-9999'"):
        run("show", "rtx-9999")


def test_detect_answers_on_a_machine_without_a_gpu(run, capsys, monkeypatch):
    monkeypatch.setattr(detect, "gpus", lambda: ())

    assert run("detect") == 0
    out = capsys.readouterr().out
    assert "none found" in out
    assert "ram " in out


def test_detect_says_which_known_card_each_gpu_is(run, capsys, monkeypatch):
    card = detect.Gpu("NVIDIA L4", 22 * GiB, (8, 9), 58, None, 4, 16, "torch")
    monkeypatch.setattr(detect, "gpus", lambda: (card,))

    assert run("detect") == 0
    assert "NVIDIA L4: 22.00 GiB, PCIe 4 x16, as l4 (read by torch)" in capsys.readouterr().out


def test_detect_prints_json(run, capsys):
    assert run("detect", "--json") == 0

    assert json.loads(capsys.readouterr().out)["cpu_cores"] >= 1
