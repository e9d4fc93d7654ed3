"""Where in a history of uses the newest ones came before: the longest suffix match."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_SHALLOW = 16
_ODD = np.uint64(0x9E3779B97F4A7C15)

Numbers = npt.NDArray[np.int64]

NOWHERE = -1
"""No place."""


def best_matches(history: Numbers) -> tuple[int, int]:
    """Where the newest uses came before, the longest run of them; and a place that fits as well.

    Several runs may be as long. The newest is taken, and the one before it is its rival; but where
    a loop was gone through again and again, the pass in it that has as many before it as there are
    now: so the end of the loop is expected when it is as long as it was then, and not after every
    pass. The newest key has to have come before.
    """
    ends, length = _longest_matches(history, np.flatnonzero(history[:-1] == history[-1]))
    gaps = np.diff(ends)[::-1]
    if not len(gaps):
        return int(ends[-1]), NOWHERE
    if gaps[0] > length:
        return int(ends[-1]), int(ends[-2])
    passes = int(np.append(gaps != gaps[0], True).argmax())
    return int(ends[-1 - passes]), NOWHERE


def _longest_matches(history: Numbers, ends: Numbers) -> tuple[Numbers, int]:
    """Of the places where the newest key came before, those with the longest run of equal keys
    up to there, and how long it is (or at least: if there is but one)."""
    now = len(history) - 1
    for depth in range(1, _SHALLOW):
        if len(ends) == 1:
            return ends, depth
        longer = ends[ends >= depth]
        longer = longer[history[longer - depth] == history[now - depth]]
        if not len(longer):
            return ends, depth
        ends = longer
    return _longest_of_many(history, ends)


def _longest_of_many(history: Numbers, ends: Numbers) -> tuple[Numbers, int]:
    """`_longest_matches` where they are long: by halving, with sums that tell runs apart.

    (Karp and Rabin, 1987.) Step by step, a long loop of few keys would take many milliseconds.
    """
    length, now = len(history), len(history) - 1
    powers = np.full(length, _ODD)
    powers[0] = 1
    powers = np.cumprod(powers)  # all of it modulo 2**64
    sums = np.zeros(length + 1, dtype=np.uint64)
    np.cumsum(history.astype(np.uint64) * powers, out=sums[1:])
    equal, more = _SHALLOW, length + 1  # the longest is at least, and less than
    while more - equal > 1 and len(ends) > 1:
        tried = (equal + more) // 2
        longer = ends[ends >= tried - 1]
        there, here = (sums[end + 1] - sums[end + 1 - tried] for end in (longer, np.array([now])))
        longer = longer[there * powers[now - longer] == here]
        if len(longer):
            ends, equal = longer, tried
        else:
            more = tried
    return ends, equal
