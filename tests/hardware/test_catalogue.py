from __future__ import annotations

import ast
import re
import time
from itertools import pairwise
from pathlib import Path

import memplan
import pytest
from memplan.errors import UserError
from memplan.hardware import catalogue
from memplan.hardware.profile import Device
from memplan.units import GiB, MiB
from pydantic import ValidationError

ROOT = Path(memplan.__file__).resolve().parent
SCHEMA = ROOT.parent / "shared" / "measurements" / "schema.py"
STATUS = re.compile(r"(measured|derived|datasheet|statement|source-code|unverified); \S")
every_device = pytest.mark.parametrize("device", catalogue.devices(), ids=lambda device: device.key)


@every_device
def test_every_figure_names_its_status_and_source(device):
    needed = {
        "total_bytes", "context_bytes", "sm_count", "max_threads_per_sm", "max_shared_memory_per_block_optin",
        "memory_bandwidth_bytes_per_s", "flops_per_s", "tdp_w", "compute_capability", "ecc",
        "pcie.bytes_per_s" if device.pcie else "c2c",
    } | ({"nvlink"} if device.nvlink else set())  # fmt: skip

    assert needed <= set(device.sources)
    assert [field for field, text in device.sources.items() if not STATUS.match(text)] == []
    assert {field.split(".")[0] for field in device.sources} <= set(Device.model_fields)


@every_device
def test_the_memory_that_torch_reports_is_near_and_below_the_nominal_size(device):
    nominal = device.nominal_gb * GiB  # the boards count in binary units, but for the largest HBM stacks

    assert 0.90 * nominal <= device.total_bytes <= nominal
    assert device.sources["total_bytes"].startswith(device.total_status)


@every_device
def test_the_context_takes_less_than_a_gibibyte(device):
    assert 64 * MiB <= device.context_bytes <= GiB
    assert device.usable_bytes == device.total_bytes - device.context_bytes


@every_device
def test_a_smaller_dtype_is_never_slower(device):
    order = [device.flops_per_s[dtype] for dtype in ("fp32", "tf32", "bf16", "fp8") if dtype in device.flops_per_s]

    assert all(faster >= 0.99 * slower for slower, faster in pairwise(order))  # the sources round to three digits


@pytest.mark.parametrize(
    ("capability", "threads", "shared_kib"),
    [((7, 0), 2048, 96), ((7, 5), 1024, 64), ((8, 0), 2048, 163), ((8, 6), 1536, 99), ((8, 9), 1536, 99), ((9, 0), 2048, 227)],
)
def test_cards_of_one_compute_capability_share_its_limits(capability, threads, shared_kib):
    cards = [device for device in catalogue.devices() if device.compute_capability == capability]

    limits = {(device.max_threads_per_sm, device.max_shared_memory_per_block_optin) for device in cards}
    assert limits == {(threads, shared_kib * 1024)}


def test_the_fp32_rate_of_cuda_cards_follows_from_their_sms():
    # An SM of Ampere GA10x and Ada does 128 fused multiply-adds a cycle: 256 FLOP.  Clocks lie between 1 and 3 GHz.
    cards = [device for device in catalogue.devices() if device.compute_capability in ((8, 6), (8, 9))]

    for device in cards:
        clock = device.flops_per_s["fp32"] / (device.sm_count * 256)
        assert 1.0e9 <= clock <= 3.0e9, device.key


def test_figures_of_known_cards_stand_as_published():
    a100, t4 = catalogue.device("a100-sxm-80gb"), catalogue.device("t4")

    assert a100.total_bytes == 81038 * MiB  # torch 2.3
    assert (a100.sm_count, a100.flops_per_s["bf16"], a100.memory_bandwidth_bytes_per_s) == (108, 312 * 10**12, 2039 * 10**9)
    assert a100.nvlink is not None
    assert a100.nvlink.per_direction_bytes_per_s == 300 * 10**9
    assert t4.context_bytes == 140 * MiB  # the median of 140.9, 143, 128, 140, 96


def test_a_dtype_without_hardware_runs_at_the_fp32_rate():
    t4 = catalogue.device("t4")

    assert t4.peak_flops("bf16") == t4.flops_per_s["fp32"]
    assert t4.peak_flops("fp16") == 65 * 10**12


def test_there_are_at_least_forty_cards_of_three_vendors():
    assert len(catalogue.keys()) == len(set(catalogue.keys())) >= 40
    assert {device.vendor for device in catalogue.devices()} == {"nvidia", "amd", "intel"}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("a100-80gb", "a100-sxm-80gb"),
        ("h100-80gb", "h100-sxm-80gb"),
        ("h100", "h100-sxm-80gb"),
        ("v100-16gb", "v100-sxm-16gb"),
        ("rtx-4090-24gb", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("a10g-24gb", "a10g"),
        ("t4-16gb", "t4"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_card_is_found_by_the_names_that_people_and_drivers_use(name, key):
    assert catalogue.device(name).key == key


def test_every_other_name_stands_for_a_card_and_hides_none():
    keys = set(catalogue.keys())

    assert set(catalogue.aliases().values()) <= keys
    assert set(catalogue.aliases()) & keys == set()


def test_the_name_that_a_driver_prints_leads_to_its_card():
    wrong = {
        name: device.key for device in catalogue.devices() for name in device.device_names if catalogue.find(name) != device.key
    }

    assert wrong == {"NVIDIA H100": "h100-96gb-hbm2e"}  # people mean the 80 GB board by it; detection goes by the memory


def test_an_ambiguous_name_says_which_card_it_means():
    device, note = catalogue.resolve("a100-80gb")

    assert device.key == "a100-sxm-80gb"
    assert note == (
        "a100-80gb means the A100 SXM4 80GB (a100-sxm-80gb): the SXM4 board is the usual one; the PCIe card is a100-pcie-80gb"
    )


def test_a_key_needs_no_note():
    assert catalogue.resolve("rtx-4090") == (catalogue.device("rtx-4090"), None)


def test_an_unknown_card_is_refused_with_the_nearest_names():
    with pytest.raises(UserError, match=r"Unknown GPU 'rtx-4091'. Did you mean rtx-4090, .*`memplan hardware list`"):
        catalogue.device("rtx-4091")


def test_the_callers_memory_replaces_the_total_and_says_so():
    modded = catalogue.device("rtx-4090", memory_bytes=47 * GiB)

    assert (modded.total_bytes, modded.total_status) == (47 * GiB, "given")
    assert modded.usable_bytes == 47 * GiB - catalogue.device("rtx-4090").context_bytes
    assert catalogue.device("rtx-4090").total_bytes < 24 * GiB  # the catalogue's own record is untouched


def test_a_memory_no_larger_than_the_context_is_refused():
    with pytest.raises(UserError, match=r"rtx-4090: a memory of 0.25 GiB leaves nothing beside the context of 0.36 GiB"):
        catalogue.device("rtx-4090", memory_bytes=GiB // 4)


@pytest.mark.skipif(not SCHEMA.exists(), reason="the measurements are not beside this tree")
def test_every_card_of_the_published_measurements_is_known():
    tree = ast.parse(SCHEMA.read_text())
    hardware = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Hardware")
    field = next(node for node in hardware.body if isinstance(node, ast.AnnAssign) and node.target.id == "gpu")
    names = [node.value for node in ast.walk(field.annotation) if isinstance(node, ast.Constant)]

    assert len(names) > 30
    assert [name for name in names if catalogue.find(name) is None] == []


def test_a_lookup_takes_under_thirty_milliseconds():
    def seconds() -> float:
        for cached in (catalogue._read, catalogue._rows, catalogue._by_key, catalogue._names):
            cached.cache_clear()
        start = time.perf_counter()
        catalogue.device("rtx-4090")
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.030


def test_a_device_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        catalogue.device("t4").total_bytes = 1


def test_a_misspelt_field_is_an_error():
    row = {**catalogue.device("t4").model_dump(), "totl_bytes": 1}

    with pytest.raises(ValidationError, match="totl_bytes"):
        Device.model_validate(row)


def test_a_card_without_a_way_to_its_host_is_an_error():
    row = {**catalogue.device("t4").model_dump(), "pcie": None}

    with pytest.raises(ValidationError, match="t4: exactly one of pcie and c2c must be given"):
        Device.model_validate(row)


def test_a_coherent_link_takes_the_place_of_pcie():
    grace = catalogue.device("gb200")

    assert grace.pcie is None
    assert (grace.h2d_bytes_per_s, grace.d2h_bytes_per_s) == (201 * 10**9, 193 * 10**9)
