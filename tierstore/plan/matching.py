"""Finds the longest earlier match of a history's newest uses (longest suffix match)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_SHALLOW = 16
_ODD = np.uint64(0x9E3779B97F4A7C15)

Numbers = npt.NDArray[np.int64]

NOWHERE = -1
"""The place that is returned if nothing matches."""


def best_matches(history: Numbers) -> tuple[int, int]:
    """Return the place of the longest earlier match of the newest uses, and a rival place.

    If several matches are equally long, the newest is returned, and the one before it is the rival.
    A repeated loop is an exception: it matches, without a rival, at the pass that had as many
    passes before it as the current one. So the end of the loop is expected after as many passes as
    last time, not after every pass. The newest key must have occurred before.
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
    """Return the places in `ends` with the longest match up to there, and its length.

    `ends` are the earlier places of the newest key. If only one is left, the length is a lower
    bound.
    """
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
    """Implement `_longest_matches` for long matches, by bisecting over hashes of runs.

    The rolling hashes are those of Karp and Rabin, 1987. Extending matches one use at a time would
    take many milliseconds for a long loop of few keys.
    """
    length, now = len(history), len(history) - 1
    powers = np.full(length, _ODD)
    powers[0] = 1
    powers = np.cumprod(powers)  # all of it modulo 2**64
    sums = np.zeros(length + 1, dtype=np.uint64)
    np.cumsum(history.astype(np.uint64) * powers, out=sums[1:])
    equal, more = _SHALLOW, length + 1  # bounds of the longest: at least, and less than
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
