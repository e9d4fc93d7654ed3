"""Detects that the steps of one stream of uses repeat.

A step is the set of groups that a unit leases together, by key. If the latest n steps equal the n
steps before them, in order, n is a *period*. A text encoder before each denoising, or two experts
used in phases, have a long period that contains shorter ones. The recorder reports the shortest
period that fits. A period that was left, because a different step came, is reported again only once
it has repeated for longer than before. Until then, a longer period that fits is reported instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tierstore.plan.loop_plan import Loop, Step

MOST = 4096
"""Longest period, in steps."""

StepKeys = tuple[str, ...]


class LoopRecorder:
    """Records the latest steps."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._numbers: dict[StepKeys, int] = {}
        self._keys: list[StepKeys] = []  # by number
        self._steps = np.zeros(4 * most, dtype=np.int64)
        self._count = self._gaps = 0
        self._left: dict[int, int] = {}  # by period: the steps for which it had repeated

    def note(self, keys: StepKeys) -> None:
        """Append a step that has ended."""
        number = self._numbers.get(keys)
        if number is None:
            number = self._numbers[keys] = len(self._keys)
            self._keys.append(keys)
        self._append(number)

    def note_gap(self) -> None:
        """Note that steps are missing here: no period extends across the gap."""
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
        """Return the shortest period of at least `least` steps that occurred twice; 0 if none.

        Skips a period that was left, until it repeats for longer than before.
        """
        steps = self._steps[: self._count]
        if not len(steps):
            return 0
        lengths = self._count - 1 - np.flatnonzero(steps[:-1] == steps[-1])[::-1]
        barred: list[int] = []  # a multiple of one of these is no longer period
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
        """Return the number of latest steps that each equal the step one period earlier."""
        different = np.flatnonzero(steps[length:] != steps[:-length])
        return len(steps) - length - (int(different[-1]) + 1 if len(different) else 0)

    def ends_with(self, steps: Sequence[StepKeys]) -> bool:
        """Return whether these are the latest steps."""
        numbers = [self._numbers.get(keys, -1) for keys in steps]
        latest = self._steps[max(self._count - len(numbers), 0) : self._count]
        return bool(latest.tolist() == numbers)

    def keys(self, length: int) -> list[StepKeys]:
        """Return the latest `length` steps."""
        return [self._keys[n] for n in self._steps[self._count - length : self._count].tolist()]

    def left(self, length: int, repeated: int) -> None:
        """Note that a period was left because a different step came.

        It had been followed for `repeated` steps besides those recorded here.
        """
        self._left[length] = max(self._left.get(length, 0), repeated + length)


def as_loop(
    steps: Sequence[StepKeys], sizes: Mapping[str, int], seconds: Sequence[float]
) -> tuple[Loop, list[str]]:
    """Return steps as a loop, and the key of each of its groups.

    `sizes` has the bytes of each group by key, `seconds` the computing of each step.
    """
    groups: dict[str, int] = {}
    found = []
    for keys, spent in zip(steps, seconds, strict=True):
        own = tuple(groups.setdefault(key, len(groups)) for key in keys)
        found.append(Step(_name(keys), own, spent))
    return Loop(tuple(found), tuple(sizes[key] for key in groups)), list(groups)


def _name(keys: Sequence[str]) -> str:
    return ", ".join(keys)
