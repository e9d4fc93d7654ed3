"""Groups that change all the time: parameters in training, their gradients, an optimizer's state.

Such a group is changed in host memory, by whoever has a lease of it there. While nobody has, its
copy on disk lies in an extent of its own, and can be viewed: as CPU tensors that cost no memory
until they are read, and that are the group as far as anybody can tell. They read as the file does,
and what is written to them is in the file, so that nothing needs to notice it.

For that to be true, nobody may have a copy in memory that the file does not know of. So whoever
views such a group moves it to disk first, and again after each pass in which it was used.

The store learns nothing from the uses of these groups. In training, who uses them knows the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from tierstore.engine.core import Core, refuse_beyond_the_disk
from tierstore.engine.groups import Groups
from tierstore.engine.lease_table import LeaseTable
from tierstore.engine.leases import refuse_permanently_leased
from tierstore.engine.puts import Puts
from tierstore.engine.request_loop import RequestLoop
from tierstore.engine.saves import Saves
from tierstore.engine.transaction import transaction
from tierstore.engine.wait_queue import LONGEST_ENTRY, LeaseRecord, Request, RequestKind
from tierstore.lease import Lease, OpenLease
from tierstore.model import events
from tierstore.model.groups import NO_GROUP, GroupId
from tierstore.model.moves import Instruction
from tierstore.model.tiers import Access, HostAccess, Tier, UseOrder
from tierstore.plan.records import State
from tierstore.system.views import laid_out, packed, show_block
from tierstore.tiers.entry import GroupEntry


class MutableGroups:
    """Groups that change. `create`, `lease_in_host`, `move_to_disk` and `wait_for_arrivals` may
    wait."""

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
        """Store copies of tensors as a group that is going to be changed, and never outlives us.

        Raises what `put` raises, and DuplicateKeyError.
        """
        self.core.check_open()
        self.core.refuse_duplicate(key)
        self._puts.put_with(
            key, tensors, self.core.tiers.host.fill, mutable=True, use_order=UseOrder.ANNOUNCED
        )

    def create_on_disk(self, key: str, like: Mapping[str, torch.Tensor]) -> None:
        """The same, of tensors like these, on disk only: with whatever values.

        Raises DuplicateKeyError, TypeError, BudgetError, DiskFullError or TransferError.
        """
        core = self.core
        core.check_open()
        core.refuse_duplicate(key)
        packing, _ = packed(key, like)
        spec = laid_out(key, packing, like)
        group = core.new_group(key)
        entry = GroupEntry(
            group, spec, None, packing, False, mutable=True, use_order=UseOrder.ANNOUNCED
        )
        refuse_beyond_the_disk(self.core, key, spec.nbytes)
        core.tiers.disk.create(entry)
        self._know(key, entry)

    @transaction
    def _know(self, key: str, entry: GroupEntry) -> None:
        core = self.core
        core.check_open()
        core.refuse_duplicate(key)
        refuse_beyond_the_disk(self.core, key, entry.spec.nbytes)
        core.mover.add(entry)
        core.tell(events.Registered(entry.group, entry.spec.nbytes, use_order=UseOrder.ANNOUNCED))
        core.current[key] = entry.group

    def put(
        self, key: str, tensors: Mapping[str, torch.Tensor], *, in_place: bool
    ) -> dict[str, torch.Tensor]:
        """Store copies of tensors that others change all the time: as a group that is never
        durable, in place of the one of before. Returns what they are while away.

        That is the same tensors if they are `in_place`: if they are what was returned before. Else
        they are copied to memory in a file without a name, which costs no RAM.
        Raises what `put` raises.
        """
        self.core.check_open()
        homes = dict(tensors) if in_place else self._in_file_memory(key, tensors)
        self._puts.put(key, homes, durable=False)
        return homes

    def _in_file_memory(
        self, key: str, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        packing, blocks = packed(key, tensors)
        memory = self._groups.file_memory(max(packing.nbytes, 1))
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        homes = {}
        for block, at in zip(packing.blocks, packing.offsets, strict=True):
            whole[at : at + block.nbytes].copy_(blocks[block.name])
            homes.update(show_block(block.views, memory, at))
        return homes

    # Leases in host memory -----------------------------------------------------------------------

    def lease_in_host(self, key: str, purpose: HostAccess, owner: object = None) -> Lease:
        """The group in host memory, until the lease is released.

        Its holder is this caller, or `owner`. The group may be acquired (to be read on the device)
        meanwhile: by who knows that it does not change then. Of what is leased to KEEP it, those
        who wait for its room are told at once that they wait in vain. Raises what `acquire` raises.
        """
        core = self.core
        core.check_open()
        access = Access.READ if purpose is HostAccess.READ else Access.UPDATE
        request = Request(key, RequestKind.HOST_LEASE, access, purpose)
        if owner is not None:
            request.owner = owner
        for_plan = owner is not None and owner is core.followed
        if for_plan:  # that is no use in the order of this thread
            request.stream = id(owner)
        try:
            longest = LONGEST_ENTRY if for_plan else None
            record = self._requests.wait(request, self._try_to_lease, longest)
            tensors = core.tiers.host.view_for_caller(core.mover.entry(record.group))
            return OpenLease(key, record.group, tensors, self._lease_table, record)
        except BaseException:
            self._requests.give_up(request)
            raise

    def _try_to_lease(self, request: Request) -> LeaseRecord | None:
        core, purpose = self.core, request.purpose
        assert purpose is not None, "it is a request for a lease in host memory"
        core.check_open()
        core.check_still_entering(request)
        core.collect_garbage()
        if core.current.get(request.key) != request.group:
            group = core.lookup(request.key)
            if purpose is not HostAccess.READ:
                core.leave_loop("a group is changed", request.key)
            if not core.planner.host_leasable(group, purpose):
                core.leave_loop("a group was asked for that is not in host memory")
            instructions = core.handled(events.HostDemanded(group, purpose))
            request.group = group
            core.deliver(instructions)
        group = request.group
        error = core.planner.error_of(group)
        if error is not None:
            raise error
        refuse_permanently_leased(core, request)
        if not core.planner.host_leasable(group, purpose):
            return None
        instructions = core.handled(events.HostLeased(group, purpose, request.stream))
        owner = None if purpose is HostAccess.PERMANENT else request.owner
        record = LeaseRecord(
            group, owner, "held", request.noted.since, access=request.access, held=purpose
        )
        core.deliver(instructions)  # first: what is leased to be changed has no other copy
        request.record = record
        if owner is None:
            core.permanent_host_bytes += core.mover.entry(group).spec.nbytes
        self._lease_table.add(record)
        request.group = NO_GROUP
        return record

    def fill(
        self, key: str, target: torch.Tensor, source: torch.Tensor, *, add: bool
    ) -> torch.Event | None:
        """Copy `source` to `target`, or add it to that: a tensor of a group that the caller has
        leased to change it, or of its view on disk.

        What is on the store's device is moved beside what that does next, and an event is returned:
        before it has passed, nothing may change `source` nor get its memory, and nobody may read
        `target`. None: it is done.
        """
        return self.core.tiers.host.fill_part(self._entry(key), target, source, add=add)

    @transaction
    def _entry(self, key: str) -> GroupEntry:
        return self.core.mover.entry(self.core.lookup(key))

    # On disk -------------------------------------------------------------------------------------

    @transaction
    def write_back(self, key: str) -> None:
        """Begin to save a group that was changed. Never waits; `move_to_disk` tells of failures."""
        core = self.core
        core.check_open()
        core.tell(events.SpillAdvised(core.lookup(key)))

    def move_to_disk(self, keys: Iterable[str]) -> None:
        """See that groups are on disk, and not in memory, as soon as nobody uses them there.

        Waits until they are on disk. Raises what a save raises: then the group is where it was.
        """
        groups = self._save_all(list(keys))
        for key, group in groups:
            self._saves.wait_until_saved(key, group)
            self._release_memory(group)
        # What was on its way has the old bytes, and may not be looked at once others are written.
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
                instructions += core.handled(events.SaveRequested(group))
        core.deliver(instructions)
        return groups

    @transaction
    def _release_memory(self, group: GroupId) -> None:
        if group in self.core.planner:
            self.core.tell(events.MemoryReleased(group))

    @transaction
    def view_on_disk(self, key: str) -> dict[str, torch.Tensor]:
        """The copy on disk of a group that was moved there: CPU tensors, shared maps of the file.

        Each has memory of its own kind, and is true for as long as the group is moved to disk
        whenever it was changed. Raises TransferError where the file system knows no such maps.
        """
        core = self.core
        core.check_open()
        return core.tiers.disk.view(core.mover.entry(core.lookup(key)))

    # What comes next -----------------------------------------------------------------------------

    def wait_for_arrivals(self, keys: Iterable[str]) -> None:
        """Wait for those of the groups that are on their way to the fastest tier, or are gone."""
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
        def is_over(request: Request) -> bool | None:
            core = self.core
            core.check_open(saving=True)
            return group not in core.planner or not goes_on(group) or None

        self._requests.wait(Request(key, RequestKind.SAVE, group=group), is_over)

    def expect_in_host(self, keys: Iterable[str]) -> None:
        """Say what is leased in host memory next, in order. A hint, like `TierStore.prefetch`, that
        asks for no room above."""
        self._groups.expect_known(keys, Tier.HOST)

    def expect(self, keys: Iterable[str]) -> None:
        """Say what is acquired next, in order. A hint."""
        self._groups.expect_known(keys, self.core.planner.top)
