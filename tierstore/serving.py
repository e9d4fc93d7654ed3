"""The planner and the carrier under one lock: how groups are served.

This is the only module that knows both. Every step follows one pattern: under the lock, ask the
planner and hand its instructions to the carrier, so that their order is kept; outside the lock,
wait. The carrier's threads report back in the same way.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Condition
from typing import TypeVar

import torch

from tierstore.lease import Lease
from tierstore.model.errors import (
    BudgetError,
    ClosedError,
    DuplicateKeyError,
    LeaseError,
    UnknownKeyError,
)
from tierstore.model.groups import (
    GroupSpec,
    Source,
    name_of,
    version_id,
)
from tierstore.model.journal import Use
from tierstore.model.moves import Copy
from tierstore.model.tiers import Access, Tier
from tierstore.observer import Observer
from tierstore.plan.planner import Planner
from tierstore.plan.policy import policy_named
from tierstore.plan.records import State
from tierstore.plan.schedule import LearnedOrder
from tierstore.transfer.cargo import Cargo
from tierstore.transfer.carrier import ThreadCarrier
from tierstore.transfer.directory import ObjectDirectory
from tierstore.transfer.disk import FileStamp
from tierstore.transfer.objects import object_name
from tierstore.transfer.views import laid_out, packed
from tierstore.transfer.workers import weakly
from tierstore.waiting import Request, WaitingRoom

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Lent(Use):
    """The store's side of a lease, and later a note of it."""

    access: Access = Access.READ
    out: bool = False


class Serving:
    """What a store does under its lock. `TierStore` is what its users see of it."""

    def __init__(
        self,
        device: torch.device,
        budgets: dict[Tier, int | None],
        disk_dir: str,
        policy: str,
        verify: str,
    ) -> None:
        schedule = LearnedOrder()
        self.device = device
        self._planner = Planner(
            budgets, policy_named(policy, schedule), schedule, time.perf_counter
        )
        self._waiting = WaitingRoom(self._planner.idle, self._refuse_the_hopeless)
        self._changed = self._waiting.condition
        self._versions: dict[str, str] = {}  # key -> the version that readers see
        self._next_version = 1
        # Leases that were garbage-collected: that may happen in the middle of any step.
        self._lost_leases: deque[Lent] = deque()
        self.held_for_good = 0  # bytes of host memory
        self._lost_groups: deque[str] = deque()
        self._pid = os.getpid()
        self._closing = False  # nothing new may begin; what there is, is being saved
        self._closed = False
        self._directory = ObjectDirectory(disk_dir)
        # Carrier threads must not keep a forgotten store alive.
        report, ending = (weakly(weakref.WeakMethod(m)) for m in (self._arrived, self._ending))
        self._carrier = ThreadCarrier(device, budgets, self._directory, verify, report, ending)
        self._observer = Observer(self._carrier.journal, self._carrier.times)
        self._finalizer = weakref.finalize(
            self, _shut_down, self._carrier, self._directory, self._pid
        )
        try:
            self._recover()
            self._observer.level(self._planner.used)
        except BaseException:
            self._finalizer()
            raise

    def _recover(self) -> None:
        for stored in self._directory.objects():
            version = version_id(stored.key, 0)
            spec = stored.spec(version)
            source = stored.source(self._directory.path_of(stored.key))
            self._carrier.add(Cargo(version, spec, source, stored.packing, single=stored.single))
            self._planner.register(version, spec.nbytes, backed=False)
            self._carrier.add_file(stored.key)
            self._versions[stored.key] = version
        budget, held = self._planner.budgets[Tier.DISK], self._planner.used[Tier.DISK]
        if budget is not None and held > budget:
            raise BudgetError(
                self._directory.path,
                Tier.DISK.name,
                held,
                budget,
                "raise disk_budget, or remove groups with tierstore-inspect rm",
            )

    def _know(
        self,
        key: str,
        spec: GroupSpec,
        source: Source,
        stamps: Mapping[str, FileStamp],
        *,
        single: bool,
    ) -> None:
        version = self._new_version(key)
        spec = GroupSpec(version, spec.tensors, spec.nbytes)
        order = self._newest_so_far()
        self._carrier.add(Cargo(version, spec, source, single=single, stamps=stamps, order=order))
        self._planner.register(version, spec.nbytes, backed=True)
        self._versions[key] = version

    def _refuse_duplicate(self, key: str) -> None:
        if key in self._versions:
            raise DuplicateKeyError(key)

    def _new_version(self, key: str) -> str:
        self._next_version += 1
        return version_id(key, self._next_version - 1)

    # Putting -----------------------------------------------------------------------------------

    def _claim(
        self,
        key: str,
        tensors: torch.Tensor | Mapping[str, torch.Tensor],
        durable: bool,
        *,
        guided: bool = False,
    ) -> tuple[Request, dict[str, torch.Tensor]]:
        """Ask for room. Returns the request for it and the bytes to fill it with."""
        single = isinstance(tensors, torch.Tensor)
        named = {key: tensors} if isinstance(tensors, torch.Tensor) else tensors
        packing, sources = packed(key, named)
        with self._locked():
            version = self._new_version(key)
            spec = laid_out(version, packing, named)
            self._planner.claim(version, spec.nbytes, guided=guided)
            self._carrier.add(Cargo(version, spec, None, packing, durable, single))
            self._deliver()
        return Request(key, version=version), sources

    def _filled(self, key: str, version: str, durable: bool) -> None:
        """Let readers see a version whose room was granted and filled."""
        with self._locked():
            replaced = self._show(key, version)
            leaves_file = replaced is not None and self._carrier.cargo(replaced).durable
            if replaced is not None:
                self._planner.discard(replaced)
            self._deliver()
            newest = self._carrier.cargo(version).order
        if leaves_file and not durable:
            self._remove_file(key, newest, True)

    async def _off_the_loop(self, job: Callable[[], T]) -> T:
        """Run `job` on another thread, in order with the device work of this one.

        Whoever awaits it may be cancelled, and the loop may end: the job runs to its end.
        """
        loop, here = asyncio.get_running_loop(), self._stream()

        def in_order() -> T:
            with here:
                return job()

        return await asyncio.shield(loop.run_in_executor(None, in_order))

    def _stream(self) -> AbstractContextManager[object]:
        """The stream of the caller's device work; entered on another thread, it is used there."""
        if self.device.type == "cpu":
            return nullcontext()
        return torch.accelerator.current_stream(self.device)

    # Lending -----------------------------------------------------------------------------------

    @property
    def all_there(self) -> bool:
        """Whether every group has its place on the device (or is on its way): room is no matter."""
        return self._planner.all_there()

    def _asked(self, key: str, access: Access) -> Request:
        self._check_open()
        return Request(key, Access(access))

    def _demand(self, request: Request) -> None:
        """Insist on the newest version of the key."""
        request.version = version = self._lookup(request.key)
        state = self._planner.state_of(version)
        self._planner.demand(version)
        if not request.met:
            met = "hit" if state is State.PRESENT else "late" if state else "miss"
            self._observer.asked(request, met)
        self._deliver()

    def _attempt(self, request: Request) -> Lease | None:
        """Lease the group if it is there. With the lock held."""
        self._check_open()
        self._collect_lost()
        if self._versions.get(request.key) != request.version:
            self._demand(request)  # the first time, and if it was replaced meanwhile
        version = request.version
        error = self._planner.error_of(version)
        if error is not None:
            raise error
        loan = Lent(version, request.owner, request.met, request.since, access=request.access)
        try:
            loan.out = self._planner.lease(version, request.access, for_good=loan.caller is None)
            if loan.out:
                return self._lent(request, version, loan)
            if request.access is not Access.READ:
                self._refuse_what_is_kept(request)
            self._observer.waits(request)
            return None
        except BaseException:  # an interrupt, most likely: nobody would give the lease back
            self._end_lease(loan)
            raise

    def _refuse_what_is_kept(self, request: Request) -> None:
        if self._planner.kept(request.version):
            raise LeaseError(
                f"group {request.key!r} is held for good, by who trains with it: read it, or wait "
                "until that is over"
            )

    def _lent(self, request: Request, version: str, loan: Lent) -> Lease:
        self._waiting.lend(request.owner, version)
        request.version = ""
        self._deliver()
        tensors = self._carrier.view(version)
        cargo = self._carrier.cargo(version)
        self._observer.arrives(request, cargo.arrival)
        self._order_after_arrival(version)
        self._observer.granted(request, loan, cargo.spec.nbytes)
        return Lease(
            request.key,
            version,
            dict(tensors),
            functools.partial(self._release, loan),
            functools.partial(self._lost_leases.append, loan),
        )

    def _order_after_arrival(self, version: str) -> None:
        arrival = self._carrier.cargo(version).arrival
        if arrival is not None:
            torch.accelerator.current_stream(self.device).wait_event(arrival)

    def _granted(self, request: Request) -> bool | None:
        """Whether the room for a put is there. With the lock held."""
        self._check_open()
        self._collect_lost()
        error = self._planner.error_of(request.version)
        if error is not None:
            raise error
        return self._planner.granted(request.version) or None

    def _show(self, key: str, version: str) -> str | None:
        """Let readers see a version that is complete. Returns the one that they saw before."""
        replaced = self._versions.get(key)
        self._versions[key] = version
        self._carrier.cargo(version).order = self._newest_so_far()
        self._planner.arrived(version, Tier.HOST)
        return replaced

    def _give_up(self, request: Request) -> None:
        with self._changed:
            self._observer.gave_up(request)
            if request.version in self._planner:
                self._planner.withdraw(request.version)
                self._deliver()

    def _refuse_the_hopeless(self, request: Request, held: set[str]) -> None:
        """Raise: whoever could give the room (or the group) back is waiting too."""
        if request.version in held:
            raise LeaseError(
                f"group {request.key!r} is leased by callers that all wait for something: release "
                "those leases first"
            )
        nbytes = sum(self._carrier.cargo(version).spec.nbytes for version in held)
        top = self._planner.top
        raise BudgetError(
            request.key,
            top.name,
            self._carrier.cargo(request.version).spec.nbytes,
            self._planner.budgets[top] or 0,
            f"the leases of callers that all wait hold {nbytes:,} bytes; release some of them "
            "first, or raise the budget",
        )

    def _release(self, loan: Lent) -> None:
        with self._changed:
            taken = self._end_lease(loan)
        if taken is not None:
            self._remove_file(*taken)

    def _end_lease(self, loan: Lent) -> tuple[str, int, bool] | None:
        """Take a lease back, once. What is returned is for `_remove_file`, without the lock."""
        if self._closed or not loan.out:
            return None
        loan.out = False
        version, access = loan.version, loan.access
        self._waiting.give_back(loan.caller, version)
        mark = None
        if self._carrier.times is not None:
            mark = self._carrier.times.mark()
            self._carrier.used_on(version, mark.event)
        self._observer.released(loan, mark)
        cargo = self._carrier.cargo(version)
        self._planner.release(version, access, for_good=loan.caller is None)
        self._deliver()
        if access is not Access.TAKE or self._versions.get(key := name_of(version)) != version:
            return None
        del self._versions[key]
        return key, self._newest_so_far(), cargo.durable

    def _newest_so_far(self) -> int:
        self._next_version += 1
        return self._next_version - 1

    def _remove_file(self, key: str, version: int, durable: bool) -> None:
        """No version of `key` up to this one may be on disk from now on."""
        self._carrier.remove(key, version, durable)

    def discard_soon(self, keys: Iterable[str]) -> None:
        """Forget groups taken by `register` at the next step. For finalizers, which may run
        anywhere, so that nothing can be done at once."""
        self._lost_groups.extend(keys)

    def _collect_lost(self) -> None:
        while self._lost_leases:
            taken = self._end_lease(self._lost_leases.popleft())
            if taken is not None:
                self._remove_file(*taken)
        while self._lost_groups:
            version = self._versions.pop(self._lost_groups.popleft(), None)
            if version is not None:
                self._planner.discard(version)
                self._deliver()

    # Saving ------------------------------------------------------------------------------------

    def _flush_one(self, key: str) -> None:
        with self._changed:
            version = self._versions.get(key)
            if version is None or not self._is_dirty(version):
                return
            self._planner.save(version)
            self._deliver()
        self._waiting.wait(Request(key, version=version), self._saved)

    def _is_dirty(self, version: str) -> bool:
        return self._carrier.cargo(version).durable and not self._planner.saved(version)

    def _saved(self, request: Request) -> bool | None:
        """Whether a save is over. With the lock held."""
        version = request.version
        self._check_open(saving=True)
        self._collect_lost()
        if version not in self._planner or self._planner.saved(version):
            return True
        error = self._planner.error_of(version)
        if error is not None:
            self._planner.forgive(version)
            raise error
        if not self._planner.saving(version):
            # Changed again before we woke up, or somebody else was told of a failure.
            self._planner.save(version)
            self._deliver()
        return None

    # Between the planner and the carrier -------------------------------------------------------

    def _locked(self) -> Condition:
        """The lock, once it is known that the store may be used."""
        self._check_open()
        return self._changed

    def _check_open(self, *, saving: bool = False) -> None:
        if self._closed or (self._closing and not saving):
            raise ClosedError("the store is closed: open a new TierStore on its disk_dir")
        if os.getpid() != self._pid:
            raise ClosedError(
                "this process was forked from the one that opened the store: open a TierStore of "
                "its own, with another disk_dir, after the fork"
            )

    def _lookup(self, key: str) -> str:
        version = self._versions.get(key)
        if version is None:
            damage = self._directory.damaged.get(object_name(key)) if key else None
            raise damage or UnknownKeyError(key)
        return version

    def _deliver(self) -> None:
        """Hand the planner's instructions on, in order, and wake whoever waits. With the lock."""
        instructions = self._planner.instructions()
        if instructions:
            self._carrier.accept(instructions)
        self._observer.level(self._planner.used)
        self._waiting.changed()

    def _ending(self, copy: Copy) -> None:
        with self._changed:
            self._planner.ending(copy.key, copy.dst, copy.src)
            self._deliver()

    def _arrived(self, copy: Copy, error: BaseException | None) -> None:
        with self._changed:
            if error is None:
                self._planner.arrived(copy.key, copy.dst, copy.src)
            else:
                self._planner.failed(copy.key, copy.dst, copy.src, error)
            self._deliver()


def _shut_down(carrier: ThreadCarrier, directory: ObjectDirectory, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has neither the threads nor the lock
        carrier.stop()
        directory.close()
