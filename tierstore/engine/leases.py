"""How a group is leased on the fastest tier."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tierstore.engine.copy_threads import CopyThreads
from tierstore.engine.core import Core
from tierstore.engine.lease_table import LeaseTable
from tierstore.engine.puts import Puts
from tierstore.engine.request_loop import RequestLoop
from tierstore.engine.transaction import transaction
from tierstore.engine.wait_queue import LONGEST_ENTRY, LeaseRecord, Request, RequestKind
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
    """Leases of groups on the fastest tier. `acquire` and its twins may wait."""

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
        self._own_what_changes(key, access)
        return self._requests.wait(self._request(key, access), self._attempt, timeout)

    async def acquire_async(self, key: str, access: Access, timeout: float | None = None) -> Lease:
        """See `TierStore.aacquire`."""
        if Access(access) is Access.UPDATE and self._is_shared(key):
            await self._copy_threads.run(lambda: self._own_what_changes(key, access))
        return await self._requests.wait_async(self._request(key, access), self._attempt, timeout)

    def get(self, key: str, timeout: float | None = None) -> Value:
        """See `TierStore.get`."""
        with self.acquire(key, Access.READ, timeout) as lease:
            return self._copied(lease)

    async def get_async(self, key: str, timeout: float | None = None) -> Value:
        """See `TierStore.aget`."""
        request = self._request(key, Access.READ)
        lease = await self._requests.wait_async(request, self._attempt, timeout)
        assert request.record is not None, "it was granted"
        self._lease_table.hand_over(request.record)

        def copy() -> Value:
            # Released by who reads the leased memory, whether or not anybody still waits for it.
            with lease:
                return self._copied(lease)

        return await self._copy_threads.run(copy)

    def _copied(self, lease: Lease) -> Value:
        entry = self.core.mover.entry(lease.group)
        copies = clone_all(entry.spec, lease.tensors)
        return next(iter(copies.values())) if entry.single else copies

    def acquire_permanently(self, key: str, access: Access) -> Lease:
        """`acquire`, for who never gives it back as long as others may wait for its room."""
        self._own_what_changes(key, access)
        request = self._request(key, access)
        request.owner = None  # nobody waits for it
        return self._requests.wait(request, self._attempt)

    def acquire_for_plan(self, owner: object, key: str) -> Lease:
        """Lease a group to read, for `owner`, which enters the plan of a loop. That is no use in
        the order of this thread. Raises LoopLeftError if the plan was left meanwhile."""

        def attempt(request: Request) -> Lease | None:
            self.core.check_still_entering(request)
            return self._attempt(request)

        request = self._request(key, Access.READ)
        request.owner, request.stream, request.noted.met = owner, id(owner), PLANNED
        return self._requests.wait(request, attempt, LONGEST_ENTRY)

    # What a service serves ---------------------------------------------------------------------

    @transaction
    def _is_shared(self, key: str) -> bool:
        group = self.core.current.get(key)
        return group is not None and self.core.tiers.host.lends(self.core.mover.entry(group))

    def _own_what_changes(self, key: str, access: Access) -> None:
        """What a service serves, nobody may change: a copy of the caller's own takes its place."""
        if Access(access) is not Access.UPDATE or not self._is_shared(key):
            return
        with self._requests.wait(self._request(key, Access.READ), self._attempt) as lease:
            entry, tensors = self.core.mover.entry(lease.group), dict(lease.tensors)
            self._puts.put(key, tensors, durable=True, single=entry.single)

    # For a service -------------------------------------------------------------------------------

    def try_for(self, key: str, stream: int) -> Lease | None:
        """A lease to read for the worker of this number, if the group is there. It never waits."""
        return self._requests.attempt_once(self._service_request(key, stream), self._attempt)

    async def acquire_for(self, key: str, stream: int, short_of_room: Callable[[], None]) -> Lease:
        """`try_for`, as soon as the group is there. `short_of_room` is told, maybe often, when room
        must come back from those who have leases."""

        def attempt(request: Request) -> Lease | None:
            lease = self._attempt(request)
            if lease is None and not self._requests.is_coming(request):
                short_of_room()
            return lease

        return await self._requests.wait_async(self._service_request(key, stream), attempt)

    @transaction
    def end_stream(self, stream: int) -> None:
        """A worker is gone. Its leases were given back."""
        if not self.core.ended():
            self.core.tell(events.StreamEnded(stream))

    def _service_request(self, key: str, stream: int) -> Request:
        # Each lease has an owner of its own: who has it goes on, though others there may wait.
        return Request(key, RequestKind.LEASE, owner=object(), stream=stream)

    def _request(self, key: str, access: Access) -> Request:
        self.core.refuse_capture()
        return Request(key, RequestKind.LEASE, Access(access))

    def _attempt(self, request: Request) -> Lease | None:
        """Lease the group if it is there."""
        core = self.core
        core.check_open()
        core.collect_garbage()
        planner, group = core.planner, request.group
        demanded = core.current.get(request.key) == group
        if not demanded:  # the first time, and if it was replaced meanwhile
            group = core.lookup(request.key)
            demanded = not planner.leasable(group, request.access)
            if demanded:
                core.leave_loop("a group was asked for that is not there")
                self._demand(request, group)
            elif not request.noted.met:
                core.observer.asked(request.noted, "hit")
        error = planner.error_of(group)
        if error is not None:
            raise error
        if not demanded or planner.leasable(group, request.access):
            return self._grant(request, group, demanded)
        if request.access is not Access.READ:
            refuse_permanently_leased(core, request)
        core.observer.waits(request.noted, request.key)
        return None

    def _demand(self, request: Request, group: GroupId) -> None:
        """Insist on a group that cannot be leased at once."""
        core = self.core
        if isinstance(core.planner.error_of(group), ServiceLostError):
            # Of a prefetch; it may be back by now.
            core.handled(events.ErrorReported(group), make_room=False)
        state = core.planner.state_of(group)
        instructions = core.handled(events.Demanded(group, request.stream))
        request.group = group
        if not request.noted.met:
            met = "hit" if state is State.PRESENT else "late" if state else "miss"
            core.observer.asked(request.noted, met)
        if instructions or state is not State.PRESENT:  # otherwise nothing has to move
            core.deliver(instructions)

    def _grant(self, request: Request, group: GroupId, demanded: bool) -> Lease:
        core = self.core
        if request.access is not Access.READ:
            core.leave_loop("a group is changed", request.key)
        permanent = request.owner is None
        leased = events.Leased(group, request.access, permanent, demanded, request.stream)
        instructions = core.handled(leased)
        noted = request.noted
        record = LeaseRecord(group, request.owner, noted.met, noted.since, access=request.access)
        core.deliver(instructions)  # first: what is leased to be changed has no other copy
        request.record = record
        self._lease_table.add(record)
        request.group = NO_GROUP
        entry = core.mover.entry(group)
        nbytes = entry.spec.nbytes
        own = (
            not core.tiers.host.lends(entry) or core.tiers.device is not None
        )  # in memory of this process
        if own and nbytes > core.largest:
            core.largest = nbytes
        top, changes = core.tiers.top, request.access is Access.UPDATE
        tensors = dict(top.view_to_change(entry) if changes else top.view(entry))
        record.tensors = tensors
        record.stream = stream = core.current_stream()
        core.observer.arrives(noted, request.key, entry.arrival, stream)
        core.order_after_arrival(entry, stream)
        core.observer.granted(noted, record, nbytes, stream, entry.use_order)
        return OpenLease(request.key, group, tensors, self._lease_table, record)


def refuse_permanently_leased(core: Core, request: Request) -> None:
    """Raise LeaseError if the group is leased in host memory by who never gives it back."""
    if core.planner.leased_permanently(request.group):
        raise LeaseError(
            f"group {request.key!r} is leased for good, by who trains with it: read it, or wait "
            "until that is over"
        )
