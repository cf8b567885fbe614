"""A run that this machine cannot hold is refused before anything is built, with one that it can."""

import pytest
from memplan.errors import UserError
from memplan.units import GiB
from memplan.validator import room
from memplan.validator.api import request_for, run


def request(**options):
    return request_for("gpt2", "cpu", **{"micro_batch_size": 16, "seq_len": 512, **options})


def peak_of(asked):
    """12 layers of 0.25 GiB, and 1 MiB a token."""
    layers = asked.model.config["n_layer"]
    return layers * GiB // 4 + asked.micro_batch_size * asked.seq_len * 2**20


def test_a_run_that_fits_is_let_through():
    assert room.check_room(request(), 3 * GiB, peak_of, 8 * GiB) is None


def test_nothing_is_refused_where_the_system_does_not_say_what_is_available():
    assert room.check_room(request(), 3000 * GiB, peak_of, None) is None


def test_a_run_that_does_not_fit_is_refused_with_the_largest_sizes_that_do():
    with pytest.raises(UserError) as refused:
        room.check_room(request(), peak_of(request()), peak_of, 8 * GiB)
    text = str(refused.value)
    assert "a real run needs about 13.10 GiB" in text
    assert "8.00 GiB are available" in text
    assert "This would fit: --micro-batch 4, or --seq 128" in text  # half of either is still too much


def test_where_no_single_change_is_enough_several_are_named_together():
    with pytest.raises(UserError, match=r"This would fit: --set num_hidden_layers=6 --micro-batch 1 --seq 128$"):
        room.check_room(request(), peak_of(request()), peak_of, int(3 * GiB))


def test_a_machine_that_holds_no_run_of_the_model_is_told_so():
    with pytest.raises(UserError, match="Choose a smaller model, or a machine with more memory"):
        room.check_room(request(), peak_of(request()), peak_of, GiB)


def test_a_real_request_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr(room, "available_bytes", lambda: 2 * GiB)
    small = request_for("gpt2", "cpu", micro_batch_size=1, seq_len=64)
    with pytest.raises(UserError, match="gpt2: a real run needs about"):
        run(small, "cpu")
