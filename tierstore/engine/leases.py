"""Leases of groups on the fastest tier."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tierstore.engine.copy_threads import CopyThreads
from tierstore.engine.core import Core
from tierstore.engine.lease_table import LeaseTable
from tierstore.engine.puts import Puts
from tierstore.engine.request_loop import RequestLoop
from tierstore.engine.transaction import transaction
from tierstore.engine.wait_queue import MAX_ENTRY_SECONDS, LeaseRecord, Request, RequestKind
from tierstore.errors import LeaseError, ServiceLostError
from tierstore.lease import Lease, OpenLease
from tierstore.model import events
from tierstore.model.groups import NO_GROUP, GroupId
from tierstore.model.tiers import Access
from tierstore.observe.journal import PLANNED
from tierstore.plan.records import State
from tierstore.system.views import clone_all

Value = torch.Tensor | dict[str, torch.Tensor]


class Leases:
    """Leases of groups on the fastest tier. `acquire` and its variants may block."""

    def __init__(
        self,
        core: Core,
        lease_table: LeaseTable,
        requests: RequestLoop,
        copy_threads: CopyThreads,
        puts: Puts,
    ) -> None:
        self.core = core
        self._puts = puts
        self._copy_threads = copy_threads
        self._lease_table = lease_table
        self._requests = requests

    def acquire(self, key: str, access: Access, timeout: float | None = None) -> Lease:
        """See `TierStore.acquire`."""
        self._copy_shared_for_update(key, access)
        return self._requests.wait(self._request(key, access), self._attempt, timeout)

    async def acquire_async(self, key: str, access: Access, timeout: float | None = None) -> Lease:
        """See `TierStore.aacquire`."""
        if Access(access) is Access.UPDATE and self._is_shared(key):
            await self._copy_threads.run(lambda: self._copy_shared_for_update(key, access))
        return await self._requests.wait_async(self._request(key, access), self._attempt, timeout)

    def get(self, key: str, timeout: float | None = None) -> Value:
        """See `TierStore.get`."""
        with self.acquire(key, Access.READ, timeout) as lease:
            return self._copy_tensors(lease)

    async def get_async(self, key: str, timeout: float | None = None) -> Value:
        """See `TierStore.aget`."""
        request = self._request(key, Access.READ)
        lease = await self._requests.wait_async(request, self._attempt, timeout)
        assert request.record is not None, "the lease was granted"
        self._lease_table.detach_owner(request.record)

        def copy() -> Value:
            # Released by the thread that reads the memory, even if the caller was cancelled.
            with lease:
                return self._copy_tensors(lease)

        return await self._copy_threads.run(copy)

    def _copy_tensors(self, lease: Lease) -> Value:
        entry = self.core.mover.entry(lease.group)
        copies = clone_all(entry.spec, lease.tensors)
        return next(iter(copies.values())) if entry.single else copies

    def acquire_permanently(self, key: str, access: Access) -> Lease:
        """Acquire a lease that is not released while others wait for its memory."""
        self._copy_shared_for_update(key, access)
        request = self._request(key, access)
        request.owner = None  # so that deadlock detection does not expect its release
        return self._requests.wait(request, self._attempt)

    def acquire_for_plan(self, owner: object, key: str) -> Lease:
        """Lease a group to read, for `owner`, which enters the plan of a loop.

        Does not count as a use in the learned order of this thread. Raises LoopLeftError if the
        plan has been left.
        """

        def attempt(request: Request) -> Lease | None:
            self.core.check_still_entering(request)
            return self._attempt(request)

        request = self._request(key, Access.READ)
        request.owner, request.stream, request.noted.met = owner, id(owner), PLANNED
        return self._requests.wait(request, attempt, MAX_ENTRY_SECONDS)

    # Groups leased from a service ----------------------------------------------------------------

    @transaction
    def _is_shared(self, key: str) -> bool:
        group = self.core.current.get(key)
        return group is not None and self.core.tiers.host.is_shared(self.core.mover.entry(group))

    def _copy_shared_for_update(self, key: str, access: Access) -> None:
        """Replace a group that a service holds by a private copy, before it is changed."""
        if Access(access) is not Access.UPDATE or not self._is_shared(key):
            return
        with self._requests.wait(self._request(key, Access.READ), self._attempt) as lease:
            entry, tensors = self.core.mover.entry(lease.group), dict(lease.tensors)
            self._puts.put(key, tensors, durable=True, single=entry.single)

    # For a service -------------------------------------------------------------------------------

    def try_acquire_for_worker(self, key: str, stream: int) -> Lease | None:
        """Lease a group to read for a worker, given by number. Return None if it would block."""
        return self._requests.attempt_once(self._service_request(key, stream), self._attempt)

    async def acquire_for_worker(
        self, key: str, stream: int, on_memory_shortage: Callable[[], None]
    ) -> Lease:
        """Lease a group to read for a worker. Wait until it is resident.

        Calls `on_memory_shortage`, possibly many times, while the group must wait for other leases
        to be released.
        """

        def attempt(request: Request) -> Lease | None:
            lease = self._attempt(request)
            if lease is None and not self._requests.is_in_flight(request):
                on_memory_shortage()
            return lease

        return await self._requests.wait_async(self._service_request(key, stream), attempt)

    @transaction
    def end_stream(self, stream: int) -> None:
        """Forget the use order of a worker that disconnected. Its leases have ended."""
        if not self.core.is_stopped():
            self.core.apply(events.StreamEnded(stream))

    def _service_request(self, key: str, stream: int) -> Request:
        # A separate owner for each lease: its holder can proceed while others in the worker wait.
        return Request(key, RequestKind.LEASE, owner=object(), stream=stream)

    def _request(self, key: str, access: Access) -> Request:
        self.core.check_not_capturing()
        return Request(key, RequestKind.LEASE, Access(access))

    def _attempt(self, request: Request) -> Lease | None:
        """Lease the group if it is resident; else demand it, and return None."""
        core = self.core
        core.check_open()
        core.run_deferred()
        planner, group = core.planner, request.group
        demanded = core.current.get(request.key) == group
        if not demanded:  # the first attempt, or the group was replaced meanwhile
            group = core.lookup(request.key)
            demanded = not planner.leasable(group, request.access)
            if demanded:
                core.leave_loop("a group that is not resident was requested")
                self._demand(request, group)
            elif not request.noted.met:
                core.observer.acquire_begun(request.noted, "hit")
        error = planner.error_of(group)
        if error is not None:
            raise error
        if not demanded or planner.leasable(group, request.access):
            return self._grant(request, group, demanded)
        if request.access is not Access.READ:
            check_not_permanently_leased(core, request)
        core.observer.acquire_waits(request.noted, request.key)
        return None

    def _demand(self, request: Request, group: GroupId) -> None:
        """Demand from the planner a group that cannot be leased yet."""
        core = self.core
        if isinstance(core.planner.error_of(group), ServiceLostError):
            # Clear the error of an earlier prefetch: the service may be back.
            core.instructions_for(events.ErrorReported(group), free_disk=False)
        state = core.planner.state_of(group)
        instructions = core.instructions_for(events.Demanded(group, request.stream))
        request.group = group
        if not request.noted.met:
            met = "hit" if state is State.PRESENT else "late" if state else "miss"
            core.observer.acquire_begun(request.noted, met)
        if instructions or state is not State.PRESENT:  # otherwise nothing has to move
            core.deliver(instructions)

    def _grant(self, request: Request, group: GroupId, demanded: bool) -> Lease:
        core = self.core
        if request.access is not Access.READ:
            core.leave_loop("a group is being changed", request.key)
        permanent = request.owner is None
        leased = events.Leased(group, request.access, permanent, demanded, request.stream)
        instructions = core.instructions_for(leased)
        noted = request.noted
        record = LeaseRecord(group, request.owner, noted.met, noted.since, access=request.access)
        core.deliver(instructions)  # first: a group leased for writing loses its other copies
        request.record = record
        self._lease_table.add(record)
        request.group = NO_GROUP
        entry = core.mover.entry(group)
        nbytes = entry.spec.nbytes
        own = (
            not core.tiers.host.is_shared(entry) or core.tiers.device is not None
        )  # in memory of this process
        if own and nbytes > core.largest:
            core.largest = nbytes
        top, changes = core.tiers.top, request.access is Access.UPDATE
        tensors = dict(top.writable_view(entry) if changes else top.view(entry))
        record.tensors = tensors
        record.stream = stream = core.current_stream()
        core.observer.acquire_arriving(noted, request.key, entry.arrival, stream)
        core.order_after_arrival(entry, stream)
        core.observer.acquire_granted(noted, record, nbytes, stream, entry.use_order)
        return OpenLease(request.key, group, tensors, self._lease_table, record)


def check_not_permanently_leased(core: Core, request: Request) -> None:
    """Raise LeaseError if the group has a permanent lease in host memory."""
    if core.planner.leased_permanently(request.group):
        raise LeaseError(
            f"group {request.key!r} is leased until the end of a training run: acquire it with "
            "Access.READ, or wait until the run ends"
        )
