"""`memplan validate` as it is typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from memplan.__main__ import main
from memplan.validator import api

USER = Path(__file__).with_name("user_models.py")


@pytest.fixture(autouse=True)
def _own_places(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


def run(*words):
    return main(["validate", *words])


def test_a_real_run_prints_the_verdict_and_is_remembered(capsys):
    assert run(f"{USER}:shared", "--device", "cpu", "--seq", "16", "--micro-batch", "2") == 0
    out = capsys.readouterr().out
    assert out.startswith("AGREES ")
    assert "peak of all steps" in out
    assert "\x1b" not in out
    assert run("--records") == 0
    assert "agrees" in capsys.readouterr().out


def test_json_is_the_same_as_data_and_nothing_else(capsys):
    words = (f"{USER}:shared", "--device", "cpu", "--seq", "16", "--json", "--no-record", "--steps", "1", "--optimizer", "sgd")
    assert run(*words) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["outcome"] == "agrees"
    assert data["question"]["loop"]["iterations"] == 1
    assert data["measured"]["peak_bytes"] > 0
    assert run("--records", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_run_that_takes_too_long_is_exit_code_2_with_the_reason(capsys):
    assert run(f"{USER}:shared", "--device", "cpu", "--seq", "16", "--timeout", "0.01") == 2
    assert capsys.readouterr().out.startswith("COULD NOT RUN  the run took longer than 0.01 s")


def test_peaks_further_apart_than_the_tolerance_are_exit_code_1(monkeypatch, capsys):
    real = api.run

    def doubled(request, device, **how):
        result = real(request, device, isolated=False, **how)
        phases = tuple(type(p)(**{**vars(p), "peak_bytes": 2 * p.peak_bytes}) for p in result.predicted.phases)
        ours = type(result.predicted)(**{**vars(result.predicted), "phases": phases})
        return type(result)(**{**vars(result), "predicted": ours, "rows": api.rows_of(ours, result.measured)})

    monkeypatch.setattr(api, "run", doubled)
    assert run(f"{USER}:shared", "--device", "cpu", "--seq", "16", "--no-record") == 1
    assert capsys.readouterr().out.startswith("DIFFERS ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "MODEL is missing. Name a model, or use --records"),
        (("gpt2", "--steps", "0"), "--steps 0: must be 1 or more"),
        (("gpt2", "--timeout", "-1"), "--timeout -1: must be more than 0"),
        (("gpt2", "--threads", "-1"), "--threads -1: must be 0 or more"),
        (("gpt2", "--tolerance", "2"), "--tolerance 2: expected a share between 0 and 1"),
        (("gpt2", "--seq", "-3"), "--seq -3: must be 1 or more"),
        (("gpt2", "--seq", "9999"), "gpt2 has positions for 1024 tokens"),
        (("gpt2", "--optimizer", "adamm", "--seq", "8"), "--optimizer adamm: not known"),
        (("gpt2", "--snapshot", "x.pickle"), "--snapshot: only a GPU run has a memory history"),
        (("gpt2", "--strategy", "fsdp1"), "--strategy fsdp1: expected a number of GPUs"),
        (("gpt2", "--offload", "optimizer"), "--offload optimizer with --strategy single"),
        (("gpt2", "--attention", "flash_attention_2"), "flash_attention_2 runs on a GPU only"),
        (("no-such-model-at-all/",), "model"),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2(words, message, capsys):
    assert run(*words, "--device", "cpu") == 2
    error = capsys.readouterr().err
    assert error.startswith("memplan: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_store_that_cannot_be_written_is_a_note_and_the_answer_comes(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "records.sqlite3"
    assert run(f"{USER}:shared", "--device", "cpu", "--seq", "16", "--store", str(place)) == 0
    out = capsys.readouterr().out
    assert out.startswith("AGREES ")
    assert "Note: the result was not recorded in" in out


def test_the_api_takes_a_reference_and_gives_a_comparison(tmp_path):
    import memplan

    result = memplan.validate(f"{USER}:shared", device="cpu", micro_batch_size=2, seq_len=16, store=tmp_path / "r.sqlite3")
    assert result.agrees
    assert (tmp_path / "r.sqlite3").exists()


def test_help_imports_no_torch():
    code = (
        "import sys\nfrom memplan.__main__ import main\n"
        "try: main(['validate', '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'transformers', 'sqlite3') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--tolerance" in done.stdout
    assert done.stdout.rstrip().endswith("[]")
