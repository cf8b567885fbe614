"""DeepSpeed's Muon under ZeRO: whose parameters are whose, and what it keeps beside AdamW."""

from __future__ import annotations

import pytest
from memplan.planner.strategies import zero_muon
from memplan.planner.trace.steptrace import TensorSlot


def slot(fqn: str, *shape: int) -> TensorSlot:
    return TensorSlot(fqn, shape, "bfloat16", True, 0, 0)


@pytest.mark.parametrize(
    ("param", "its"),
    [
        (slot("layers.0.mlp.up.weight", 8, 4), True),
        (slot("conv.weight", 8, 4, 3, 3), True),
        (slot("experts.gate_up_proj", 4, 8, 6), True),
        (slot("layers.0.norm.weight", 8), False),
        (slot("model.embed_tokens.weight", 100, 8), False),
        (slot("bert.Embeddings.position.weight", 100, 8), False),
        (slot("lm_head.weight", 100, 8), False),
        (slot("transformer.wte.weight", 100, 8), True),  # no name that DeepSpeed knows
    ],
)
def test_matrices_are_muons_unless_their_name_says_embedding_or_head(param, its):
    assert zero_muon.is_muons(param) is its


def test_each_group_is_cut_in_two_and_muons_half_is_in_order_of_shapes():
    a, b, c, bias = slot("a", 4, 8), slot("b", 8, 4), slot("c", 4, 9), slot("bias", 4)
    assert zero_muon.halves([[a, bias, b, c], [bias]]) == [[b, c, a], [bias], [bias]]


def test_the_gram_of_a_long_matrix_is_of_its_smaller_side():
    def peak(method: str) -> int:
        live = most = 0
        sizes = {}
        for event in zero_muon._events((1000, 10), "bfloat16", method):
            if event.kind.name == "FREE":
                live -= sizes.pop(event.slot)
            else:
                sizes[event.slot] = event.nbytes
                live += event.nbytes
            most = max(most, live)
        return most

    assert peak("gram") == 50_000  # the test for infinities: three masks and the magnitudes
    assert peak("standard") == 2 * 4 * 10_000 + 2 * 2 * 100  # four of the iterate's size in a round
