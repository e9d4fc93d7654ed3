"""Memory that is put aside for a while and wanted back soon, under names that the store makes up.

What autograd saves has no name, is written once, read once or a few times, and goes with the graph.
No name is used twice: a learned order of use would tell the planner, in the middle of the forward
pass, to fetch what the backward pass of the last step began with. Who puts memory aside says itself
what it wants next.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch

from tierstore.lease import Lease
from tierstore.model import events
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Instruction
from tierstore.model.tiers import Tier
from tierstore.observe.observer import ActivationCounts
from tierstore.serving import Serving
from tierstore.settings import Settings, device_memory, grown_device_budget
from tierstore.steps import step
from tierstore.tiers.arena import Arena
from tierstore.tiers.objects import check_key
from tierstore.waiting import Request, Want

PREFIX = "activation/"

SCARCE = 256 << 20
"""Room in host memory is scarce when so many bytes of the budget are left, ..."""
SCARCE_SHARE = 4
"""... or one in so many."""


def key_of(number: int) -> str:
    """The key of what was put aside under this number.

    >>> key_of(7)
    'activation/000007'
    """
    return f"{PREFIX}{number:06}"


_OF_THE_STORE = re.compile(PREFIX + "[0-9]{6,}")


class Giver(Protocol):
    """One who holds leases for later."""

    def make_room(self) -> None:
        """Give them back, if they can be had again. Called by a thread that waits for room."""


class PuttingAside(Serving):
    """The part of a store that lends a shelf to who saves activations.

    Only `put_aside` may wait.
    """

    def __init__(self, settings: Settings) -> None:
        self._fresh = itertools.count()
        self._left: deque[int] = deque()  # dropped by finalizers
        self._unspilled: dict[int, GroupId] = {}  # number -> version, the oldest first
        self._largest = 0  # bytes of the largest group that was lent or put aside so far
        self.givers: weakref.WeakSet[Giver] = weakref.WeakSet()
        super().__init__(settings)

    def _collect_lost(self) -> None:
        super()._collect_lost()
        instructions: list[Instruction] = []
        while self._left:
            number = self._left[0]
            version = self._versions.pop(key_of(number), None)
            self._unspilled.pop(number, None)
            self._left.popleft()
            if version is not None:
                instructions += self._handled(events.Discarded(version))
        if instructions:
            self._deliver(instructions)

    @staticmethod
    def _check_key(key: str) -> None:
        """Raise TypeError or ValueError if it cannot be a caller's key."""
        if _OF_THE_STORE.fullmatch(check_key(key)):
            raise ValueError(f"{key!r} is a name for saved activations: use another key")

    def _tidy_up(self) -> None:
        """Take back what finalizers have left, so that one sees what really is there."""
        self._mover.look()
        if not self._closed:
            self._collect_lost()

    @property
    def activation_counts(self) -> ActivationCounts:
        """Where those who save activations count what they do."""
        return self._observer.activations

    def make_room(self) -> None:
        """Have those who hold something for later give it back, if they can."""
        for giver in list(self.givers):
            giver.make_room()

    @property
    def _device_arena(self) -> Arena:
        device = self._tiers.device
        assert device is not None, "there is no accelerator"
        return device.arena

    @step
    def spare_device_memory(self) -> int:
        """The bytes that `give_back_device_memory` would give back now, on an accelerator."""
        return self._planner.spare_bytes() + self._device_arena.idle_bytes

    def give_back_device_memory(self) -> None:
        """Let others have the memory of the device that the store holds and that nobody uses.

        What is given up has a copy elsewhere. It comes back when it is needed. Waits for the
        device to be done with it.
        """
        self._vacate()
        self._mover.catch_up()  # the slots of what was given up are idle by then
        self._device_arena.give_back_idle()

    @step
    def _vacate(self) -> None:
        self._check_open()
        self._call_in()
        self._tell(events.DeviceVacated())

    @step
    def grow_device_budget(self) -> None:
        """Every model has run: have the device budget take half of what is free, if nobody chose
        it. For adapters. Happens once."""
        given = self._settings
        if self._ended() or not given.device_budget_may_grow:
            return
        arena, before = self._device_arena, given.budgets[Tier.DEVICE]
        assert before is not None
        free, _ = device_memory(self.device)
        budget = grown_device_budget(before, arena.bytes_held, free)
        arena.resize(budget)  # first: the planner's instructions may need it
        budgets = {**given.budgets, Tier.DEVICE: budget}
        self._settings = replace(given, budgets=budgets, device_budget_may_grow=False)
        self._tell(events.BudgetChanged(budget))

    def largest_aside(self) -> int:
        """The bytes that any one group may have at most: what every tier above the disk can hold
        (2**62 if there is no limit)."""
        budgets = {tier: self._planner.budgets[tier] for tier in self._planner.tiers[:-1]}
        rooms = [
            budget - (self.held_for_good if tier is Tier.HOST else 0)
            for tier, budget in budgets.items()
            if budget is not None
        ]
        return min(rooms, default=1 << 62)

    def room_for_the_lent(self) -> int:
        """The bytes that may be lent for long on the fastest tier: the largest group that was ever
        wanted there has room beside them (2**62 or so if there is no limit)."""
        top = self._planner.top
        for_good = self.held_for_good if top is Tier.HOST else 0
        return (self._planner.budgets[top] or 1 << 62) - for_good - self._largest

    def _lend(self, request: Request, version: GroupId, demanded: bool) -> Lease:
        self._largest = max(self._largest, self._mover.entry(version).spec.nbytes)
        return super()._lend(request, version, demanded)

    def put_aside(self, memory: torch.Tensor) -> tuple[int, Any]:
        """Copy `memory` (uint8, 1-d) into the store, beside what the device does next.

        Returns its number, and an event of the device: before it has passed, nothing may change
        `memory`, nor get it from the allocator. None: it is copied. Raises what `put` raises.
        """
        number = next(n for n in self._fresh if key_of(n) not in self._versions)
        request = Request(key_of(number), Want.ROOM)
        try:
            data = self._claim(request, memory, False, guided=True)
            self._wait(request, self._granted)
            entry = self._mover.entry(request.version)
            copied = self._tiers.host.fill(entry, data, behind=True)
            self._filled(request, False)
            self._see_to_room(number)
            return number, copied
        except BaseException:
            self._give_up(request)
            self.drop_aside(number)
            raise

    @step
    def _see_to_room(self, number: int) -> None:
        """What was put aside comes back some day. And where room gets scarce, write as much as has
        come: the oldest is wanted last.

        Later, who needs the room can have it at once.
        """
        budget = self._planner.budgets[Tier.HOST]
        version = self._versions.get(key_of(number))
        if version is None or budget is None:
            return
        due = self._mover.entry(version).spec.nbytes
        self._largest = max(self._largest, due)
        self._unspilled[number] = version
        if self._planner.used[Tier.HOST] <= budget - min(budget // SCARCE_SHARE, SCARCE):
            return
        while due > 0 and self._unspilled:
            oldest = self._unspilled.pop(next(iter(self._unspilled)))
            instructions = self._handled(events.SpillAdvised(oldest))
            due -= sum(copy.nbytes for copy in instructions if isinstance(copy, Copy))
            self._deliver(instructions)

    def _mend(self) -> None:
        super()._mend()
        known = {k: v for k, v in self._unspilled.items() if self._versions.get(key_of(k)) == v}
        self._unspilled = known

    def drop_aside(self, number: int) -> None:
        """Forget what was put aside, at the next step: finalizers may run anywhere."""
        self._left.append(number)

    def expect_aside(self, numbers: Iterable[int]) -> None:
        """Say what is wanted back next, in order. A hint, like `prefetch`."""
        self._expect([key_of(number) for number in numbers], self._planner.top)

    @step
    def _expect(self, keys: list[str], top: Tier) -> None:
        """These come next, on a tier up to `top`. What is not there any more does not."""
        self._check_open()
        self._collect_lost()
        found = [self._versions.get(key) for key in keys]
        known = tuple(version for version in found if version is not None)
        self._tell(events.Expected(known, top))
