"""What is offered for a word that nobody knows."""

from __future__ import annotations

import pytest
from memplan.errors import did_you_mean, nearest

NAMES = ("adam", "adamw", "adamax", "sgd", "lion", "meta-llama/Llama-3.1-8B", "expandable_segments", "gradient_clipping",
         "gradient_allreduce_op", "FULL_SHARD")  # fmt: skip


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("adamx", "adamax"),
        ("ADAMV", "adam"),
        ("gradient_cliping", "gradient_clipping"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("lama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("expandable", "expandable_segments"),
        ("full", "FULL_SHARD"),
        ("clipping", "gradient_clipping"),
    ],
)
def test_the_nearest_name_comes_first(word, first):
    assert nearest(word, NAMES)[0] == first


@pytest.mark.parametrize("word", ["shampoo", "xyz", "colour", "", "a", "learning_rate"])
def test_nothing_is_offered_for_a_word_that_is_like_none(word):
    assert did_you_mean(word, NAMES) == ""


def test_what_is_clearly_further_off_is_left_out():
    assert nearest("gradient_cliping", NAMES) == ["gradient_clipping"]


def test_there_is_nothing_to_offer_of_nothing():
    assert did_you_mean("adam", ()) == ""
