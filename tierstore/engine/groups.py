"""Register groups, pass on hints, and discard groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from tierstore.engine.checkpoints import CheckpointFile
from tierstore.engine.core import Core
from tierstore.engine.derived_cache import DerivedCache
from tierstore.engine.in_place_groups import (
    ObjectFile,
    TensorsToWrite,
    checkpoint_groups,
    describe_in_place,
    stamp_of,
)
from tierstore.engine.keys import check_callers_key
from tierstore.engine.mirrors import mirror
from tierstore.engine.remote_groups import RemoteGroups, fetch_tensors
from tierstore.engine.transaction import transaction
from tierstore.model import events
from tierstore.model.groups import FileTensor, GroupId, GroupSpec, Source
from tierstore.model.locks import inside
from tierstore.model.tiers import Tier, UseOrder
from tierstore.system.file_table import HeldFile
from tierstore.system.files import FileStamp
from tierstore.system.maps import AddressSpace, unnamed_file_memory
from tierstore.tiers.entry import GroupEntry, SharedGroup
from tierstore.tiers.workers import Future

NO_CASTS: Mapping[str, torch.dtype] = {}


@dataclass(frozen=True)
class FileGroup:
    """A group stored in files, `held` open by path; `shared` if a service holds it."""

    spec: GroupSpec
    source: Source
    held: Mapping[str, HeldFile]
    shared: SharedGroup | None = None


class Groups:
    """Registers groups in place, passes on hints, and discards groups.

    `register` and `discard` may block.
    """

    def __init__(self, core: Core, made: DerivedCache) -> None:
        self.core = core
        self.remote = RemoteGroups(core)
        self._derived = made

    # Registering in place ----------------------------------------------------------------------

    def open_files(self, files: Iterable[CheckpointFile]) -> dict[str, HeldFile]:
        """Open the files of a checkpoint, by path. Waits for the disk."""
        table = self.core.tiers.disk.files
        return {
            file.path: table.hold(file.path, file.stamp, file.header_digest)
            for file in files
            if isinstance(file.stamp, FileStamp)
        }

    def register_files(
        self,
        files: list[CheckpointFile],
        held: Mapping[str, HeldFile],
        prefix: str,
        groups: Mapping[str, Iterable[str]] | None,
    ) -> dict[str, tuple[GroupSpec, Source]]:
        """See `TierStore.register_checkpoint`. Returns the registered groups by key."""
        found = checkpoint_groups(files, prefix, groups)
        for key in found:
            check_callers_key(key)
        if any(file.remote is not None for file in files):
            self._add_remote(self.remote.describe(files, found, single=groups is None))
            return found
        described = {key: FileGroup(*location, held) for key, location in found.items()}
        self._add_files(self._shared(described), single=groups is None)
        return found

    def _shared(self, found: Mapping[str, FileGroup]) -> Mapping[str, FileGroup]:
        """Offer groups to the service, if there is one, before they are registered. May block.

        Raises ServiceLostError, or an error about their files.
        """
        core, host, table = self.core, self.core.tiers.host, self.core.tiers.disk.files
        if not host.connected or not found:
            return found
        core.check_open()
        for key in found:
            core.check_key_is_new(key)
        files: dict[str, HeldFile] = {}
        shared = {}
        for key, group in found.items():
            files.update(group.held)
            for path in group.source.paths - files.keys():  # an object file that the service keeps
                files[path] = table.hold(path, stamp_of(path))
            used = {path: files[path] for path in group.source.paths}
            served = SharedGroup(key, group.spec.nbytes, group.source, used)
            shared[key] = replace(group, shared=served)
        host.offer([group.shared for group in shared.values() if group.shared is not None])
        return shared

    @transaction
    def _add_remote(self, found: Mapping[str, GroupEntry]) -> None:
        core = self.core
        core.check_open()
        core.run_deferred()  # groups that finalizers discarded are no duplicates
        for key in found:
            core.check_key_is_new(key)
        for entry in found.values():
            self.remote.add(entry)

    @transaction
    def _add_files(self, found: Mapping[str, FileGroup], *, single: bool) -> None:
        core = self.core
        core.check_open()
        core.run_deferred()  # groups that finalizers discarded are no duplicates
        for key in found:
            core.check_key_is_new(key)
        for key, group in found.items():
            self._add(key, group, single=single)

    def register(
        self,
        key: str,
        tensors: Mapping[str, torch.Tensor],
        space: AddressSpace | None = None,
        casts: Mapping[str, torch.dtype] = NO_CASTS,
        use_order: UseOrder = UseOrder.LEARNED,
    ) -> dict[str, torch.Tensor]:
        """See `TierStore.register`.

        `space`, the address map of the process, saves time if many groups are registered in a row.
        `casts` gives the dtype of each tensor that the group holds in another dtype. As long as its
        source files are unchanged, the result of a cast is reused without reading or writing
        weights.
        """
        core = self.core
        check_callers_key(key)
        core.check_open()
        core.check_key_is_new(key)
        write_once = partial(self._write_once, routed=use_order is UseOrder.ROUTED)
        reference_to = core.references.of_path
        described = describe_in_place(
            tensors, space or AddressSpace(), write_once, casts, reference_to
        )
        files = core.tiers.disk.files
        held = {path: files.hold(path, stamp) for path, stamp in described.stamps.items()}
        found = self._shared({key: FileGroup(described.spec, described.source, held)})
        self.add(key, found[key], use_order)
        return described.host_views

    @transaction
    def add(self, key: str, found: FileGroup, use_order: UseOrder = UseOrder.LEARNED) -> None:
        """Add a group that is stored in files. Raises DuplicateKeyError."""
        core = self.core
        core.check_open()
        core.check_key_is_new(key)
        self._add(key, found, use_order=use_order)

    def _add(
        self,
        key: str,
        found: FileGroup,
        *,
        single: bool = False,
        use_order: UseOrder = UseOrder.LEARNED,
    ) -> None:
        core = self.core
        group = core.new_group(key)
        order = core.next_number()
        source, held, shared = found.source, found.held, found.shared
        entry = GroupEntry(
            group,
            found.spec,
            replace(source, keeps=core.references.of_source(source)),
            single=single,
            files={path: held[path] for path in source.paths if path in held},
            order=order,
            backing=Tier.DISK,
            use_order=use_order,
        )
        if shared is not None:
            core.tiers.host.set_shared(entry, shared)
        core.mover.add(entry)
        core.apply(
            events.Registered(
                group,
                found.spec.nbytes,
                backing=True,
                use_order=use_order,
                shared=shared is not None,
            )
        )
        core.current[key] = group

    def _write_once(self, wanted: TensorsToWrite, *, routed: bool) -> ObjectFile:
        """Return the object file with exactly these tensors, found by content or written.

        A `routed` group may be all experts of a layer, and larger than host memory.
        """
        found = self._derived.get(wanted.derivation)
        if found is not None and wanted.matches(found.stored):
            return found
        return self._derived.put(wanted.derivation, wanted.values(), of_any_size=routed)

    def get_derived(self, derivation: str | None) -> dict[str, torch.Tensor] | None:
        """Return the cached result of a derivation (see `derivation_of`) as maps of its file."""
        found = self._derived.get(derivation)
        return None if found is None else found.views()

    def put_derived(
        self, derivation: str | None, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Cache the result of a derivation in a file. Return its tensors as maps of the file.

        They belong to no group until they are registered, in place.
        """
        return self._derived.put(derivation, tensors, of_any_size=True).views()

    def fetch_tensors(
        self, file: CheckpointFile, tensors: Sequence[FileTensor]
    ) -> dict[str, torch.Tensor]:
        """Return tensors of a remote file, as maps of cached files in the store's directory.

        Fetches those that are not cached. Waits for the network and the disk.

        Raises StaleCheckpointError, TransferError, DiskFullError or BudgetError.
        """
        self.core.check_open()
        return fetch_tensors(file, tensors, self.get_derived, self.put_derived)

    def allocate_file_memory(self, nbytes: int) -> memoryview:
        """Return memory in an unlinked file, for weights that do not fit in RAM.

        Does not count against a budget. Raises DiskFullError or TransferError.
        """
        self.core.check_open()
        return unnamed_file_memory(self.core.directory.path, nbytes)

    def download_mirror(self, url: str, *, subfolder: str, variant: str | None) -> str:
        """Download the files of a pretrained model at a URL, and return their directory.

        Files that are there already are not downloaded again: see `mirror`. Waits for the network
        and the disk.
        """
        self.core.check_open()
        return mirror(url, self.core.directory.path, subfolder=subfolder, variant=variant)

    # Hints -------------------------------------------------------------------------------------

    @transaction
    def prefetch(self, keys: Iterable[str]) -> None:
        """Hint: these groups are acquired next, in order. Raises UnknownKeyError."""
        core = self.core
        core.check_open()
        core.apply(events.Expected(tuple(core.lookup(key) for key in keys)))

    @transaction
    def prefetch_existing(self, keys: Iterable[str], top: Tier) -> None:
        """Hint: these groups are used next, on `top` or a slower tier. Skips unknown keys."""
        core = self.core
        core.check_open()
        core.run_deferred()
        found = [core.current.get(key) for key in keys]
        core.apply(events.Expected(tuple(group for group in found if group is not None), top))

    @transaction
    def offload(self, key: str) -> None:
        """Hint: a group is not needed on the device for now."""
        core = self.core
        core.check_open()
        core.apply(events.Offloaded(core.lookup(key)))

    @transaction
    def make_sticky(self, key: str) -> None:
        """Hint: evict a group last."""
        core = self.core
        core.check_open()
        group = core.lookup(key)
        core.mover.entry(group).sticky = True
        core.apply(events.MadeSticky(group))

    # The end of groups -------------------------------------------------------------------------

    def discard(self, key: str) -> None:
        """See `TierStore.discard`."""
        if inside():  # called by a finalizer inside a transaction: the next one discards it
            group = self.core.lookup(key)
            self.core.deferred.append(partial(self._discard_if_current, key, group))
            return
        removal = self._discard_now(key)
        if removal is not None:
            self.core.wait_for_removal(removal)

    def _discard_if_current(self, key: str, group: GroupId) -> None:
        if self.core.current.get(key) == group:
            self._discard(key)

    @transaction
    def _discard_now(self, key: str) -> Future[None] | None:
        self.core.check_open()
        return self._discard(key)

    def _discard(self, key: str) -> Future[None] | None:
        """Discard a group. Return the pending removal of its file. Part of a transaction."""
        core = self.core
        disk = core.tiers.disk
        if key not in core.current and disk.is_delete_pending(key):
            return disk.remove(key, core.next_number(), True)
        group = core.lookup(key)
        core.leave_loop("a group was discarded", key)
        durable = core.mover.entry(group).durable and not core.planner.backed(group)
        del core.current[key]
        core.apply(events.Discarded(group))
        return disk.remove(key, core.next_number(), durable)

    def discard_from_finalizer(self, keys: Iterable[str]) -> None:
        """Discard registered groups, and free their memory, once a model is gone.

        Does so now if the lock is free, or else at the next transaction. For finalizers, which may
        run inside a transaction.
        """
        self.discard_at_next_transaction(keys)
        self.core.run_deferred_if_free()

    def discard_at_next_transaction(self, keys: Iterable[str]) -> None:
        """Discard groups at the next transaction: tensors that map their files still exist now."""
        self.core.deferred.extend(partial(self.discard_in_transaction, key) for key in keys)
        self.core.deferred.append(self.core.idle_memory.free)

    def discard_in_transaction(self, key: str) -> None:
        """Discard a group without a file in the store, if it exists. Part of a transaction."""
        core = self.core
        core.leave_loop("a group was discarded", key)
        group = core.current.pop(key, None)
        if group is not None:
            core.apply(events.Discarded(group))
