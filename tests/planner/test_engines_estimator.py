"""DeepSpeed's estimator beside ours: the same integers as the real functions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memplan.planner.api import make_request
from memplan.planner.engines import estimator
from memplan.planner.predict import ledger_of
from memplan.planner.trace.source import TraceSource

_PARAMS, _FEW = st.integers(1, 2 * 10**11), st.integers(1, 64)
TINY = {"num_hidden_layers": "2", "hidden_size": "64", "intermediate_size": "128", "num_attention_heads": "4"}
TINY |= {"num_key_value_heads": "2", "head_dim": "16", "vocab_size": "512"}


@settings(max_examples=300, deadline=None)
@given(total=_PARAMS, gpus=_FEW, nodes=_FEW, offload=st.booleans())
def test_stage_2_is_the_real_function(total, gpus, nodes, offload):
    stage2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")

    real = stage2.estimate_zero2_model_states_mem_needs(total, gpus, nodes, cpu_offload=offload)

    assert estimator.zero2(total, gpus, nodes, cpu_offload=offload) == real


@settings(max_examples=300, deadline=None)
@given(total=_PARAMS, share=st.integers(1, 100), gpus=_FEW, nodes=_FEW, flags=st.tuples(*[st.booleans()] * 3))
def test_stage_3_is_the_real_function(total, share, gpus, nodes, flags):
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    names = dict(zip(("cpu_offload", "cpu_offload_params", "zero_init"), flags, strict=True))

    cpu, gpu, _ = stage3.estimate_zero3_model_states_mem_needs(total, total // share, gpus, nodes, **names)

    assert estimator.zero3(total, total // share, gpus, nodes, **names) == (cpu, gpu)


@pytest.fixture(scope="module")
def traces():
    return TraceSource()


def ask(**options):
    given = {"gpus": 4, "precision": "bf16-mixed", "micro_batch_size": 1, "seq_len": 16, "overrides": TINY}
    return make_request("meta-llama/Llama-3.2-1B", "a100-80gb", **{**given, **options})


def test_parameters_are_counted_as_on_the_live_model(traces):
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    transformers = pytest.importorskip("transformers")
    request = ask(strategy="zero3")
    config = transformers.AutoConfig.for_model(**request.model.config)
    model = transformers.AutoModelForCausalLM.from_config(config)

    assert estimator.params_of(traces.step(request)) == stage3.model_to_params(model)


def test_the_estimate_of_a_question_takes_its_gpus_and_machines(traces):
    one = estimator.estimator(request := ask(strategy="zero3", gpus=8), traces.step(request))
    two = estimator.estimator(request := ask(strategy="zero3", gpus=8, nodes=2), traces.step(request))

    assert one.gpu_bytes == two.gpu_bytes
    assert one.cpu_bytes > two.cpu_bytes


def test_buckets_and_step_are_what_the_estimator_leaves_out(traces):
    """With DeepSpeed's default buckets of 5e8 elements, a small model's run needs far more than its estimator says."""
    request = ask(strategy="zero2")
    trace = traces.step(request)

    peak = max(ledger_of(request, trace).live_bytes())

    assert peak > 2 * 500_000_000 > estimator.estimator(request, trace).gpu_bytes


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1", "fsdp2"])
def test_there_is_no_estimate_where_deepspeed_has_none(traces, strategy):
    request = ask(strategy=strategy, gpus=1 if strategy == "single" else 4)

    assert estimator.estimator(request, traces.step(request)) is None
