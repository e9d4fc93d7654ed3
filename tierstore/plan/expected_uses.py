"""The uses expected at one moment, and when each of them comes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.plan.matching import Numbers

NEAR = 1
"""Number of next uses of a stream whose missing groups are always fetched."""

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExpectedUses:
    """Expected uses, by number of the group, soonest first.

    The first `near` uses are imminent, and `sure` of them are as certain as a prefetch call. If
    there are several streams, `until` has the seconds until each use, and `streams` the stream of
    each (negative: none). If there is one, both are None: each use comes after the computing of
    those before it.
    """

    numbers: Numbers
    until: Seconds | None = None
    streams: Numbers | None = None
    near: int = NEAR
    sure: int = 0

    def of_streams_of(self, stuck: Collection[int]) -> npt.NDArray[np.bool_]:
        """Return a mask of the uses in streams that also use one of these groups."""
        if self.streams is None or not stuck:
            return np.zeros(len(self.numbers), dtype=np.bool_)
        return np.isin(self.streams, self.streams[np.isin(self.numbers, list(stuck))])


def values_of(array: npt.NDArray[Any], numbers: Numbers) -> npt.NDArray[Any]:
    """Return an array's values at these numbers; unknown numbers get the last value."""
    return array.take(numbers, None, None, "clip")
