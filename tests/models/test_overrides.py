"""`--set`: values as JSON or text, nested keys, families' own names, and nothing that the family does not know."""

import pytest
import torch
from memplan.errors import UserError
from memplan.models import build, load
from memplan.models.overrides import parse_settings, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("0.5", 0.5),
        ("true", True),
        ("False", False),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ("gelu", "gelu"),
        ('"3"', "3"),
    ],
)
def test_a_value_is_json_where_it_can_be(text, value):
    assert parse_value(text) == value


def test_settings_are_split_at_the_first_equals_sign():
    assert parse_settings(["a=1", "b=x=y"]) == {"a": "1", "b": "x=y"}


@pytest.mark.parametrize("item", ["num_hidden_layers", "=3", ""])
def test_a_setting_without_a_key_or_a_value_is_refused(item):
    with pytest.raises(UserError, match="expected KEY=VALUE"):
        parse_settings([item])


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("gpt2", "n_layer"),
        ("t5-small", "num_layers"),
        ("mpt-7b", "n_layers"),
        ("distilbert", "n_layers"),
        ("bloom-560m", "n_layer"),
        ("llama-2-7b", "num_hidden_layers"),
        ("gpt-neo-125m", "num_layers"),
    ],
)
def test_num_hidden_layers_reaches_the_familys_own_name(name, own):
    config = load(name, overrides={"num_hidden_layers": "2"}).config
    assert config[own] == 2
    assert own == "num_hidden_layers" or "num_hidden_layers" not in config


def test_a_nested_key_is_changed_and_the_catalogue_is_not():
    changed = load("google/gemma-3-4b-pt", overrides={"text_config.num_hidden_layers": "2"})
    assert changed.config["text_config"]["num_hidden_layers"] == 2
    assert load("google/gemma-3-4b-pt").config["text_config"]["num_hidden_layers"] == 34


def test_a_key_that_the_config_lacks_but_the_family_knows_is_taken():
    assert load("llama-3.1-8b", overrides={"attention_bias": "true"}).config["attention_bias"] is True


def test_an_override_drops_the_published_count():
    assert load("gpt2", overrides={"n_layer": "2"}).num_params is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"hiden_size": "8"},
            r"--set hiden_size: google-bert/bert-base-uncased has no config key 'hiden_size'\. Did you mean hidden_size",
        ),
        ({"vocab_size": "many"}, r"--set vocab_size=many: vocab_size is a number \(30522\)"),
        ({"num_hidden_layers": "0"}, r"expected 1 layer or more"),
        ({"text_config.hidden_size": "8"}, r"has no config key 'text_config'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        load("bert-base-uncased", overrides=overrides)


def test_a_key_of_the_language_model_is_offered_with_its_prefix():
    with pytest.raises(UserError, match=r"Did you mean text_config\.num_hidden_layers"):
        load("google/gemma-3-4b-pt", overrides={"num_hidden_layers": "2"})


@pytest.mark.parametrize(("layers", "types"), [("1", ["full_attention"]), ("3", None)])
def test_lists_with_one_entry_a_layer_follow_the_depth(tmp_path, layers, types):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}')
    assert load(str(file), overrides={"num_hidden_layers": layers}).config.get("layer_types") == types


def test_a_size_that_the_family_refuses_names_the_reason():
    spec = load("gpt2", overrides={"n_embd": "100", "n_layer": "1"})
    with pytest.raises(UserError, match=r"gpt2: the model cannot be built from its config: .*divisible"):
        build(spec, dtype=torch.float32)


def test_a_value_of_the_wrong_type_names_the_field():
    spec = load("llama-3.1-8b", overrides={"num_hidden_layers": "[1]"})
    with pytest.raises(UserError, match=r"transformers refuses the config: .*num_hidden_layers"):
        build(spec, dtype=torch.float32)
