from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memplan.errors import CannotTell, UserError
from memplan.hardware import catalogue
from memplan.planner.timeline.collectives import KINDS, Group, host_copy_bytes_per_s

GB = 10**9
HOSTS = ("dgx-a100-80gb", "dgx-h100", "8x-rtx-4090-dual-socket-box", "aws-p4d.24xlarge", "dgx-1-v100-32gb")


def group(host: str, ranks: int = 8, nodes: int = 1) -> Group:
    node = catalogue.host(host)
    return Group(node, catalogue.device(node.gpu), ranks, nodes)


@pytest.mark.parametrize("curve", catalogue.all_reduce_curves(), ids=lambda c: f"{c.gpu}-{c.nodes}")
def test_a_measured_all_reduce_takes_what_was_measured(curve):
    node = next(h for h in catalogue.hosts() if h.gpu == curve.gpu and h.nic and h.num_gpus == curve.gpus_per_node)
    ranks = curve.gpus_per_node * curve.nodes
    for nbytes, busbw in curve.points:
        expected = 2 * (ranks - 1) / ranks * nbytes / busbw
        assert Group(node, catalogue.device(curve.gpu), ranks, curve.nodes).seconds("all_reduce", nbytes) == pytest.approx(
            expected
        )


@pytest.mark.parametrize("curve", catalogue.all_reduce_curves(), ids=lambda c: f"{c.gpu}-{c.nodes}")
def test_the_formula_alone_is_within_a_third_of_large_measured_all_reduces(curve):
    node = next(h for h in catalogue.hosts() if h.gpu == curve.gpu and h.nic and h.num_gpus == curve.gpus_per_node)
    ranks = curve.gpus_per_node * curve.nodes
    made = Group(node, catalogue.device(curve.gpu), ranks, curve.nodes)
    for nbytes, busbw in curve.points:
        if nbytes >= 256 * 2**20:
            measured = 2 * (ranks - 1) / ranks * nbytes / busbw
            ways = [made._ring(2, nbytes, p) for p in (0, 1)] + [made._tree(nbytes, p) for p in (0, 1)]
            assert min(ways) == pytest.approx(measured, rel=0.33)


@given(st.sampled_from(HOSTS), st.sampled_from(KINDS), st.integers(1, 8), st.integers(1, 4), st.integers(1, 10**10))
def test_more_bytes_never_take_less_time(host, kind, ranks, nodes, nbytes):
    node = catalogue.host(host)
    if nodes > 1 and node.nic is None:
        return
    made = group(host, ranks * nodes, nodes)

    assert made.seconds(kind, 2 * nbytes) >= made.seconds(kind, nbytes) >= 0


@given(st.sampled_from(HOSTS), st.integers(2, 8), st.integers(1, 10**10))
def test_an_all_reduce_takes_as_long_as_its_two_halves(host, ranks, nbytes):
    made = group(host, ranks)
    halves = made.seconds("reduce_scatter", nbytes) + made.seconds("all_gather", nbytes)

    assert made.seconds("all_reduce", nbytes) <= 1.001 * halves


def test_one_gpu_needs_no_collective():
    assert group("dgx-h100", 1).seconds("all_gather", 10**9) == 0.0


def test_nodes_are_joined_by_their_network_cards():
    one, two = group("aws-p4d.24xlarge"), group("aws-p4d.24xlarge", 16, 2)

    assert two.network_bytes_per_s == 0.9 * 4 * 12.5 * GB
    assert two.seconds("all_gather", 10 * GB) > 4 * one.seconds("all_gather", 10 * GB)


def test_cards_without_peer_access_are_slower_than_cards_on_a_switch_by_far():
    assert group("8x-rtx-4090-dual-socket-box").inner_kind == "pcie"
    assert group("8x-rtx-4090-dual-socket-box").seconds("all_reduce", GB) > 20 * group("dgx-a100-80gb").seconds(
        "all_reduce", GB
    )


def test_a_small_all_reduce_over_many_nodes_goes_by_the_tree():
    made = group("dgx-a100-40gb", 512, 64)

    assert made.seconds("all_reduce", 1024) == min(made._tree(1024, p) for p in (0, 1))


def test_an_all_to_all_across_nodes_is_bound_by_what_leaves_the_node():
    made = group("aws-p4d.24xlarge", 16, 2)
    leaving = 8 * 10 * GB * 8 / 16  # each of 8 cards sends half of its 10 GB to the other node

    assert made.seconds("all_to_all", 10 * GB) == pytest.approx(leaving / made.network_bytes_per_s, rel=0.01)


def test_two_cards_under_one_pcie_switch_upload_at_half_the_rate():
    assert host_copy_bytes_per_s(group("dgx-a100-80gb", 1)) == 2 * host_copy_bytes_per_s(group("dgx-a100-80gb", 2))


def test_cards_with_a_way_of_their_own_upload_at_the_full_rate():
    made = group("8x-rtx-4090-dual-socket-box")

    assert host_copy_bytes_per_s(made, "d2h") == min(made.device.h2d_bytes_per_s, made.device.d2h_bytes_per_s)


def test_an_unknown_network_between_nodes_is_not_guessed():
    with pytest.raises(CannotTell, match="network between nodes of kind lambda-8x-h100-sxm is not known"):
        group("lambda-8x-h100-sxm", 16, 2).seconds("all_reduce", 10**6)


def test_gpus_that_a_node_does_not_have_are_refused():
    with pytest.raises(UserError, match="16 GPUs on a node dgx-h100: it has 8"):
        group("dgx-h100", 16)
    with pytest.raises(UserError, match="expected a multiple of the nodes"):
        group("dgx-h100", 9, 2)


def test_a_card_without_a_node_of_its_own_gets_a_plain_box():
    host = catalogue.usual_host(catalogue.device("rtx-5090"), 8)

    assert (host.fabric, host.sockets, host.p2p, host.nic) == ("pcie", 2, False, None)


def test_a_card_of_the_data_centre_gets_its_makers_node():
    assert catalogue.usual_host(catalogue.device("a100-sxm-80gb"), 8).key == "dgx-a100-80gb"
    assert catalogue.usual_host(catalogue.device("h100-sxm-80gb"), 1).key == "dgx-h100"


def test_the_shards_of_a_replica_stay_in_their_node():
    whole = group("dgx-a100-80gb", 32, 4)
    shards = whole.part(8, 1)

    assert (shards.ranks, shards.nodes, shards.sharing) == (8, 1, 1)
    assert shards.seconds("all_gather", GB) == group("dgx-a100-80gb").seconds("all_gather", GB)


def test_replicas_share_the_network_cards_of_their_nodes():
    whole = group("dgx-a100-80gb", 32, 4)
    replicas = whole.part(4, 8)  # one GPU of each node: eight such rings at once

    assert (replicas.ranks, replicas.nodes, replicas.sharing) == (4, 4, 8)
    assert replicas.network_bytes_per_s == whole.network_bytes_per_s / 8


def test_all_ranks_are_the_group_itself():
    whole = group("dgx-a100-80gb", 16, 2)

    assert whole.part(0, 1) is whole
    assert whole.part(16, 1) is whole
