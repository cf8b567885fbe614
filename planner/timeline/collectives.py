"""What a collective takes, from the graph of a node and the network between nodes.

Ring and tree algorithms as NCCL runs them; the faster one counts, as NCCL chooses.  With p ranks, m nodes, S bytes, B the bus
bandwidth (what the slowest hop of the ring carries: `busbw` of nccl-tests) and the latencies a of one step:

    all-reduce      ring  2 (p-1)/p S/B + 2 (p-1) steps       tree  2 S/B + 2 log2(m) network and 2 (p/m - 1) inner steps
    all-gather, reduce-scatter, broadcast    ring  (p-1)/p S/B + (p-1) steps    (S: the whole tensor)
    all-to-all      S/p to every other rank: the larger of what stays in the node over its link and of what leaves it

Where an all-reduce over the same links, ranks and nodes was measured (`hardware/data/links.json`), its bus bandwidth at S
stands for the formula; an all-gather and a reduce-scatter are half an all-reduce (they are its two halves).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

from ...errors import CannotTell, UserError
from ...hardware.profile import CollectiveCurve, Device, Host

if TYPE_CHECKING:
    import networkx as nx

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

# What rings reach of a link's data-sheet rate, at 8 GB and more: A100 231.6 of 300, H200 without NVLS 367.6 of 450, B200 673 of
# 900 (hardware/data/links.json, all-reduce bus bandwidths).
RING_EFFICIENCY = 0.78
# NVSwitch adds up inside the switch from Hopper on (NVLS), with all eight cards: H100 480 of 450, H200 482 of 450, B200 846 of
# 900.
NVLS_EFFICIENCY = 1.0
_NVLS_CAPABILITY, _NVLS_RANKS = (9, 0), 8
# Of the network's data-sheet rate: 340 of 400 Gbit/s on EFA v1, 381.8 of 400 GB/s on EFA v4 (links.json).
NETWORK_EFFICIENCY = 0.9
# NCCL 2.28, src/graph/tuning.cc: microseconds of a launch (`baseLat`) and of one step (`hwLat`) over (NVLink, PCIe, network),
# for the protocols LL128 (120 of 128 bytes carry data) and Simple, and for ring and tree.
_PROTOCOLS = ((14.0e-6, 120 / 128), (8.4e-6, 1.0))
_STEP_S = {
    "ring": {"nvlink": (1.9e-6, 3.4e-6), "pcie": (2.5e-6, 5.7e-6), "network": (4.0e-6, 14.0e-6)},
    "tree": {"nvlink": (1.25e-6, 4.0e-6), "pcie": (1.9e-6, 4.0e-6), "network": (8.5e-6, 14.0e-6)},
}


@dataclass(frozen=True)
class Group:
    """The ranks of one collective: `ranks` GPUs in all, evenly on `nodes` nodes of kind `host`.

    `sharing` collectives of this kind run at once over the network cards of a node: the replicas of HSDP, one ring a GPU.
    """

    host: Host
    device: Device
    ranks: int
    nodes: int = 1
    sharing: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.nodes < 1 or self.ranks % self.nodes:
            raise UserError(f"{self.ranks} GPUs on {self.nodes} nodes: expected a multiple of the nodes", "--gpus is their sum")
        if self.per_node > self.host.num_gpus:
            raise UserError(
                f"{self.per_node} GPUs on a node {self.host.key}: it has {self.host.num_gpus}", "Use more nodes, with --nodes"
            )

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes

    @cached_property
    def graph(self) -> nx.Graph[str]:
        from ...hardware.topology import node_graph

        return node_graph(self.host, self.device)

    @cached_property
    def inner_kind(self) -> str:
        """nvlink or pcie: what the slowest hop of a ring inside the node is."""
        return "pcie" if self.host.fabric in ("none", "pcie") or self._bridges_are_too_few else "nvlink"

    @property
    def _bridges_are_too_few(self) -> bool:
        return self.host.fabric == "bridge" and self.per_node > 2

    @cached_property
    def inner_bytes_per_s(self) -> float:
        """Bus bandwidth of a ring inside one node, over large messages."""
        from ...hardware.topology import ring_bytes_per_s

        if self.per_node < 2:
            return math.inf
        if self.host.fabric == "mesh":  # NCCL runs several rings over the cube mesh, which use each of a card's links
            assert self.device.nvlink is not None
            links = 1.0 if self.per_node == self.host.num_gpus else 0.5  # the others lead to GPUs that do not take part
            return self.device.nvlink.per_direction_bytes_per_s * RING_EFFICIENCY * links
        rate = ring_bytes_per_s(self.graph, self.per_node)
        capability = self.device.compute_capability or (0, 0)
        nvls = self.host.fabric == "switch" and self.per_node >= _NVLS_RANKS and capability >= _NVLS_CAPABILITY
        return rate * (NVLS_EFFICIENCY if nvls else RING_EFFICIENCY)

    @cached_property
    def network_bytes_per_s(self) -> float:
        """What one node sends to another, over all its network cards."""
        if self.nodes == 1:
            return math.inf
        nic = self.host.nic
        if nic is None:
            raise CannotTell(f"the network between nodes of kind {self.host.key} is not known")
        return nic.count * nic.bytes_per_s_each * NETWORK_EFFICIENCY / self.sharing

    def part(self, ranks: int, stride: int) -> Group:
        """The group of every `stride`th rank, `ranks` of them; 0: this group."""
        if not ranks or ranks >= self.ranks:
            return self
        near = max(1, self.per_node // stride)  # of one node
        inside = min(ranks, near)
        nodes = -(-ranks // inside)
        return Group(self.host, self.device, inside * nodes, nodes, self.per_node // inside if nodes > 1 else 1)

    @property
    def bus_bytes_per_s(self) -> float:
        """B: every byte of a ring leaves each node once, over all its network cards together."""
        return min(self.inner_bytes_per_s, self.network_bytes_per_s)

    def seconds(self, kind: str, nbytes: float) -> float:
        """How long a collective takes; `nbytes` is the whole tensor (all-to-all: what one rank sends and keeps)."""
        if kind not in KINDS:
            raise ValueError(f"{kind} is no collective; there are {', '.join(KINDS)}")
        if self.ranks == 1 or nbytes <= 0:
            return 0.0
        if kind == "all_to_all":
            return self._all_to_all(nbytes)
        rounds = 2 if kind == "all_reduce" else 1
        curve = _measured(self.device, self.per_node, self.nodes) if self.sharing == 1 else None
        if curve is not None:
            factor = rounds * (self.ranks - 1) / self.ranks
            smallest = curve.points[0][0]  # below it the time is that of the smallest message: latency
            return factor * max(nbytes, smallest) / curve.busbw_bytes_per_s(int(max(nbytes, smallest)))
        ways = [self._ring(rounds, nbytes, protocol) for protocol in range(len(_PROTOCOLS))]
        if kind == "all_reduce":
            ways += [self._tree(nbytes, protocol) for protocol in range(len(_PROTOCOLS))]
        return min(ways)

    def _ring(self, rounds: int, nbytes: float, protocol: int) -> float:
        launch, share = _PROTOCOLS[protocol]
        outer = self.nodes if self.nodes > 1 else 0
        inner = self.ranks - 1 - min(outer, self.ranks - 1)
        step = _STEP_S["ring"]
        latency = launch + rounds * (inner * step[self.inner_kind][protocol] + outer * step["network"][protocol])
        return latency + rounds * (self.ranks - 1) / self.ranks * nbytes / (self.bus_bytes_per_s * share)

    def _tree(self, nbytes: float, protocol: int) -> float:
        launch, share = _PROTOCOLS[protocol]
        step = _STEP_S["tree"]
        inner = (self.per_node - 1) * step[self.inner_kind][protocol]
        outer = math.log2(self.nodes) * step["network"][protocol]
        return launch + 2 * (inner + outer) + 2 * nbytes / (self.bus_bytes_per_s * share)

    def _all_to_all(self, nbytes: float) -> float:
        launch, _ = _PROTOCOLS[1]
        inside = nbytes * (self.per_node - 1) / self.ranks / self.inner_bytes_per_s
        outside = self.per_node * nbytes * (self.ranks - self.per_node) / self.ranks / self.network_bytes_per_s
        steps = (self.per_node - 1) * _STEP_S["ring"][self.inner_kind][1] + (self.nodes - 1) * _STEP_S["ring"]["network"][1]
        return launch + steps + max(inside, outside)


def _measured(device: Device, per_node: int, nodes: int) -> CollectiveCurve | None:
    """The curve of this card, or of one with the same links and compute capability."""
    if device.nvlink is None or device.nvlink.pairs_only:
        return None
    return _curves().get((device.nvlink.per_direction_bytes_per_s, device.compute_capability, per_node, nodes))


@cache
def _curves() -> dict[tuple[int, tuple[int, int] | None, int, int], CollectiveCurve]:
    from ...hardware import catalogue

    found = {}
    for curve in catalogue.all_reduce_curves():
        device = catalogue.device(curve.gpu)
        assert device.nvlink is not None
        found[device.nvlink.per_direction_bytes_per_s, device.compute_capability, curve.gpus_per_node, curve.nodes] = curve
    return found


def host_copy_bytes_per_s(group: Group, direction: str = "h2d") -> float:
    """What each GPU gets when all GPUs of a node copy to or from the host at once: PCIe switches and sockets are shared."""
    if group.per_node == 1:  # the way to the host is its own, and as fast as its slower direction (`hardware.topology`)
        return min(group.device.h2d_bytes_per_s, group.device.d2h_bytes_per_s)
    from ...hardware.topology import concurrent_host_bytes_per_s

    alone = group.device.h2d_bytes_per_s if direction == "h2d" else group.device.d2h_bytes_per_s
    return min(alone, concurrent_host_bytes_per_s(group.graph, group.per_node))
