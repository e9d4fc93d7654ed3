"""Which groups there are: taken by reference, hinted at, forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from tierstore.engine.adoption import (
    KeptObject,
    Unadopted,
    adopt,
    checkpoint_groups,
    stamp_of,
)
from tierstore.engine.checkpoints import CheckpointFile
from tierstore.engine.core import Core
from tierstore.engine.keys import check_callers_key
from tierstore.engine.made_weights import MadeWeights
from tierstore.engine.mirrors import mirror
from tierstore.engine.remote_groups import RemoteGroups, fetched
from tierstore.engine.transaction import transaction
from tierstore.model import events
from tierstore.model.groups import FileTensor, GroupId, GroupSpec, Source
from tierstore.model.locks import inside
from tierstore.model.tiers import Tier, UseOrder
from tierstore.system.file_table import HeldFile
from tierstore.system.files import FileStamp
from tierstore.system.maps import AddressSpace, nameless_file_memory
from tierstore.tiers.entry import GroupEntry, SharedGroup
from tierstore.tiers.workers import Future

NO_CASTS: Mapping[str, torch.dtype] = {}


@dataclass(frozen=True)
class FileGroup:
    """A group whose bytes lie in files, `held` open by path. What is `shared`, a service serves."""

    spec: GroupSpec
    source: Source
    held: Mapping[str, HeldFile]
    shared: SharedGroup | None = None


class Groups:
    """Groups by reference, hints, and the end of groups. `adopt` and `discard` may wait."""

    def __init__(self, core: Core, made: MadeWeights) -> None:
        self.core = core
        self.remote = RemoteGroups(core)
        self._made = made

    # By reference ------------------------------------------------------------------------------

    def hold(self, files: Iterable[CheckpointFile]) -> dict[str, HeldFile]:
        """Open the files of a checkpoint. Waits for the disk."""
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
        """See `TierStore.register_checkpoint`. Returns what was registered, by key."""
        found = checkpoint_groups(files, prefix, groups)
        for key in found:
            check_callers_key(key)
        if any(file.remote is not None for file in files):
            self._know_remote(self.remote.describe(files, found, single=groups is None))
            return found
        described = {key: FileGroup(*lying, held) for key, lying in found.items()}
        self._know_files(self._shared(described), single=groups is None)
        return found

    def _shared(self, found: Mapping[str, FileGroup]) -> Mapping[str, FileGroup]:
        """Have the service know groups that are about to be registered, if there is one. Waits.

        Raises ServiceLostError, or what is wrong with their files.
        """
        core, host, table = self.core, self.core.tiers.host, self.core.tiers.disk.files
        if not host.connected or not found:
            return found
        core.check_open()
        for key in found:
            core.refuse_duplicate(key)
        files: dict[str, HeldFile] = {}
        shared = {}
        for key, group in found.items():
            files.update(group.held)
            for path in group.source.paths - files.keys():  # an object file of the service
                files[path] = table.hold(path, stamp_of(path))
            used = {path: files[path] for path in group.source.paths}
            served = SharedGroup(key, group.spec.nbytes, group.source, used)
            shared[key] = replace(group, shared=served)
        host.offer([group.shared for group in shared.values() if group.shared is not None])
        return shared

    @transaction
    def _know_remote(self, found: Mapping[str, GroupEntry]) -> None:
        core = self.core
        core.check_open()
        core.collect_garbage()  # what a finalizer has discarded is no duplicate
        for key in found:
            core.refuse_duplicate(key)
        for entry in found.values():
            self.remote.know(entry)

    @transaction
    def _know_files(self, found: Mapping[str, FileGroup], *, single: bool) -> None:
        core = self.core
        core.check_open()
        core.collect_garbage()  # what a finalizer has discarded is no duplicate
        for key in found:
            core.refuse_duplicate(key)
        for key, group in found.items():
            self._know(key, group, single=single)

    def register(
        self,
        key: str,
        tensors: Mapping[str, torch.Tensor],
        space: AddressSpace | None = None,
        casts: Mapping[str, torch.dtype] = NO_CASTS,
        use_order: UseOrder = UseOrder.LEARNED,
    ) -> dict[str, torch.Tensor]:
        """See `TierStore.register`.

        `space` saves time where many groups are registered in a row: what is mapped where, looked
        up once. `casts` has the dtypes of those tensors that the group is to hold cast. What was
        cast from the same files before, as they are still, is neither read nor written again.
        """
        core = self.core
        check_callers_key(key)
        core.check_open()
        core.refuse_duplicate(key)
        write_once = partial(self._write_once, routed=use_order is UseOrder.ROUTED)
        reference_to = core.references.of_path
        adoption = adopt(tensors, space or AddressSpace(), write_once, casts, reference_to)
        files = core.tiers.disk.files
        held = {path: files.hold(path, stamp) for path, stamp in adoption.stamps.items()}
        found = self._shared({key: FileGroup(adoption.spec, adoption.source, held)})
        self.know(key, found[key], use_order)
        return adoption.homes

    @transaction
    def know(self, key: str, found: FileGroup, use_order: UseOrder = UseOrder.LEARNED) -> None:
        """A group lies in files. Raises DuplicateKeyError."""
        core = self.core
        core.check_open()
        core.refuse_duplicate(key)
        self._know(key, found, use_order=use_order)

    def _know(
        self,
        key: str,
        found: FileGroup,
        *,
        single: bool = False,
        use_order: UseOrder = UseOrder.LEARNED,
    ) -> None:
        core = self.core
        group = core.new_group(key)
        order = core.newest()
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
            core.tiers.host.know_lent(entry, shared)
        core.mover.add(entry)
        core.tell(
            events.Registered(
                group,
                found.spec.nbytes,
                backing=True,
                use_order=use_order,
                shared=shared is not None,
            )
        )
        core.current[key] = group

    def _write_once(self, wanted: Unadopted, *, routed: bool) -> KeptObject:
        """The object file with exactly these tensors: found by their content, or written.

        What is `routed` may be all experts of a layer, and never be in memory as a whole.
        """
        found = self._made.find(wanted.derivation)
        if found is not None and wanted.is_as(found.stored):
            return found
        return self._made.keep(wanted.derivation, wanted.values(), of_any_size=routed)

    def made_before(self, derivation: str | None) -> dict[str, torch.Tensor] | None:
        """What was kept for this derivation (see `derivation_of`), as maps of its file."""
        found = self._made.find(derivation)
        return None if found is None else found.views()

    def keep_made(
        self, derivation: str | None, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Write tensors once, for who makes the same of the same bytes again. Returns maps of them.

        They belong to no group: whoever registers them later finds them in their file.
        """
        return self._made.keep(derivation, tensors, of_any_size=True).views()

    def fetched(
        self, file: CheckpointFile, tensors: Sequence[FileTensor]
    ) -> dict[str, torch.Tensor]:
        """Tensors of a file in an object store, as maps of files in the store's directory: fetched,
        unless they were before. Waits for the network and the disk.

        Raises StaleCheckpointError, TransferError, DiskFullError or BudgetError.
        """
        self.core.check_open()
        return fetched(file, tensors, self.made_before, self.keep_made)

    def file_memory(self, nbytes: int) -> memoryview:
        """Memory for what is going to be registered, if it is too much for RAM: in a file without
        a name, beside the budgets. Raises DiskFullError or TransferError."""
        self.core.check_open()
        return nameless_file_memory(self.core.directory.path, nbytes)

    def mirrored(self, url: str, *, subfolder: str, variant: str | None) -> str:
        """A directory with what a library loads of the pretrained model at a URL, downloaded unless
        it was before: see `mirror`. Waits for the network and the disk."""
        self.core.check_open()
        return mirror(url, self.core.directory.path, subfolder=subfolder, variant=variant)

    # Hints -------------------------------------------------------------------------------------

    @transaction
    def expect(self, keys: Iterable[str]) -> None:
        """These are acquired next, in order. Raises UnknownKeyError."""
        core = self.core
        core.check_open()
        core.tell(events.Expected(tuple(core.lookup(key) for key in keys)))

    @transaction
    def expect_known(self, keys: Iterable[str], top: Tier) -> None:
        """These come next, on a tier up to `top`. What is not there any more does not."""
        core = self.core
        core.check_open()
        core.collect_garbage()
        found = [core.current.get(key) for key in keys]
        core.tell(events.Expected(tuple(group for group in found if group is not None), top))

    @transaction
    def offload(self, key: str) -> None:
        """A group is not needed on the device for now."""
        core = self.core
        core.check_open()
        core.tell(events.Offloaded(core.lookup(key)))

    @transaction
    def make_sticky(self, key: str) -> None:
        """A group should stay in memory once it was used."""
        core = self.core
        core.check_open()
        group = core.lookup(key)
        core.mover.entry(group).sticky = True
        core.tell(events.MadeSticky(group))

    # The end of groups -------------------------------------------------------------------------

    def discard(self, key: str) -> None:
        """See `TierStore.discard`."""
        if inside():  # a finalizer's, in the middle of a transaction: the next one does it
            group = self.core.lookup(key)
            self.core.deferred.append(partial(self._forget_if_current, key, group))
            return
        removal = self._forget_now(key)
        if removal is not None:
            self.core.wait_for_removal(removal)

    def _forget_if_current(self, key: str, group: GroupId) -> None:
        if self.core.current.get(key) == group:
            self._forget(key)

    @transaction
    def _forget_now(self, key: str) -> Future[None] | None:
        self.core.check_open()
        return self._forget(key)

    def _forget(self, key: str) -> Future[None] | None:
        """Forget a group, as part of a transaction. Returns the removal of its file."""
        core = self.core
        disk = core.tiers.disk
        if key not in core.current and disk.is_left(key):
            return disk.remove(key, core.newest(), True)
        group = core.lookup(key)
        core.leave_loop("a group was discarded", key)
        durable = core.mover.entry(group).durable and not core.planner.backed(group)
        del core.current[key]
        core.tell(events.Discarded(group))
        return disk.remove(key, core.newest(), durable)

    def discard_soon(self, keys: Iterable[str]) -> None:
        """Forget groups taken by `register`, and give their memory back, once a model is gone: at
        once, or at the next transaction. For finalizers, which may run in the middle of one."""
        self.discard_next(keys)
        self.core.collect_garbage_if_free()

    def discard_next(self, keys: Iterable[str]) -> None:
        """`discard_soon`, but at the next transaction: tensors that are about to go show these."""
        self.core.deferred.extend(partial(self.forget_generation, key) for key in keys)
        self.core.deferred.append(self.core.idle_memory.give_back)

    def forget_generation(self, key: str) -> None:
        """Forget a group that has no file of its own, if it is there; as part of a transaction."""
        core = self.core
        core.leave_loop("a group was discarded", key)
        group = core.current.pop(key, None)
        if group is not None:
            core.tell(events.Discarded(group))
