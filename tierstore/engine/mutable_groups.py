"""Mutable groups: parameters in training, their gradients, and optimizer state.

Such a group is changed in host memory, under a lease there. While it is not leased, its copy on
disk has its own extent, and can be viewed as CPU tensors: shared maps of the file, which take no
memory until they are read. Writes to them go to the file, so the store does not have to detect
them.

This requires that no copy in memory is newer than the file. The adapter therefore moves a group to
disk before it views it, and again after each pass that used it.

The store does not learn the order of use of these groups. The training adapter knows the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from tierstore.engine.core import Core, check_disk_budget
from tierstore.engine.groups import Groups
from tierstore.engine.lease_table import LeaseTable
from tierstore.engine.leases import check_not_permanently_leased
from tierstore.engine.puts import Puts
from tierstore.engine.request_loop import RequestLoop
from tierstore.engine.saves import Saves
from tierstore.engine.transaction import transaction
from tierstore.engine.wait_queue import MAX_ENTRY_SECONDS, LeaseRecord, Request, RequestKind
from tierstore.lease import Lease, OpenLease
from tierstore.model import events
from tierstore.model.groups import NO_GROUP, GroupId
from tierstore.model.moves import Instruction
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder
from tierstore.plan.records import State
from tierstore.system.views import block_tensors, pack_tensors, packed_spec
from tierstore.tiers.entry import GroupEntry


class MutableGroups:
    """Groups that change.

    `create`, `put`, `lease_in_host`, `move_to_disk` and `wait_for_arrivals` may block.
    """

    def __init__(
        self,
        core: Core,
        lease_table: LeaseTable,
        requests: RequestLoop,
        puts: Puts,
        saves: Saves,
        groups: Groups,
    ) -> None:
        self.core = core
        self._lease_table = lease_table
        self._requests = requests
        self._puts = puts
        self._saves = saves
        self._groups = groups

    # Creation ----------------------------------------------------------------------------------

    def create(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store copies of tensors as a mutable group, which does not outlive the store.

        Raises DuplicateKeyError, and the errors of `TierStore.put`.
        """
        self.core.check_open()
        self.core.check_key_is_new(key)
        self._puts.put_with(
            key, tensors, self.core.tiers.host.fill, mutable=True, use_order=UseOrder.PREFETCHED
        )

    def create_on_disk(self, key: str, like: Mapping[str, torch.Tensor]) -> None:
        """Create a mutable group on disk only, for tensors like these, with undefined values.

        Raises DuplicateKeyError, TypeError, BudgetError, DiskFullError or TransferError.
        """
        core = self.core
        core.check_open()
        core.check_key_is_new(key)
        packing, _ = pack_tensors(key, like)
        spec = packed_spec(key, packing, like)
        group = core.new_group(key)
        entry = GroupEntry(
            group, spec, None, packing, False, mutable=True, use_order=UseOrder.PREFETCHED
        )
        check_disk_budget(self.core, key, spec.nbytes)
        core.tiers.disk.create(entry)
        self._add(key, entry)

    @transaction
    def _add(self, key: str, entry: GroupEntry) -> None:
        core = self.core
        core.check_open()
        core.check_key_is_new(key)
        check_disk_budget(self.core, key, entry.spec.nbytes)
        core.mover.add(entry)
        core.apply(events.Registered(entry.group, entry.spec.nbytes, use_order=UseOrder.PREFETCHED))
        core.current[key] = entry.group

    def put(
        self, key: str, tensors: Mapping[str, torch.Tensor], *, in_place: bool
    ) -> dict[str, torch.Tensor]:
        """Put tensors that other code keeps changing, as a group that is not durable.

        Returns the host views of the tensors. Those are the same tensors if they are `in_place`,
        that is, host views from an earlier call. Otherwise they are copies in an unlinked file,
        which takes no RAM. Raises the errors of `TierStore.put`.
        """
        self.core.check_open()
        host_views = dict(tensors) if in_place else self._in_file_memory(key, tensors)
        self._puts.put(key, host_views, durable=False)
        return host_views

    def _in_file_memory(
        self, key: str, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        packing, blocks = pack_tensors(key, tensors)
        memory = self._groups.allocate_file_memory(max(packing.nbytes, 1))
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        host_views = {}
        for block, at in zip(packing.blocks, packing.offsets, strict=True):
            whole[at : at + block.nbytes].copy_(blocks[block.name])
            host_views.update(block_tensors(block.views, memory, at))
        return host_views

    # Leases in host memory -----------------------------------------------------------------------

    def lease_in_host(self, key: str, purpose: HostAccess, owner: object = None) -> Lease:
        """Lease a group in host memory. Blocks until it is resident there.

        The owner is this caller, or `owner`. During the lease, a caller that knows that the group
        does not change may acquire it to read it on the device. With `HostAccess.PERMANENT`,
        callers that need its memory fail immediately instead of waiting. Raises the errors of
        `TierStore.acquire`.
        """
        core = self.core
        core.check_open()
        access = Access.READ if purpose is HostAccess.READ else Access.UPDATE
        request = Request(key, RequestKind.HOST_LEASE, access, purpose)
        if owner is not None:
            request.owner = owner
        for_plan = owner is not None and owner is core.followed
        if for_plan:  # not a use in the learned order of this thread
            request.stream = id(owner)
        try:
            longest = MAX_ENTRY_SECONDS if for_plan else None
            record = self._requests.wait(request, self._try_to_lease, longest)
            tensors = core.tiers.host.view_for_caller(core.mover.entry(record.group))
            return OpenLease(key, record.group, tensors, self._lease_table, record)
        except BaseException:
            self._requests.cancel(request)
            raise

    def _try_to_lease(self, request: Request) -> LeaseRecord | None:
        core, purpose = self.core, request.purpose
        assert purpose is not None, "the request is for a lease in host memory"
        core.check_open()
        core.check_still_entering(request)
        core.run_deferred()
        if core.current.get(request.key) != request.group:
            group = core.lookup(request.key)
            if purpose is not HostAccess.READ:
                core.leave_loop("a group is being changed", request.key)
            if not core.planner.host_leasable(group, purpose):
                core.leave_loop("a group that is not in host memory was requested")
            instructions = core.instructions_for(events.HostDemanded(group, purpose))
            request.group = group
            core.deliver(instructions)
        group = request.group
        error = core.planner.error_of(group)
        if error is not None:
            raise error
        check_not_permanently_leased(core, request)
        if not core.planner.host_leasable(group, purpose):
            return None
        instructions = core.instructions_for(events.HostLeased(group, purpose, request.stream))
        owner = None if purpose is HostAccess.PERMANENT else request.owner
        record = LeaseRecord(
            group, owner, "held", request.noted.since, access=request.access, host_access=purpose
        )
        core.deliver(instructions)  # first: a group leased for writing loses its other copies
        request.record = record
        if owner is None:
            core.permanent_host_bytes += core.mover.entry(group).spec.nbytes
        self._lease_table.add(record)
        request.group = NO_GROUP
        return record

    def fill(
        self, key: str, target: torch.Tensor, source: torch.Tensor, *, add: bool
    ) -> torch.Event | None:
        """Copy or add `source` to `target`.

        `target` is a tensor of a group that the caller has leased for writing, or of its view on
        disk. A copy from the store's device is asynchronous: it returns an event, and until the
        event completes, `source` must not be changed or freed, nor `target` read. Otherwise returns
        None.
        """
        return self.core.tiers.host.fill_part(self._entry(key), target, source, add=add)

    @transaction
    def _entry(self, key: str) -> GroupEntry:
        return self.core.mover.entry(self.core.lookup(key))

    # On disk -------------------------------------------------------------------------------------

    @transaction
    def write_back(self, key: str) -> None:
        """Begin to save a changed group. Never blocks; `move_to_disk` raises if the save fails."""
        core = self.core
        core.check_open()
        core.apply(events.SpillAdvised(core.lookup(key)))

    def move_to_disk(self, keys: Iterable[str]) -> None:
        """Move groups to disk, and free their memory as soon as it is not leased.

        Blocks until they are on disk. If a save fails, raises its error, and keeps that group in
        memory.
        """
        groups = self._save_all(list(keys))
        for key, group in groups:
            self._saves.wait_until_saved(key, group)
            self._release_memory(group)
        # A copy in flight has the old bytes, and must end before new bytes are written.
        for key, group in groups:
            self._wait_while(key, group, self._is_arriving_anywhere)

    @transaction
    def _save_all(self, keys: list[str]) -> list[tuple[str, GroupId]]:
        core = self.core
        core.check_open()
        groups = [(key, core.lookup(key)) for key in keys]
        instructions: list[Instruction] = []
        for _, group in groups:
            if not core.planner.saved(group):
                instructions += core.instructions_for(events.SaveRequested(group))
        core.deliver(instructions)
        return groups

    @transaction
    def _release_memory(self, group: GroupId) -> None:
        if group in self.core.planner:
            self.core.apply(events.MemoryReleased(group))

    @transaction
    def view_on_disk(self, key: str) -> dict[str, torch.Tensor]:
        """Return the disk copy of a group that was moved to disk, as shared maps: CPU tensors.

        They are correct as long as the group is moved to disk after each change. Raises
        TransferError if the file system does not support shared maps.
        """
        core = self.core
        core.check_open()
        return core.tiers.disk.view(core.mover.entry(core.lookup(key)))

    # Hints ---------------------------------------------------------------------------------------

    def wait_for_arrivals(self, keys: Iterable[str]) -> None:
        """Wait until none of the groups is in flight to the fastest tier."""
        for key, group in self._arriving(list(keys)):
            self._wait_while(key, group, self._is_arriving)

    @transaction
    def _arriving(self, keys: list[str]) -> list[tuple[str, GroupId]]:
        core = self.core
        core.check_open()
        found = [(key, core.current.get(key)) for key in keys]
        return [(k, group) for k, group in found if group is not None and self._is_arriving(group)]

    def _is_arriving(self, group: GroupId) -> bool:
        return self.core.planner.state_of(group) is State.ARRIVING

    def _is_arriving_anywhere(self, group: GroupId) -> bool:
        return self.core.planner.arriving(group)

    def _wait_while(self, key: str, group: GroupId, goes_on: Callable[[GroupId], bool]) -> None:
        def is_finished(request: Request) -> bool | None:
            core = self.core
            core.check_open(saving=True)
            return group not in core.planner or not goes_on(group) or None

        self._requests.wait(Request(key, RequestKind.SAVE, group=group), is_finished)

    def prefetch_to_host(self, keys: Iterable[str]) -> None:
        """Hint: these groups are leased in host memory next, in order.

        Like `TierStore.prefetch`, but takes no device memory.
        """
        self._groups.prefetch_existing(keys, Tier.HOST)

    def prefetch(self, keys: Iterable[str]) -> None:
        """Hint: these groups are acquired next, in order."""
        self._groups.prefetch_existing(keys, self.core.planner.top)
