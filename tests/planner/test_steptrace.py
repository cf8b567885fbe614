"""The file form of a trace: what is written is read back, and nothing else is taken for a trace."""

from __future__ import annotations

import io
import json
import random
import zipfile
from dataclasses import fields

import numpy as np
import pytest
from memplan.planner.api import make_request
from memplan.planner.trace.depth import same_structure
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import ITEMSIZE, EventKind, StepTrace, TensorInfo, TensorSlot


@pytest.fixture(scope="module")
def trace() -> StepTrace:
    asked = make_request("openai-community/gpt2", "a100-80gb", overrides={"n_layer": "1"}, micro_batch_size=2, seq_len=32)
    return TraceSource(exact=True).step(asked)


@pytest.fixture(scope="module")
def data(trace) -> bytes:
    return trace.to_bytes()


def test_a_trace_survives_its_file_form_in_every_field(trace, data):
    again = StepTrace.from_bytes(data)
    assert same_structure(again, trace)
    for field in fields(StepTrace):
        ours, theirs = getattr(trace, field.name), getattr(again, field.name)
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs)
        elif field.name != "graph":
            assert ours == theirs, field.name
    assert again.graph is None


def test_the_file_form_is_the_same_every_time_but_for_dates(trace, data):
    assert StepTrace.from_bytes(data).to_bytes()[:4] == data[:4]
    assert same_structure(StepTrace.from_bytes(StepTrace.from_bytes(data).to_bytes()), trace)


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_file_is_a_value_error_or_the_trace(trace, data, seed):
    chosen = random.Random(seed)
    damaged = bytearray(data)
    if seed % 3 == 0:
        del damaged[chosen.randrange(len(damaged)) :]
    else:
        start = len(damaged) - 1200 if seed % 3 == 1 else 0  # the directory at the end of a zip file, or anywhere
        for _ in range(2):
            damaged[chosen.randrange(start, len(damaged))] ^= 1 << chosen.randrange(8)
    try:
        found = StepTrace.from_bytes(bytes(damaged))
    except ValueError:
        return
    assert same_structure(found, trace)


def test_a_trace_of_another_format_is_refused_with_its_number(data):
    source = zipfile.ZipFile(io.BytesIO(data))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in source.namelist():
            content = source.read(name)
            if name == "header.json":
                content = json.dumps({**json.loads(content), "format": 999}).encode()
            archive.writestr(name, content)
    with pytest.raises(ValueError, match="999"):
        StepTrace.from_bytes(buffer.getvalue())


def test_a_pickled_column_is_refused(data):
    source = zipfile.ZipFile(io.BytesIO(data))
    raw = io.BytesIO()
    np.save(raw, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in source.namelist():
            archive.writestr(name, raw.getvalue() if name == "event_arg.npy" else source.read(name))
    with pytest.raises(ValueError, match=r"[Oo]bject arrays|pickle"):
        StepTrace.from_bytes(buffer.getvalue())


def test_events_are_given_with_their_kinds(trace):
    kinds = [kind for kind, _, _ in trace.events()]
    assert kinds[0] is EventKind.PHASE
    assert len(kinds) == len(trace.event_kind)


def test_parameters_are_counted_once(trace):
    block = 12 * 768 * 768 + 13 * 768
    assert trace.num_params == 50257 * 768 + 1024 * 768 + block + 2 * 768


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((0, 5), 0), ((2, 3), 6), ((70_000, 70_000), 4_900_000_000)])
def test_sizes_of_tensors_are_exact(shape, numel):
    assert TensorInfo("float32", shape, shape).nbytes == 4 * numel
    assert TensorSlot("w", shape, "bfloat16", True, 0, 0).nbytes == 2 * numel


def test_itemsizes_are_those_of_torch():
    import torch

    for name, size in ITEMSIZE.items():
        assert getattr(torch, name).itemsize == size
