"""What memplan knows about a GPU, a link, a host and a disk: typed records, read from the data files beside this module.

The records say where each figure is from: `sources` maps a field to a text that begins with its status word
(`measured`, `derived`, `datasheet`, `statement`, `source-code` or `unverified`) and names the source.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "int8"]
Vendor = Literal["nvidia", "amd", "intel"]
TotalStatus = Literal["measured", "datasheet", "unverified", "given"]  # given: the user's own figure


class Record(BaseModel):
    """Base of every data record: immutable, and a misspelt field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)  # a question needs few of these classes


class Pcie(Record):
    """The PCIe link between a GPU and its host."""

    gen: int
    lanes: int
    h2d_bytes_per_s: int  # pinned memory, one direction at a time, transfers of 100 MB and more
    d2h_bytes_per_s: int


class C2c(Record):
    """A coherent link between a GPU and its CPU (NVLink-C2C of GH200 and GB200), which takes the place of PCIe."""

    kind: str
    per_direction_bytes_per_s: int  # the data-sheet rate
    h2d_bytes_per_s: int  # measured
    d2h_bytes_per_s: int


class Link(Record):
    """A direct link between GPUs (NVLink, Infinity Fabric)."""

    kind: str  # for people: "NVLink3, 12 links"
    per_direction_bytes_per_s: int  # the data-sheet rate of all links of one GPU together
    pairs_only: bool = False  # a bridge joins two cards; there is no switch


class Device(Record):
    """One kind of GPU, as a training process sees it.

    `total_bytes` is what `torch.cuda.get_device_properties(0).total_memory` prints on Linux with a current driver, which is
    less than the nominal size; on newer drivers it shrinks, so it is the smallest value found.  `context_bytes` is what one
    process loses to the CUDA context and the kernels that load lazily: it is outside PyTorch's allocator and excludes NCCL.
    """

    key: str
    name: str
    vendor: Vendor
    arch: str
    compute_capability: tuple[int, int] | None  # None: not an NVIDIA card
    gfx: str | None = None  # AMD's name of the instruction set, such as gfx942
    device_names: tuple[str, ...] = ()  # what torch and nvidia-smi call the card
    total_bytes: int = Field(gt=0)
    total_status: TotalStatus
    nominal_gb: int  # what the box says
    memory_type: str
    ecc: str
    context_bytes: int = Field(ge=0)
    sm_count: int  # torch's multi_processor_count; compute units on AMD
    max_threads_per_sm: int
    max_shared_memory_per_block_optin: int  # bytes
    memory_bandwidth_bytes_per_s: int
    flops_per_s: dict[Dtype, int]  # dense, tensor cores with fp32 accumulation; a dtype without hardware is absent
    pcie: Pcie | None
    c2c: C2c | None = None
    nvlink: Link | None
    tdp_w: int
    best_matmul_share: float | None = None  # of `flops_per_s`, measured on this machine; None: roofline.json has it
    sources: dict[str, str]  # field -> "status; source"
    made: str  # the date of the figures, ISO
    note: str | None = None

    @property
    def usable_bytes(self) -> int:
        """What the allocator of one single-GPU process can reserve: the total less the context."""
        return self.total_bytes - self.context_bytes

    @property
    def host_link(self) -> Pcie | C2c:
        """The way between this card and its host."""
        link = self.pcie or self.c2c
        assert link is not None  # the validator below saw to it
        return link

    @property
    def h2d_bytes_per_s(self) -> int:
        """Copy rate from pinned host memory to the card."""
        return self.host_link.h2d_bytes_per_s

    @property
    def d2h_bytes_per_s(self) -> int:
        """Copy rate from the card to pinned host memory."""
        return self.host_link.d2h_bytes_per_s

    @model_validator(mode="after")
    def _is_whole(self) -> Device:
        if (self.pcie is None) == (self.c2c is None):
            raise ValueError(f"{self.key}: exactly one of pcie and c2c must be given")
        if self.context_bytes >= self.total_bytes:
            raise ValueError(f"{self.key}: the context of {self.context_bytes} bytes leaves nothing of {self.total_bytes}")
        if "fp32" not in self.flops_per_s:
            raise ValueError(f"{self.key}: flops_per_s needs at least fp32")
        return self

    def peak_flops(self, dtype: Dtype) -> int:
        """Dense peak for `dtype`; a type without hardware of its own runs at the fp32 rate (bf16 on Turing is emulated so)."""
        return self.flops_per_s.get(dtype, self.flops_per_s["fp32"])

    def with_communicator(self, nbytes: int) -> Device:
        """The same card in a job of several GPUs: NCCL's buffers lie outside PyTorch's allocator, beside the context."""
        return self.model_copy(update={"context_bytes": self.context_bytes + nbytes})

    def with_memory(self, total_bytes: int) -> Device:
        """The same card with `total_bytes` of memory: a modded board, ECC switched on, or the user's own reading."""
        return self.model_copy(
            update={
                "total_bytes": total_bytes,
                "total_status": "given",
                "sources": {**self.sources, "total_bytes": "given; by the caller"},
            }
        )


class LinkFigure(Record):
    """One published figure about a link; `bytes_per_s` follows the order that `what` names."""

    key: str
    what: str
    kind: Literal["pcie", "nvlink", "c2c", "infinity-fabric", "nic", "collective"]
    bytes_per_s: tuple[int, ...]
    status: str
    source: str
    note: str | None = None


class CollectiveCurve(Record):
    """Bus bandwidth of an all-reduce by message size, on `nodes` nodes of `gpus_per_node` cards."""

    gpu: str
    gpus_per_node: int
    nodes: int
    points: tuple[tuple[int, int], ...]  # (message bytes, bus bytes per second), ascending
    status: str
    source: str

    def busbw_bytes_per_s(self, message_bytes: int) -> float:
        """Interpolates linearly between the points; outside them the nearest point holds."""
        points = self.points
        if message_bytes <= points[0][0]:
            return float(points[0][1])
        for (left, low), (right, high) in pairwise(points):
            if message_bytes <= right:
                return low + (high - low) * (message_bytes - left) / (right - left)
        return float(points[-1][1])


class Disk(Record):
    """The local NVMe drives of a node, taken together."""

    count: int | None
    bytes: int | None  # all drives together
    read_bytes_per_s: int | None = None  # measured, large sequential transfers
    write_bytes_per_s: int | None = None
    status: str


class Nic(Record):
    """The network cards of a node that carry collectives."""

    kind: str
    count: int
    bytes_per_s_each: int  # per direction
    status: str


class Host(Record):
    """One node as it is sold: which GPUs, how many, how they are joined, and what the host offers.

    `fabric` is the way from one GPU to another inside the node: `none` (a single GPU), `pcie` (through the host),
    `mesh` (direct links, the hybrid cube mesh of eight V100), `bridge` (pairs), `switch` (NVSwitch or the like, all to all).
    """

    key: str
    name: str
    gpu: str  # key of a Device
    num_gpus: int
    vcpus: int | None
    ram_bytes: int | None
    sockets: int = 1
    fabric: Literal["none", "pcie", "mesh", "bridge", "switch"]
    disk: Disk | None = None
    nic: Nic | None = None
    p2p: bool = True  # False: copies between GPUs go through host memory
    sources: dict[str, str]
    note: str | None = None


class Figure(Record):
    """A published figure about the host's work (pinned memory, CPU Adam, NVMe) or NCCL's memory, in its own unit."""

    key: str
    what: str
    values: tuple[float, ...]
    unit: str
    status: str
    source: str
    note: str | None = None
