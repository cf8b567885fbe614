"""DistZO2 in real processes over gloo: every layout trains as MeZO does, and a rank holds what its share of the work needs."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
from memplan.validator.runtimes.zo.distzo2 import Layout
from memplan.validator.runtimes.zo.run import ZoRun, run_zo_all

_SPEC = importlib.util.spec_from_file_location("zo_units", Path(__file__).with_name("test_zo_units.py"))
units_tests = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(units_tests)
plain, WIDTH, VOCAB = units_tests.plain, units_tests.WIDTH, units_tests.VOCAB

BLOCK = 4 * WIDTH * WIDTH + 5 * WIDTH  # parameters
EPS = 1e-2
# fp32: the ranks' sums and additions are grouped in another way than MeZO's.  A loss near 3.7 is a sum of 16 terms, and 4 steps
# of restoring move every weight by less than 12 units in the last place: 16 such units of the loss are 2^-18.
LOSS_ERROR = 2**-18
GRAD_ERROR = 2 * LOSS_ERROR / (2 * EPS)

MEZO = {"mezo": {}, "mezo on a batch of 4": {"micro_batch_size": 4}, "mezo, bf16": {"precision": "bf16"}}
LAYOUTS = {
    "pairs": (Layout(pert_size=2), {}),
    "pairs, replayed": (Layout(pert_size=2, replayed=True), {}),
    "pairs, bf16": (Layout(pert_size=2), {"precision": "bf16"}),
    "pairs, replayed, bf16": (Layout(pert_size=2, replayed=True), {"precision": "bf16"}),
    "pairs, sliced": (Layout(pert_size=2, sliced=True), {}),
    "data of 2": (Layout(data_size=2), {}),
    "data of 2, buckets": (Layout(data_size=2), {"communication": "bucket"}),
    "data of 2, sliced": (Layout(data_size=2, sliced=True), {}),
    "data of 2, sliced, fp16 on the host": (Layout(data_size=2, sliced=True), {"transfer_dtype": "float16"}),
}
FOUR = {
    "data of 4": (Layout(data_size=4), {"micro_batch_size": 1}),
    "pairs on 2 parts": (Layout(pert_size=2, data_size=2), {}),
    "pairs on 2 parts, sliced": (Layout(pert_size=2, data_size=2, sliced=True), {}),
}


def question(method, layout=None, **options):
    how = {"micro_batch_size": 2, "seq_len": 8, "steps": 4, "lr": 1e-2, "eps": EPS, "evaluate": True, **options}
    return ZoRun(model=plain(), method=method, layout=layout or Layout(), keep_parameters=True, **how)


@functools.cache
def found():
    """All runs, in as few processes as they need: starting them is what takes time."""
    runs = {name: question("mezo", **options) for name, options in MEZO.items()}
    runs |= {"zo2": question("zo2")}
    runs |= {name: question("distzo2", layout, **options) for name, (layout, options) in (LAYOUTS | FOUR).items()}
    return dict(zip(runs, run_zo_all(list(runs.values())), strict=True))


def reference(name):
    layout, options = (LAYOUTS | FOUR)[name]
    if "precision" in options:
        return found()["mezo, bf16"]
    return found()["mezo on a batch of 4" if layout.data_size > 1 else "mezo"]


@pytest.mark.parametrize("name", [n for n in LAYOUTS | FOUR if "16" not in n])
def test_every_layout_has_the_losses_and_gradients_of_mezo(name):
    ours, mezo = found()[name], reference(name)
    for rank in ours.ranks:
        assert rank.losses == ours.losses  # bit for bit, or the ranks would take different steps
        assert rank.projected_grads == ours.projected_grads
        assert rank.eval_loss == pytest.approx(mezo.ranks[0].eval_loss, abs=LOSS_ERROR)
    for (plus, minus), (theirs_plus, theirs_minus) in zip(ours.losses, mezo.losses, strict=True):
        assert plus == pytest.approx(theirs_plus, abs=LOSS_ERROR)
        assert minus == pytest.approx(theirs_minus, abs=LOSS_ERROR)
    assert ours.projected_grads == pytest.approx(mezo.projected_grads, abs=GRAD_ERROR)
    assert min(map(abs, mezo.projected_grads)) > 20 * GRAD_ERROR  # the comparison says something


@pytest.mark.parametrize("name", ["pairs, replayed", "pairs, replayed, bf16"])
def test_pairs_that_replay_are_bitwise_mezo(name):
    ours, mezo = found()[name], reference(name)
    assert ours.losses == mezo.losses
    assert {r.digest for r in ours.ranks} == {mezo.ranks[0].digest}


@pytest.mark.parametrize("name", LAYOUTS | FOUR)
def test_after_the_last_update_all_ranks_have_the_parameters_of_the_canonical_one(name):
    ours = found()[name]
    assert ours.canonical_rank == 0
    assert {r.digest for r in ours.ranks} == {ours.ranks[ours.canonical_rank].digest}


def test_pairs_in_bf16_begin_as_mezo_and_drift_from_it():
    ours, mezo = found()["pairs, bf16"], found()["mezo, bf16"]
    assert ours.losses[0][0] == mezo.losses[0][0]  # nothing is restored before the first forward pass at +eps
    assert ours.ranks[0].digest != mezo.ranks[0].digest


def test_ranks_are_numbered_sign_first():
    assert [(r.pert, r.data) for r in found()["pairs on 2 parts"].ranks] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [(r.pert, r.data) for r in found()["data of 4"].ranks] == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_a_rank_of_a_pair_carries_one_stream_of_activations():
    pair, zo2 = found()["pairs"].ranks[1], found()["zo2"].ranks[0]
    x = 2 * 8 * WIDTH * 4
    ours, theirs = (next(p for p in r.phases if (p.kind, p.unit, p.step) == ("update", "blocks.1", 1)) for r in (pair, zo2))
    assert theirs.peak_bytes - ours.peak_bytes == x


def test_a_rank_of_data_parallel_needs_what_zo2_needs_for_its_part_of_the_batch():
    assert found()["data of 2"].ranks[0].peaks(by="unit") == found()["zo2"].ranks[0].peaks(by="unit")


def test_a_sliced_block_takes_no_second_buffer_on_the_device():
    plain_run, sliced = (found()[n].ranks[1] for n in ("data of 2", "data of 2, sliced"))
    assert sliced.device_peak_bytes == plain_run.device_peak_bytes
    assert sliced.peaks()["upload"] == plain_run.peaks()["upload"]


def test_with_slices_a_host_keeps_its_part_of_every_block():
    whole, half, quarter = (
        found()[n].ranks[0] for n in ("data of 2, buckets", "data of 2, sliced", "pairs on 2 parts, sliced")
    )
    assert whole.host_pinned_bytes == 3 * 8192  # of 4,416 bytes
    assert half.host_pinned_bytes == 3 * 4096  # of 2,208
    assert quarter.host_pinned_bytes == 3 * 2048  # of 1,104
    assert (4 * BLOCK, half.host_pageable_bytes) == (4416, 0)


def test_slices_in_fp16_widen_on_the_device():
    narrow = found()["data of 2, sliced, fp16 on the host"]
    assert narrow.ranks[0].host_pinned_bytes == 3 * 2048
    assert narrow.losses[0][0] == pytest.approx(found()["mezo on a batch of 4"].losses[0][0], abs=1e-3)
    upload = next(p for p in narrow.ranks[0].phases if (p.kind, p.unit, p.step) == ("upload", "blocks.1", 1))
    assert upload.peak_bytes - upload.after_bytes == 2 * BLOCK  # the flat fp16 block, until the last tensor is widened


def test_cutting_the_loaded_model_into_slices_takes_no_more_host_memory_than_loading_it():
    loaded = 4 * (3 * BLOCK + 2 * VOCAB * WIDTH + 2 * WIDTH)
    for name in ("data of 2, sliced", "pairs on 2 parts, sliced"):
        assert max(p.host_pageable_bytes for p in found()[name].ranks[0].phases) == loaded
