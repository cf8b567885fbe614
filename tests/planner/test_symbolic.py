"""Expressions in (batch, seq): found exactly where they exist, refused where they do not."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memplan.planner.trace.family import MAX_BATCH, Domain
from memplan.planner.trace.symbolic import Expression, Fitter, evaluate_tree, fit_tree

ALIGNED = Domain(2, MAX_BATCH, 32, 4096, True).probes()
UNALIGNED = Domain(2, MAX_BATCH, 32, 4096, False).probes()
BATCH_OF_ONE = Domain(1, 1, 32, 4096, False).probes()
PROBES = st.sampled_from([ALIGNED, UNALIGNED])
COEFFICIENTS = st.integers(-(2**40), 2**40)
# lengths that are no multiple of 16, as in the domain of the probes UNALIGNED
POINTS = st.tuples(st.integers(2, 5000), st.integers(33, 4095).filter(lambda s: s % 16))


def polynomial(coefficients, batch, seq):
    terms = (1, batch, seq, batch * seq, seq * seq, batch * seq * seq)
    return sum(c * t for c, t in zip(coefficients, terms, strict=True))


def up(seq, multiple):
    return -(-seq // multiple) * multiple


@given(PROBES, st.lists(COEFFICIENTS, min_size=6, max_size=6), POINTS)
def test_every_polynomial_of_a_step_is_found_and_exact_anywhere(probes, coefficients, point):
    found = Fitter(probes).fit([polynomial(coefficients, *p) for p in probes])
    assert found is not None
    assert found(*point) == polynomial(coefficients, *point)


@given(st.lists(COEFFICIENTS, min_size=3, max_size=3), st.integers(32, 4096))
def test_with_one_sample_a_polynomial_in_the_length_is_found(coefficients, seq):
    a, b, c = coefficients
    found = Fitter(BATCH_OF_ONE).fit([a + b * s + c * s * s for _, s in BATCH_OF_ONE])
    assert found is not None
    assert found(1, seq) == a + b * seq + c * seq * seq


@settings(deadline=None)
@given(st.sampled_from([2, 4, 8, 16, 32, 64, 128]), st.lists(st.integers(1, 2**30), min_size=2, max_size=2), POINTS)
def test_a_length_that_is_rounded_up_is_exact_anywhere_or_refused(multiple, coefficients, point):
    a, b = coefficients

    def value(batch, seq):
        return a * batch * up(seq, multiple) + b * batch * seq * up(seq, multiple)

    found = Fitter(UNALIGNED).fit([value(*p) for p in UNALIGNED])
    if found is not None:
        assert found(*point) == value(*point)


def test_a_mask_padded_to_rows_of_16_is_found():
    found = Fitter(UNALIGNED).fit([4 * b * s * up(s, 16) for b, s in UNALIGNED])
    assert found is not None
    assert found.multiple == 16


def test_the_probes_of_unaligned_lengths_tell_even_from_odd():
    assert Fitter(UNALIGNED).fit([b * (s // 2) for b, s in UNALIGNED]) is None


@given(st.lists(st.integers(0, 2**40), min_size=7, max_size=7))
def test_what_is_found_reproduces_every_probe(values):
    found = Fitter(ALIGNED).fit(values)
    if found is not None:
        assert [found(*p) for p in ALIGNED] == values


@settings(max_examples=30)
@given(st.integers(0, 6), st.integers(1, 2**20), st.lists(COEFFICIENTS, min_size=6, max_size=6))
def test_a_polynomial_with_one_wrong_value_is_refused(index, error, coefficients):
    values = [polynomial(coefficients, *p) for p in ALIGNED]
    values[index] += error
    found = Fitter(ALIGNED).fit(values)
    assert found is None or [found(*p) for p in ALIGNED] == values


@pytest.mark.parametrize(
    "value",
    [
        lambda b, s: b * s**3,
        lambda b, s: b * b,
        lambda b, s: b * min(s, 1000),
        lambda b, s: s.bit_length() * 2 ** s.bit_length(),
        lambda b, s: 1 << b,
    ],
    ids=["seq cubed", "batch squared", "a window inside", "power of two", "exponential"],
)
def test_what_is_no_polynomial_of_a_step_is_refused(value):
    assert Fitter(ALIGNED).fit([value(*p) for p in ALIGNED]) is None


def test_a_constant_needs_no_term():
    found = Fitter(ALIGNED).fit([7] * len(ALIGNED))
    assert found is not None
    assert found.terms == ((Fraction(7), (0, 0, 0)),)
    assert str(Fitter(ALIGNED).fit([0] * len(ALIGNED))) == "0"


def test_a_value_that_is_no_integer_between_the_probes_raises_instead_of_rounding():
    half = Expression(((Fraction(1, 2), (0, 1, 0)),))
    assert half(1, 4) == 2
    with pytest.raises(ValueError, match="no integer"):
        half(1, 5)


@given(st.lists(COEFFICIENTS, min_size=6, max_size=6))
def test_an_expression_survives_its_own_data_form(coefficients):
    found = Fitter(ALIGNED).fit([polynomial(coefficients, *p) for p in ALIGNED])
    assert found is not None
    assert Expression.from_data(found.to_data()) == found


def test_a_tree_is_fitted_leaf_by_leaf_and_keeps_what_is_no_number():
    trees = [[["mask", b * s, 3], True, None] for b, s in ALIGNED]
    found = fit_tree(Fitter(ALIGNED), trees, lambda: pytest.fail("every leaf has an expression"))
    assert evaluate_tree(found, 6, 100) == [["mask", 600, 3], True, None]


def test_a_leaf_without_expression_is_reported():
    refused = []
    fit_tree(Fitter(ALIGNED), [[b * b] for b, _ in ALIGNED], lambda: refused.append(1))
    assert refused == [1]


def test_missing_values_leave_an_expression_that_still_has_a_check():
    values = [b * s for b, s in ALIGNED]
    assert Fitter(ALIGNED).fit([None, *values[1:]]) is None  # six terms, six values: nothing left to check with
