"""Which copy would be missed least? A policy ranks; it never evicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tierstore.model.groups import name_of
from tierstore.model.tiers import Tier
from tierstore.plan.schedule import LearnedOrder, Schedule


class Policy(Protocol):
    """One ranking for all tiers. The planner tells it what it does and asks for victims."""

    def admitted(self, key: str, tier: Tier) -> None:
        """A copy of `key` is complete on `tier`."""

    def used(self, key: str) -> None:
        """`key` was leased."""

    def dropped(self, key: str, tier: Tier) -> None:
        """The copy of `key` on `tier` is gone."""

    def victims(self, tier: Tier, rival: str | None) -> Iterator[str]:
        """Keys with a copy on `tier`, the one missed least first.

        `rival` is the key of a prefetch that wants the room: only keys needed later than it are
        yielded. None: the room must be had, so every key is yielded sooner or later.
        """


class LeastRecentlyUsed:
    """The copy that was not used for longest goes first."""

    def __init__(self) -> None:
        self._order: dict[str, None] = {}
        self._on: dict[Tier, set[str]] = {tier: set() for tier in Tier}

    def admitted(self, key: str, tier: Tier) -> None:
        self._on[tier].add(key)
        self._touch(key)

    def used(self, key: str) -> None:
        self._touch(key)

    def _touch(self, key: str) -> None:
        self._order.pop(key, None)
        self._order[key] = None

    def dropped(self, key: str, tier: Tier) -> None:
        self._on[tier].discard(key)
        if not any(key in keys for keys in self._on.values()):
            self._order.pop(key, None)

    def victims(self, tier: Tier, rival: str | None) -> Iterator[str]:
        present = self._on[tier]
        return iter([key for key in self._order if key in present and key != rival])


class FarthestNextUse(LeastRecentlyUsed):
    """The copy whose next use is farthest ahead goes first (Belady, 1966), by a learned schedule.

    Keys that the schedule does not expect go before all others, the least recently used first.
    """

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule

    def victims(self, tier: Tier, rival: str | None) -> Iterator[str]:
        def steps(key: str) -> float:
            return self._schedule.steps_until(name_of(key))

        ranked = sorted(super().victims(tier, rival), key=lambda key: -steps(key))
        if rival is None or self._knows_nothing():
            return iter(ranked)
        needed = steps(rival)
        return iter([key for key in ranked if steps(key) > needed])

    def _knows_nothing(self) -> bool:
        return isinstance(self._schedule, LearnedOrder) and self._schedule.learning


POLICIES = ("next-use", "lru")


def policy_named(name: str, schedule: Schedule) -> Policy:
    """The policy of this name, ranking by `schedule` where it ranks by a schedule."""
    if name == "next-use":
        return FarthestNextUse(schedule)
    if name == "lru":
        return LeastRecentlyUsed()
    raise ValueError(f"there is no policy {name!r}: choose one of {', '.join(POLICIES)}")
