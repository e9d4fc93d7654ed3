"""Sees that a row of steps repeats: the latest steps of one stream of uses.

A step is what a unit borrows at once: the keys of its groups. Where the latest steps are those that
came before them, in the same order, that many steps are a *period*. A text encoder before each
denoising, or two experts in phases, have a long period with shorter ones in it. The shortest that
fits is told first; one that was left because another step came is told again only when it has
repeated for longer than it did then, so that the longer period, which fits by now, is told instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tierstore.plan.loop_plan import Loop, Step

MOST = 4096
"""Steps that a period may have."""

StepKeys = tuple[str, ...]


class LoopRecorder:
    """The latest steps."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._numbers: dict[StepKeys, int] = {}
        self._keys: list[StepKeys] = []  # by number
        self._steps = np.zeros(4 * most, dtype=np.int64)
        self._count = self._gaps = 0
        self._left: dict[int, int] = {}  # by the steps of a period: for how long it had repeated

    def note(self, keys: StepKeys) -> None:
        """A step has ended."""
        number = self._numbers.get(keys)
        if number is None:
            number = self._numbers[keys] = len(self._keys)
            self._keys.append(keys)
        self._append(number)

    def interrupted(self) -> None:
        """Note that steps are missing here: no period reaches from before to after."""
        self._gaps += 1
        self._append(-self._gaps)

    def _append(self, number: int) -> None:
        if self._count == len(self._steps):
            kept = 2 * self._most
            self._steps[:kept] = self._steps[-kept:].copy()
            self._count = kept
        self._steps[self._count] = number
        self._count += 1

    def period(self, least: int = 1) -> int:
        """Steps of the shortest period, of at least so many, that the latest steps have gone
        through twice; 0 if none."""
        steps = self._steps[: self._count]
        if not len(steps):
            return 0
        lengths = self._count - 1 - np.flatnonzero(steps[:-1] == steps[-1])[::-1]
        barred: list[int] = []  # several passes of these are no longer period
        for length in lengths.tolist():
            if 2 * length > self._count or length > self._most:
                return 0
            if length < least:
                continue
            repeated = self._repeated(steps, length)
            if repeated < length or any(length % shorter == 0 for shorter in barred):
                continue
            if repeated <= self._left.get(length, 0):
                barred.append(length)
            else:
                return int(length)
        return 0

    @staticmethod
    def _repeated(steps: npt.NDArray[np.int64], length: int) -> int:
        """For how many of the latest steps the one a period before was the same."""
        different = np.flatnonzero(steps[length:] != steps[:-length])
        return len(steps) - length - (int(different[-1]) + 1 if len(different) else 0)

    def ends_with(self, steps: Sequence[StepKeys]) -> bool:
        """Return whether these are the latest steps."""
        numbers = [self._numbers.get(keys, -1) for keys in steps]
        latest = self._steps[max(self._count - len(numbers), 0) : self._count]
        return bool(latest.tolist() == numbers)

    def keys(self, length: int) -> list[StepKeys]:
        """The latest steps of a period."""
        return [self._keys[n] for n in self._steps[self._count - length : self._count].tolist()]

    def left(self, length: int, repeated: int) -> None:
        """Another step came than a period of this `length` has, which had been followed for so many
        steps (beside those that were noted)."""
        self._left[length] = max(self._left.get(length, 0), repeated + length)


def as_loop(
    steps: Sequence[StepKeys], sizes: Mapping[str, int], seconds: Sequence[float]
) -> tuple[Loop, list[str]]:
    """Return steps as a loop, and the key of each of its groups.

    `sizes` tells the bytes of a group by its key. Each step computes for so many `seconds`.
    """
    groups: dict[str, int] = {}
    found = []
    for keys, spent in zip(steps, seconds, strict=True):
        own = tuple(groups.setdefault(key, len(groups)) for key in keys)
        found.append(Step(_name(keys), own, spent))
    return Loop(tuple(found), tuple(sizes[key] for key in groups)), list(groups)


def _name(keys: Sequence[str]) -> str:
    return ", ".join(keys)
