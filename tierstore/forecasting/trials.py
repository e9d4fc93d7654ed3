"""Trials of budgets, and advice: the smallest budget that is enough.

In a loop over all weights, those that do not fit are read again in each step, so the bytes read
fall linearly with the budget. A budget is *enough* if a step takes at most SLOWER times as long as
with all weights in RAM. If the time of a step or the speed of the disk is unknown, a budget is
enough if a step reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.forecasting.budgets import Budget
from tierstore.forecasting.forecast import Conditions, Partition, bytes_for_all, forecast, partition
from tierstore.forecasting.sources import Model, looping_models
from tierstore.model.formatting import Units, at_least, size
from tierstore.model.sizes import PAGE, available_memory, is_auto

Forecast = dict[str, Any]

COMFORTABLE = 3
"""Number of largest groups that should fit: one in use, one arriving, and the next."""

SLOWER = 1.05

MOST = 8
"""Number of budgets to try by default, besides `auto`."""

_STEPS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
_ROUND = [int(step * 1000**power) for power in range(1, 5) for step in _STEPS]
"""Bytes in usual sizes of memory: 8GB, 12GB, 16GB, 24GB..."""


@dataclass(frozen=True)
class Trial:
    """A simulated budget, with a forecast of the steps of each looping model.

    If it is too small, there are no `steps`; `problem` and `remedy` say why and what to do.
    """

    budget: Budget
    partition: Partition
    steps: tuple[Forecast, ...] = ()
    problem: str | None = None
    remedy: str = ""

    @property
    def overlaps(self) -> bool:
        """True if the groups in use, arriving, and next fit at the same time."""
        return self.budget.nbytes >= COMFORTABLE * self.partition.largest.nbytes


@dataclass(frozen=True)
class Advice:
    """The budget to use, whether it is one `of_tried`, and the advice as a `text`."""

    budget: Budget
    of_tried: bool
    text: str


def ladder(models: Sequence[Model], conditions: Conditions) -> list[Budget]:
    """Return the default budgets: round sizes up to all weights, and `auto`.

    Where possible, the smallest holds `COMFORTABLE` of the largest group.
    """
    least = COMFORTABLE * partition(models, PAGE, conditions).largest.nbytes
    most = bytes_for_all(models, conditions)
    usable = [nbytes for nbytes in _ROUND if nbytes >= max(least, PAGE)] or [least]
    count = next((n for n, nbytes in enumerate(usable) if nbytes >= most), len(usable) - 1)
    tried = usable[: count + 1]
    if len(tried) > MOST:
        tried = [tried[0], *tried[1 - MOST :]]
    return [*map(Budget.at_least, tried), Budget.parse("auto")]


@dataclass
class Trials:
    """Simulates budgets for the models of a checkpoint."""

    models: Sequence[Model]
    conditions: Conditions

    def simulate(self, budget: Budget) -> Trial:
        """Simulate the models' steps with this budget."""
        parts = partition(self.models, budget.nbytes, self.conditions)
        largest, units = parts.largest, budget.units or Units.DECIMAL
        tiers = ("--ram", budget.text, budget.nbytes), ("--device", "", self.conditions.device)
        for option, text, nbytes in tiers:
            if nbytes is not None and largest.nbytes > nbytes:
                least, most = (at_least(n * largest.nbytes, units) for n in (1, COMFORTABLE))
                return Trial(
                    budget,
                    parts,
                    problem=f"{' '.join(filter(None, (option, text)))} is too small: the group "
                    f"{largest.key!r} alone has {largest.nbytes:,} bytes, and it cannot be "
                    "partitioned further",
                    remedy=f"Give at least {option} {least}, or {most} so that reading and "
                    "computing overlap.",
                )
        return Trial(budget, parts, tuple(self._forecasts(parts, budget.nbytes)))

    def _forecasts(self, parts: Partition, ram: int) -> list[Forecast]:
        known = {group.key: group.nbytes for part in parts.components for group in part.groups}
        names = {model.name for model in looping_models(self.models)}
        looping = [part for part in parts.components if part.name in names]
        return [forecast(part, known, ram, self.conditions) for part in looping]

    def advice(self, trials: Iterable[Trial], units: Units) -> Advice:
        """Return the smallest budget that is enough, whether it was tried or not."""
        possible = sorted(
            (trial for trial in trials if trial.problem is None),
            key=lambda trial: trial.budget.nbytes,
        )
        whole = next((trial for trial in possible if _reads_nothing(trial.steps)), None)
        whole = whole or self.simulate(self._whole_budget(units))
        enough = [trial for trial in possible if _is_enough(trial.steps, whole.steps)]
        if enough:
            text = self._sentence(enough[0], True) + self._smaller_option(
                enough[0], possible, units
            )
            return Advice(enough[0].budget, True, text)
        found = self._between(possible[-1].budget, whole)
        return Advice(found.budget, False, self._sentence(found, False))

    def _smaller_option(self, found: Trial, possible: Sequence[Trial], units: Units) -> str:
        """Return a sentence with a smaller budget if `"auto"` is much more than needed."""
        below = [trial for trial in possible if trial.budget.nbytes < found.budget.nbytes]
        if not is_auto(found.budget.text) or not below:
            return ""
        less = self._between(below[-1].budget, self.simulate(self._whole_budget(units)))
        return f" {less.budget.text!r} is enough, too."

    def _whole_budget(self, units: Units) -> Budget:
        """Return a budget with which steps read nothing."""
        looping = looping_models(self.models)
        needed = max(bytes_for_all([model], self.conditions) for model in looping)
        budget = Budget.at_least(needed, units)
        if _reads_nothing(self.simulate(budget).steps):
            return budget
        return Budget.at_least(bytes_for_all(self.models, self.conditions), units)

    def _between(self, tried: Budget, whole: Trial) -> Trial:
        """Find the smallest round budget above `tried` that is enough, or `whole`."""
        if not self._compares_times(whole.steps):
            return whole
        choice = [n for n in _ROUND if tried.nbytes < n < whole.budget.nbytes]
        best, low, high = whole, 0, len(choice)
        while low < high:
            middle = (low + high) // 2
            trial = self.simulate(Budget.at_least(choice[middle]))
            if trial.problem is None and _is_enough(trial.steps, whole.steps):
                best, high = trial, middle
            else:
                low = middle + 1
        return best

    @staticmethod
    def _compares_times(whole: Iterable[Forecast]) -> bool:
        """Return whether steps take time, so that budgets can be compared by time."""
        return any(step["seconds"] for step in whole)

    def _sentence(self, trial: Trial, of_tried: bool) -> str:
        give, reads = f"ram_budget={trial.budget.text!r}", not _reads_nothing(trial.steps)
        longer = f"takes at most {SLOWER - 1:.0%} longer than with all weights in RAM"
        place = "in RAM" if self.conditions.device is None else "in RAM and on the device"
        kept = f"reads nothing, because all its weights stay {place}"
        what = f"a step {longer if reads else kept}"
        if of_tried:
            text = f"Use {give}: the smallest of these budgets with which {what}."
        else:
            text = (
                f"None of these budgets is enough. Use {give}, with which {what}; or as much as "
                "you can spare: weights that do not fit are read in each step."
            )
        there = available_memory()
        if trial.budget.nbytes > there:
            units = trial.budget.units or Units.DECIMAL
            text += f" (This machine has {size(there, units)} available now.)"
        return text


def _reads_nothing(steps: Iterable[Forecast]) -> bool:
    return not any(step["read"] for step in steps)


def _is_enough(steps: Sequence[Forecast], whole: Sequence[Forecast]) -> bool:
    """Return whether each step takes at most SLOWER times as long as with all weights in RAM."""
    if any(step["seconds"] is None for step in steps):
        return _reads_nothing(steps)
    pairs = zip(steps, whole, strict=True)
    return all(one["seconds"] <= SLOWER * best["seconds"] for one, best in pairs)
