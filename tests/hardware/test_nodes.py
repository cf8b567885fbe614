from __future__ import annotations

from collections import Counter

import networkx as nx
import pytest
from memplan.errors import UserError
from memplan.hardware import catalogue, topology
from memplan.units import GiB, MiB

GB = 10**9


@pytest.mark.parametrize("host", catalogue.hosts(), ids=lambda host: host.key)
def test_every_node_of_the_catalogue_is_one_connected_graph(host):
    graph = topology.node_graph(host)
    kinds = Counter(data["kind"] for _, data in graph.nodes(data=True))

    assert nx.is_connected(graph)
    assert kinds["gpu"] == host.num_gpus
    assert kinds["nic"] == (host.nic.count if host.nic else 0)
    assert all(data["bytes_per_s"] > 0 for _, _, data in graph.edges(data=True))


def test_nodes_have_the_memory_that_is_published():
    assert catalogue.host("aws-p5.48xlarge").ram_bytes == 2048 * GiB
    assert catalogue.host("azure-nc48ads-a100-v4").num_gpus == 2


def test_an_unknown_node_is_refused_with_the_nearest_names():
    with pytest.raises(UserError, match=r"Unknown node 'aws-p5.48'. Did you mean aws-p5.48xlarge"):
        catalogue.host("aws-p5.48")


def test_gpus_of_a_switched_node_reach_each_other_at_the_full_nvlink_rate():
    graph = topology.node_graph(catalogue.host("dgx-h100"))

    assert topology.route(graph, "gpu0", "gpu7") == (["gpu0", "nvswitch", "gpu7"], 450 * GB)
    assert topology.ring_bytes_per_s(graph, 8) == 450 * GB


def test_each_v100_of_the_cube_mesh_has_six_links():
    graph = topology.node_graph(catalogue.host("dgx-1-v100-32gb"))
    link = 25 * GB

    for gpu in range(8):
        direct = [data["bytes_per_s"] for _, _, data in graph.edges(f"gpu{gpu}", data=True) if data["kind"] == "nvlink"]
        assert sum(direct) == 6 * link


def test_the_cube_mesh_closes_a_ring_of_double_links():
    graph = topology.node_graph(catalogue.host("dgx-1-v100-32gb"))

    assert topology.ring_bytes_per_s(graph, 8) == 50 * GB  # 0-3-2-1-5-6-7-4: two links of 25 GB/s on each hop


def test_a_bridge_joins_pairs_and_the_rest_goes_over_pcie():
    graph = topology.node_graph(catalogue.host("azure-nc96ads-a100-v4"))

    assert topology.peer_bytes_per_s(graph, "gpu0", "gpu1") == 300 * GB
    assert topology.peer_bytes_per_s(graph, "gpu1", "gpu2") == catalogue.device("a100-pcie-80gb").d2h_bytes_per_s


def test_without_peer_access_a_copy_runs_at_half_the_link():
    graph = topology.node_graph(catalogue.host("aws-g4dn.12xlarge"))

    assert topology.peer_bytes_per_s(graph, "gpu0", "gpu1") == catalogue.device("t4").h2d_bytes_per_s // 2


def test_crossing_the_sockets_is_slower_than_staying_on_one():
    graph = topology.node_graph(catalogue.host("aws-g5.48xlarge"))

    assert topology.peer_bytes_per_s(graph, "gpu0", "gpu7") < topology.peer_bytes_per_s(graph, "gpu0", "gpu1")


def test_a_route_never_passes_through_another_gpu():
    graph = topology.node_graph(catalogue.host("dgx-1-v100-32gb"))

    path, _ = topology.route(graph, "gpu0", "gpu7")  # no direct link joins these two

    assert [name for name in path[1:-1] if name.startswith("gpu")] == []


def test_another_card_can_take_the_place_of_the_nodes_own():
    graph = topology.node_graph(catalogue.host("2x-rtx-3090-desktop"), catalogue.device("rtx-5090"))

    assert topology.route(graph, "gpu0", "gpu1")[1] == catalogue.device("rtx-5090").d2h_bytes_per_s


def test_a_card_without_links_is_refused_on_a_switched_node():
    with pytest.raises(UserError, match=r"Node dgx-h100: GeForce RTX 4090 has no link for the fabric 'switch'"):
        topology.node_graph(catalogue.host("dgx-h100"), catalogue.device("rtx-4090"))


def test_a_route_to_a_part_that_is_not_there_names_the_parts():
    graph = topology.node_graph(catalogue.host("aws-p3.2xlarge"))

    with pytest.raises(UserError, match=r"there is no 'gpu3'. It has gpu0, "):
        topology.route(graph, "gpu0", "gpu3")


def test_a_ring_of_one_is_refused():
    with pytest.raises(UserError, match="two GPUs or more, got 1"):
        topology.ring_bytes_per_s(topology.node_graph(catalogue.host("dgx-h100")), 1)


def test_measured_curves_rise_with_the_message():
    for curve in catalogue.all_reduce_curves():
        sizes, rates = zip(*curve.points, strict=True)
        assert list(sizes) == sorted(sizes)
        assert list(rates) == sorted(rates)


def test_a_curve_is_read_between_its_points_and_held_outside_them():
    curve = next(curve for curve in catalogue.all_reduce_curves() if curve.gpu == "h100-sxm-80gb")

    assert curve.busbw_bytes_per_s(1) == 67 * GB
    assert curve.busbw_bytes_per_s(2**40) == 480.2 * GB
    assert curve.busbw_bytes_per_s(3 * MiB) == pytest.approx((86.9 + 135.4) / 2 * GB)


def test_every_figure_about_links_and_hosts_has_a_key_of_its_own_and_a_source():
    for rows in (catalogue.links(), catalogue.host_figures(), catalogue.nccl_figures()):
        assert len({row.key for row in rows}) == len(rows)
        assert all(row.status and row.source for row in rows)
