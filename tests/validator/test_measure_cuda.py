"""The parts of a GPU measurement that need no GPU; on a machine with one, the whole."""

import ctypes
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from memplan.errors import UserError
from memplan.planner.predict import predict
from memplan.planner.trace.source import TraceSource
from memplan.validator import cuda, predicted
from memplan.validator.api import request_for, resolve_device, validate
from memplan.validator.cuda import Reading

USER = Path(__file__).with_name("user_models.py")


def reading(phase, iteration, allocated, peak, reserved):
    return Reading(
        phase=phase, iteration=iteration, allocated_bytes=allocated, peak_allocated_bytes=peak, peak_reserved_bytes=reserved
    )


def test_readings_become_the_peaks_of_the_first_step_and_of_the_later_ones():
    readings = [
        reading("build", 0, 9, 9, 9999), reading("init", 0, 10, 12, 20), reading("forward", 0, 30, 35, 40),
        reading("forward", 1, 32, 37, 44), reading("forward", 2, 31, 36, 42),
    ]  # fmt: skip
    found = cuda.usage(readings, {}, gpu="a card", used_bytes=500)
    assert found.phase("forward", "first").peak_bytes == 35
    assert (found.phase("forward", "later").peak_bytes, found.phase("forward", "later").after_bytes) == (37, 31)
    assert found.peak_bytes == 37
    assert found.reserved_peak_bytes == 44
    assert found.detail == {"gpu": "a card", "driver_used_bytes": 500}


class Driver:
    """As much of the driver's library as is called."""

    def __init__(self, processes, status=0):
        self.processes, self.status, self.closed = processes, status, False

    def nvmlInit_v2(self):
        return 0

    def nvmlShutdown(self):
        self.closed = True

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        self.uuid = uuid
        return self.status

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle, count, table):
        for entry, (pid, used) in zip(table, self.processes, strict=False):
            entry.pid, entry.used = pid, used
        count._obj.value = len(self.processes)
        return 0


@pytest.mark.parametrize(
    ("processes", "expected"),
    [([(1, 7), (os.getpid(), 5)], 5), ([(1, 7)], None), ([(os.getpid(), 2**64 - 1)], None), ([], None)],
)
def test_the_driver_says_what_this_process_holds(processes, expected):
    driver = Driver(processes)
    assert cuda.process_used_bytes(SimpleNamespace(uuid="abc"), lambda: driver) == expected
    assert driver.uuid == b"GPU-abc"
    assert driver.closed


def test_a_driver_that_refuses_or_is_missing_says_nothing():
    properties = SimpleNamespace(uuid="abc")
    assert cuda.process_used_bytes(properties, lambda: Driver([], status=3)) is None
    assert cuda.process_used_bytes(properties, lambda: None) is None
    assert cuda.process_used_bytes(SimpleNamespace(), lambda: Driver([])) is None


def test_the_structure_is_the_drivers_own():
    """nvml.h: nvmlProcessInfo_t is pid, bytes, two instance ids: 24 bytes with padding."""
    driver = Driver([(os.getpid(), 5)])
    sizes = []
    original = driver.nvmlDeviceGetComputeRunningProcesses_v3

    def spy(handle, count, table):
        sizes.append(ctypes.sizeof(table[0]))
        return original(handle, count, table)

    driver.nvmlDeviceGetComputeRunningProcesses_v3 = spy
    cuda.process_used_bytes(SimpleNamespace(uuid="abc"), lambda: driver)
    assert sizes == [24]


def test_a_snapshot_is_written_whole(tmp_path):
    place = tmp_path / "run.pickle"
    cuda.write_snapshot(str(place), {"segments": []})
    assert pickle.loads(place.read_bytes()) == {"segments": []}
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        cuda.write_snapshot(str(place), lambda: None)
    assert pickle.loads(place.read_bytes()) == {"segments": []}
    assert list(tmp_path.iterdir()) == [place]


def test_the_predicted_side_is_the_prediction_that_fit_gives():
    request = request_for(f"{USER}:shared", "cpu", micro_batch_size=2, seq_len=64)
    _, ours = predicted.on_cuda(request, TraceSource(exact=True))
    answer = predict(request, TraceSource(exact=True))
    assert ours.counter == "allocated"
    assert ours.peak_bytes == answer.allocated_peak_bytes
    assert ours.reserved_peak_bytes == answer.reserved_peak_bytes


def has_gpu():
    return resolve_device("auto") == "cuda"


def test_asking_for_a_gpu_that_is_not_there_is_a_mistake():
    if has_gpu():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match="torch can use no GPU on this machine"):
        validate("gpt2", device="cuda")


def test_a_real_step_on_a_gpu_agrees_with_the_prediction(tmp_path):
    if not has_gpu():
        pytest.skip("needs a GPU")
    snapshot = tmp_path / "run.pickle"
    result = validate("gpt2", device="cuda", micro_batch_size=4, seq_len=512, precision="bf16", record=False, snapshot=snapshot)
    assert result.reason == ""
    assert result.agrees, str(result)
    assert snapshot.exists()
