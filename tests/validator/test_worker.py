"""What becomes of a run: every death is an outcome with one line, never a traceback."""

import json
from pathlib import Path

import pytest
from memplan.files import write_whole
from memplan.validator.api import request_for
from memplan.validator.job import Job
from memplan.validator.launch import run_isolated
from memplan.validator.worker import run_job

USER = Path(__file__).with_name("user_models.py")


def job(function, **options):
    return Job(request=request_for(f"{USER}:{function}", "cpu", micro_batch_size=2, seq_len=8, **options))


def test_a_job_is_the_same_after_a_trip_through_json():
    sent = job("shared", precision="bf16", grad_accum_steps=3, frozen=("block",))
    back = Job.from_json(json.loads(json.dumps(sent.to_json())))
    assert back.request == sent.request
    assert back == sent


def test_a_job_of_a_configuration_is_the_same_after_a_trip_through_json():
    sent = Job(request=request_for("gpt2", "cpu", seq_len=8, overrides={"n_layer": "2"}), outputs={"aten::mm": [[4], [8, 8]]})
    assert Job.from_json(json.loads(json.dumps(sent.to_json()))) == sent


def test_a_run_in_a_process_of_its_own_measures_what_one_in_this_process_does():
    there, here = run_isolated(job("scalar_loss")), run_job(job("scalar_loss"))
    assert there.reason == here.reason == ""
    assert there.usage.phases == here.usage.phases
    assert there.usage.components == here.usage.components


def test_an_exception_of_the_users_code_is_one_line_that_says_where():
    outcome = run_isolated(job("raises"))
    assert outcome.usage is None
    assert "ValueError: no such table" in outcome.reason
    assert "user_models.py:" in outcome.reason
    assert "\n" not in outcome.reason


def test_a_worker_that_ends_without_a_word_is_an_outcome():
    assert run_isolated(job("exits")).reason == "the run ended with exit code 3"


def test_a_worker_that_is_killed_is_an_outcome_that_speaks_of_memory():
    assert "killed (SIGKILL)" in run_isolated(job("killed")).reason


def test_a_worker_that_hangs_is_stopped_in_time():
    outcome = run_isolated(job("hangs"), timeout_s=2)
    assert outcome.usage is None
    assert outcome.reason.startswith("the run took longer than 2 s and was stopped (--timeout)")


def test_any_other_exception_of_the_run_is_one_line(monkeypatch):
    from memplan.validator import cpu

    def fail(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: not enough memory:\n you tried to allocate 9 bytes")

    monkeypatch.setattr(cpu, "measure", fail)
    reason = run_job(job("shared")).reason
    assert reason == "the run raised OutOfMemoryError: DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"


def test_a_gpu_job_without_a_gpu_says_so():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    outcome = run_job(Job(request=job("shared").request, device="cuda"))
    assert outcome.reason == "--device cuda: torch finds no GPU. Use --device cpu"


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    place = tmp_path / "outcome.json"
    write_whole(place, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(place, "new \ud800")
    assert place.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["outcome.json"]
