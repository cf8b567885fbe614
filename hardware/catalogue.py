"""Looks up a GPU by the names that people use, and the nodes, links and figures of the data files.

The data files are read once; only the record that is asked for is validated, so a lookup costs about a millisecond.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from ..errors import UserError, did_you_mean
from ..units import gib
from .profile import CollectiveCurve, Device, Figure, Host, LinkFigure

AUTO = "auto"
_FAMILY_WORDS = {"nvidia", "geforce", "tesla", "amd", "instinct", "radeon", "generation"}


@cache
def _read(file_name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(files(f"{__package__}.data").joinpath(file_name).read_text(encoding="utf-8"))
    return content


@cache
def _rows(file_name: str, section: str) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for row in _read(file_name)[section]}


def keys() -> tuple[str, ...]:
    """The keys of every GPU in the catalogue, in the order of the data file."""
    return tuple(_rows("gpus.json", "gpus"))


def aliases() -> dict[str, str]:
    """Every other name that `device` understands -> the key that it stands for."""
    return {alias: entry["key"] for alias, entry in _read("aliases.json")["aliases"].items()}


@cache
def _by_key(key: str) -> Device:
    return Device.model_validate(_rows("gpus.json", "gpus")[key])


def devices() -> tuple[Device, ...]:
    """Every GPU of the catalogue."""
    return tuple(_by_key(key) for key in keys())


def _normalised(name: str) -> str:
    """Case, blanks and the vendor's family words do not matter: "NVIDIA GeForce RTX 4090" is "rtx-4090"."""
    words = re.split(r"[\s_-]+", name.strip().lower())
    return "-".join(word for word in words if word not in _FAMILY_WORDS)


@cache
def _names() -> dict[str, str]:
    """Normalised device names as the drivers print them -> key."""
    return {_normalised(name): row["key"] for row in _rows("gpus.json", "gpus").values() for name in row["device_names"]}


def find(name: str) -> str | None:
    """The key for `name` (a key, an alias, or a name that a driver prints); None when it is unknown."""
    wanted = _normalised(name)
    if wanted in _rows("gpus.json", "gpus"):
        return wanted
    return aliases().get(wanted) or _names().get(wanted)


def resolve(key: str, *, memory_bytes: int | None = None) -> tuple[Device, str | None]:
    """The GPU that `key` names, and a sentence for the user when the name leaves a choice or is another name for the card.

    `auto` is this machine's first GPU.  `memory_bytes` replaces the card's total, as torch reports it.
    Raises UserError for an unknown name, for `auto` without a GPU, and for a memory that leaves nothing beside the context.
    """
    if key.strip().lower() == AUTO:
        from .detect import this_gpu

        device: Device
        note: str | None
        device, note = this_gpu()
    else:
        found = find(key)
        if found is None:
            known = [*keys(), *aliases()]
            hint = did_you_mean(_normalised(key), known)
            raise UserError(f"Unknown GPU {key!r}", f"{hint} `memplan hardware list` shows every known GPU")
        device, note = _by_key(found), _note(key, found)
    return (device if memory_bytes is None else _with_memory(device, memory_bytes)), note


def device(key: str, *, memory_bytes: int | None = None) -> Device:
    """As `resolve`, without the note."""
    return resolve(key, memory_bytes=memory_bytes)[0]


def _note(name: str, key: str) -> str | None:
    entry = _read("aliases.json")["aliases"].get(_normalised(name))
    if entry is None or _normalised(name) == key:
        return None
    why = f": {entry['why']}" if entry["why"] else ""
    return f"{name} means the {_by_key(key).name} ({key}){why}"


def _with_memory(device: Device, memory_bytes: int) -> Device:
    if memory_bytes <= device.context_bytes:
        raise UserError(
            f"{device.key}: a memory of {gib(memory_bytes)} leaves nothing beside the context of {gib(device.context_bytes)}",
            "Give the card's whole memory, for example 24GiB",
        )
    return device.with_memory(memory_bytes)


def hosts() -> tuple[Host, ...]:
    """Every node of the catalogue."""
    return tuple(Host.model_validate(row) for row in _read("hosts.json")["hosts"])


def host(key: str) -> Host:
    """The node with this key; raises UserError with the nearest names."""
    row = _rows("hosts.json", "hosts").get(key.strip().lower())
    if row is None:
        raise UserError(f"Unknown node {key!r}", did_you_mean(key, _rows("hosts.json", "hosts")))
    return Host.model_validate(row)


def host_figures() -> tuple[Figure, ...]:
    """Published figures about pinned memory, CPU optimizers and NVMe."""
    return tuple(Figure.model_validate(row) for row in _read("hosts.json")["figures"])


def links() -> tuple[LinkFigure, ...]:
    """Published rates of PCIe, NVLink, C2C, network cards and collectives."""
    return tuple(LinkFigure.model_validate(row) for row in _read("links.json")["links"])


def all_reduce_curves() -> tuple[CollectiveCurve, ...]:
    """Measured all-reduce bus bandwidth by message size."""
    return tuple(CollectiveCurve.model_validate(row) for row in _read("links.json")["all_reduce"])


def communicator_bytes(gpus: int) -> int:
    """What one NCCL communicator of `gpus` GPUs holds on each: measured for 2 and for 3 to 4 on A100 with NVLink; more ranks
    in a node add channels to no new peer of a ring, so the latter stands for them too."""
    wanted = "communicator-2-gpus" if gpus == 2 else "communicator-4-gpus"
    figure = next(f for f in nccl_figures() if f.key == wanted)
    return int(figure.values[0]) * 2**20


def nccl_bytes(gpus: int, communicators: int = 1) -> int:
    """What NCCL takes of each of `gpus` GPUs: once for its kernels, which stays when a communicator is destroyed, and the
    buffers of each communicator."""
    before, after = next(f for f in nccl_figures() if f.key == "loaded").values
    return int(after - before) * 2**20 + communicators * communicator_bytes(gpus)


def nccl_figures() -> tuple[Figure, ...]:
    """Published figures about the GPU memory that NCCL takes outside PyTorch's allocator."""
    return tuple(Figure.model_validate(row) for row in _read("links.json")["nccl"])


_USUAL = ("dgx", "aws", "azure", "gcp")  # which of several nodes stands for a GPU: NVIDIA's own, then the clouds
_MANY_GPUS = 4  # more share two sockets


def usual_host(device: Device, gpus: int) -> Host:
    """A node of at least `gpus` of this card: of the catalogue, small and with a known network first; else a plain box."""
    fitting = [h for h in hosts() if h.gpu == device.key and h.num_gpus >= gpus]
    if fitting:
        return min(fitting, key=lambda h: (h.nic is None, h.num_gpus > max(gpus, 8), _preference(h.key), h.num_gpus))
    direct = device.nvlink is not None and not device.nvlink.pairs_only
    return Host(
        key="plain-box",
        name=f"a plain box of {gpus} {device.name}",
        gpu=device.key,
        num_gpus=gpus,
        vcpus=None,
        ram_bytes=None,
        sockets=2 if gpus > _MANY_GPUS else 1,
        fabric="none" if gpus == 1 else "switch" if direct else "pcie",
        p2p=not device.name.startswith("GeForce"),
        sources={"shape": "unverified; no node of this card is in the catalogue"},
    )


def _preference(key: str) -> int:
    return next((rank for rank, word in enumerate(_USUAL) if key.startswith(word)), len(_USUAL))
