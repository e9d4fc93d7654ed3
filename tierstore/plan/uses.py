"""What a use of a group teaches: the order of uses, the times between them, and who should stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierstore.plan.movement import Movement
from tierstore.plan.policy import Policy
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.records import GroupRecord
from tierstore.plan.schedule import Schedule

Handlers = dict[type, Callable[[Any], bool]]
"""What to do for each type of event. True: something may have to move now."""


class Uses:
    """Tells of each use to who learns from it."""

    def __init__(
        self, policy: Policy, schedule: Schedule, prefetcher: Prefetcher, movement: Movement
    ) -> None:
        self._policy = policy
        self._schedule = schedule
        self._prefetcher = prefetcher
        self._movement = movement

    def note(self, group: GroupRecord) -> None:
        """A group was lent."""
        prefetcher = self._prefetcher
        self._policy.used(group.id)
        self._movement.look_ahead = True
        if group.caller_scheduled:
            self._schedule.come(group.id.key)
            prefetcher.came(group.number)
            return
        self._schedule.advance_past(group.id.key)
        prefetcher.used(group.number)
        if prefetcher.choose_retained(group.number):
            retention = prefetcher.retention
            self._policy.keep(retention.staying, retention.nearer)
