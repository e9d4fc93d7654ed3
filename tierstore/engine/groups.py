"""Which groups there are: taken by reference, hinted at, forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch

from tierstore.engine.adoption import (
    CASTS,
    WEIGHTS,
    Adoption,
    Unadopted,
    adopt,
    checkpoint_groups,
    content_hash,
    object_views,
)
from tierstore.engine.checkpoints import CheckpointFile
from tierstore.engine.core import Core, refuse_beyond_the_disk
from tierstore.engine.keys import check_callers_key
from tierstore.engine.puts import Puts
from tierstore.engine.saves import Saves
from tierstore.engine.transaction import transaction
from tierstore.model import events
from tierstore.model.groups import GroupSpec, Source
from tierstore.model.objects import StoredObject
from tierstore.model.tiers import Tier, UseOrder
from tierstore.observe.journal import hop
from tierstore.system.file_table import HeldFile
from tierstore.system.maps import AddressSpace, nameless_file_memory
from tierstore.system.objects import intact_object
from tierstore.system.views import laid_out, packed
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.workers import Future

NO_CASTS: Mapping[str, torch.dtype] = {}
CONTENT = "content"
"""The name of the one tensor in objects under `CASTS`."""


class Groups:
    """Groups by reference, hints, and the end of groups. `adopt` and `discard` may wait."""

    def __init__(self, core: Core, puts: Puts, saves: Saves) -> None:
        self.core = core
        self._puts = puts
        self._saves = saves

    # By reference ------------------------------------------------------------------------------

    def hold(self, files: Iterable[CheckpointFile]) -> dict[str, HeldFile]:
        """Open the files of a checkpoint. Waits for the disk."""
        table = self.core.tiers.disk.files
        return {f.path: table.hold(f.path, f.stamp, f.header_digest) for f in files}

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
        self._know_files(held, found, single=groups is None)
        return found

    @transaction
    def _know_files(
        self,
        held: Mapping[str, HeldFile],
        found: Mapping[str, tuple[GroupSpec, Source]],
        *,
        single: bool,
    ) -> None:
        core = self.core
        core.check_open()
        for key in found:
            core.refuse_duplicate(key)
        for key, (spec, source) in found.items():
            self._know(key, spec, source, held, single=single)

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
        adoption = adopt(tensors, space or AddressSpace(), write_once, casts)
        files = core.tiers.disk.files
        held = {path: files.hold(path, stamp) for path, stamp in adoption.stamps.items()}
        self._know_adopted(key, adoption, held, use_order)
        return adoption.homes

    @transaction
    def _know_adopted(
        self, key: str, adoption: Adoption, held: Mapping[str, HeldFile], use_order: UseOrder
    ) -> None:
        core = self.core
        core.check_open()
        core.refuse_duplicate(key)
        self._know(key, adoption.spec, adoption.source, held, use_order=use_order)

    def _know(
        self,
        key: str,
        spec: GroupSpec,
        source: Source,
        held: Mapping[str, HeldFile],
        *,
        single: bool = False,
        use_order: UseOrder = UseOrder.LEARNED,
    ) -> None:
        core = self.core
        group = core.new_group(key)
        order = core.newest()
        files = {path: held[path] for path in source.paths if path in held}
        core.mover.add(
            GroupEntry(
                group,
                spec,
                source,
                single=single,
                files=files,
                order=order,
                backed=True,
                use_order=use_order,
            )
        )
        core.tell(events.Registered(group, spec.nbytes, backing=True, use_order=use_order))
        core.current[key] = group

    def _write_once(self, wanted: Unadopted, *, routed: bool) -> tuple[str, StoredObject]:
        """The object file with exactly these tensors: found by their content, or written.

        What is `routed` may be all experts of a layer, and never be in memory as a whole.
        """
        found = self._found(wanted.derivation)
        if found is not None and wanted.is_as(found[1]):
            return found
        values = wanted.values()
        return self._keep(wanted.derivation, values, of_any_size=routed)

    def _keep(
        self,
        derivation: str | None,
        values: Mapping[str, torch.Tensor],
        *,
        of_any_size: bool,
    ) -> tuple[str, StoredObject]:
        content = content_hash(values)
        found = self._put_once(WEIGHTS + content, values, of_any_size=of_any_size)
        if derivation is not None:
            told = torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8)
            self._put_once(CASTS + derivation, {CONTENT: told})
        return found

    def _put_once(
        self, key: str, tensors: Mapping[str, torch.Tensor], *, of_any_size: bool = False
    ) -> tuple[str, StoredObject]:
        if key not in self.core.current:
            budget = self.core.planner.budgets[Tier.HOST]
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            if of_any_size and budget is not None and nbytes > budget:
                self._write(key, tensors)
            else:
                self._puts.put(key, tensors, durable=True)
        stored = self._stored(key)
        self.offload(key)
        return stored

    def _write(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put a group on disk that does not fit into memory: by way of a file without a name."""
        core = self.core
        packing, blocks = packed(key, tensors)
        spec = laid_out(key, packing, tensors)
        refuse_beyond_the_disk(core, key, spec.nbytes)
        memory = self.file_memory(packing.nbytes)
        target = torch.frombuffer(memory, dtype=torch.uint8)
        for block, at in zip(packing.blocks, packing.offsets, strict=True):
            target[at : at + block.nbytes].copy_(blocks[block.name])
        group = core.new_group(key)
        entry = GroupEntry(group, spec, None, packing, order=core.newest())
        core.tiers.disk.write(entry, memory)
        core.mover.journal.count(hop(Tier.HOST, Tier.DISK), spec.nbytes)
        self._know_written(key, entry)

    @transaction
    def _know_written(self, key: str, entry: GroupEntry) -> None:
        core = self.core
        core.check_open()
        core.mover.add(entry)
        core.tell(events.Registered(entry.group, entry.spec.nbytes))
        core.current[key] = entry.group

    def _stored(self, key: str) -> tuple[str, StoredObject]:
        """The object file of a group that is there."""
        self._saves.flush_key(key)  # another thread may have put it, or a write may have failed
        path = self.core.directory.path_of(key)
        return path, intact_object(path)

    def _found(self, derivation: str | None) -> tuple[str, StoredObject] | None:
        """The object file of what was made of the same bytes before; None if there is none."""
        current = self.core.current
        key = CASTS + str(derivation)
        if key not in current:
            return None
        told = object_views(*self._stored(key)).get(CONTENT)
        content = "" if told is None else bytes(told.tolist()).hex()
        if WEIGHTS + content not in current:
            return None
        return self._stored(WEIGHTS + content)

    def made_before(self, derivation: str | None) -> dict[str, torch.Tensor] | None:
        """What was kept for this derivation (see `derivation_of`), as maps of its file."""
        found = self._found(derivation)
        return None if found is None else object_views(*found)

    def keep_made(
        self, derivation: str | None, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Write tensors once, for who makes the same of the same bytes again. Returns maps of them.

        They belong to no group: whoever registers them later finds them in their file.
        """
        return object_views(*self._keep(derivation, tensors, of_any_size=True))

    def file_memory(self, nbytes: int) -> memoryview:
        """Memory for what is going to be registered, if it is too much for RAM: in a file without
        a name, beside the budgets. Raises DiskFullError or TransferError."""
        self.core.check_open()
        return nameless_file_memory(self.core.directory.path, nbytes)

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
        removal = self._forget(key)
        if removal is not None:
            self.core.wait_for_removal(removal)

    @transaction
    def _forget(self, key: str) -> Future[None] | None:
        """Returns the removal of the group's file."""
        core = self.core
        core.check_open()
        disk = core.tiers.disk
        if key not in core.current and disk.is_left(key):
            return disk.remove(key, core.newest(), True)
        group = core.lookup(key)
        durable = core.mover.entry(group).durable and not core.planner.backed(group)
        del core.current[key]
        core.tell(events.Discarded(group))
        return disk.remove(key, core.newest(), durable)

    def discard_soon(self, keys: Iterable[str]) -> None:
        """Forget groups taken by `register` at the next transaction. For finalizers, which may run
        anywhere, so that nothing can be done at once."""
        self.core.deferred.extend(partial(self.forget_generation, key) for key in keys)

    def forget_generation(self, key: str) -> None:
        """Forget a group that has no file of its own, if it is there; as part of a transaction."""
        core = self.core
        group = core.current.pop(key, None)
        if group is not None:
            core.tell(events.Discarded(group))
