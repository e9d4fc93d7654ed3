"""The groups of a store that lie in object stores, and the tier that they are on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from tierstore.engine.checkpoint_file import CheckpointFile
from tierstore.engine.core import Core
from tierstore.engine.transaction import transaction
from tierstore.model import events
from tierstore.model.groups import (
    FileTensor,
    GroupSpec,
    Segment,
    Source,
    block_of,
    group_of,
    pack,
    placed,
)
from tierstore.model.tiers import Tier, UseOrder
from tierstore.tiers.entry import REMOTE, GroupEntry, RemoteSource
from tierstore.tiers.object_store import RemoteObject
from tierstore.tiers.remote_tier import RemoteTier, has_cache, remote_tier


class RemoteGroups:
    """The groups of one store that lie in object stores.

    The tier comes with the first of them, or if the directory holds what was fetched before.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self._opening = threading.Lock()
        self._tier: RemoteTier | None = None
        if has_cache(core.directory.path):
            self._open()

    def _open(self) -> RemoteTier:
        """The tier. Waits for the disk, the first time."""
        with self._opening:
            if self._tier is None:
                core = self.core
                core.check_open()
                if core.settings.tiers.link is not None:
                    raise ValueError(
                        "a store that is connected to a service has no object stores of its own: "
                        "open a TierStore(ram_budget, disk_dir), or download the checkpoint"
                    )
                reading = core.mover.hops[Tier.DISK, Tier.HOST]
                tier, hops = remote_tier(core.tiers, core.directory.path, reading)
                core.mover.add_tier(tier, hops)
                self._know_tier(tier)
                self._tier = tier
            return self._tier

    @transaction
    def _know_tier(self, tier: RemoteTier) -> None:
        """Have the planner know the tier, and what was fetched before, as far as that is allowed:
        nobody has told which of it will be needed."""
        core = self.core
        core.settings.tiers.budgets[REMOTE] = 0
        core.rebuild()
        budget, cache = core.planner.budgets[Tier.DISK], tier.cache
        for key, entry in list(cache.left.items()):
            core.mover.add(entry)
            nbytes = entry.spec.nbytes
            if budget is not None and core.planner.used[Tier.DISK] + nbytes > budget:
                del cache.left[key]
                core.tell(_recovered(entry))
                core.tell(events.Discarded(entry.group))
            else:
                core.tell(_recovered(entry))

    def describe(
        self,
        files: Iterable[CheckpointFile],
        found: Mapping[str, tuple[GroupSpec, Source]],
        *,
        single: bool,
    ) -> dict[str, GroupEntry]:
        """Entries of groups, to be known by `know`. Opens the tier. Waits for the disk."""
        self._open()
        objects = {file.path: file.remote for file in files if file.remote is not None}
        tensors = {t.name: t for file in files for t in file.tensors}
        return {
            key: _entry(self.core, key, [tensors[t.name] for t in spec.tensors], objects, single)
            for key, (spec, _) in found.items()
        }

    def know(self, entry: GroupEntry, use_order: UseOrder = UseOrder.LEARNED) -> None:
        """A group lies in an object store. Part of a transaction."""
        core, tier = self.core, self._tier
        assert tier is not None, "the tier was opened before"
        left = tier.cache.take(entry)
        entry.use_order, entry.order = use_order, core.newest()
        core.mover.add(entry)
        if left is not None:
            core.tell(events.Discarded(left.group))
        core.tell(_recovered(entry))
        core.current[entry.group.key] = entry.group


def _recovered(entry: GroupEntry) -> events.Recovered:
    tiers = (REMOTE,) if entry.cached is None else (Tier.DISK, REMOTE)
    return events.Recovered(
        (
            events.RecoveredGroup(
                entry.group,
                entry.spec.nbytes,
                tiers,
                backing=REMOTE,
                use_order=entry.use_order,
                sticky=entry.sticky,
            ),
        )
    )


def _entry(
    core: Core,
    key: str,
    tensors: list[FileTensor],
    objects: Mapping[str, RemoteObject],
    single: bool,
) -> GroupEntry:
    """A group of these tensors. What is fetched is put where an object file has it, so that it lies
    alike whether it was fetched or was there."""
    packing = pack(block_of([placed(t, 0)], t.extent.nbytes) for t in tensors)
    specs = {spec.name: spec for spec in packing.specs()}
    segments = tuple(
        Segment(t.extent, specs[t.name].offset) for t in tensors if t.extent.nbytes
    )
    used = {segment.extent.path for segment in segments}
    return GroupEntry(
        core.new_group(key),
        group_of(key, [specs[t.name] for t in tensors], packing.nbytes),
        packing=packing,
        single=single,
        remote=RemoteSource(segments, {url: objects[url] for url in used}),
    )
