"""The cast of a quantised model to 16 bits, as the real DeepSpeed engine makes it, against the end of the loading told."""

from __future__ import annotations

import importlib.util
import json

import pytest
from memplan.models import load
from memplan.models.adapters import AdapterSettings
from memplan.planner.api import make_request
from memplan.planner.loading import steps
from memplan.planner.predict import ledger_of
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import Phase
from memplan.validator.runtimes.deepspeed import EngineCase, run_cases
from memplan.validator.zero_cases import BATCH, MODELS, SEQ

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("bitsandbytes", "peft", "deepspeed")),
    reason="bitsandbytes, peft or deepspeed is not installed",
)
CAST = "its 16-bit form beside the fp32 one"


@pytest.mark.parametrize("quant", ["nf4-dq", "int8"])
def test_the_engine_casts_a_widened_model_back_with_the_peak_that_is_told(tmp_path, monkeypatch, quant):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama"]))
    adapter = AdapterSettings(base_quant=quant, rank=4)
    request = make_request(
        load(str(tmp_path)), "a100-80gb", method="lora", strategy="zero2", gpus=2, precision="bf16-mixed",
        micro_batch_size=BATCH, seq_len=SEQ, adapter=adapter,
    )  # fmt: skip
    trace = TraceSource().step(request, "cpu")
    live, told = 0, 0
    for step in steps(request, trace):
        told = max(told, live + sum(step.made)) if step.what == CAST else told
        live += sum(step.kept) - sum(step.gone)
    ledger = ledger_of(request, trace)
    told = max(told, int(ledger.live_bytes()[ledger.phase[ledger.rows()] == Phase.INIT].max()))
    fields = {"base_quant": quant, "rank": 4, "autocast": False}
    zero = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    case = EngineCase(reference=str(tmp_path), config=zero, batch_size=BATCH, seq_len=SEQ, adapter=fields, iterations=1)
    (marks,) = run_cases([case])
    assert marks[0].phase == "init"
    assert told == pytest.approx(marks[0].peak_bytes, rel=0.01)
