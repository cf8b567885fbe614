"""The traced rules of torch.optim against the real optimizers on the CPU, and against closed forms from their source."""

from __future__ import annotations

import json
from pathlib import Path

import memplan
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memplan.errors import CannotTell, UserError
from memplan.planner import cache
from memplan.planner.optimizers.rule import OptimizerTensor, StepEvent, StepEvents, StepKind
from memplan.planner.optimizers.traced import _FUSED, _OPTIMIZERS, impl_in, make_optimizer, names, traced_rule

SHARED = Path(memplan.__file__).resolve().parent.parent / "shared"
ITEM = {"float32": 4, "bfloat16": 2}
AWKWARD = [(3, 5), (7,), (), (1, 1, 129), (64, 32), (1,)]
PLAIN = [(32, 16), (8, 8), (100,)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


def tensors(shapes, dtype="float32") -> list[OptimizerTensor]:
    return [OptimizerTensor(tuple(shape), dtype) for shape in shapes]


def combinations() -> list[tuple[str, str]]:
    return [(n, i) for n in names() for i in ("foreach", "for-loop", *(["fused"] if n in _FUSED else []))]


def real_state_bytes(name: str, impl: str, shapes, dtype: str, *, count_host_scalars: bool) -> int:
    """Bytes of optimizer.state after two steps of the real optimizer."""
    class_name, arguments, _ = _OPTIMIZERS[name]
    params = [torch.nn.Parameter(torch.randn(shape).to(getattr(torch, dtype))) for shape in shapes]
    how = {"fused": True} if impl == "fused" else {"foreach": impl == "foreach"}
    optimizer = getattr(torch.optim, class_name)(params, **arguments, **how)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn(param.shape).to(param.dtype)
        optimizer.step()
    values = [
        v
        for state in optimizer.state.values()
        for k, v in state.items()
        if torch.is_tensor(v) and (k != "step" or count_host_scalars)
    ]
    return sum(storage.nbytes() for storage in {v.untyped_storage()._cdata: v.untyped_storage() for v in values}.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "impl"), combinations())
def test_state_bytes_are_those_of_the_real_optimizer(name, impl, dtype):
    rule = traced_rule(name, impl, target="cpu")
    expected = real_state_bytes(name, impl, AWKWARD, dtype, count_host_scalars=True)
    assert rule.step(tensors(AWKWARD, dtype)).state_bytes == expected


@pytest.mark.parametrize(("name", "impl"), [c for c in combinations() if c[1] != "fused"])
def test_on_cuda_only_the_step_counters_stay_on_the_host(name, impl):
    shapes = [s for s in AWKWARD if s]  # a 0-d parameter's states look like counters to nobody but us
    found = traced_rule(name, impl).step(tensors(shapes)).state_bytes
    counters = real_state_bytes(name, impl, shapes, "float32", count_host_scalars=True) - found
    assert counters <= 2 * 8 * len(shapes)
    assert found == traced_rule(name, impl, target="cpu").step(tensors(shapes)).state_bytes - counters


def test_the_moments_of_a_0d_parameter_are_on_the_gpu():
    # exp_avg and exp_avg_sq of 4 bytes; the step counter is on the host
    assert traced_rule("adamw", "foreach").step(tensors([()])).state_bytes == 2 * 4


def test_fused_keeps_its_step_counters_on_the_gpu():
    fused = traced_rule("adamw", "fused").step(tensors(PLAIN)).state_bytes
    assert fused == traced_rule("adamw", "foreach").step(tensors(PLAIN)).state_bytes + 4 * len(PLAIN)


# -- closed forms, from torch/optim/*.py -----------------------------------------------------------------------------------


def peak(name, impl, shapes, dtype="float32", part="later") -> int:
    return StepEvents.transient_bytes(getattr(traced_rule(name, impl).step(tensors(shapes, dtype)), part))


def nbytes(shapes, dtype="float32") -> list[int]:
    return [t.nbytes for t in tensors(shapes, dtype)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["adamw", "adam", "nadam", "radam", "adamax", "rmsprop", "adadelta", "adagrad"])
def test_foreach_makes_whole_lists(name, dtype):
    lists = {"adadelta": 2, "adagrad": 2}.get(name, 1)
    assert peak(name, "foreach", PLAIN, dtype) == pytest.approx(lists * sum(nbytes(PLAIN, dtype)), abs=64 * len(PLAIN))


@pytest.mark.parametrize("shapes", [PLAIN, PLAIN[::-1], [(50,), (60,), (10,), (40,)]])
@pytest.mark.parametrize(("name", "previous", "own"), [("adamw", 1, 2), ("adam", 1, 2), ("rmsprop", 1, 1), ("adagrad", 1, 1)])
def test_the_loop_holds_the_last_tensors_temporary_while_it_makes_its_own(name, previous, own, shapes):
    sizes = nbytes(shapes)
    expected = max(previous * p + own * n for p, n in zip([0, *sizes], sizes, strict=False))
    assert peak(name, "for-loop", shapes) == pytest.approx(expected, abs=64)


@pytest.mark.parametrize("shapes", [PLAIN, PLAIN[::-1], [(50,), (60,), (10,), (40,)]])
def test_the_loop_of_adadelta_holds_two_temporaries_of_the_last_tensor(shapes):
    # _single_tensor_adadelta binds `std`, then `delta`; both names still hold the last tensor's when the next `std` is made
    sizes = nbytes(shapes)
    expected = max(max(2 * p + n, p + 2 * n) for p, n in zip([0, *sizes], sizes, strict=False))
    assert peak("adadelta", "for-loop", shapes) == expected


@pytest.mark.parametrize("name", sorted(_FUSED))
def test_fused_makes_nothing_in_later_steps(name):
    assert peak(name, "fused", PLAIN) == 0


def test_plain_sgd_makes_nothing_and_keeps_nothing():
    events = traced_rule("sgd", "foreach").step(tensors(PLAIN))
    assert (events.state_bytes, StepEvents.transient_bytes(events.later)) == (0, 0)


def test_asgd_keeps_three_scalars_beside_each_average_on_the_gpu():
    events = traced_rule("asgd", "foreach").step(tensors(PLAIN))
    assert events.state_bytes == sum(nbytes(PLAIN)) + len(PLAIN) * 3 * 4  # step, eta and mu, made on the parameter's device


@pytest.mark.parametrize(
    ("name", "per_parameter"),
    [
        ("adamw", 2),
        ("adamw-amsgrad", 3),
        ("sgd-momentum", 1),
        ("rmsprop", 1),
        ("adagrad", 1),
        ("adadelta", 2),
        ("adamax", 2),
        ("rprop", 2),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_as_large_as_their_parameters(name, per_parameter, dtype):
    assert traced_rule(name).step(tensors(PLAIN, dtype)).state_bytes == per_parameter * sum(nbytes(PLAIN, dtype))


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix_and_all_of_a_vector():
    assert traced_rule("adafactor").step(tensors([(30, 20), (7,)])).state_bytes == 4 * (30 + 20) + 4 * 7


def test_two_dtypes_in_one_group_overlap_and_two_groups_do_not():
    mixed = [OptimizerTensor((1000,), "float32"), OptimizerTensor((1000,), "bfloat16")]
    apart = [mixed[0], OptimizerTensor((1000,), "bfloat16", group=1)]
    rule = traced_rule("adamw", "foreach")
    assert StepEvents.transient_bytes(rule.step(mixed).later) == 4000 + 2000
    assert StepEvents.transient_bytes(rule.step(apart).later) == 4000


# -- the form of a rule ----------------------------------------------------------------------------------------------------


def check_form(events: tuple[StepEvent, ...]) -> None:
    made: dict[int, StepKind] = {}
    for event in events:
        if event.kind is StepKind.FREE:
            assert made.pop(event.slot) is StepKind.TEMP
        else:
            assert event.slot not in made
            made[event.slot] = event.kind


@pytest.mark.parametrize(("name", "impl"), combinations())
def test_every_temporary_is_made_once_and_freed_at_most_once_and_later_steps_make_no_state(name, impl):
    events = traced_rule(name, impl).step(tensors(AWKWARD))
    for part in (events.init, events.first, events.later):
        check_form(part)
    assert not any(e.kind is StepKind.STATE for e in events.later)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=6))
def test_adamw_of_any_list_keeps_two_of_each_and_copies_one(shapes):
    events = traced_rule("adamw", "foreach").step(tensors(shapes))
    assert events.state_bytes == 2 * sum(nbytes(shapes))
    sized = [s for s in shapes if s]
    assert StepEvents.transient_bytes(events.later) >= sum(nbytes(sized))


@pytest.mark.parametrize("name", names())
def test_an_empty_list_needs_nothing(name):
    events = traced_rule(name).step([])
    assert (events.init, events.first, events.later) == ((), (), ())


@pytest.mark.parametrize("name", names())
def test_the_default_on_cuda_is_what_torch_picks_there(name):
    # torch/optim/optimizer.py, _default_to_fused_or_foreach; torch/optim/_adafactor.py picks the loop
    assert traced_rule(name).impl == ("for-loop" if name == "adafactor" else "foreach")
    assert traced_rule(name, target="cpu").impl == "for-loop"


def test_a_rule_is_read_back_from_disk_as_it_was_made():
    from memplan.planner.optimizers import traced

    rule = traced_rule("adamw", "foreach")
    first = rule.step(tensors([(11, 3)]))
    traced._events.cache_clear()
    (entry,) = [p for p in cache.folder().iterdir() if p.name.startswith("optimizer")]
    assert rule.step(tensors([(11, 3)])) == first
    for content in (b"", b"junk", entry.read_bytes()[:20], entry.read_bytes()[::-1]):
        entry.write_bytes(content)
        traced._events.cache_clear()
        assert rule.step(tensors([(11, 3)])) == first


@pytest.mark.parametrize(
    ("name", "impl", "message"),
    [("adamww", "default", "not known"), ("adamw", "quick", "not known"), ("adafactor", "fused", "no fused adafactor")],
)
def test_a_wrong_name_is_one_sentence(name, impl, message):
    with pytest.raises(UserError, match=message):
        traced_rule(name, impl)


@pytest.mark.skipif(not (SHARED / "facts" / "optim.json").exists(), reason="the facts are not beside the repository")
def test_names_are_spelt_as_in_the_facts():
    text = json.dumps(json.loads((SHARED / "facts" / "optim.json").read_text())).lower()
    assert all(name.split("-")[0] in text for name in names())


# -- torch's versions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "impl", "version", "expected"),
    [
        ("adamw", "default", None, "default"),
        ("adamw", "default", (2, 1), "default"),
        ("adamw", "foreach", (2, 0), "foreach-2.0"),
        ("adam", "default", (2, 0), "foreach-2.0"),
        ("adam", "default", (1, 13), "for-loop"),  # foreach is a default since 2.0
        ("adam", "foreach", (1, 13), "foreach-2.0"),
        ("adamw", "fused", (2, 0), "fused"),
        ("adagrad", "for-loop", (2, 0), "for-loop"),
        ("adafactor", "default", (2, 0), "for-loop"),
        ("sgd", "default", (2, 0), "foreach"),
    ],
)
def test_an_older_torch_runs_the_implementation_that_it_had(name, impl, version, expected):
    assert impl_in(name, impl, version) == expected


def test_a_foreach_step_whose_lists_are_not_known_is_not_guessed():
    with pytest.raises(CannotTell, match=r"the foreach step of adagrad in torch 2\.0 is not modelled"):
        impl_in("adagrad", "default", (2, 0))


def lists_of_adam_2_0(shapes) -> int:
    """What Adam's foreach step held at its highest, in bytes: square roots, scaled in place, and denominators made of them."""
    roots = denominators = sum(4 * torch.Size(shape).numel() for shape in shapes)
    return roots + denominators


@pytest.mark.parametrize("name", ["adam", "adamw", "adamw-amsgrad"])
def test_before_2_1_the_adams_held_two_lists_at_once(name):
    then, now = (traced_rule(name, impl).step(tensors(PLAIN)) for impl in ("foreach-2.0", "foreach"))

    for events in (then.first, then.later):
        assert StepEvents.transient_bytes(events) == lists_of_adam_2_0(PLAIN)
    assert StepEvents.transient_bytes(now.later) == lists_of_adam_2_0(PLAIN) // 2
    assert then.state_bytes == now.state_bytes


def test_the_two_lists_of_one_group_are_gone_before_the_next_group_is_stepped():
    groups = [OptimizerTensor((10,), "float32"), OptimizerTensor((30,), "float32", group=1)]

    assert StepEvents.transient_bytes(traced_rule("adamw", "foreach-2.0").step(groups).later) == 2 * 30 * 4


def test_an_implementation_of_the_past_is_predicted_only():
    with pytest.raises(UserError, match="no installed torch runs it"):
        make_optimizer("adamw", "foreach-2.0", [torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(UserError, match=r"foreach-2\.0: not known of sgd"):
        traced_rule("sgd", "foreach-2.0")
