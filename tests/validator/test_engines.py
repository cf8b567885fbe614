"""`memplan validate` with a strategy or a zeroth-order method: another engine than the plain loop is run and compared."""

import pytest
from memplan.errors import CannotTell, UserError
from memplan.planner.strategies.zo_settings import ZoSettings
from memplan.planner.trace.source import TraceSource
from memplan.validator.api import request_for, run
from memplan.validator.engines import has_engine, run_engine
from memplan.validator.measurement import COMPONENTS
from memplan.validator.zero_suite import SCALARS_BYTES
from memplan.validator.zoo import find

LLAMA = find("llama").spec(num_hidden_layers=3)
OPT = find("opt").spec()


@pytest.fixture(scope="module")
def traces() -> TraceSource:
    return TraceSource()


def asked(model=LLAMA, **options):
    return request_for(model, "cpu", **{"micro_batch_size": 2, "seq_len": 32, "precision": "fp32", **options})


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("ddp", "fp32"), ("fsdp1", "fp32"), ("fsdp2", "fp32"), ("fsdp1", "bf16-mixed"), ("fsdp2", "bf16-mixed")],
)
def test_a_rank_of_the_real_engine_agrees_with_the_prediction(traces, strategy, precision):
    found = run_engine(asked(strategy=strategy, gpus=4, precision=precision), traces)

    assert found.reason == ""
    assert not [row for row in found.rows if row.difference_bytes]
    assert found.agrees


@pytest.mark.parametrize(("strategy", "offload"), [("zero2", ()), ("zero3", ("optimizer", "param"))])
def test_a_rank_of_the_real_deepspeed_agrees_with_the_prediction(traces, strategy, offload):
    pytest.importorskip("deepspeed")
    found = run_engine(asked(strategy=strategy, gpus=4, precision="bf16-mixed", offload=offload), traces)

    assert found.reason == ""
    assert found.agrees
    # zero.Init makes the rotary tables, a few bytes, in bf16
    assert not [row for row in found.rows if row.what in set(COMPONENTS) - {"buffer"} and row.difference_bytes]
    assert not [row for row in found.rows if abs(row.difference_bytes) > SCALARS_BYTES]


@pytest.mark.parametrize("method", ["mezo", "zo2"])
def test_zeroth_order_training_agrees_with_the_prediction(traces, method):
    found = run_engine(asked(OPT, method=method, loss="plain", zo=ZoSettings(use_cache=False)), traces, tolerance=0.005)

    assert found.reason == ""
    assert found.agrees
    assert not [r for r in found.rows if r.what.startswith("host_") and r.difference_bytes]
    assert method == "mezo" or any(r.what == "host_pinned" for r in found.rows)


@pytest.mark.slow
def test_processes_that_share_the_perturbed_forwards_agree_with_the_prediction(traces):
    zo = ZoSettings(zo_pert=2, zo_data=2)
    found = run_engine(asked(OPT, method="distzo2", gpus=4, loss="plain", zo=zo), traces, tolerance=0.005)

    assert (found.reason, found.agrees) == ("", True)


def test_an_engine_that_fails_is_an_outcome(traces, monkeypatch):
    from memplan.validator.runtimes import torch_distributed

    def fails(*args, **kwargs):
        raise RuntimeError("first line\nthe group could not meet")

    monkeypatch.setattr(torch_distributed, "measure", fails)
    found = run_engine(asked(strategy="ddp", gpus=2), traces)

    assert (found.measured, found.reason, found.exit_code) == (None, "the group could not meet", 2)


def test_a_plain_loop_needs_no_engine():
    assert not has_engine(asked())
    assert has_engine(asked(strategy="ddp", gpus=2))
    assert has_engine(asked(OPT, method="mezo"))


def test_an_engine_needs_as_many_gpus_as_ranks_and_is_not_run_on_the_cpu_instead(traces, monkeypatch):
    from memplan.hardware import detect

    monkeypatch.setattr(detect, "gpus", tuple)
    with pytest.raises(UserError, match=r"--strategy ddp --gpus 2: torch finds 0 here.*--device cpu"):
        run(asked(strategy="ddp", gpus=2), "cuda", traces=traces)
    with pytest.raises(CannotTell, match=r"--method mezo.*Use --device cpu"):
        run(asked(OPT, method="mezo", gpus=1), "cuda", traces=traces)
