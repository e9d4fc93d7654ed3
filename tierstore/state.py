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
from collections import deque
from collections.abc import Iterable, Mapping

import torch

from tierstore.aside import PuttingAside
from tierstore.lease import Lease
from tierstore.model.errors import BudgetError
from tierstore.model.tiers import Access, Hold, Tier
from tierstore.serving import Lent
from tierstore.transfer.cargo import Cargo
from tierstore.transfer.views import laid_out, packed
from tierstore.waiting import Request


class KeepingState(PuttingAside):
    """The part of a store that keeps what changes.

    `settle`, `hold`, `put_away` and `show` may wait.
    """

    def __init__(
        self,
        device: torch.device,
        budgets: dict[Tier, int | None],
        disk_dir: str,
        policy: str,
        verify: str,
    ) -> None:
        self._lost_holds: deque[Lent] = deque()  # garbage-collected, in the middle of any step
        super().__init__(device, budgets, disk_dir, policy, verify)

    def _collect_lost(self) -> None:
        super()._collect_lost()
        while self._lost_holds:
            self._let_go(self._lost_holds.popleft())

    def settle(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store copies of tensors as a group that is going to be changed, and never outlives us.

        Raises what `put` raises, and DuplicateKeyError.
        """
        with self._locked():
            self._refuse_duplicate(key)
        request, data = self._claim(key, tensors, False, guided=True)
        try:
            self._waiting.wait(request, self._granted)
            self._carrier.cargo(request.version).settled = True
            self._carrier.fill(request.version, data)
        except BaseException:
            self._give_up(request)
            raise
        self._filled(request.key, request.version, False)

    def settle_on_disk(self, key: str, like: Mapping[str, torch.Tensor]) -> None:
        """The same, of tensors like these, on disk only: with whatever values.

        Raises DuplicateKeyError, TypeError, BudgetError, DiskFullError or TransferError.
        """
        packing, _ = packed(key, like)
        with self._locked():
            self._refuse_duplicate(key)
            version = self._new_version(key)
            spec = laid_out(version, packing, like)
            budget = self._planner.budgets[Tier.DISK]
            if budget is not None and self._planner.used[Tier.DISK] + spec.nbytes > budget:
                advice = "raise disk_budget, or discard groups that are not needed"
                raise BudgetError(key, Tier.DISK.name, spec.nbytes, budget, advice)
            self._carrier.add(Cargo(version, spec, None, packing, False, settled=True))
            self._carrier.place(version)
            self._planner.register(version, spec.nbytes, backed=False, guided=True)
            self._versions[key] = version

    def hold(self, key: str, purpose: Hold) -> Lease:
        """The group in host memory, until the lease is released.

        It may be acquired (to be read on the device) while it is held: by who knows that it does
        not change meanwhile. Of what is held to KEEP it, those who wait for its room are told at
        once that they wait in vain. Raises what `acquire` raises.
        """
        self._check_open()
        request = Request(key, Access.READ if purpose is Hold.READ else Access.UPDATE)
        attempt = functools.partial(self._try_to_hold, purpose=purpose)
        try:
            return self._waiting.wait(request, attempt)
        except BaseException:
            with self._changed:
                if request.version in self._planner:
                    self._planner.withdraw_fetch(request.version, purpose)
                    self._deliver()
            raise

    def _try_to_hold(self, request: Request, *, purpose: Hold) -> Lease | None:
        self._check_open()
        self._collect_lost()
        if self._versions.get(request.key) != request.version:
            request.version = self._lookup(request.key)
            self._planner.fetch(request.version, purpose)
            self._deliver()
        version = request.version
        error = self._planner.error_of(version)
        if error is not None:
            raise error
        self._refuse_what_is_kept(request)
        if not self._planner.hold(version, purpose):
            return None
        owner = None if purpose is Hold.KEEP else request.owner
        held = Lent(version, owner, "held", request.since, access=request.access, out=True)
        if owner is None:
            self.held_for_good += self._carrier.cargo(version).spec.nbytes
        self._waiting.lend(owner, version)
        request.version = ""
        self._deliver()
        return Lease(
            request.key,
            version,
            self._carrier.host_view(version),
            functools.partial(self._end_hold, held),
            functools.partial(self._lost_holds.append, held),
        )

    def _let_go(self, held: Lent) -> None:
        """Take back, once, what somebody held in host memory. With the lock held."""
        if self._closed or not held.out:
            return
        held.out = False
        if held.caller is None:
            self.held_for_good -= self._carrier.cargo(held.version).spec.nbytes
        self._waiting.give_back(held.caller, held.version)
        self._planner.let_go(held.version)
        self._deliver()

    def _end_hold(self, held: Lent) -> None:
        with self._changed:
            self._let_go(held)

    def acquire_for_good(self, key: str, access: Access) -> Lease:
        """`acquire`, for who never gives it back as long as others may wait for its room."""
        request = self._asked(key, access)
        request.owner = None
        try:
            return self._waiting.wait(request, self._attempt)
        except BaseException:
            self._give_up(request)
            raise

    def write_back(self, key: str) -> None:
        """Begin to save a group that was changed. Never waits; `put_away` tells of failures."""
        with self._locked():
            version = self._lookup(key)
            self._planner.spill_early(version)
            self._deliver()

    def put_away(self, keys: Iterable[str]) -> None:
        """See that groups are on disk, and not in memory, as soon as nobody uses them there.

        Waits until they are on disk. Raises what a save raises: then the group is where it was.
        """
        versions = []
        with self._locked():
            for key in keys:
                version = self._lookup(key)
                versions.append((key, version))
                if not self._planner.saved(version):
                    self._planner.save(version)
            self._deliver()
        for key, version in versions:
            self._waiting.wait(Request(key, version=version), self._saved)
            with self._changed:
                self._planner.put_away(version)
                self._deliver()
        # What was on its way has the old bytes, and may not be looked at once others are written.
        for key, version in versions:
            self._waiting.wait(Request(key, version=version), self._has_gone)

    def _has_gone(self, request: Request) -> bool | None:
        self._check_open(saving=True)
        gone = request.version not in self._planner
        return gone or not self._planner.arriving(request.version) or None

    def expect_in_ram(self, keys: Iterable[str]) -> None:
        """Say what is held next, in order. A hint, like `prefetch`, that asks for no room above."""
        self._expect(keys, Tier.HOST)

    def expect(self, keys: Iterable[str]) -> None:
        """Say what is acquired next, in order. A hint."""
        self._expect(keys, self._planner.top)

    def _expect(self, keys: Iterable[str], top: Tier) -> None:
        with self._locked():
            self._collect_lost()
            found = [self._versions.get(key) for key in keys]
            self._planner.prefetch([v for v in found if v is not None], top)
            self._deliver()

    def show(self, key: str) -> dict[str, torch.Tensor]:
        """The copy on disk of a group that was put away, as CPU tensors: shared maps of the file.

        Each has memory of its own kind, and is true for as long as the group is put away whenever
        it was changed. Raises TransferError where the file system knows no such maps.
        """
        with self._locked():
            return self._carrier.show(self._lookup(key))
