"""The suites: many architectures at once.  A dozen of the zoo run here, all of them by the command."""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from memplan.__main__ import main
from memplan.errors import UserError
from memplan.validator import model_types, pool, suite
from memplan.validator.suite import TypeRow, TypesResult, ZooResult, ZooRow, run_suite
from memplan.validator.suite_report import write_section
from memplan.validator.tiny import default_config, shrunk
from memplan.validator.zoo import ZOO, find

FAST = ("qwen3", "gpt2", "deepseek_v3", "mamba", "bert", "t5", "bart", "vit", "swin", "whisper", "wav2vec2", "clip")


def test_the_zoo_has_sixty_architectures_of_six_kinds_each_once():
    assert len(ZOO) >= 60
    assert set(Counter(a.kind for a in ZOO)) == {"causal", "masked", "seq2seq", "vision", "audio", "multimodal"}
    assert [name for name, count in Counter(a.name for a in ZOO).items() if count > 1] == []


@pytest.fixture(scope="module")
def fast():
    return run_suite("zoo", only=FAST)


def test_every_figure_of_a_dozen_architectures_agrees_with_their_real_steps(fast):
    assert [row.name for row in fast.rows if not row.within(0.001)] == []
    assert {row.name for row in fast.rows} == set(FAST)
    assert fast.exit_code == 0


def test_nearly_all_peaks_are_equal_to_the_byte(fast):
    assert fast.exact >= len(FAST) - 1


def test_the_page_shows_every_architecture_within_the_tolerance():
    """All of the zoo takes minutes: `memplan validate --suite zoo --write docs/zoo.md` runs it and writes the page."""
    page = Path(__file__).parents[2].joinpath("docs", "zoo.md").read_text()
    ratios = dict(re.findall(r"^\| (\S+) \| \w+ \| \S+ \| [\d,]+ \| [\d,]+ \| ([\d.]+) \|", page, re.MULTILINE))
    assert list(ratios) == [architecture.name for architecture in ZOO]
    assert [name for name, ratio in ratios.items() if abs(float(ratio) - 1) > 0.001] == []


def row(name="a", predicted=1000, measured=1000, reason=""):
    known = {"predicted_bytes": predicted, "measured_bytes": None if reason else measured}
    return ZooRow(name=name, kind="causal", task="causal-lm", figures=18, equal_figures=17, reason=reason, **known)


def zoo_of(*rows):
    return ZooResult(rows=rows, tolerance=0.001, versions={"torch": "2.13.0", "memplan": "0"})


def test_a_peak_that_is_too_far_off_fails_the_suite_and_is_named_as_the_worst():
    result = zoo_of(row(), row("b", predicted=1001), row("c", predicted=990))
    assert (result.within, result.exact, result.exit_code) == (2, 1, 1)
    assert result.worst.name == "c"
    assert "2 of 3 architectures within 0.1%, 1 exactly equal, 0 could not run.\nWorst: c, 1.0000% (-10 bytes)." in str(result)


def test_a_model_that_cannot_run_is_a_row_with_its_reason_and_fails_the_suite():
    result = zoo_of(row(), row("b", predicted=None, reason="b: no such thing"))
    assert result.exit_code == 1
    assert "Could not run:\nb: b: no such thing" in str(result)
    assert result.to_json()["could_not_run"] == 1


def test_all_equal_is_exit_code_zero():
    assert zoo_of(row()).exit_code == 0


def test_a_name_that_the_suite_does_not_have_is_refused_with_a_near_one():
    with pytest.raises(UserError, match=r"--only lama: --suite zoo has no such model\. Did you mean .*llama"):
        run_suite("zoo", only=["lama"])


def test_the_command_prints_the_table_to_stdout_and_progress_to_stderr(capsys):
    code = main(["validate", "--suite", "zoo", "--only", "qwen3", "--json"])
    out = capsys.readouterr()
    data = json.loads(out.out)
    assert code == 0
    assert (data["architectures"], data["within_tolerance"], data["could_not_run"]) == (1, 1, 0)
    assert out.err.startswith("1/1  qwen3 ")


def test_types_that_trace_and_types_that_do_not_are_told_apart(capsys):
    code = main(["validate", "--suite", "types", "--only", "llama,jetmoe,sam_mask_decoder"])
    out = capsys.readouterr().out
    assert code == 0
    assert "1 of 3 model types trace (1 narrow).\nWithout the 1 that are only parts of another model: 1 of 2." in out
    assert "1 x decides by the values of a tensor, which no trace knows:\n  jetmoe: jetmoe: " in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["llama", "--suite", "zoo"], "--suite zoo takes no MODEL, got llama"),
        (["--suite", "zoo", "--jobs", "0"], "--jobs 0: must be 1 or more"),
        (["--suite", "zoo", "--timeout", "0"], "--timeout 0: must be more than 0"),
        (["--suite", "zoo", "--tolerance", "2"], "--tolerance 2: expected a share between 0 and 1"),
        (["gpt2", "--only", "llama"], "--only belongs to --suite"),
    ],
)
def test_options_that_do_not_go_together_are_one_line_and_exit_code_2(arguments, said, capsys):
    assert main(["validate", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


# -- the page ------------------------------------------------------------------------------------------------------------


def test_each_suite_renews_its_own_section_of_the_page(tmp_path):
    page = tmp_path / "zoo.md"
    types = TypesResult(rows=(TypeRow(name="x", reason="x: forward needs y, which the config does not describe"),), versions={})
    write_section(zoo_of(row("first")), page)
    write_section(types, page)
    page.write_text(page.read_text() + "\nMy own words.\n")
    write_section(zoo_of(row("second")), page)
    text = page.read_text()
    assert "| second | causal | causal-lm | 1,000 | 1,000 | 1.000000 | +0 | 17/18 |" in text
    assert "| first |" not in text
    assert "| x |  |  | takes inputs that its config does not describe |" in text
    assert text.endswith("My own words.\n")
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## Predicted and measured", "## All model types"]


# -- the workers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def workers_that(monkeypatch):
    """Replaces the worker's program by a few lines of Python."""

    def use(code):
        original = pool.subprocess.Popen

        def popen(command, **how):
            return original([sys.executable, "-c", code], **how)

        monkeypatch.setattr(pool.subprocess, "Popen", popen)

    return use


ECHO = """
import json, os, sys, time
for line in sys.stdin:
    job = json.loads(line)
    if job["name"] == "dies":
        os.kill(os.getpid(), 11)
    if job["name"] == "hangs":
        time.sleep(600)
    print(json.dumps({"name": job["name"], "reason": ""}), flush=True)
"""


def reasons(names, **options):
    jobs = [{"name": name} for name in names]
    return {job["name"]: answer["reason"] for job, answer in pool.answers(jobs, **{"workers": 2, "timeout_s": 60, **options})}


def test_a_worker_that_dies_costs_its_own_job_only(workers_that):
    workers_that(ECHO)
    found = reasons(["a", "dies", "b", "c"], workers=1)
    assert found == {"a": "", "dies": "the run died of SIGSEGV", "b": "", "c": ""}


def test_a_job_that_takes_too_long_is_stopped_and_the_next_one_runs(workers_that):
    workers_that(ECHO)
    found = reasons(["hangs", "a"], workers=1, timeout_s=1)
    assert found == {"hangs": "took longer than 1 s and was stopped", "a": ""}


def test_workers_end_when_nobody_wants_more_answers(workers_that, monkeypatch):
    workers_that(ECHO)
    made = []
    monkeypatch.setattr(pool, "_Worker", lambda original=pool._Worker: made.append(original()) or made[-1])
    answers = pool.answers([{"name": "a"}, {"name": "hangs"}], workers=2, timeout_s=60)
    next(answers)
    answers.close()
    assert [worker._process.poll() is not None for worker in made] == [True] * len(made)


# -- tiny configs --------------------------------------------------------------------------------------------------------


def test_a_hybrid_keeps_a_layer_of_each_kind():
    config = {"num_hidden_layers": 4, "layer_types": ["linear", "linear", "linear", "full"], "vocab_size": 1000}
    assert shrunk(config, "shallow") == {"num_hidden_layers": 2, "layer_types": ["linear", "full"], "vocab_size": 1000}


def test_widths_shrink_only_where_a_narrow_config_is_asked_for():
    config = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "n_layer": 30, "n_routed_experts": 256}
    assert shrunk(config, "default") == config
    assert shrunk(config, "shallow") == {**config, "n_layer": 2, "n_routed_experts": 4}
    narrow = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "n_layer": 2, "n_routed_experts": 4}
    assert shrunk(config, "narrow") == narrow


def test_special_tokens_stay_different_inside_the_small_vocabulary():
    config = {"vocab_size": 50000, "pad_token_id": 3, "image_token_id": 49000, "text_config": {"eos_token_id": [49001, 49000]}}
    small = shrunk(config, "narrow")
    assert (small["vocab_size"], small["pad_token_id"]) == (256, 3)
    assert small["text_config"]["eos_token_id"][1] == small["image_token_id"]
    assert len({small["image_token_id"], *small["text_config"]["eos_token_id"]}) == 2
    assert max(small["text_config"]["eos_token_id"]) < 256


def test_stage_depths_shrink_and_what_is_derived_from_them_goes():
    small = shrunk(
        {"depths": [3, 4, 6, 3], "stage_names": ["stem", "stage1"], "out_features": ["stage4"], "embed_dim": 96}, "narrow"
    )
    assert small == {"depths": [2, 2, 2, 2], "embed_dim": 96}


@pytest.mark.parametrize("name", ["llama", "qwen2_vl", "swin", "t5"])
def test_an_architecture_is_small_and_keeps_its_family(name):
    config = find(name).values()
    assert config["model_type"] == name
    assert len(json.dumps(config, default=str)) <= len(json.dumps(default_config(name), default=str)) + 200


def test_an_architectures_own_fields_reach_nested_configs():
    assert find("siglip").values()["text_config"]["projection_size"] == 64


# -- reasons -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "group"),
    [
        ("x: the model cannot be built: ImportError: A requires the timm library but", "needs the package timm"),
        ("x: forward needs grid_thw, which the config does not describe.", "takes inputs that its config does not describe"),
        ("x: a layer decides by the values of a tensor (op)", "decides by the values of a tensor, which no trace knows"),
        ("took longer than 60 s and was stopped", "took too long"),
        ("x: model.layers.0 raised RuntimeError: shapes", "its step raised an error on the example batch"),
    ],
)
def test_reasons_of_many_types_are_put_into_few_words(reason, group):
    assert model_types.group_of(reason) == group


def test_progress_says_what_became_of_a_model():
    assert suite._said("types", {"reason": "", "size": "narrow", "task": "causal-lm"}, 0.001) == "traced (narrow, causal-lm)"
    assert suite._said("zoo", {"reason": "", "predicted_bytes": 90, "measured_bytes": 100}, 0.001).startswith("DIFFERS")
    assert suite._said("zoo", {"reason": "no"}, 0.001) == "could not run: no"
