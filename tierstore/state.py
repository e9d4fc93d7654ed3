"""Groups that change all the time: parameters in training, their gradients, an optimizer's state.

Such a group is changed in host memory, by whoever *holds* it there. While nobody does, its copy on
disk lies in a place of its own, and can be shown: as CPU tensors that cost no memory until they are
read, and that are the group as far as anybody can tell. They read as the file does, and what is
written to them is in the file, so that nothing needs to notice it.

For that to be true, nobody may have a copy in memory that the file does not know of. So whoever
shows such a group puts it away first, and again after each pass in which it was used.

The store learns nothing from the uses of these groups. In training, who uses them knows the order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

import torch

from tierstore.aside import PuttingAside
from tierstore.lease import Lease, OpenLease
from tierstore.model import events
from tierstore.model.errors import BudgetError
from tierstore.model.groups import NO_GROUP, GroupId
from tierstore.model.moves import Instruction
from tierstore.model.tiers import Access, Hold, Tier
from tierstore.plan.records import State
from tierstore.steps import step
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.views import laid_out, packed
from tierstore.tiers.workers import Answer
from tierstore.waiting import Lent, Request, Want


class KeepingState(PuttingAside):
    """The part of a store that keeps what changes.

    `settle`, `hold`, `put_away` and `show` may wait.
    """

    def settle(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store copies of tensors as a group that is going to be changed, and never outlives us.

        Raises what `put` raises, and DuplicateKeyError.
        """
        self._check_open()
        self._refuse_duplicate(key)
        request = Request(key, Want.ROOM)
        try:
            data = self._claim(request, tensors, False, guided=True)
            self._mover.entry(request.version).settled = True
            self._wait(request, self._granted)
            self._tiers.host.fill(self._mover.entry(request.version), data)
            self._filled(request, False)
        except BaseException:
            self._give_up(request)
            raise

    def settle_on_disk(self, key: str, like: Mapping[str, torch.Tensor]) -> None:
        """The same, of tensors like these, on disk only: with whatever values.

        Raises DuplicateKeyError, TypeError, BudgetError, DiskFullError or TransferError.
        """
        self._check_open()
        self._refuse_duplicate(key)
        packing, _ = packed(key, like)
        version = self._new_version(key)
        spec = laid_out(key, packing, like)
        entry = GroupEntry(version, spec, None, packing, False, settled=True, guided=True)
        self._refuse_beyond_the_disk(key, spec.nbytes)
        self._tiers.disk.place(entry)
        self._know_settled(key, entry)

    def _refuse_beyond_the_disk(self, key: str, nbytes: int) -> None:
        budget = self._planner.budgets[Tier.DISK]
        if budget is not None and self._planner.used[Tier.DISK] + nbytes > budget:
            advice = "raise disk_budget, or discard groups that are not needed"
            raise BudgetError(key, Tier.DISK.name, nbytes, budget, advice)

    @step
    def _know_settled(self, key: str, entry: GroupEntry) -> None:
        self._check_open()
        self._refuse_duplicate(key)
        self._refuse_beyond_the_disk(key, entry.spec.nbytes)
        self._mover.add(entry)
        self._tell(events.Registered(entry.key, entry.spec.nbytes, caller_scheduled=True))
        self._versions[key] = entry.key

    def hold(self, key: str, purpose: Hold) -> Lease:
        """The group in host memory, until the lease is released.

        It may be acquired (to be read on the device) while it is held: by who knows that it does
        not change meanwhile. Of what is held to KEEP it, those who wait for its room are told at
        once that they wait in vain. Raises what `acquire` raises.
        """
        self._check_open()
        request = Request(key, Want.HOLD, Access.READ if purpose is Hold.READ else Access.UPDATE)
        request.purpose = purpose
        try:
            held = self._wait(request, functools.partial(self._try_to_hold, purpose=purpose))
            return OpenLease(
                key,
                held.version,
                self._tiers.host.view_for_caller(self._mover.entry(held.version)),
                self,
                held,
            )
        except BaseException:
            self._give_up(request)
            raise

    def _try_to_hold(self, request: Request, *, purpose: Hold) -> Lent | None:
        self._check_open()
        self._collect_lost()
        if self._versions.get(request.key) != request.version:
            version = self._lookup(request.key)
            instructions = self._handled(events.HostDemanded(version, purpose))
            request.version = version
            self._deliver(instructions)
        version = request.version
        error = self._planner.error_of(version)
        if error is not None:
            raise error
        self._refuse_what_is_kept(request)
        if not self._planner.host_lendable(version, purpose):
            return None
        instructions = self._handled(events.HostLeased(version, purpose))
        owner = None if purpose is Hold.KEEP else request.owner
        held = Lent(version, owner, "held", request.since, access=request.access, held=purpose)
        self._deliver(instructions)  # first: what is held to be changed has no other copy
        request.loan = held
        self._out[held] = None
        if owner is None:
            self.held_for_good += self._mover.entry(version).spec.nbytes
        self._waiting.lend(owner, version)
        request.version = NO_GROUP
        return held

    @step
    def _let_go(self, held: Lent) -> None:
        """Take back, once, what somebody held in host memory."""
        if self._ended() or held not in self._out:
            return
        del self._out[held]
        if held.caller is None:
            self.held_for_good -= self._mover.entry(held.version).spec.nbytes
        self._waiting.give_back(held.caller, held.version)
        self._tell(events.HostReleased(held.version))

    def _give_back(self, loan: Lent) -> Answer[None] | None:
        if loan.held is None:
            return super()._give_back(loan)
        self._let_go(loan)
        return None

    def acquire_for_good(self, key: str, access: Access) -> Lease:
        """`acquire`, for who never gives it back as long as others may wait for its room."""
        request = self._asked(key, access)
        request.owner = None  # nobody waits for it
        return self._wait(request, self._attempt)

    @step
    def write_back(self, key: str) -> None:
        """Begin to save a group that was changed. Never waits; `put_away` tells of failures."""
        self._check_open()
        self._tell(events.SpillAdvised(self._lookup(key)))

    def put_away(self, keys: Iterable[str]) -> None:
        """See that groups are on disk, and not in memory, as soon as nobody uses them there.

        Waits until they are on disk. Raises what a save raises: then the group is where it was.
        """
        versions = self._save_all(list(keys))
        for key, version in versions:
            self._wait(self._of_version(key, version), self._saved)
            self._leave_memory(version)
        # What was on its way has the old bytes, and may not be looked at once others are written.
        for key, version in versions:
            self._wait(self._of_version(key, version), self._has_gone)

    @step
    def _save_all(self, keys: list[str]) -> list[tuple[str, GroupId]]:
        self._check_open()
        versions = [(key, self._lookup(key)) for key in keys]
        instructions: list[Instruction] = []
        for _, version in versions:
            if not self._planner.saved(version):
                instructions += self._handled(events.SaveRequested(version))
        self._deliver(instructions)
        return versions

    @step
    def _leave_memory(self, version: GroupId) -> None:
        if version in self._planner:
            self._tell(events.MemoryReleased(version))

    def land(self, keys: Iterable[str]) -> None:
        """Wait for those of the groups that are on their way to the fastest tier, or are gone."""
        for key, version in self._arriving(list(keys)):
            self._wait(self._of_version(key, version), self._has_landed)

    @step
    def _arriving(self, keys: list[str]) -> list[tuple[str, GroupId]]:
        self._check_open()
        found = [(key, self._versions.get(key)) for key in keys]
        return [(k, v) for k, v in found if v is not None and self._is_arriving(v)]

    def _is_arriving(self, version: GroupId) -> bool:
        return self._planner.state_of(version) is State.ARRIVING

    def _has_landed(self, request: Request) -> bool | None:
        return self._is_over(request, self._is_arriving)

    def _has_gone(self, request: Request) -> bool | None:
        return self._is_over(request, self._planner.arriving)

    def _is_over(self, request: Request, goes_on: Callable[[GroupId], bool]) -> bool | None:
        self._check_open(saving=True)
        gone = request.version not in self._planner
        return gone or not goes_on(request.version) or None

    def expect_in_ram(self, keys: Iterable[str]) -> None:
        """Say what is held next, in order. A hint, like `prefetch`, that asks for no room above."""
        self._expect(list(keys), Tier.HOST)

    def expect(self, keys: Iterable[str]) -> None:
        """Say what is acquired next, in order. A hint."""
        self._expect(list(keys), self._planner.top)

    @step
    def show(self, key: str) -> dict[str, torch.Tensor]:
        """The copy on disk of a group that was put away, as CPU tensors: shared maps of the file.

        Each has memory of its own kind, and is true for as long as the group is put away whenever
        it was changed. Raises TransferError where the file system knows no such maps.
        """
        self._check_open()
        return self._tiers.disk.view(self._mover.entry(self._lookup(key)))
