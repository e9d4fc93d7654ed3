"""A planner that takes one event at a time, by name, for tests of single events.

It makes events from its arguments, stamps each with the time of `clock`, and collects the resulting
instructions until `instructions` returns them. A name stands for the first generation of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from tierstore.model import events
from tierstore.model.groups import GroupId
from tierstore.model.moves import Instruction
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder
from tierstore.plan.copies import CopyTable
from tierstore.plan.planner import Planner
from tierstore.plan.policy import Policy
from tierstore.plan.prefetch import Prefetcher
from tierstore.plan.records import GroupRecord
from tierstore.plan.requests import Requests
from tierstore.plan.schedule import LearnedOrder

Name = str | GroupId


def group_of(name: Name) -> GroupId:
    return name if isinstance(name, GroupId) else GroupId(name, 0)


class Driver:
    """Passes events to `planner`."""

    def __init__(self, planner: Planner, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.planner = planner
        self.clock = clock
        self._instructions: list[Instruction] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.planner, name)

    @property
    def table(self) -> CopyTable:
        """The planner's copies, for tests of its internals."""
        return self.planner.copies

    @property
    def requests(self) -> Requests:
        """The planner's requests, for the same tests."""
        return self.planner.requests

    @property
    def prefetcher(self) -> Prefetcher:
        """The planner's expectations, for the same tests."""
        return self.planner.prefetcher

    def record(self, name: Name) -> GroupRecord:
        """Return the planner's entry of a group."""
        return self.table.groups[group_of(name)]

    def handle(self, event: events.Event) -> None:
        self._instructions += self.planner.handle(event, self.clock())

    def instructions(self) -> list[Instruction]:
        """Return the instructions since the last call, in order, with groups by name if any."""
        found, self._instructions = self._instructions, []
        return [self._named(instruction) for instruction in found]

    def _named(self, instruction: Instruction) -> Instruction:
        if instruction.group.generation:
            return instruction
        name: Any = instruction.group.key
        return replace(instruction, group=name)

    # Events ------------------------------------------------------------------------------------

    def register(
        self,
        name: Name,
        nbytes: int,
        *,
        backing: bool = True,
        use_order: UseOrder = UseOrder.LEARNED,
        tier: Tier = Tier.DISK,
        shared: bool = False,
    ) -> None:
        group = group_of(name)
        self.handle(events.Registered(group, nbytes, backing, use_order, tier, shared))

    def recover(self, groups: Iterable[events.RecoveredGroup]) -> None:
        self.handle(events.Recovered(tuple(groups)))

    def claim(self, name: Name, nbytes: int, *, use_order: UseOrder = UseOrder.LEARNED) -> None:
        self.handle(events.Claimed(group_of(name), nbytes, use_order))

    def fill(self, name: Name) -> None:
        self.handle(events.Filled(group_of(name)))

    def demand(self, name: Name) -> None:
        self.handle(events.Demanded(group_of(name)))

    def withdraw(self, name: Name) -> None:
        self.handle(events.Withdrawn(group_of(name)))

    def lease(
        self, name: Name, access: Access, *, permanent: bool = False, demanded: bool = True
    ) -> bool:
        """Lease the group if possible."""
        leasable = self.leasable(name, access)
        if leasable:
            self.handle(events.Leased(group_of(name), access, permanent, demanded))
        return leasable

    def release(self, name: Name, access: Access, *, permanent: bool = False) -> None:
        self.handle(events.Released(group_of(name), access, permanent))

    def demand_on_host(self, name: Name, purpose: HostAccess) -> None:
        self.handle(events.HostDemanded(group_of(name), purpose))

    def withdraw_on_host(self, name: Name, purpose: HostAccess) -> None:
        self.handle(events.HostWithdrawn(group_of(name), purpose))

    def lease_on_host(self, name: Name, purpose: HostAccess) -> bool:
        """Lease the group in host memory if possible."""
        leasable = self.host_leasable(name, purpose)
        if leasable:
            self.handle(events.HostLeased(group_of(name), purpose))
        return leasable

    def release_on_host(self, name: Name) -> None:
        self.handle(events.HostReleased(group_of(name)))

    def expect(self, names: Iterable[Name], highest: Tier | None = None) -> None:
        self.handle(events.Expected(tuple(map(group_of, names)), highest))

    def offload(self, name: Name) -> None:
        self.handle(events.Offloaded(group_of(name)))

    def release_memory(self, name: Name) -> None:
        self.handle(events.MemoryReleased(group_of(name)))

    def vacate(self) -> None:
        self.handle(events.DeviceVacated())

    def make_sticky(self, name: Name) -> None:
        self.handle(events.MadeSticky(group_of(name)))

    def change_budget(self, nbytes: int) -> None:
        self.handle(events.BudgetChanged(nbytes))

    def change_shared_budget(self, nbytes: int) -> None:
        self.handle(events.SharedBudgetChanged(nbytes))

    def save(self, name: Name) -> None:
        self.handle(events.SaveRequested(group_of(name)))

    def advise_spill(self, name: Name) -> None:
        self.handle(events.SpillAdvised(group_of(name)))

    def report_error(self, name: Name) -> None:
        self.handle(events.ErrorReported(group_of(name)))

    def discard(self, name: Name) -> None:
        self.handle(events.Discarded(group_of(name)))

    def ending(self, name: Name, src: Tier, dst: Tier) -> None:
        self.handle(events.Ending(group_of(name), src, dst))

    def arrive(self, name: Name, src: Tier, dst: Tier, *, timed: bool = True) -> None:
        self.handle(events.Arrived(group_of(name), src, dst, timed))

    def fail(self, name: Name, src: Tier, dst: Tier, error: BaseException) -> None:
        self.handle(events.Failed(group_of(name), src, dst, error))

    def measure_transfer(
        self, src: Tier, dst: Tier, nbytes: int, began: float, ended: float
    ) -> None:
        self.handle(events.TransferMeasured(src, dst, nbytes, began, ended))

    def measure_use(self, name: Name, asked: float, began: float) -> None:
        self.handle(events.UseMeasured(group_of(name), asked, began))

    # Questions ---------------------------------------------------------------------------------

    def __contains__(self, name: Name) -> bool:
        return group_of(name) in self.planner

    def leasable(self, name: Name, access: Access) -> bool:
        return self.planner.leasable(group_of(name), access)

    def host_leasable(self, name: Name, purpose: HostAccess) -> bool:
        return self.planner.host_leasable(group_of(name), purpose)

    def computing_seconds(self, name: Name) -> float:
        return self.planner.computing_seconds(group_of(name))

    def state_of(self, name: Name) -> Any:
        return self.planner.state_of(group_of(name))

    def residence(self, name: Name) -> tuple[Tier, ...]:
        return self.planner.residence(group_of(name))

    def arriving(self, name: Name) -> bool:
        return self.planner.arriving(group_of(name))

    def backed(self, name: Name) -> bool:
        return self.planner.backed(group_of(name))

    def granted(self, name: Name) -> bool:
        return self.planner.granted(group_of(name))

    def kept(self, name: Name) -> bool:
        return self.planner.leased_permanently(group_of(name))

    def saved(self, name: Name) -> bool:
        return self.planner.saved(group_of(name))

    def saving(self, name: Name) -> bool:
        return self.planner.saving(group_of(name))

    def error_of(self, name: Name) -> BaseException | None:
        return self.planner.error_of(group_of(name))


def driver_of(
    budgets: Mapping[Tier, int | None],
    policy: Policy,
    schedule: LearnedOrder,
    clock: Callable[[], float] = lambda: 0.0,
    *,
    timed_by_device: bool = False,
) -> Driver:
    """A driver of a new planner."""
    return Driver(Planner(budgets, policy, schedule, timed_by_device=timed_by_device), clock)
