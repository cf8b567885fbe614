"""Two sequences set side by side, as a text comparison sets lines: which items are the same ones.

E. Myers, An O(ND) Difference Algorithm and Its Variations, 1986, figure 2: quick where few items differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

_MAX_EDITS = 2000


def aligned(ours: Sequence[Hashable], theirs: Sequence[Hashable], max_edits: int = _MAX_EDITS) -> list[tuple[int, int]]:
    """Pairs (i, j) of equal items, rising in both, as many as can be had.

    After `max_edits` items that only one side has, what follows is left unpaired: it is another program.
    """
    # farthest[d][p]: the farthest i on diagonal i - j = 2 p - d that d edits reach
    farthest: list[array[int]] = []
    for edits in range(min(len(ours) + len(theirs), max_edits) + 1):
        row = array("q", bytes(8 * (edits + 1)))
        for place in range(edits + 1):
            i = _enter(farthest, edits, place)
            j = i - 2 * place + edits
            while i < len(ours) and j < len(theirs) and ours[i] == theirs[j]:
                i, j = i + 1, j + 1
            row[place] = i
            if i >= len(ours) and j >= len(theirs):
                return _path([*farthest, row], place)
        farthest.append(row)
    edits = len(farthest) - 1
    inside = [p for p, i in enumerate(farthest[-1]) if i <= len(ours) and i - 2 * p + edits <= len(theirs)]
    return _path(farthest, max(inside, key=lambda p: 2 * (farthest[-1][p] - p)))


def _by_theirs(farthest: Sequence[array[int]], edits: int, place: int) -> bool:
    """Whether the best path to this diagonal ends in an item of theirs: `place` was the same then, else it was one less."""
    before = farthest[edits - 1]
    return place == 0 or (place != edits and before[place - 1] < before[place])


def _enter(farthest: Sequence[array[int]], edits: int, place: int) -> int:
    """The i at which a path with `edits` edits comes to its diagonal."""
    if not edits:
        return 0
    before = farthest[edits - 1]
    return before[place] if _by_theirs(farthest, edits, place) else before[place - 1] + 1


def _path(farthest: Sequence[array[int]], place: int) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for edits in range(len(farthest) - 1, -1, -1):
        entered = _enter(farthest, edits, place)
        pairs += [(i, i - 2 * place + edits) for i in range(farthest[edits][place] - 1, entered - 1, -1)]
        if edits and not _by_theirs(farthest, edits, place):
            place -= 1
    return pairs[::-1]
