"""The groups of a store that lie in object stores, and the tier that they are on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from tierstore.engine.checkpoint_file import CheckpointFile
from tierstore.engine.core import Core
from tierstore.engine.transaction import transaction
from tierstore.model import events
from tierstore.model.formatting import size
from tierstore.model.groups import (
    FileTensor,
    GroupId,
    GroupSpec,
    Packing,
    Segment,
    Source,
    block_of,
    group_of,
    pack,
    placed,
)
from tierstore.model.locks import RLock, exclusively
from tierstore.model.sizes import slot_bytes
from tierstore.model.tiers import Tier, UseOrder
from tierstore.progress import byte_bar
from tierstore.system.views import view_all
from tierstore.tiers.entry import REMOTE, GroupEntry
from tierstore.tiers.object_store import RemoteObject
from tierstore.tiers.pages import fresh_memory
from tierstore.tiers.remote_tier import (
    IN_FLIGHT,
    RemoteSource,
    RemoteTier,
    cache_key,
    fetch,
    has_cache,
    remote_tier,
)
from tierstore.tiers.workers import Job

logger = logging.getLogger("tierstore.engine")

RUN_BYTES = 64 << 20
"""Bytes of neighbours in a file that are fetched and kept together, if no tensor is larger."""


class RemoteGroups:
    """The groups of one store that lie in object stores.

    The tier comes with the first of them, or if the directory holds what was fetched before.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self._opening = RLock()
        self._tier: RemoteTier | None = None
        if has_cache(core.directory.path):
            self._open()

    def _open(self) -> RemoteTier:
        """The tier. Waits for the disk, the first time."""
        return exclusively(self._opening, self._the_tier)

    def _the_tier(self) -> RemoteTier:
        if self._tier is None:
            core = self.core
            core.check_open()
            if core.tiers.host.connected:
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
        cache = self._open().cache
        objects = {file.path: file.remote for file in files if file.remote is not None}
        tensors = {t.name: t for file in files for t in file.tensors}
        described = {}
        for key, (spec, _) in found.items():
            lying = [tensors[t.name] for t in spec.tensors]
            packing, source = _laid_out(lying, objects)
            described[key] = entry = _entry(self.core.new_group(key), lying, packing, single)
            cache.add(entry, source)
        return described

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


def fetched(
    file: CheckpointFile,
    tensors: Sequence[FileTensor],
    made_before: Callable[[str], dict[str, torch.Tensor] | None],
    keep: Callable[[str, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Tensors of a remote file, as what is `made_before` or what was fetched is kept.

    Raises StaleCheckpointError or TransferError, and what `keep` raises.
    """
    assert file.remote is not None
    found: dict[str, torch.Tensor] = {}
    objects = {file.path: file.remote}
    nbytes = sum(tensor.extent.nbytes for tensor in tensors)
    logger.info("fetching %d weights of %s: %s", len(tensors), file.path, size(nbytes))
    with (
        byte_bar("Fetching weights", nbytes) as advance,
        ThreadPoolExecutor(IN_FLIGHT) as pool,
    ):
        for run in _runs(tensors):
            packing, source = _laid_out(run, objects)
            derivation = cache_key(packing, source, 0)[:32]
            views = made_before(derivation)
            if views is None:
                memory = fresh_memory(slot_bytes(max(packing.nbytes, 1)))
                fetch(source, memory.numpy().data, lambda jobs: all_done(pool, jobs))
                group = group_of("", packing.specs(), packing.nbytes)
                offsets = {spec.name: spec.offset for spec in group.tensors}
                views = keep(derivation, view_all(group, memory, offsets))
            found.update(views)
            advance(source.nbytes)
    return found


def all_done(pool: ThreadPoolExecutor, jobs: Iterable[Job]) -> None:
    """Do jobs on the threads of a pool. Raises what one of them raised, once none is being done."""
    running = [pool.submit(job) for job in jobs]
    try:
        for each in running:
            each.result()
    finally:
        for each in running:
            each.cancel()
        wait(running)


def _runs(tensors: Iterable[FileTensor]) -> Iterator[list[FileTensor]]:
    """Neighbours in a file, cut into what is fetched and kept together."""
    run: list[FileTensor] = []
    for tensor in sorted(tensors, key=lambda t: t.extent.offset):
        if run and sum(t.extent.nbytes for t in run) + tensor.extent.nbytes > RUN_BYTES:
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _recovered(entry: GroupEntry) -> events.Recovered:
    tiers = (REMOTE,) if entry.source is None else (Tier.DISK, REMOTE)
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
    group: GroupId, tensors: Iterable[FileTensor], packing: Packing, single: bool
) -> GroupEntry:
    """A group of these tensors. What is fetched is put where an object file has it, so that it lies
    alike whether it was fetched or was there."""
    specs = {spec.name: spec for spec in packing.specs()}
    spec = group_of(group.key, [specs[t.name] for t in tensors], packing.nbytes)
    return GroupEntry(group, spec, packing=packing, single=single)


def _laid_out(
    tensors: Iterable[FileTensor], objects: Mapping[str, RemoteObject]
) -> tuple[Packing, RemoteSource]:
    """How tensors lie in an object file, and where their bytes come from."""
    tensors = list(tensors)
    packing = pack(block_of([placed(t, 0)], t.extent.nbytes) for t in tensors)
    specs = {spec.name: spec for spec in packing.specs()}
    segments = tuple(Segment(t.extent, specs[t.name].offset) for t in tensors if t.extent.nbytes)
    used = {segment.extent.path for segment in segments}
    return packing, RemoteSource(segments, {url: objects[url] for url in used})
