"""The catalogue's facts are checked by building every model, without memory for it, and counting."""

import json
import re
from pathlib import Path

import pytest
import torch
from memplan.models import build, catalogue, load
from memplan.models.builder import num_params
from memplan.models.tasks import AUTO_CLASS

ENTRIES = {entry.id: entry for entry in catalogue.entries()}
PUBLISHED = Path(__file__).parents[2].parent / "shared" / "measurements" / "published.jsonl"


@pytest.mark.parametrize("name", ENTRIES)
def test_the_built_model_has_the_stated_number_of_parameters(name):
    with torch.device("meta"):
        built = build(load(name), dtype=torch.bfloat16)
    assert num_params(built.module) == ENTRIES[name].num_params


def _unit_of_last_digit(published: str) -> tuple[float, float]:
    number, suffix = re.fullmatch(r"([\d.]+)([MB])", published).groups()
    factor = {"M": 10**6, "B": 10**9}[suffix]
    whole, _, decimals = number.partition(".")
    zeros = len(whole) - len(whole.rstrip("0")) if not decimals else 0
    return float(number) * factor, factor * 10 ** (zeros - len(decimals))


@pytest.mark.parametrize("name", ENTRIES)
def test_the_stated_number_agrees_with_what_the_makers_published(name):
    entry = ENTRIES[name]
    if isinstance(entry.published, int):
        assert entry.num_params == entry.published
    else:
        value, unit = _unit_of_last_digit(entry.published)
        assert abs(entry.num_params - value) < unit


def test_no_name_is_claimed_by_two_entries():
    claimed: dict[str, str] = {}
    for entry in catalogue.entries():
        for name in entry.names:
            assert claimed.setdefault(name.lower(), entry.id) == entry.id, name


def test_every_entry_has_a_task_that_can_be_built_and_says_who_published_its_size():
    for entry in catalogue.entries():
        assert entry.task in AUTO_CLASS, entry.id
        assert entry.published_by, entry.id


def test_the_catalogue_holds_more_than_sixty_models():
    assert len(ENTRIES) > 60


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("bert-base-uncased", "google-bert/bert-base-uncased"),
        ("BERT-Large-Uncased", "google-bert/bert-large-uncased"),
        ("META-LLAMA/llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("gpt2", "openai-community/gpt2"),
        ("HuggingFaceH4/zephyr-7b-beta", "mistralai/Mistral-7B-v0.1"),
    ],
)
def test_a_model_is_found_by_its_usual_spellings(alias, name):
    assert load(alias).name == name


def test_an_unknown_field_in_a_data_file_is_refused():
    with pytest.raises(ValueError, match=r"some\.json: x/y: .*licence"):
        catalogue._entry({"id": "x/y", "licence": "mit"}, Path("some.json"))


@pytest.mark.skipif(not PUBLISHED.is_file(), reason="the published measurements are not beside the repository")
def test_sizes_agree_with_the_published_measurements():
    checked = set()
    for line in PUBLISHED.read_text(encoding="utf-8").splitlines():
        model = json.loads(line)["model"]
        entry = catalogue.find(model["ref"])
        if entry is None or model["n_params_check"] != "exact" or model["truncated_layers"]:
            continue
        if entry.task != "causal-lm" or model["family"] != entry.config["model_type"]:
            continue  # another head, or another class (MosaicML's own MPT), has another count
        assert entry.num_params == model["n_params"], entry.id
        checked.add(entry.id)
    assert len(checked) > 15
