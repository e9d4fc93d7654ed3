"""The uses that are foreseen at one moment, and when each of them comes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.plan.matching import Numbers

NEAR = 1
"""A group that is missing and comes within so many uses of a stream is fetched in any case."""

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Uses that are foreseen, soonest first: so many of them are `near`, and so many as `sure` as
    what the caller names. Of several streams, each is
    `until` so many seconds from now, in one of the `streams`, or in none (negative). Of one, it
    comes after the computing of those before it."""

    numbers: Numbers
    until: Seconds | None = None
    streams: Numbers | None = None
    near: int = NEAR
    sure: int = 0

    def of_streams_of(self, stuck: Collection[int]) -> npt.NDArray[np.bool_]:
        """Which uses are of the streams that use one of these groups."""
        if self.streams is None or not stuck:
            return np.zeros(len(self.numbers), dtype=np.bool_)
        return np.isin(self.streams, self.streams[np.isin(self.numbers, list(stuck))])


def values_of(array: npt.NDArray[Any], numbers: Numbers) -> npt.NDArray[Any]:
    """An array's values at these numbers. Of who never was known, they are those of nobody."""
    return array.take(numbers, None, None, "clip")
