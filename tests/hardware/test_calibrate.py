"""Calibration finds the curve that timings were made from, keeps what it measured, and says what it could not."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from memplan.__main__ import main
from memplan.errors import UserError
from memplan.hardware import calibration, catalogue
from memplan.hardware.calibrate import SHAPES, CpuBench, calibrate, fit_products
from memplan.hardware.calibration import Calibration, Product, applied, store, stored
from memplan.planner.timeline.roofline import best_matmul_share

A100 = catalogue.device("a100-sxm-80gb")
PEAK = float(A100.flops_per_s["bf16"])


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_HOME", str(tmp_path))
    return tmp_path


def seconds_of(rows: int, inner: int, columns: int, *, share: float, k_half: float, gap: float) -> float:
    """The curve of the module's docstring, written again."""
    tiles = math.ceil(rows / 128) * math.ceil(columns / 128)
    quantum = max(tiles / (math.ceil(tiles / A100.sm_count) * A100.sm_count), 0.25)
    return 2 * rows * inner * columns / (PEAK * share * quantum * inner / (inner + k_half)) + gap


class FakeGpu:
    """A GPU whose truth is known; `noise` is the relative spread of its timings."""

    name = "NVIDIA A100-SXM4-80GB"
    dtypes = ("bf16",)

    def __init__(self, share: float = 0.83, k_half: float = 180.0, gap: float = 4e-6, noise: float = 0.0) -> None:
        self._truth = {"share": share, "k_half": k_half, "gap": gap}
        self._noise, self._random = noise, np.random.default_rng(3)

    def product(self, dtype: str, rows: int, inner: int, columns: int) -> float:
        return seconds_of(rows, inner, columns, **self._truth) * float(1 + self._noise * self._random.standard_normal())

    def copy(self, direction: str, num_bytes: int, *, pinned: bool) -> float:
        rate = {"h2d": 24e9 if pinned else 6e9, "d2h": 22e9, "d2d": 1.5e12 / 2}[direction]
        return num_bytes / rate

    def launch(self) -> float:
        return 2e-6

    def memory(self) -> tuple[int, int]:
        return A100.total_bytes, 500 << 20


def measure(bench=None, device=A100) -> Calibration:
    return calibrate(bench or FakeGpu(), device, {"torch": "x"}, say=lambda text: None)


@pytest.mark.parametrize("truth", [(0.83, 180.0, 4e-6), (0.5, 20.0, 1e-5), (0.95, 600.0, 1e-6)])
def test_the_fit_finds_the_curve_that_the_times_were_made_from(truth) -> None:
    share, k_half, gap = truth
    bench = FakeGpu(share, k_half, gap)
    fit = fit_products([Product(dtype="bf16", rows=m, inner=k, columns=n, seconds=bench.product("bf16", m, k, n))
                        for m, k, n in SHAPES], PEAK, A100.sm_count)  # fmt: skip
    assert (fit.best_share, fit.k_half) == (pytest.approx(share, rel=1e-3), pytest.approx(k_half, rel=1e-2))
    assert fit.gap_s == pytest.approx(gap, rel=0.05)
    assert fit.median_error < 1e-3


def test_noise_of_a_twentieth_moves_the_best_share_by_less() -> None:
    found = measure(FakeGpu(noise=0.05))
    assert found.best_matmul_share == pytest.approx(0.83, rel=0.1)
    assert found.fit_error == pytest.approx(0.03, abs=0.05)


def test_what_was_measured_is_kept_and_read_back() -> None:
    found = measure()
    assert found.h2d_bytes_per_s == pytest.approx(24e9)
    assert found.memory_bytes_per_s == pytest.approx(1.5e12)
    store(found)
    assert stored(A100.key) == found


def test_this_machines_card_takes_its_own_figures_and_no_other_card_does() -> None:
    store(measure())
    mine = applied(A100)
    assert (mine.context_bytes, mine.pcie.h2d_bytes_per_s) == (500 << 20, 24_000_000_000)
    assert best_matmul_share(mine) == pytest.approx(0.83, rel=1e-2)
    assert best_matmul_share(A100) == 0.869
    assert mine.sources["pcie"].startswith("measured; this machine")
    other = catalogue.device("l4")
    assert applied(other) is other


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1, "device": 3}', "[]"])
def test_a_damaged_file_is_named(text, home) -> None:
    file = calibration.path_of(A100.key)
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(UserError, match="is no calibration"):
        stored(A100.key)


def test_a_file_of_a_newer_memplan_is_refused() -> None:
    file = store(measure())
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 9}))
    with pytest.raises(UserError, match="newer memplan"):
        stored(A100.key)


def test_a_machine_without_a_gpu_measures_its_processor_and_says_what_is_missing(monkeypatch) -> None:
    monkeypatch.setattr("memplan.hardware.calibrate._CPU_SHAPES", ((64, 64, 64),))
    monkeypatch.setattr("memplan.hardware.calibrate._COPY_BYTES", 1 << 20)
    monkeypatch.setattr("memplan.hardware.calibrate._ADAM_PARAMS", 1000)
    found = measure(CpuBench(), None)
    assert found.device == "cpu"
    assert found.host_copy_bytes_per_s > 0
    assert found.cpu_adam_params_per_s > 0
    assert set(found.not_measured) >= {"h2d_bytes_per_s", "context_bytes"}


def test_the_budget_ends_the_products() -> None:
    found = calibrate(FakeGpu(), A100, {}, budget_s=-1.0, say=lambda text: None)
    assert found.products == ()
    assert "best_matmul_share" in found.not_measured


def test_a_dry_run_prints_and_keeps_nothing(monkeypatch, capsys, home) -> None:
    monkeypatch.setattr("memplan.hardware.calibrate._CPU_SHAPES", ((64, 64, 64),))
    monkeypatch.setattr("memplan.hardware.calibrate._COPY_BYTES", 1 << 20)
    monkeypatch.setattr("memplan.hardware.calibrate._ADAM_PARAMS", 1000)
    assert main(["hardware", "calibrate", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "copies in host memory" in out
    assert "not measured" in out
    assert not (home / "hardware").exists()
