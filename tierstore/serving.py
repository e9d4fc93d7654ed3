"""How groups are put, lent and saved: what happens in a store's steps."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TypeVar

import torch

from tierstore.books import Books
from tierstore.copiers import Copiers
from tierstore.lease import Lease, OpenLease
from tierstore.model import events
from tierstore.model.errors import (
    BudgetError,
    ClosedError,
    LeaseError,
    StoreTimeoutError,
    TierStoreError,
    TransferError,
)
from tierstore.model.groups import NO_GROUP, GroupId
from tierstore.model.objects import refuse_unreadable
from tierstore.model.tiers import Access
from tierstore.plan.records import State
from tierstore.progress import bar
from tierstore.settings import Settings
from tierstore.steps import step
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.streams import selecting
from tierstore.tiers.views import laid_out, packed
from tierstore.tiers.workers import Answer, weakly
from tierstore.waiting import Lent, Request, Want

T = TypeVar("T")

DEAD = 30.0
"""Seconds without any sign of life after which `close` does not wait for a disk any more."""


class Serving(Books):
    """What a store does for those who put, use and save groups."""

    def __init__(self, settings: Settings) -> None:
        # What was garbage-collected: that may happen in the middle of any step.
        self._lost_leases: deque[Lent] = deque()
        self._lost_groups: deque[str] = deque()
        self._copiers = Copiers(selecting(settings.device))
        super().__init__(settings)

    # Putting -----------------------------------------------------------------------------------

    def _claim(
        self,
        request: Request,
        tensors: torch.Tensor | Mapping[str, torch.Tensor],
        durable: bool,
        *,
        guided: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Ask for room for what is put. Returns the bytes to fill it with."""
        self._check_open()
        self._refuse_capture()
        key, single = request.key, isinstance(tensors, torch.Tensor)
        named = {key: tensors} if isinstance(tensors, torch.Tensor) else tensors
        packing, sources = packed(key, named)
        if durable:
            refuse_unreadable(key, packing, single=single)
        version = self._new_version(key)
        spec = laid_out(key, packing, named)
        self._enter(
            request, GroupEntry(version, spec, None, packing, durable, single, guided=guided)
        )
        return sources

    @step
    def _enter(self, request: Request, entry: GroupEntry) -> None:
        self._check_open()
        instructions = self._handled(
            events.Claimed(entry.key, entry.spec.nbytes, caller_scheduled=entry.guided)
        )
        self._mover.add(entry)
        request.version = entry.key  # first: who gives it up looks for this
        self._putting[entry.key] = None
        self._deliver(instructions)

    def _fill(self, request: Request, data: Mapping[str, torch.Tensor], durable: bool) -> None:
        """Fill the room that was granted, and let readers see it. Copies; waits for nobody."""
        self._tiers.host.fill(self._mover.entry(request.version), data)
        self._filled(request, durable)

    def _fill_whole(
        self, request: Request, data: Mapping[str, torch.Tensor], durable: bool
    ) -> None:
        """`_fill`, or nothing at all."""
        try:
            self._fill(request, data, durable)
        except BaseException:
            self._give_up(request)
            raise

    def _filled(self, request: Request, durable: bool) -> None:
        """Let readers see what was put into the room that was granted."""
        removal = self._show(request, durable)
        if removal is not None:
            # If it fails, this is put all the same, and who flushes is told.
            with suppress(TransferError):
                self._see_removed(removal)

    @step
    def _show(self, request: Request, durable: bool) -> Answer[None] | None:
        """Readers see the new version from now on. Returns the removal of the old one's file."""
        self._check_open()  # what is not seen now is not written by who closes the store
        version, key = request.version, request.key
        replaced = self._versions.get(key)
        was_durable = replaced is not None and self._mover.entry(replaced).durable
        entry = self._mover.entry(version)
        entry.order = newest = self._newest_so_far()
        self._versions[key] = version
        self._putting.pop(version, None)
        request.version = NO_GROUP
        instructions = self._handled(events.Filled(version))
        if replaced is not None:
            instructions += self._handled(events.Discarded(replaced))
        self._deliver(instructions)
        return None if durable else self._tiers.disk.remove(key, newest, was_durable)

    async def _off_the_loop(self, job: Callable[[], T]) -> T:
        """Run `job` on a thread of ours, in order with the device work of this one."""
        here = self._stream()

        def in_order() -> T:
            with here:
                return job()

        return await self._copiers.run(in_order)

    def _stream(self) -> AbstractContextManager[object]:
        """The stream of the caller's device work; entered on another thread, it is used there."""
        if self.device.type == "cpu":
            return nullcontext()
        return torch.accelerator.current_stream(self.device)

    def _granted(self, request: Request) -> bool | None:
        """Whether the room for a put is there."""
        self._check_open()
        self._collect_lost()
        error = self._planner.error_of(request.version)
        if error is not None:
            raise error
        return self._planner.granted(request.version) or None

    # Lending -----------------------------------------------------------------------------------

    def _asked(self, key: str, access: Access) -> Request:
        self._refuse_capture()
        return Request(key, Want.LEASE, Access(access))

    def _demand(self, request: Request, version: GroupId) -> None:
        """Insist on a group that cannot be lent at once."""
        state = self._planner.state_of(version)
        instructions = self._handled(events.Demanded(version))
        request.version = version
        if not request.met:
            met = "hit" if state is State.PRESENT else "late" if state else "miss"
            self._observer.asked(request, met)
        if state is not State.PRESENT:  # otherwise nothing has to move
            self._deliver(instructions)

    def _attempt(self, request: Request) -> Lease | None:
        """Lease the group if it is there."""
        self._check_open()
        self._collect_lost()
        planner, version = self._planner, request.version
        demanded = self._versions.get(request.key) == version
        if not demanded:  # the first time, and if it was replaced meanwhile
            version = self._lookup(request.key)
            demanded = not planner.lendable(version, request.access)
            if demanded:
                self._demand(request, version)
            elif not request.met:
                self._observer.asked(request, "hit")
        error = planner.error_of(version)
        if error is not None:
            raise error
        if not demanded or planner.lendable(version, request.access):
            return self._lend(request, version, demanded)
        if request.access is not Access.READ:
            self._refuse_what_is_kept(request)
        self._observer.waits(request)
        return None

    def _refuse_what_is_kept(self, request: Request) -> None:
        if self._planner.kept(request.version):
            raise LeaseError(
                f"group {request.key!r} is held for good, by who trains with it: read it, or wait "
                "until that is over"
            )

    def _lend(self, request: Request, version: GroupId, demanded: bool) -> Lease:
        permanent = request.owner is None
        instructions = self._handled(events.Leased(version, request.access, permanent, demanded))
        loan = Lent(version, request.owner, request.met, request.since, access=request.access)
        self._deliver(instructions)  # first: what is lent to be changed has no other copy
        request.loan = loan
        self._out[loan] = None
        request.version = NO_GROUP
        self._waiting.lend(loan.caller, version)
        entry = self._mover.entry(version)
        tensors = self._tiers.top.view(entry)
        loan.stream = self.current_stream()
        self._observer.arrives(request, entry.arrival, loan.stream)
        self._order_after_arrival(entry, loan.stream)
        learned = not entry.guided
        self._observer.granted(request, loan, entry.spec.nbytes, loan.stream, learned=learned)
        return OpenLease(
            request.key,
            version,
            dict(tensors),
            self,
            loan,
        )

    def _ready(self, request: Request) -> bool:
        version, planner = request.version, self._planner
        if self._closing or self._ended() or request.want not in (Want.LEASE, Want.ROOM):
            return True
        if version not in planner or planner.error_of(version) is not None:
            return True
        if request.want is Want.ROOM:
            return planner.granted(version)
        if self._versions.get(request.key) != version or planner.lendable(version, request.access):
            return True
        return request.access is not Access.READ and planner.kept(version)

    def _refuse_the_hopeless(self, request: Request, held: set[GroupId]) -> None:
        if request.version in held:
            raise LeaseError(
                f"group {request.key!r} is leased by callers that all wait for something: release "
                "those leases first"
            )
        nbytes = sum(self._mover.entry(version).spec.nbytes for version in held)
        top = self._planner.top
        raise BudgetError(
            request.key,
            top.name,
            self._mover.entry(request.version).spec.nbytes,
            self._planner.budgets[top] or 0,
            f"the leases of callers that all wait hold {nbytes:,} bytes; release some of them "
            "first, or raise the budget",
        )

    def _release(self, loan: Lent) -> None:
        if os.getpid() != self._pid:
            return  # it is the parent's
        self._refuse_capture()  # where the lease ends could not be asked of a graph
        loan.stream = self.current_stream()
        removal = self._give_back(loan)
        if removal is not None:
            self._see_removed(removal)

    @step
    def _hand_on(self, loan: Lent) -> None:
        """Somebody else gives the lease back: whoever asked may wait for things meanwhile."""
        self._waiting.give_back(loan.caller, loan.version)
        loan.caller = object()
        self._waiting.lend(loan.caller, loan.version)

    def _lose(self, loan: Lent) -> bool:
        """Take a lease back at the next step: finalizers may run anywhere. False if it is back."""
        if loan not in self._out:
            return False
        self._lost_leases.append(loan)
        return True

    def _take_away(self, loan: Lent) -> None:
        if loan.access is Access.TAKE:
            loan.access = Access.READ  # nobody has read it
        self._give_back(loan)

    def _give_back(self, loan: Lent) -> Answer[None] | None:
        """Take back what was lent, once. Returns the removal of the file of what was taken."""
        return self._end_lease(loan)

    @step
    def _end_lease(self, loan: Lent) -> Answer[None] | None:
        """Take a lease back, once. Returns the removal of the file of what was taken."""
        if self._ended() or loan not in self._out:
            return None
        mark = None
        if (device := self._tiers.device) is not None:
            mark = device.times.mark(loan.stream)
            device.used_on(self._mover.entry(loan.version), mark.event)
        version, access, key = loan.version, loan.access, loan.version.key
        self._resting.pop(loan, None)
        # In this order: if it is cut short, it can be done again.
        if access is Access.TAKE and self._versions.get(key) == version:
            del self._versions[key]
        del self._out[loan]
        permanent = loan.caller is None
        self._waiting.give_back(loan.caller, version)
        self._observer.released(loan, mark)
        entry = self._mover.entry(version)
        self._mover.look()
        for measured in self._lessons.take():
            self._handled(measured)
        self._tell(events.Released(version, access, permanent))
        if access is not Access.TAKE or key in self._versions:
            return None
        return self._tiers.disk.remove(key, self._newest_so_far(), entry.durable)

    def _see_removed(self, removal: Answer[None]) -> None:
        """Wait for a removal, and wake who flushes: they wait for it, too.

        Where an event loop runs, nothing waits: `flush` and `close` tell if it fails.
        """
        if asyncio._get_running_loop() is not None:
            removal.then(weakly(weakref.WeakMethod(self._stir)))
            return
        try:
            removal.wait()
        finally:
            self._stir()

    @step
    def _stir(self) -> None:
        self._waiting.changed()

    def discard_soon(self, keys: Iterable[str]) -> None:
        """Forget groups taken by `register` at the next step. For finalizers, which may run
        anywhere, so that nothing can be done at once."""
        self._lost_groups.extend(keys)

    def _collect_lost(self) -> None:
        super()._collect_lost()
        while self._lost_leases:
            self._give_back(self._lost_leases[0])
            self._lost_leases.popleft()
        while self._lost_groups:
            version = self._versions.pop(self._lost_groups[0], None)
            self._lost_groups.popleft()
            if version is not None:
                self._tell(events.Discarded(version))

    # Saving ------------------------------------------------------------------------------------

    def _flush_one(self, key: str, timeout: float | None = None) -> None:
        """Wait until nothing older than what there is now of a key is on disk."""
        request = self._of_version(key, self._begin_to_save(key))
        pending = request.version is not NO_GROUP
        self._wait(request, self._saved if pending else self._removed, timeout)

    def _of_version(self, key: str, version: GroupId) -> Request:
        request = Request(key, Want.SAVE)
        request.version = version
        return request

    @step
    def _begin_to_save(self, key: str) -> GroupId:
        """The version of a key that is not on disk yet, but will be; NO_GROUP if there is none."""
        version = self._versions.get(key)
        if version is None or not self._is_dirty(version):
            return NO_GROUP
        self._tell(events.SaveRequested(version))
        return version

    def _is_dirty(self, version: GroupId) -> bool:
        return self._mover.entry(version).durable and not self._planner.saved(version)

    def _saved(self, request: Request) -> bool | None:
        """Whether a save is over."""
        self._check_open(saving=True)
        self._collect_lost()
        if request.version not in self._planner:
            return self._superseded(request)
        version = request.version
        if self._planner.saved(version):
            return True
        error = self._planner.error_of(version)
        if error is not None:
            self._tell(events.ErrorReported(version))
            raise error
        if not self._planner.saving(version):
            # Changed again before we woke up, or somebody else was told of a failure.
            self._tell(events.SaveRequested(version))
        return None

    def _superseded(self, request: Request) -> bool | None:
        """Whether the disk has nothing older than what was to be saved, and then was replaced."""
        key = request.key
        newest = self._versions.get(key)
        if newest is not None and self._mover.entry(newest).durable:
            request.version = newest
            return self._saved(request)
        return self._removed(request)

    def _removed(self, request: Request) -> bool | None:
        """Whether no file of the key is being removed."""
        self._check_open(saving=True)
        return request.key not in self._tiers.disk.removing() or None

    def _flush_all(self, timeout: float | None = None) -> None:
        ends = None if timeout is None else time.monotonic() + timeout
        errors = []
        for key in bar(self._dirty(), "Writing what is not on disk", "groups"):
            left = None if ends is None else max(ends - time.monotonic(), 0.0)
            errors.append(self._save_error(key, left))
        errors += self._tiers.disk.remove_leftovers()
        self._raise_first(errors)

    @step
    def _dirty(self) -> list[str]:
        """The keys of which something else is on disk than there should be."""
        unsaved = {key: None for key, version in self._versions.items() if self._is_dirty(version)}
        return list(unsaved | dict.fromkeys(self._tiers.disk.removing()))

    def _save_error(self, key: str, timeout: float | None) -> BaseException | None:
        try:
            self._flush_one(key, timeout)
        except TierStoreError as error:
            return error
        return None

    def _flush_before_end(self) -> None:
        """Flush, for as long as the disk does anything."""
        errors: list[BaseException | None] = []
        for key in bar(self._dirty(), "Writing what is not on disk", "groups"):
            error = self._save_error(key, DEAD)
            while isinstance(error, StoreTimeoutError) and self._tiers.disk.idle_for() < DEAD:
                error = self._save_error(key, DEAD)
            if isinstance(error, ClosedError):
                return  # somebody else closes the store, too, and was faster
            errors.append(error)
            if isinstance(error, StoreTimeoutError):
                break
        else:
            errors += self._tiers.disk.remove_leftovers()
        self._raise_first(errors)

    @staticmethod
    def _raise_first(errors: Iterable[BaseException | None]) -> None:
        for error in errors:
            if error is not None:
                raise error
