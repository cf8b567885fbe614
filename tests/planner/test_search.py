"""The search: bounds that hold, and the result of an exhaustive one."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest
from memplan.errors import CannotTell, UserError
from memplan.planner.api import make_request
from memplan.planner.predict import predict, simulated
from memplan.planner.search.api import make_plan, plan
from memplan.planner.search.bounds import Bounds
from memplan.planner.search.search import candidate_of, judge, row_of, score_of, search
from memplan.planner.search.space import OBJECTIVES, Level, Wanted, candidates, levels
from memplan.planner.timeline.step_time import step_time
from memplan.planner.trace.source import TraceSource

MODEL, LAYERS = "openai-community/gpt2", {"n_layer": "2", "vocab_size": "1024", "n_embd": "256", "n_head": "4"}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMPLAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def source() -> TraceSource:
    return TraceSource()


def base(usable: int | None = None, gpus: int = 1, **options):
    """A question about cards that leave `usable` bytes to torch."""
    request = make_request(MODEL, "a100-80gb", overrides=LAYERS, gpus=gpus, seq_len=128, precision="fp32", **options)
    if usable is None:
        return request
    missing = usable - request.device.usable_bytes
    return replace(request, device=request.device.model_copy(update={"total_bytes": request.device.total_bytes + missing}))


def everything(gpus: int, nodes: int = 1, batch: int = 8) -> list:
    """Every configuration of every level: full training, zeroth-order, and methods that an optimizer is."""
    methods = ("full", "galore", "apollo", "lomo", "hift", "mezo", "zo2", "distzo2")
    wanted = Wanted(global_batch_size=batch * gpus, methods=methods, recomputes=("none", "full"))
    found = {}
    for level in levels(wanted):
        for request in candidates({gpus: base(gpus=gpus, nodes=nodes)}, wanted, level):
            found[request.as_data().__repr__()] = request
    return list(found.values())


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (2, 1), (8, 2)])
def test_no_bound_is_above_what_the_simulation_finds(gpus, nodes, source):
    random.seed(gpus)
    requests = everything(gpus, nodes)
    bounds, compared = Bounds(source), 0
    for request in random.sample(requests, min(30, len(requests))):
        try:
            trace = source.step(request)
            run = simulated(request, trace)
        except (CannotTell, UserError):
            continue
        assert bounds.look(request) == ""
        assert bounds.floor_bytes(request) <= run.ledger.peak_bytes(), request.as_data()
        try:
            seconds = step_time(request, trace, run.ledger, run.work).seconds
        except CannotTell:
            continue
        assert bounds.floor_s(request) <= seconds * (1 + 1e-9), request.as_data()
        compared += 1
    assert compared >= 15


def test_a_bound_without_a_trace_of_its_own_is_no_higher_than_with_it(source):
    known, fresh = Bounds(source), Bounds(source)
    requests = [r for r in everything(2) if r.method == "full" and r.precision == "bf16-mixed" and r.optimizer == "adamw"]
    first = max((r for r in requests if r.recompute == "none"), key=lambda r: r.micro_batch_size)
    assert fresh.look(first) == ""
    for request in requests:
        assert known.look(request) == ""
        assert fresh.floor_s(request) <= known.floor_s(request)
        assert fresh.floor_bytes(request) <= known.floor_bytes(request)


def test_the_bound_of_bytes_is_close_enough_to_be_of_use(source):
    request = base().but(precision="bf16-autocast", micro_batch_size=64, optimizer_impl="fused")
    bounds = Bounds(source)
    bounds.look(request)
    assert bounds.floor_bytes(request) > 0.9 * simulated(request, source.step(request)).ledger.peak_bytes()


def _exhaustive(requests, objective, source, top):
    best: dict = {}
    for request in requests:
        try:
            judged = judge(request, source)
        except (CannotTell, UserError):
            continue
        if judged.prediction.fits:
            row, score = row_of(request), score_of(objective, judged)
            best[row] = min(best.get(row, score), score)
    return sorted(best.values())[:top]


def _spaces():
    rng = random.Random(7)
    for number in range(24):
        gpus = rng.choice([1, 1, 2, 4])
        names = ["single", "release"] if gpus == 1 else ["ddp", "zero1", "zero2", "zero3", "fsdp2"]
        yield pytest.param(
            gpus,
            tuple(rng.sample(names, min(len(names), rng.choice([1, 2])))),
            rng.choice([("none",), ("none", "full")]),
            rng.choice([4, 6, 8]),
            rng.choice([0.4, 0.6, 0.8, 0.95, 1.5]),
            OBJECTIVES[number % len(OBJECTIVES)],
            rng.choice([1, 2]),
            ("full",),
            id=str(number),
        )
    for objective in OBJECTIVES:
        yield pytest.param(
            1, None, ("none", "full"), 4, 0.7, objective, 2, ("full", "galore", "lomo", "hift", "mezo"), id=objective
        )


@pytest.mark.parametrize(("gpus", "strategies", "recomputes", "batch", "share", "objective", "top", "methods"), list(_spaces()))
def test_the_result_is_that_of_an_exhaustive_search(
    gpus, strategies, recomputes, batch, share, objective, top, methods, source
):
    wanted = Wanted(
        global_batch_size=batch * gpus, methods=methods, strategies=strategies, recomputes=recomputes, offloads=((),)
    )
    level = levels(wanted)[0]
    asked = base(gpus=gpus)
    largest = max(
        predict(r.but(grad_accum_steps=min(r.loop.grad_accum_steps, 2)), source).reserved_peak_bytes
        for r in candidates({gpus: asked}, wanted, level)
        if r.micro_batch_size == batch or r.loop.grad_accum_steps == 2
    )
    requests = list(candidates({gpus: base(usable=int(largest * share), gpus=gpus)}, wanted, level))
    found = search(requests, source, objective=objective, top=top)
    assert [score for score, _ in found.ranked()[:top]] == _exhaustive(requests, objective, source, top)
    assert found.num_considered == len(requests)


@pytest.mark.parametrize(
    ("strategy", "precision", "gpus"),
    [("single", "bf16-autocast", 1), ("ddp", "fp32", 2), ("zero1", "bf16-mixed", 4), ("zero2", "bf16-mixed", 4),
     ("zero3", "bf16-mixed", 4), ("fsdp2", "bf16-mixed", 4)],
)  # fmt: skip
def test_many_micro_steps_are_answered_as_if_all_had_been_simulated(strategy, precision, gpus, source):
    asked = base(gpus=gpus).but(strategy=strategy, precision=precision, grad_accum_steps=9, micro_batch_size=2)
    short = judge(asked, source)
    trace = source.step(asked)
    run = simulated(asked, trace)
    full = predict(asked, source)
    time_ = step_time(asked, trace, run.ledger, run.work)
    assert short.prediction.allocated_peak_bytes == full.allocated_peak_bytes
    assert short.prediction.reserved_peak_bytes == full.reserved_peak_bytes
    assert short.prediction.flops_per_step == full.flops_per_step
    assert short.time is not None
    assert short.time.seconds == pytest.approx(time_.seconds, rel=2e-3)
    assert short.time.tokens_per_s == pytest.approx(time_.tokens_per_s, rel=2e-3)
    assert short.time.bound_by == time_.bound_by


def test_a_thousand_configurations_are_considered_in_a_second_of_the_processor(source):
    wanted = Wanted(
        global_batch_size=5040 * 8,
        optimizers=("adamw", "sgd", "sgd-momentum", "adagrad"),
        recomputes=("none", "full"),
    )
    start = time.process_time()
    requests = list(candidates({8: base(usable=1 << 20, gpus=8)}, wanted, levels(wanted)[0]))
    bounds = Bounds(source)
    bounds.look(next(r for r in requests if r.micro_batch_size == 8))
    found = search(requests, source, bounds=bounds)
    assert not found.best
    assert found.num_considered > 1000
    assert found.num_considered / (time.process_time() - start) > 1000


def test_full_training_is_not_given_up_while_it_fits(source):
    plan = make_plan({1: base()}, Wanted(global_batch_size=4), source)
    assert {c.method for c in plan.candidates} == {"full"}
    assert all(c.gives_up == () for c in plan.candidates)
    assert not any("giving something up" in note for note in plan.notes)


def test_where_nothing_else_fits_something_is_given_up_and_said(source):
    asked = base().but(strategy="single", precision="bf16-autocast", micro_batch_size=1)
    wanted = Wanted(global_batch_size=1, offloads=((),), strategies=("single",))
    least = predict(asked.but(recompute="full", optimizer_impl="fused"), source).allocated_peak_bytes
    plan = make_plan({1: base(usable=int(least * 0.8))}, wanted, source)
    assert plan.fits
    assert plan.candidates[0].gives_up
    assert any("nothing fits without giving something up" in note for note in plan.notes)


def test_a_method_that_the_user_fixed_is_never_left(source):
    plan = make_plan({1: base(usable=8 << 20)}, Wanted(global_batch_size=1, methods=("full",)), source)
    assert not plan.fits
    assert plan.candidates == ()
    assert {level.methods for level in levels(Wanted(global_batch_size=1, methods=("full",)))} == {("full",)}


def test_where_nothing_fits_the_closest_and_a_way_out_are_named(source):
    wanted = Wanted(global_batch_size=2, methods=("full",), optimizers=("adamw",), precisions=("fp32",), strategies=("single",))
    need = predict(base().but(recompute="full", optimizer_impl="fused"), source).allocated_peak_bytes
    plan = make_plan({1: base(usable=int(0.7 * need))}, wanted, source)
    assert plan.closest is not None
    assert plan.closest.simulated
    assert plan.closest.needs_bytes == pytest.approx(need, rel=0.3)
    assert plan.closest.needs_bytes > plan.usable_bytes
    assert any(words.startswith("Tesla T4") or "T4" in words for words in plan.would_fit), plan.would_fit


def test_each_row_says_why_a_larger_micro_batch_was_refused(source):
    wanted = Wanted(global_batch_size=8, strategies=("single",), precisions=("fp32",), recomputes=("none",), offloads=((),))
    whole = predict(base().but(micro_batch_size=8, optimizer_impl="fused"), source).reserved_peak_bytes
    plan = make_plan({1: base(usable=int(0.9 * whole))}, wanted, source)
    assert plan.best is not None
    assert plan.best.micro_batch_size < 8
    assert plan.best.why_not_more.startswith(f"micro batch {plan.best.micro_batch_size * 2} needs ")


def test_micro_batches_and_accumulation_make_the_global_batch(source):
    wanted = Wanted(global_batch_size=24)
    for gpus in (1, 2, 4):
        found = list(candidates({gpus: base(gpus=gpus)}, wanted, levels(wanted)[0]))
        assert {r.micro_batch_size * r.loop.grad_accum_steps * r.gpus for r in found} == {24}
        assert all(r.strategy != "single" for r in found) or gpus == 1


def test_every_candidate_of_the_space_passes_its_own_checks(source):
    for request in itertools.chain(everything(1), everything(8, 2)):
        request.check()


def test_a_global_batch_that_does_not_divide_is_a_mistake_with_the_nearest_that_do(source):
    with pytest.raises(UserError, match=r"--global-batch 10: does not divide over 4 GPUs. Use 8 or 12"):
        make_plan({4: base(gpus=4)}, Wanted(global_batch_size=10), source)


def test_a_micro_batch_that_does_not_divide_is_a_mistake(source):
    with pytest.raises(UserError, match=r"--micro-batch 3: 8 samples of each GPU do not divide by it. Use one of 1, 2, 4, 8"):
        make_plan({1: base()}, Wanted(global_batch_size=8, micro_batch_size=3), source)


def test_an_unknown_objective_is_a_mistake():
    with pytest.raises(UserError, match="--objective 'speed' is not known"):
        Wanted(global_batch_size=1, objective="speed").check()


def test_cost_prefers_fewer_gpus_where_communication_eats_the_gain(source):
    wanted = Wanted(global_batch_size=8, objective="cost")
    plan = make_plan({1: base(), 8: base(gpus=8)}, wanted, source, top=8)
    costs = [c.step_s * c.gpus for c in plan.candidates if c.step_s and c.verdict == "fits"]
    assert costs == sorted(costs)
    assert plan.candidates[0].gpus == 1


def test_a_deeper_level_holds_the_one_above_it():
    found = levels(Wanted(global_batch_size=1))
    assert isinstance(found[0], Level)
    for above, below in itertools.pairwise(found):
        assert set(above.methods) <= set(below.methods)
        assert set(above.optimizers) <= set(below.optimizers)
        assert below.words


def test_a_plan_can_be_asked_for_from_python(source):
    made = plan(
        base().model, "rtx-4090", global_batch_size=4, seq_len=128, strategies=("single",), offloads=((),), traces=source
    )
    assert made.best is not None
    assert made.best.strategy == "single"
    assert made.best.micro_batch_size * made.best.grad_accum_steps == 4


def test_a_default_global_batch_is_named(source):
    made = plan(base().model, "rtx-4090", seq_len=128, strategies=("single",), offloads=((),), traces=source)
    assert made.global_batch_size == 8
    assert "8 samples a step (not given)" in made.notes


def test_what_fits_only_just_comes_after_what_fits(source):
    wanted = Wanted(global_batch_size=4, strategies=("single",), precisions=("fp32",), recomputes=("none",), offloads=((),))
    whole = predict(base().but(micro_batch_size=4, optimizer_impl="fused"), source).reserved_peak_bytes
    made = make_plan({1: base(usable=int(1.005 * whole))}, wanted, source)
    assert made.best is not None
    assert (
        judge(base(usable=int(1.005 * whole)).but(micro_batch_size=4, optimizer_impl="fused"), source).prediction.verdict
        == "tight"
    )
    assert made.best.verdict == "fits"
    assert made.best.micro_batch_size < 4


def test_free_memory_in_pieces_is_answered_with_segments_that_grow(source):
    asked = base().but(micro_batch_size=64, seq_len=512, precision="fp32", recompute="full", grad_accum_steps=2)
    usable = int(1.03 * predict(asked, source).allocated_peak_bytes)
    short = replace(asked, device=base(usable=usable).device)
    plain = predict(short, source)
    assert not plain.fits
    assert plain.allocated_peak_bytes <= usable
    judged = judge(short, source)
    assert judged.prediction.fits
    assert judged.prediction.question["alloc_conf"] == "expandable_segments:True"
    found = search([short], source)
    assert candidate_of(short, found.ranked()[0][1]).alloc_conf == "expandable_segments:True"


def test_too_little_host_memory_refuses_what_is_offloaded(source):
    wanted = Wanted(global_batch_size=4, strategies=("zero2",), offloads=(("optimizer",),))
    few = base().but(host_ram_bytes=1 << 20)
    made = make_plan({1: few}, replace(wanted, methods=("full",), optimizers=("adamw",), precisions=("bf16-mixed",)), source)
    assert not made.fits
    assert made.closest is not None
    assert "host memory" in made.closest.reason
    assert any("--host-ram" in words for words in made.would_fit)


def test_rows_that_the_times_cannot_tell_apart_are_named(source):
    made = make_plan({4: base(gpus=4)}, Wanted(global_batch_size=16, strategies=("zero2", "zero1")), source)
    times = [c.step_s for c in made.candidates]
    assert len(times) >= 2
    assert None not in times
    alike = any("as fast as row 1" in note for note in made.notes)
    assert alike == any(abs(time / times[0] - 1) < 0.15 for time in times[1:])


@pytest.mark.slow
def test_where_the_host_is_too_small_nvme_is_named_and_where_the_gpus_are_too_few_the_fewest_by_either_engine(source):
    choices = {"methods": ("full",), "precisions": ("bf16-mixed",), "optimizers": ("adamw",), "recomputes": ("full",)}
    alone = plan("meta-llama/Llama-3.1-8B", "rtx-4090", global_batch_size=8, seq_len=2048, host_ram_bytes=64 << 30,
                 traces=source, **choices)  # fmt: skip
    assert not alone.fits
    assert any("on NVMe in each machine (--nvme; zero3, offload optimizer:nvme" in way for way in alone.would_fit)
    two = plan("meta-llama/Llama-3.1-8B", "rtx-4090", gpus=2, global_batch_size=64, seq_len=4096, offloads=((),),
               traces=source, **choices)  # fmt: skip
    assert not two.fits
    assert two.would_fit[0].startswith("16 GPUs of this kind (zero3, ")  # FSDP2 keeps whole gradients between micro steps: 64
