"""A node as a graph: GPUs, PCIe switches, sockets, NVSwitch and network cards; the edges carry bytes per second and direction.

Nodes are named `gpu0`, `pcie0`, `socket0`, `nvswitch`, `nic0`; the attribute `kind` says which.  Each edge has `kind` (pcie,
nvlink, c2c, socket, network) and `bytes_per_s`, the rate of one direction.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import networkx as nx

from ..errors import UserError
from . import catalogue
from .profile import Device, Host

# What one GPU gets across two sockets.  Hosts of the PCIe 5 generation: 51.0 GB/s, measured (voipmonitor/rtx6kpro,
# hardware/pcie-bandwidth.md); older ones: 10 GB/s, NCCL's own model (https://github.com/NVIDIA/nccl-tests/issues/307).
_SOCKET_BYTES_PER_S, _OLD_SOCKET_BYTES_PER_S = 51_000_000_000, 10_000_000_000
# Without peer access a copy goes down and up again through host memory: 5.7 of 12.4 GB/s on two RTX 2080 Ti (the AutoDL
# interconnection test), 12.9 of 26 each way on two RTX 4090 (https://github.com/tinygrad/open-gpu-kernel-modules/issues/6).
_SHARE_WITHOUT_P2P = 0.5
_GPUS_PER_SWITCH = 2  # DGX and HGX boards: a PCIe switch joins two GPUs and their network cards

# The hybrid cube mesh of eight V100 (DGX-1): the links between each pair, six a GPU, two quads joined.  NVIDIA, "DGX-1 with
# Tesla V100 System Architecture", figure 4.
_CUBE_MESH = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1, (3, 7): 1,
    (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip


def node_graph(host: Host, gpu: Device | None = None) -> nx.Graph[str]:
    """The graph of one node of kind `host`; `gpu` replaces the host's own card."""
    device = gpu or catalogue.device(host.gpu)
    graph: nx.Graph[str] = nx.Graph(name=host.key, p2p=host.p2p)
    modern = device.pcie is None or device.pcie.gen >= 5
    across = _SOCKET_BYTES_PER_S if modern else _OLD_SOCKET_BYTES_PER_S
    for socket in range(host.sockets):
        graph.add_node(f"socket{socket}", kind="socket")
        if socket:
            graph.add_edge(f"socket{socket - 1}", f"socket{socket}", kind="socket", bytes_per_s=across)
    _join_to_host(graph, host, device)
    _join_gpus(graph, host, device)
    if host.nic is not None:
        for index in range(host.nic.count):
            above = _parent(graph, host, index * host.num_gpus // host.nic.count)
            graph.add_node(f"nic{index}", kind="nic")
            graph.add_edge(f"nic{index}", above, kind="network", bytes_per_s=host.nic.bytes_per_s_each)
    return graph


def _join_to_host(graph: nx.Graph[str], host: Host, device: Device) -> None:
    per_socket = -(-host.num_gpus // host.sockets)
    rate = min(device.h2d_bytes_per_s, device.d2h_bytes_per_s)
    kind = "pcie" if device.pcie is not None else "c2c"
    for index in range(host.num_gpus):
        socket = f"socket{index // per_socket}"
        graph.add_node(f"gpu{index}", kind="gpu", total_bytes=device.total_bytes)
        if kind == "pcie" and host.fabric in ("switch", "mesh"):
            switch = f"pcie{index // _GPUS_PER_SWITCH}"
            graph.add_node(switch, kind="pcie")
            graph.add_edge(switch, socket, kind="pcie", bytes_per_s=rate)
            graph.add_edge(f"gpu{index}", switch, kind="pcie", bytes_per_s=rate)
        else:
            graph.add_edge(f"gpu{index}", socket, kind=kind, bytes_per_s=rate)


def _join_gpus(graph: nx.Graph[str], host: Host, device: Device) -> None:
    if host.fabric in ("none", "pcie"):
        return
    if device.nvlink is None:
        raise UserError(f"Node {host.key}: {device.name} has no link for the fabric {host.fabric!r}", "Choose another GPU")
    rate = device.nvlink.per_direction_bytes_per_s
    if host.fabric == "switch":
        graph.add_node("nvswitch", kind="nvswitch")
        for index in range(host.num_gpus):
            graph.add_edge(f"gpu{index}", "nvswitch", kind="nvlink", bytes_per_s=rate)
    elif host.fabric == "bridge":
        for first in range(0, host.num_gpus - 1, 2):
            graph.add_edge(f"gpu{first}", f"gpu{first + 1}", kind="nvlink", bytes_per_s=rate)
    else:
        links = {pair: count for pair, count in _CUBE_MESH.items() if pair[1] < host.num_gpus}
        for (a, b), count in links.items():
            graph.add_edge(f"gpu{a}", f"gpu{b}", kind="nvlink", bytes_per_s=rate * count // 6)


def _parent(graph: nx.Graph[str], host: Host, gpu: int) -> str:
    """The switch or socket that a network card shares with GPU number `gpu`."""
    above = [name for name in graph.neighbors(f"gpu{gpu}") if graph.nodes[name]["kind"] in ("pcie", "socket")]
    return str(above[0])


def route(graph: nx.Graph[str], source: str, target: str) -> tuple[list[str], int]:
    """The widest way between two nodes of the graph, the shortest among equals, and its rate in bytes per second.

    Data passes through switches and sockets, never through a third GPU or a network card.
    Raises UserError when a name is not in the graph or nothing joins the two.
    """
    for name in (source, target):
        if name not in graph:
            raise UserError(f"Node {graph.name}: there is no {name!r}", f"It has {', '.join(sorted(graph))}")
    ends = {source, target}
    passable = [name for name, data in graph.nodes(data=True) if name in ends or data["kind"] not in ("gpu", "nic")]
    through = graph.subgraph(passable)
    for width in sorted({data["bytes_per_s"] for _, _, data in through.edges(data=True)}, reverse=True):
        wide: Any = nx.Graph((a, b) for a, b, data in through.edges(data=True) if data["bytes_per_s"] >= width)
        if source in wide and target in wide and nx.has_path(wide, source, target):
            return nx.shortest_path(wide, source, target), width
    raise UserError(f"Node {graph.name}: nothing joins {source} and {target}", "Choose two parts of one node")


def peer_bytes_per_s(graph: nx.Graph[str], first: str, second: str) -> int:
    """The rate of a copy from one GPU to another, through host memory where the node has no peer access."""
    path, rate = route(graph, first, second)
    through_host = any(graph.nodes[name]["kind"] == "socket" for name in path)
    return int(rate * _SHARE_WITHOUT_P2P) if through_host and not graph.graph["p2p"] else rate


def ring_bytes_per_s(graph: nx.Graph[str], ranks: int) -> int:
    """The slowest hop of the best ring over the first `ranks` GPUs: what bounds one ring collective inside the node."""
    if ranks < 2:
        raise UserError(f"A ring needs two GPUs or more, got {ranks}", "Ask for at least two")
    names = [f"gpu{rank}" for rank in range(ranks)]
    rates = {frozenset(pair): peer_bytes_per_s(graph, *pair) for pair in combinations(names, 2)}
    for rate in sorted(set(rates.values()), reverse=True):
        near = {name: {other for other in names if other != name and rates[frozenset((name, other))] >= rate} for name in names}
        if _closes(names[0], frozenset(names[1:]), names[0], near):
            return rate
    raise AssertionError("every pair is joined at the lowest rate, so that a ring exists")


def _closes(here: str, left: frozenset[str], start: str, near: dict[str, set[str]]) -> bool:
    """Whether a path from `here` through all of `left` can return to `start`; depth first, as a node holds few GPUs."""
    if not left:
        return start in near[here]
    return any(_closes(name, left - {name}, start, near) for name in sorted(left & near[here]))


def concurrent_host_bytes_per_s(graph: nx.Graph[str], ranks: int) -> int:
    """What each of the first `ranks` GPUs gets when all copy from (or to) their own socket's memory at once.

    The GPUs that share a PCIe switch share its way up; the smallest share counts.
    """
    users: dict[frozenset[str], int] = {}
    for rank in range(ranks):
        path = _way_to_host(graph, f"gpu{rank}")
        for edge in pairwise(path):
            users[frozenset(edge)] = users.get(frozenset(edge), 0) + 1
    return min(int(graph.edges[tuple(edge)]["bytes_per_s"] // count) for edge, count in users.items())


def _way_to_host(graph: nx.Graph[str], gpu: str) -> list[str]:
    """From a GPU up through its PCIe switch to the socket above it."""
    path = [gpu]
    while graph.nodes[path[-1]]["kind"] != "socket":
        above = [n for n in graph.neighbors(path[-1]) if graph.nodes[n]["kind"] in ("pcie", "socket") and n not in path]
        path.append(above[0])
    return path
