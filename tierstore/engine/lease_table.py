"""The leases that are out: how they end, and how an unused one is revoked."""

from __future__ import annotations

from functools import partial

from tierstore.engine.core import Core
from tierstore.engine.transaction import transaction
from tierstore.engine.wait_queue import LeaseRecord
from tierstore.lease import Lease
from tierstore.model import events
from tierstore.model.locks import inside
from tierstore.model.tiers import Access
from tierstore.tiers.workers import Future


class LeaseTable:
    """Leases on the fastest tier and in host memory. Whom a `Lease` goes back to."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def add(self, record: LeaseRecord) -> None:
        """A lease goes out, as part of a transaction."""
        core = self.core
        core.leases[record] = None
        core.queue.add_lease(record.caller, record.group)

    @transaction
    def hand_over(self, record: LeaseRecord) -> None:
        """Somebody else gives the lease back: whoever asked may wait for things meanwhile."""
        self.pass_on(record, object())

    def pass_on(self, record: LeaseRecord, holder: object) -> None:
        """The same, to this holder, as part of a transaction."""
        queue = self.core.queue
        queue.remove_lease(record.caller, record.group)
        record.caller = holder
        queue.add_lease(record.caller, record.group)

    # Leases end --------------------------------------------------------------------------------

    def release(self, record: LeaseRecord) -> None:
        """It comes back. A second time, nothing happens. Waits for the removal of what was taken.

        Raises CaptureError: where the lease ends cannot be asked of a graph.
        """
        core = self.core
        if core.forked():
            return  # it is the parent's
        core.refuse_capture()
        record.stream = core.current_stream()
        if inside():  # a finalizer's, in the middle of a transaction: the next one ends it
            self.lose(record)
            return
        removal = self._end_now(record)
        if removal is not None:
            core.wait_for_removal(removal)

    @transaction
    def _end_now(self, record: LeaseRecord) -> Future[None] | None:
        return self.end(record)

    def lose(self, record: LeaseRecord) -> bool:
        """Take a lease back at the next transaction, for finalizers. False if it is back."""
        if record not in self.core.leases:
            return False
        self.core.deferred.append(partial(self.end, record))
        return True

    def take_back(self, record: LeaseRecord) -> None:
        """Take back a lease that did not reach its caller, or that its holder does not use; as part
        of a transaction."""
        if record.access is Access.TAKE:
            record.access = Access.READ  # nobody has read it
        if record.tensors is not None:
            record.tensors.clear()  # the lease may be kept, but nobody uses it
        self.end(record)

    def end_lease(self, lease: Lease) -> None:
        """Take back a lease that its holder has no use for, as part of a transaction."""
        self.end(lease.revoked())

    def end(self, record: LeaseRecord) -> Future[None] | None:
        """Take a lease back, once, as part of a transaction.

        Returns the removal of the file of what was taken.
        """
        if record.held is None:
            return self._end_on_top(record)
        self._end_in_host(record)
        return None

    def _end_on_top(self, record: LeaseRecord) -> Future[None] | None:
        core = self.core
        if core.ended() or record not in core.leases:
            return None
        mark = None
        group, access, key = record.group, record.access, record.group.key
        entry = core.mover.entry(group)
        if (device := core.tiers.device) is not None:
            mark = device.times.mark(record.stream)
            device.used_on(entry, mark)
        core.revocable.pop(record, None)
        record.tensors = None
        # In this order: if it is cut short, it can be done again.
        if access is Access.TAKE and core.current.get(key) == group:
            del core.current[key]
        del core.leases[record]
        permanent = record.caller is None
        core.queue.remove_lease(record.caller, group)
        core.observer.released(record, mark)
        core.mover.look()
        self.learn()
        core.tell(events.Released(group, access, permanent))
        if access is not Access.TAKE or key in core.current:
            return None
        return core.tiers.disk.remove(key, core.newest(), entry.durable)

    def learn(self) -> None:
        """As part of a transaction: tell the planner what was measured on a device meanwhile."""
        for measured in self.core.measurements.take():
            self.core.handled(measured, make_room=False)

    def _end_in_host(self, record: LeaseRecord) -> None:
        core = self.core
        if core.ended() or record not in core.leases:
            return
        del core.leases[record]
        if record.caller is None:
            core.permanent_host_bytes -= core.mover.entry(record.group).spec.nbytes
        core.queue.remove_lease(record.caller, record.group)
        core.tell(events.HostReleased(record.group))

    # Leases that are not used at the moment ------------------------------------------------------

    @transaction
    def make_revocable(self, record: LeaseRecord) -> bool:
        """Whoever needs the room may end it from now on. False: somebody does, or it is no lease to
        read on the fastest tier."""
        core = self.core
        if core.ended() or record not in core.leases or core.queue.anybody():
            return False
        if record.access is not Access.READ or record.held is not None:
            return False
        if (device := core.tiers.device) is not None:
            record.stream = core.current_stream()
            mark = device.times.mark(record.stream)
            device.used_on(core.mover.entry(record.group), mark)
        core.revocable[record] = None
        return True

    def resume(self, record: LeaseRecord) -> bool:
        """It is in use again. False if it was revoked."""
        core = self.core
        core.refuse_capture()
        # Who takes it out of there has it: this caller, or one who revokes it.
        try:
            del core.revocable[record]
        except KeyError:
            return False
        record.stream = core.current_stream()
        core.order_after_arrival(core.mover.entry(record.group), record.stream)
        return True

    def revoke_all(self) -> None:
        """Take back what is leased and not used, as part of a transaction: somebody would have to
        wait."""
        revocable = self.core.revocable
        while revocable:
            record, _ = revocable.popitem()
            self.take_back(record)
