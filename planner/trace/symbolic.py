"""Integer expressions in (batch, seq), found from their values at a few probes.

Shapes, storage sizes and FLOPs of a step are sums of products of the batch size and the sequence length, and sometimes of the
length rounded up (padded masks).  An expression is a list of coefficients over such terms.  It is solved exactly, in
rationals, from as many probes as there are terms, and must then reproduce every other probe; the probes lie at both ends of
the domain, so agreement there is evidence for all that is between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

#: A probe: (batch, seq).
Point = tuple[int, int]

# Terms as powers: (batch, seq, rounded seq).
_Term = tuple[int, int, int]
_POLYNOMIAL: tuple[_Term, ...] = ((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 2, 0), (1, 2, 0))
_ROUNDED: tuple[_Term, ...] = ((0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1))
_MULTIPLES = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Expression:
    """sum(coefficient * batch^i * seq^j * up(seq)^k), where up rounds to `multiple`; always an integer in its domain."""

    terms: tuple[tuple[Fraction, _Term], ...]
    multiple: int = 1

    def __call__(self, batch: int, seq: int) -> int:
        rounded = -(-seq // self.multiple) * self.multiple
        total = Fraction(0)
        for coefficient, (i, j, k) in self.terms:
            total += coefficient * (batch**i * seq**j * rounded**k)
        if total.denominator != 1:
            raise ValueError(f"{self} is no integer at batch={batch}, seq={seq}")
        return int(total)

    def __str__(self) -> str:
        names = ("batch", "seq", f"up(seq, {self.multiple})")
        parts = []
        for coefficient, powers in self.terms:
            factors = [f"{n}^{p}" if p > 1 else n for n, p in zip(names, powers, strict=True) if p]
            parts.append("*".join([str(coefficient), *factors]))
        return " + ".join(parts) or "0"

    def to_data(self) -> list[Any]:
        return [self.multiple, [[c.numerator, c.denominator, *powers] for c, powers in self.terms]]

    @classmethod
    def from_data(cls, data: Sequence[Any]) -> Expression:
        multiple, terms = data
        return cls(tuple((Fraction(n, d), (i, j, k)) for n, d, i, j, k in terms), multiple)


class Fitter:
    """Finds expressions for value vectors over fixed probes; solved systems are kept."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.points = tuple(points)
        self._batch_varies = len({b for b, _ in points}) > 1
        self._seq_varies = len({s for _, s in points}) > 1
        self._solvers: dict[tuple[int, tuple[int, ...]], _Solver | None] = {}
        self._known: dict[tuple[int | None, ...], Expression | None] = {}

    def fit(self, values: Sequence[int | None]) -> Expression | None:
        """The expression with these values at the probes; None entries do not matter.  None when there is none."""
        key = tuple(values)
        if key not in self._known:
            self._known[key] = self._fit(key)
        return self._known[key]

    def _fit(self, values: tuple[int | None, ...]) -> Expression | None:
        used = tuple(i for i, v in enumerate(values) if v is not None)
        given = [v for v in values if v is not None]
        if all(v == given[0] for v in given):
            return Expression(((Fraction(given[0]), (0, 0, 0)),) if given[0] else ())
        for multiple in (1, *_MULTIPLES):
            solver = self._solver(multiple, used)
            found = solver.solve(given) if solver else None
            if found is not None:
                return found
        return None

    def _solver(self, multiple: int, used: tuple[int, ...]) -> _Solver | None:
        key = (multiple, used)
        if key not in self._solvers:
            terms = [t for t in (_POLYNOMIAL if multiple == 1 else _ROUNDED) if self._varies(t)]
            points = [self.points[i] for i in used]
            self._solvers[key] = _Solver.make(terms, points, multiple)
        return self._solvers[key]

    def _varies(self, term: _Term) -> bool:
        """Terms in a symbol that the probes hold fixed cannot be told from a constant."""
        i, j, k = term
        return (self._batch_varies or not i) and (self._seq_varies or not (j or k))


@dataclass(frozen=True)
class _Solver:
    """The inverse of the term matrix at the probes that were chosen to determine the coefficients."""

    terms: list[_Term]
    points: list[Point]
    multiple: int
    chosen: list[int]
    inverse: list[list[Fraction]]

    @classmethod
    def make(cls, terms: list[_Term], points: list[Point], multiple: int) -> _Solver | None:
        """None where the probes do not determine all terms with at least one probe left to check with."""
        if len(points) <= len(terms):
            return None
        rows = [[Fraction(_value(t, p, multiple)) for t in terms] for p in points]
        chosen = _independent(rows)
        if len(chosen) < len(terms):
            return None
        return cls(terms, points, multiple, chosen, _inverse([rows[i] for i in chosen]))

    def solve(self, values: list[int]) -> Expression | None:
        picked = [values[i] for i in self.chosen]
        coefficients = [sum((a * v for a, v in zip(row, picked, strict=True)), Fraction(0)) for row in self.inverse]
        expression = Expression(tuple((c, t) for c, t in zip(coefficients, self.terms, strict=True) if c), self.multiple)
        try:
            holds = all(expression(*p) == v for p, v in zip(self.points, values, strict=True))
        except ValueError:
            return None
        return expression if holds else None


def _value(term: _Term, point: Point, multiple: int) -> int:
    (i, j, k), (batch, seq) = term, point
    return int(batch**i * seq**j * (-(-seq // multiple) * multiple) ** k)


def _independent(rows: list[list[Fraction]]) -> list[int]:
    """Indices of the first rows that are linearly independent."""
    basis: list[list[Fraction]] = []
    chosen = []
    for index, row in enumerate(rows):
        rest = list(row)
        for vector in basis:
            pivot = next(i for i, x in enumerate(vector) if x)
            if rest[pivot]:
                factor = rest[pivot] / vector[pivot]
                rest = [a - factor * b for a, b in zip(rest, vector, strict=True)]
        if any(rest):
            basis.append(rest)
            chosen.append(index)
        if len(chosen) == len(row):
            break
    return chosen


def _inverse(matrix: list[list[Fraction]]) -> list[list[Fraction]]:
    """Gauss-Jordan, exact."""
    n = len(matrix)
    rows = [list(row) + [Fraction(int(i == j)) for j in range(n)] for i, row in enumerate(matrix)]
    for column in range(n):
        pivot = next(i for i in range(column, n) if rows[i][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = rows[column][column]
        rows[column] = [x / scale for x in rows[column]]
        for i in range(n):
            if i != column and rows[i][column]:
                factor = rows[i][column]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[column], strict=True)]
    return [row[n:] for row in rows]


def fit_tree(fitter: Fitter, values: Sequence[Any], strict: Callable[[], None]) -> Any:
    """A nested list of ints (same shape at every probe) with each leaf replaced by its expression where it varies.

    Leaves that are not ints are taken from the first probe.  `strict` is called where an int leaf has no expression.
    """
    first = values[0]
    if isinstance(first, list):
        return [fit_tree(fitter, [v[i] for v in values], strict) for i in range(len(first))]
    if isinstance(first, bool) or not isinstance(first, int) or all(v == first for v in values):
        return first
    found = fitter.fit(values)
    if found is None:
        strict()
        return first
    return found


def evaluate_tree(tree: Any, batch: int, seq: int) -> Any:
    if isinstance(tree, list):
        return [evaluate_tree(t, batch, seq) for t in tree]
    return tree(batch, seq) if isinstance(tree, Expression) else tree
