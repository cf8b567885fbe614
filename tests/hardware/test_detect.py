from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from memplan.errors import UserError
from memplan.hardware import catalogue, detect
from memplan.units import GiB, MiB

CARD = detect.Gpu(
    name="NVIDIA GeForce RTX 4090",
    total_bytes=24_210 * MiB,
    compute_capability=(8, 9),
    sm_count=128,
    gfx=None,
    pcie_gen=4,
    pcie_lanes=16,
    read_by="torch",
)


class FakeNvml:
    """Answers the calls that memplan makes of libnvidia-ml, as nvml.h declares them, for one RTX 4090."""

    def __init__(self, init: int = 0) -> None:
        self.init = init
        self.closed = False

    def nvmlInit_v2(self):
        return self.init

    def nvmlShutdown(self):
        self.closed = True
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = 1 + index
        return 0

    def nvmlDeviceGetName(self, handle, name, length):
        name.value = b"NVIDIA GeForce RTX 4090"
        return 0

    def nvmlDeviceGetMemoryInfo_v2(self, handle, memory):
        assert memory._obj.version == ctypes.sizeof(memory._obj) | 2 << 24
        memory._obj.total, memory._obj.reserved = 24_564 * MiB, 490 * MiB
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = 8, 9
        return 0

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle, gen):
        gen._obj.value = 4
        return 0

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle, lanes):
        lanes._obj.value = 8
        return 0


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(detect, "nvml", lambda: None)
    monkeypatch.setattr(detect, "_DRIVER_FILES", ())


def test_a_machine_without_a_gpu_is_read_all_the_same(no_gpu, tmp_path):
    found = detect.machine(tmp_path)

    assert found.gpus == ()
    assert found.cpu_cores >= 1
    assert found.ram_bytes is not None
    assert found.ram_bytes > GiB // 2
    assert found.disk_free_bytes > 0
    assert found.disk_path == str(tmp_path)


def test_auto_without_a_gpu_names_the_next_step(no_gpu):
    with pytest.raises(UserError, match=r"--gpu auto: no GPU was found on this machine. Name the card, .*--gpu rtx-4090"):
        catalogue.device("auto")


def test_auto_is_this_machines_card_with_its_own_memory(monkeypatch):
    monkeypatch.setattr(detect, "gpus", lambda: (CARD,))

    device, note = catalogue.resolve("auto")

    assert (device.key, device.total_bytes, device.total_status) == ("rtx-4090", 24_210 * MiB, "measured")
    assert note == "auto means this machine's NVIDIA GeForce RTX 4090 (rtx-4090) with 23.64 GiB"


def test_a_card_with_twice_its_memory_is_named_as_unlike_the_catalogues(monkeypatch):
    device, note = detect.as_device(replace(CARD, total_bytes=48_000 * MiB))

    assert device.total_bytes == 48_000 * MiB
    assert "unlike the 23.51 GiB of the catalogue" in note


def test_one_name_for_boards_of_two_sizes_is_told_apart_by_the_memory():
    board = replace(CARD, name="NVIDIA H100", compute_capability=(9, 0), sm_count=132, pcie_gen=5)

    assert detect.as_device(replace(board, total_bytes=95 * GiB))[0].key == "h100-96gb-hbm2e"


def test_an_unknown_card_takes_the_speeds_of_the_most_alike_one_by_its_sms():
    slice_of_a100 = replace(
        CARD, name="NVIDIA A100-SXM4-80GB MIG 3g.40gb", compute_capability=(8, 0), sm_count=42, total_bytes=40_192 * MiB
    )

    device, note = detect.as_device(slice_of_a100)

    assert (device.total_bytes, device.sm_count) == (40_192 * MiB, 42)
    assert device.compute_capability == (8, 0)
    assert device.flops_per_s["bf16"] < catalogue.device("a100-sxm-80gb").flops_per_s["bf16"]
    assert "not in the catalogue" in note
    assert device.sources["flops_per_s"].startswith("unverified")


def test_a_card_like_no_other_is_refused():
    with pytest.raises(UserError, match="nothing like this machine's 'Graphics 9000' is known"):
        detect.as_device(replace(CARD, name="Graphics 9000", compute_capability=(99, 0)))


def test_a_narrow_slot_halves_the_copy_rate():
    wide, narrow = detect.as_device(CARD)[0], detect.as_device(replace(CARD, pcie_lanes=8))[0]

    assert narrow.h2d_bytes_per_s * 2 == wide.h2d_bytes_per_s == catalogue.device("rtx-4090").h2d_bytes_per_s


def test_the_driver_is_asked_when_torch_has_no_cuda(monkeypatch):
    library = FakeNvml()
    monkeypatch.setattr(detect, "nvml", lambda: library)
    monkeypatch.setattr(detect, "_gpus_of_torch", lambda: ())

    (gpu,) = detect.gpus()

    assert gpu == replace(CARD, total_bytes=24_074 * MiB, sm_count=None, pcie_lanes=8, read_by="nvml")
    assert library.closed


def test_a_driver_that_does_not_answer_means_no_gpu(monkeypatch):
    monkeypatch.setattr(detect, "nvml", lambda: FakeNvml(init=9))  # NVML_ERROR_DRIVER_NOT_LOADED
    monkeypatch.setattr(detect, "_gpus_of_torch", lambda: ())

    assert detect.gpus() == ()


def test_torchs_properties_of_an_nvidia_card_are_read():
    properties = SimpleNamespace(
        name="NVIDIA GeForce RTX 4090", total_memory=24_210 * MiB, major=8, minor=9, multi_processor_count=128
    )

    assert detect._gpu_of_properties(properties) == replace(CARD, pcie_gen=None, pcie_lanes=None)


def test_torchs_properties_of_an_amd_card_carry_its_instruction_set():
    properties = SimpleNamespace(
        name="AMD Instinct MI300X", total_memory=191 * GiB, major=9, minor=4, multi_processor_count=304,
        gcnArchName="gfx942:sramecc+:xnack-",
    )  # fmt: skip

    gpu = detect._gpu_of_properties(properties)

    assert (gpu.gfx, gpu.compute_capability) == ("gfx942", None)
    assert detect.as_device(gpu)[0].key == "mi300x"


def test_the_link_is_that_of_the_card_and_its_slot_together(tmp_path):
    port = tmp_path / "0000:00:01.0"
    card = port / "0000:01:00.0"
    card.mkdir(parents=True)
    for place, speed, width in ((port, "8.0 GT/s PCIe", "16"), (card, "16.0 GT/s PCIe", "8")):
        (place / "max_link_speed").write_text(speed + "\n")
        (place / "max_link_width").write_text(width + "\n")

    assert detect.pcie_link("0000:01:00.0", root=port) == (3, 8)
    assert detect.pcie_link("0000:02:00.0", root=port) == (None, None)


def test_a_containers_limit_counts_as_the_host_memory(tmp_path):
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal:       65536000 kB\nMemFree:         1000000 kB\nMemAvailable:   32768000 kB\n")

    limit.write_text("max\n")
    assert detect._ram(meminfo, limit) == (65536000 * 1024, 32768000 * 1024)
    limit.write_text(f"{8 * GiB}\n")
    assert detect._ram(meminfo, limit) == (8 * GiB, 8 * GiB)


@pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="no NVIDIA GPU here")
def test_this_machines_gpu_is_known():
    device, note = catalogue.resolve("auto")

    assert device.total_bytes > GiB
    assert "this machine's" in note
