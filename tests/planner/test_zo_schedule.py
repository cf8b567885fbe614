"""MeZO, ZO2 and DistZO2 on a toy whose every byte is known: what is moved when, and what is live then."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace

import pytest
from memplan.errors import CannotTell, UserError
from memplan.hardware.catalogue import device
from memplan.models import load
from memplan.planner.ledger import Component, Ledger, Tier
from memplan.planner.loop import LoopFacts
from memplan.planner.simulate import HOST, simulate
from memplan.planner.strategies import distzo2, mezo, zo2
from memplan.planner.strategies.distzo2 import DistZo2
from memplan.planner.strategies.mezo import Mezo
from memplan.planner.strategies.single import SingleDevice
from memplan.planner.strategies.zo2 import Zo2
from memplan.planner.strategies.zo_blocks import ARITHMETIC
from memplan.planner.strategies.zo_settings import ZoSettings
from memplan.planner.trace.block_segments import cut_blocks, num_blocks, without_cast_cache
from memplan.planner.trace.options import TraceOptions
from memplan.planner.trace.steptrace import EventKind, StepTrace
from memplan.planner.trace.tracer import trace_step

BATCH, WIDTH, BLOCKS = 4, 64, 5
W = WIDTH * WIDTH * 4  # a weight
H = BATCH * WIDTH * 4  # a hidden state

MODEL = """
    import torch
    from torch import nn

    def linear():
        return nn.Linear(64, 64, bias=False)

    class Net(nn.Module):
        def __init__(self, blocks, kind):
            super().__init__()
            self.kind = kind
            self.embed, self.head = linear(), linear()
            self.blocks = nn.ModuleList(linear() for _ in range(blocks))
            if kind == "tied":
                self.head.weight = self.embed.weight
            if kind == "loose":
                self.shift = nn.Parameter(torch.zeros(64))
            if kind == "two lists":
                self.more = nn.ModuleList(linear() for _ in range(blocks))
            if kind == "frozen":
                for block in self.blocks:
                    block.weight.requires_grad_(False)

        def forward(self, x):
            x = self.embed(x)
            if self.kind == "loose":
                x = x + self.shift
            order = list(self.blocks)
            if self.kind == "twice":
                order = [b for b in order for _ in range(2)]
            if self.kind == "backwards":
                order.reverse()
            if self.kind == "two lists":
                order += self.more
            if self.kind == "between":
                order.insert(2, self.head)
            for block in order:
                x = block(x)
            return x if self.kind == "between" else self.head(x)

    def build(blocks=5, kind="plain"):
        return Net(blocks, kind), lambda batch, seq: {"x": torch.ones(batch, 64)}, lambda m, b: m(**b).sum()
"""


def toy(tmp_path, kind: str = "plain", *, blocks: int = BLOCKS, mode: str = "inference", precision: str = "fp32") -> StepTrace:
    file = tmp_path / "toy.py"
    file.write_text(textwrap.dedent(MODEL))
    spec = load(f"{file}:build", overrides={"blocks": str(blocks), "kind": kind})
    options = TraceOptions(batch_size=BATCH, seq_len=1, mode=mode, precision=precision, target="cpu")
    return trace_step(spec, options, with_graph=False)


def walk(trace: StepTrace, settings: ZoSettings | None = None, steps: int = 2) -> tuple[Ledger, list]:
    ledger, work = simulate(trace, Zo2(cut_blocks(trace), settings), loop=LoopFacts(iterations=steps))
    ledger.check()
    return ledger, work


def made(ledger: Ledger, what: str, iteration: int | None = None) -> list[str]:
    """The modules' names of the blocks that were made as `what`, in order."""
    return [
        ledger.labels[ledger.label[row]][0]
        for row in range(len(ledger))
        if ledger.delta_bytes[row] > 0
        and ledger.labels[ledger.label[row]][1] == what
        and (iteration is None or ledger.iteration[row] == iteration)
    ]


# -- pieces --------------------------------------------------------------------------------------------------------------


def test_the_units_of_a_model_are_its_embedding_its_blocks_and_its_head(tmp_path):
    pieces = cut_blocks(toy(tmp_path))

    assert [p.name for p in pieces if p.is_unit] == ["embed", *(f"blocks.{i}" for i in range(BLOCKS)), "head"]
    assert [p.block for p in pieces if p.is_unit] == [-1, 0, 1, 2, 3, 4, -1]
    assert num_blocks(pieces) == BLOCKS


def test_every_event_of_the_trace_is_in_one_piece(tmp_path):
    trace = toy(tmp_path)
    covered = [e for piece in cut_blocks(trace) for ends in (*piece.body, *piece.drops) for e in range(*ends)]

    assert sorted(covered) == list(range(len(trace.event_kind)))


def test_only_what_is_older_than_a_piece_is_dropped_after_its_lanes(tmp_path):
    trace = toy(tmp_path)
    born = {a: i for i, (kind, a, _) in enumerate(trace.events()) if kind is EventKind.ALLOC}
    for piece in cut_blocks(trace):
        start = min(e for ends in (*piece.body, *piece.drops) for e in ends)
        for first, stop in piece.drops:
            for event in range(first, stop):
                assert trace.event_kind[event] == EventKind.FREE
                assert born.get(int(trace.event_arg[event]), -1) < start


def test_a_tied_head_reads_the_embedding(tmp_path):
    pieces = {p.name: p for p in cut_blocks(toy(tmp_path, "tied"))}

    assert pieces["head"].params == pieces["embed"].params


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("two lists", "several lists of blocks"),
        ("twice", "called more than once"),
        ("backwards", "not called one after the other"),
        ("between", "not called one after the other"),
        ("loose", "shift is used outside"),
    ],
)
def test_a_model_that_cannot_go_block_by_block_is_refused_with_the_reason(tmp_path, kind, word):
    with pytest.raises(CannotTell, match=word):
        cut_blocks(toy(tmp_path, kind))


def test_a_model_without_a_list_of_blocks_is_sent_to_mezo(tmp_path):
    with pytest.raises(CannotTell, match="--method mezo"):
        cut_blocks(toy(tmp_path, blocks=1))


def test_a_trace_with_a_backward_is_no_forward_schedule(tmp_path):
    with pytest.raises(CannotTell, match="without a backward"):
        cut_blocks(toy(tmp_path, mode="train"))


# -- MeZO ----------------------------------------------------------------------------------------------------------------


def test_mezo_peaks_at_all_weights_and_four_times_the_largest_in_the_update(tmp_path):
    ledger, _ = simulate(toy(tmp_path), Mezo())
    ledger.check()

    # beside the weights: the batch, and the losses of the two forwards
    assert ledger.peak_bytes() == (BLOCKS + 2) * W + 4 * W + H + 2 * 4


def test_mezo_draws_the_noise_of_every_parameter_four_times_a_step(tmp_path):
    ledger, _ = simulate(toy(tmp_path), Mezo(), loop=LoopFacts(iterations=1))

    names = ["embed.weight", "head.weight", *(f"blocks.{i}.weight" for i in range(BLOCKS))]
    assert made(ledger, "perturbation z") == names * 4


def test_mezo_leaves_nothing_but_the_weights_the_batch_and_the_losses(tmp_path):
    ledger, _ = simulate(toy(tmp_path), Mezo())

    assert ledger.live_bytes()[-1] == (BLOCKS + 2) * W + H + 2 * 4


# -- ZO2 -----------------------------------------------------------------------------------------------------------------


def test_zo2_peaks_at_what_stays_one_block_and_its_update(tmp_path):
    ledger, _ = walk(toy(tmp_path))

    # embed and head; the block and four of it; the batch, and one hidden state for each of the two forwards
    assert ledger.peak_bytes() == 2 * W + W + 4 * W + H + 2 * H + 2 * 4


def test_the_first_step_has_no_update_to_apply(tmp_path):
    trace = toy(tmp_path)
    first, _ = walk(trace, steps=1)
    both, _ = walk(trace)

    assert made(first, "weight decay") == []
    assert len(made(both, "weight decay")) == BLOCKS + 2
    # the first peaks in a block's third perturbation, beside two results; the second in its update, four instead of three, and
    # beside the losses of the step before
    assert both.peak_bytes() - first.peak_bytes() == W - 2 * H + 2 * 4


def test_a_block_is_uploaded_once_a_step_and_sent_back_once(tmp_path):
    _, work = walk(toy(tmp_path))

    assert [w.nbytes for w in work if w.kind == "h2d"] == [W] * BLOCKS * 2
    assert [w.nbytes for w in work if w.kind == "d2h"] == [W] * BLOCKS * 2


def test_the_next_block_is_uploaded_before_the_last_one_is_sent_back(tmp_path):
    _, work = walk(toy(tmp_path), steps=1)

    assert [w.kind for w in work if w.kind in ("h2d", "d2h")] == ["h2d", *["h2d", "d2h"] * (BLOCKS - 1), "d2h"]


@pytest.mark.parametrize("blocks", [2, 3, 9])
def test_two_blocks_are_on_the_gpu_at_most(tmp_path, blocks):
    ledger, _ = walk(toy(tmp_path, blocks=blocks))
    rows = ledger.rows()
    uploaded = ledger.delta_bytes[rows] * (ledger.component[rows] == Component.OFFLOAD_BUFFER)

    assert uploaded.cumsum().max() == 2 * W
    assert uploaded.sum() == 0


def test_a_block_waits_for_its_own_upload_and_its_upload_for_the_block_two_before(tmp_path):
    _, work = walk(toy(tmp_path), steps=1)
    uploads = [i for i, w in enumerate(work) if w.kind == "h2d"]
    waits = [w.after for w in work if w.kind == "wait" and w.stream != HOST]
    arithmetic = [i for i, w in enumerate(work) if w.kind == ARITHMETIC]

    assert waits == [(ticket,) for ticket in uploads]
    assert [work[i].after for i in uploads[:2]] == [(), ()]
    for block, ticket in enumerate(uploads[2:], 2):
        (behind,) = work[ticket].after
        assert behind in arithmetic
        assert uploads[block - 1] > behind > uploads[block - 2]


def test_the_host_waits_for_a_block_before_it_sends_it_back(tmp_path):
    """task_offload of zo2: `compute_stream.synchronize()`, so that nothing of the next block is issued before."""
    _, work = walk(toy(tmp_path), steps=1)

    for i, sent in enumerate(work):
        if sent.kind == "d2h":
            assert (work[i - 1].kind, work[i - 1].stream, work[i - 1].after) == ("wait", HOST, sent.after)


def test_every_pass_over_a_parameter_is_counted_with_what_it_reads_and_writes(tmp_path):
    trace = toy(tmp_path)
    _, work = walk(trace)
    later = [w for w in work if w.kind == ARITHMETIC and w.iteration == 1]

    assert sum(w.nbytes for w in later) == 37 * sum(p.nbytes for p in trace.params)


def test_the_pinned_copies_are_those_of_all_blocks(tmp_path):
    ledger, _ = walk(toy(tmp_path))

    assert ledger.live_bytes(Tier.HOST_PINNED)[-1] == BLOCKS * W
    assert ledger.live_bytes(Tier.HOST_PAGEABLE)[-1] == 0
    assert ledger.peak_bytes(Tier.HOST_PAGEABLE) == (BLOCKS + 2) * W  # the model as it is loaded


def test_without_overlap_everything_is_on_one_stream_and_pageable(tmp_path):
    ledger, work = walk(toy(tmp_path), ZoSettings(overlap=False))

    assert set(ledger.stream[ledger.rows()].tolist()) == {0}
    assert {w.stream for w in work if w.stream != HOST} == {0}
    assert ledger.peak_bytes(Tier.HOST_PINNED) == 0
    assert ledger.live_bytes(Tier.HOST_PAGEABLE)[-1] == BLOCKS * W


def test_only_the_first_blocks_live_on_the_host_when_a_number_is_given(tmp_path):
    ledger, work = walk(toy(tmp_path), ZoSettings(offloading_blocks=2))

    assert len([w for w in work if w.kind == "h2d"]) == 2 * 2
    assert ledger.live_bytes(Tier.HOST_PINNED)[-1] == 2 * W
    assert ledger.components_after(len(ledger) - 1)["param"] == (2 + 3) * W


def test_blocks_that_all_stay_need_no_host(tmp_path):
    ledger, work = walk(toy(tmp_path), ZoSettings(offloading_blocks=0))

    assert [w for w in work if w.kind in ("h2d", "d2h")] == []
    assert ledger.peak_bytes() == (BLOCKS + 2) * W + 4 * W + H + 2 * H + 2 * 4


def test_frozen_blocks_move_but_are_not_perturbed(tmp_path):
    ledger, work = walk(toy(tmp_path, "frozen"), steps=1)

    assert len([w for w in work if w.kind == "h2d"]) == BLOCKS
    assert made(ledger, "perturbation z") == ["embed.weight"] * 3 + ["head.weight"] * 3


def test_a_tied_matrix_is_perturbed_by_both_of_its_units(tmp_path):
    ledger, _ = walk(toy(tmp_path, "tied"), steps=1)

    assert made(ledger, "perturbation z").count("embed.weight") == 6


@pytest.mark.parametrize("make", [Zo2, lambda pieces: DistZo2(pieces, ZoSettings(zo_data=2))])
def test_a_tied_matrix_is_worth_a_hint(tmp_path, make):
    for kind, hints in (("tied", 1), ("plain", 0)):
        trace = toy(tmp_path, kind)
        strategy = make(cut_blocks(trace))
        simulate(trace, strategy)

        assert len(strategy.hints()) == hints
        assert all("embed and head share embed.weight" in hint for hint in strategy.hints())


def test_a_bucket_joins_the_block_on_the_gpu_before_it_is_sent_back(tmp_path):
    ledger, _ = walk(toy(tmp_path), ZoSettings(bucket=True))
    rows = ledger.rows()
    buffers = (ledger.delta_bytes[rows] * (ledger.component[rows] == Component.OFFLOAD_BUFFER)).cumsum()

    assert buffers.max() == 3 * W
    # beside the pinned buckets: a stale copy of every block, which the optimizer's param_groups keep
    assert ledger.live_bytes(Tier.HOST_PINNED)[-1] == BLOCKS * W
    assert ledger.live_bytes(Tier.HOST_PAGEABLE)[-1] == BLOCKS * W


@pytest.mark.parametrize(("kept", "share"), [(None, 2), ("bf16", 2), ("fp8", 4)])
def test_amp_keeps_and_moves_fewer_bits(tmp_path, kept, share):
    ledger, work = walk(toy(tmp_path), ZoSettings(amp=True, precision_on_offloading_device=kept))

    assert {w.nbytes for w in work if w.kind == "h2d"} == {W // share}
    assert ledger.live_bytes(Tier.HOST_PINNED)[-1] == BLOCKS * W // share
    assert made(ledger, "decompressed")[0] == "blocks.0.weight"


def test_the_casts_of_autocast_do_not_outlive_their_use(tmp_path):
    cached = toy(tmp_path, precision="bf16-autocast")
    trace = without_cast_cache(cached)
    with_cache, without = (simulate(t, SingleDevice())[0] for t in (cached, trace))
    without.check()

    frees = [sorted(t.event_arg[t.event_kind == EventKind.FREE]) for t in (cached, trace)]
    assert frees[0] == frees[1]
    assert with_cache.peak_bytes() - without.peak_bytes() >= BLOCKS * W // 2  # all casts at once, or one


def test_a_trace_without_autocast_is_left_as_it_is(tmp_path):
    trace = toy(tmp_path)

    assert without_cast_cache(trace) is trace


# -- DistZO2 -------------------------------------------------------------------------------------------------------------


def dist(trace: StepTrace, **settings: object) -> tuple[Ledger, list]:
    ledger, work = simulate(trace, DistZo2(cut_blocks(trace), ZoSettings(**settings)))
    ledger.check()
    return ledger, work


def test_a_gpu_of_a_pair_runs_one_forward_and_perturbs_twice(tmp_path):
    trace = toy(tmp_path)
    alone, both = dist(trace, zo_pert=2), walk(trace)

    assert len(made(alone[0], "perturbation z", 0)) == 2 * (BLOCKS + 2)
    assert len(made(both[0], "perturbation z", 0)) == 3 * (BLOCKS + 2)
    assert both[0].peak_bytes() - alone[0].peak_bytes() == H + 4  # one hidden state; one loss


def test_data_parallel_groups_do_what_zo2_does(tmp_path):
    trace = toy(tmp_path)
    ledger, work = dist(trace, zo_data=4)
    plain, _ = walk(trace)

    assert ledger.delta_bytes.tolist() == plain.delta_bytes.tolist()
    assert [w.nbytes for w in work if w.kind == "all_reduce"] == [4, 4]


@pytest.mark.parametrize(("pert", "data"), [(1, 2), (2, 1), (2, 2), (2, 4)])
def test_slices_divide_the_host_and_the_uploads_by_the_gpus(tmp_path, pert, data):
    ledger, work = dist(toy(tmp_path), zo_pert=pert, zo_data=data, zo_slice=True)
    gpus = pert * data

    assert {w.nbytes for w in work if w.kind in ("h2d", "d2h")} == {W // gpus}
    assert {w.nbytes for w in work if w.kind == "all_gather"} == {W}
    assert ledger.live_bytes(Tier.HOST_PINNED)[-1] == BLOCKS * W // gpus


def test_an_upload_in_slices_lands_in_its_place_of_the_whole_block(tmp_path):
    ledger, _ = dist(toy(tmp_path), zo_data=4, zo_slice=True)
    rows = ledger.rows()
    buffers = (ledger.delta_bytes[rows] * (ledger.component[rows] == Component.OFFLOAD_BUFFER)).cumsum()

    assert buffers.max() == 2 * W


def test_a_block_in_slices_waits_for_its_gather(tmp_path):
    _, work = dist(toy(tmp_path), zo_data=2, zo_slice=True)
    gathers = [i for i, w in enumerate(work) if w.kind == "all_gather"]

    assert all(work[work[i].after[0]].kind == "h2d" for i in gathers)
    assert [w.after for w in work if w.kind == "wait" and w.stream != HOST] == [(i,) for i in gathers]


# -- doors ---------------------------------------------------------------------------------------------------------------


def asked(method: str, gpu: str = "a100-80gb", **options: object) -> SimpleNamespace:
    loop = LoopFacts(**{k: options.pop(k) for k in ("grad_accum_steps", "clip_grad_norm") if k in options})
    given = {"strategy": "single", "recompute": "none", "mode": "train", "precision": "fp16", "gpus": 1, "nodes": 1, "zo": None}
    given |= {"optimizer": "adamw", "use_cache": False, "adapter": None}
    return SimpleNamespace(method=method, device=device(gpu), loop=loop, **{**given, **options})


@pytest.mark.parametrize(
    ("door", "request_", "error", "word"),
    [
        (mezo, asked("mezo", grad_accum_steps=2), UserError, "--grad-accum 2"),
        (mezo, asked("mezo", recompute="full"), UserError, "no backward"),
        (mezo, asked("mezo", clip_grad_norm=True), UserError, "no gradients"),
        (mezo, asked("mezo", strategy="zero2"), CannotTell, "--strategy zero2"),
        (mezo, asked("mezo", mode="forward"), CannotTell, "--mode inference"),
        (mezo, asked("mezo", precision="fp16-mixed"), CannotTell, "no fp32 masters"),
        (mezo, asked("mezo", zo=ZoSettings(bucket=True)), UserError, "--method zo2"),
        (zo2, asked("zo2", gpus=2), UserError, "--method distzo2"),
        (zo2, asked("zo2", zo=ZoSettings(zo_pert=2)), UserError, "--method distzo2"),
        (zo2, asked("zo2", zo=ZoSettings(amp=True)), UserError, "bf16-autocast"),
        (zo2, asked("zo2", precision="bf16-autocast"), UserError, "--zo-amp"),
        (distzo2, asked("distzo2"), UserError, "--gpus N"),
        (distzo2, asked("distzo2", gpus=4), UserError, "--zo-data 4"),
        (distzo2, asked("distzo2", gpus=3, zo=ZoSettings(zo_pert=2)), UserError, "--zo-pert 1"),
        (distzo2, asked("distzo2", "rtx-4090", gpus=2, zo=ZoSettings(zo_data=2, zo_slice=True)), UserError, "no NVLink"),
        (distzo2, asked("distzo2", gpus=16, nodes=2, zo=ZoSettings(zo_data=16, zo_slice=True)), CannotTell, "several nodes"),
        (distzo2, asked("distzo2", gpus=2, zo=ZoSettings(zo_data=2, zo_slice=True, bucket=True)), CannotTell, "--zo-bucket"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_way_out(door, request_, error, word):
    with pytest.raises(error, match=word):
        door.check(request_)


@pytest.mark.parametrize(
    ("door", "request_"),
    [
        (mezo, asked("mezo", zo=ZoSettings(use_cache=False))),
        (zo2, asked("zo2", zo=ZoSettings(amp=True), precision="bf16-autocast")),
        (distzo2, asked("distzo2", gpus=4, zo=ZoSettings(zo_pert=2, zo_data=2, zo_slice=True))),
        (distzo2, asked("distzo2", "rtx-4090", gpus=2, zo=ZoSettings(zo_pert=2))),
    ],
)
def test_what_goes_together_is_taken_and_said(door, request_):
    door.check(request_)

    assert door.said(request_)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"zo_pert": 3}, "--zo-pert 3"),
        ({"zo_data": 0}, "--zo-data 0"),
        ({"offloading_blocks": -1}, "-1"),
        ({"amp": True, "precision_on_offloading_device": "fp9"}, "Did you mean"),
        ({"precision_on_offloading_device": "fp8"}, "--zo-amp"),
    ],
)
def test_a_knob_that_cannot_be_is_refused_where_it_is_made(fields, word):
    with pytest.raises(UserError) as caught:
        ZoSettings(**fields)

    assert word in f"{caught.value}"
