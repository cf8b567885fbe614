"""Whatever a configuration file holds, the answer is a question, a mistake on one line, or `unknown`: never a traceback."""

from __future__ import annotations

import inspect
import json
import re

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from memplan.errors import MemplanError, UserError
from memplan.planner.engines import (
    accelerate_yaml,
    axolotl,
    deepspeed_json,
    deepspeed_schema,
    fsdp_config,
    llamafactory,
    torchtune,
    training_args,
    trl,
)
from memplan.planner.engines.imported import apply
from memplan.planner.engines.text import Text, parse_json, parse_yaml, read_file

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 10**12)
    | st.floats()
    | st.sampled_from(["auto", "cpu", "nvme", "none", "x", ""])
)
_WORDS = sorted(
    {
        *deepspeed_schema.known_keys(deepspeed_schema.ZeroSection),
        "enabled",
        "type",
        "params",
        "device",
        "dtype",
        "grad_accum_dtype",
    }
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(_WORDS), inner, max_size=3),
    max_leaves=6,
)
_ZERO = st.dictionaries(st.sampled_from(_WORDS), _VALUES, max_size=4)


def _holds(reader, data, **options):
    said = "a question"
    try:
        apply(reader(data, "file"), {"gpus": 4, **options}, {"hidden_size": 8})
    except MemplanError as error:
        said = str(error)
    assert said
    assert "\n" not in said


def _reads(text):
    said = "data"
    try:
        parse_json(text, "file")
    except UserError as error:
        said = str(error)
    assert said
    assert "\n" not in said


_ANY = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@_ANY
@given(
    data=st.dictionaries(st.sampled_from(sorted(deepspeed_schema.TOP_LEVEL)), _VALUES, max_size=5),
    zero=_ZERO | _VALUES,
    micro=st.sampled_from([1, 2, "auto"]) | _SCALARS,
)
@example(data={}, zero={}, micro=float("inf"))
@example(data={}, zero={}, micro=float("nan"))
def test_any_deepspeed_file(data, zero, micro):
    _holds(deepspeed_json.read, {**data, "zero_optimization": zero, "train_micro_batch_size_per_gpu": micro})


@_ANY
@given(
    data=st.dictionaries(st.sampled_from(sorted(accelerate_yaml.KEYS)), _VALUES, max_size=4),
    kind=st.sampled_from(["FSDP", "DEEPSPEED", "MULTI_GPU", "NO", "TP", 3]),
    block=st.dictionaries(st.sampled_from([f"fsdp_{key}" for key in fsdp_config.KEYS]), _SCALARS, max_size=4),
)
def test_any_accelerate_file(data, kind, block):
    _holds(accelerate_yaml.read, {"fsdp_config": block, **data, "distributed_type": kind})


@_ANY
@given(
    data=st.dictionaries(st.sampled_from(sorted(training_args.KNOWN)), _VALUES, max_size=5),
    block=st.dictionaries(st.sampled_from(sorted(fsdp_config.KEYS)), _SCALARS, max_size=4),
    zero=_ZERO,
)
def test_any_training_arguments(data, block, zero):
    _holds(training_args.read, data)
    _holds(training_args.read, {**data, "deepspeed": None, "fsdp": True, "fsdp_config": block})
    _holds(training_args.read, {**data, "fsdp": None, "deepspeed": {"zero_optimization": zero}})


def _words_of(reader):
    """The keys that a reader knows, as its source spells them."""
    return sorted(set(re.findall(r'"([a-z_0-9]{3,})"', inspect.getsource(reader))))


@pytest.mark.parametrize(
    "reader", [axolotl, llamafactory, trl, torchtune], ids=lambda module: module.__name__.rpartition(".")[2]
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_training_file(reader, data):
    words = st.sampled_from(_words_of(reader))
    values = _VALUES | words | st.dictionaries(words, _VALUES, max_size=3)

    _holds(lambda made, source: reader.read(Text(source, made)), data.draw(st.dictionaries(words, values, max_size=6)))


@_ANY
@given(text=st.text(alphabet="ab:-&*!<{}[]\n '\"|?,#", max_size=40))
def test_any_text_that_looks_like_yaml(text):
    said = "data"
    try:
        parse_yaml(text, "file")
    except UserError as error:
        said = str(error)
    assert said
    assert "\n" not in said


@_ANY
@given(text=st.text(max_size=60))
def test_any_text(text):
    _reads(text)


@_ANY
@given(text=st.text(alphabet='{}[]",:/*#\n\\a1 ', max_size=60))
def test_any_text_that_looks_like_json(text):
    _reads(text)


@pytest.mark.parametrize("text", ["1: 2", "a: {true: 1}", "a: [{2026-01-01: 1}]"])
def test_keys_that_are_no_words_are_a_mistake(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)

    with pytest.raises(UserError, match="expected a word"):
        read_file(tmp_path / "a.yaml")


def test_a_deep_file_is_a_mistake_and_no_crash(tmp_path):
    (tmp_path / "a.json").write_text('{"a": ' * 100_000)

    with pytest.raises(UserError):
        read_file(tmp_path / "a.json")


def test_numbers_that_are_none_are_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"steps_per_print": float("inf"), "train_micro_batch_size_per_gpu": 1}))

    assert deepspeed_json.read(read_file(tmp_path / "a.json").data, "a.json").said["micro_batch_size"].value == 1
