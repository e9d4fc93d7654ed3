"""Groups in object stores, and their tier below the disk."""

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
"""Largest run of adjacent tensors that is fetched and cached together, in bytes."""


class RemoteGroups:
    """The groups of one store that are in object stores.

    The tier is added with the first of them, or if the directory has a cache of earlier fetches.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self._opening = RLock()
        self._tier: RemoteTier | None = None
        if has_cache(core.directory.path):
            self._open()

    def _open(self) -> RemoteTier:
        """Return the tier. The first call adds it, and waits for the disk."""
        return exclusively(self._opening, self._the_tier)

    def _the_tier(self) -> RemoteTier:
        if self._tier is None:
            core = self.core
            core.check_open()
            if core.tiers.host.connected:
                raise ValueError(
                    "a store that is connected to a service cannot register URLs: open a "
                    "TierStore(ram_budget, disk_dir), or download the checkpoint"
                )
            reading = core.mover.hops[Tier.DISK, Tier.HOST]
            tier, hops = remote_tier(core.tiers, core.directory.path, reading)
            core.mover.add_tier(tier, hops)
            self._add_tier(tier)
            self._tier = tier
        return self._tier

    @transaction
    def _add_tier(self, tier: RemoteTier) -> None:
        """Add the tier and its cached groups to the planner, as far as the disk budget allows.

        The others are dropped, because it is not known yet which groups will be needed.
        """
        core = self.core
        core.settings.tiers.budgets[REMOTE] = 0
        core.rebuild()
        budget, cache = core.planner.budgets[Tier.DISK], tier.cache
        for key, entry in list(cache.unclaimed.items()):
            core.mover.add(entry)
            nbytes = entry.spec.nbytes
            if budget is not None and core.planner.used[Tier.DISK] + nbytes > budget:
                del cache.unclaimed[key]
                core.apply(_recovered_event(entry))
                core.apply(events.Discarded(entry.group))
            else:
                core.apply(_recovered_event(entry))

    def describe(
        self,
        files: Iterable[CheckpointFile],
        found: Mapping[str, tuple[GroupSpec, Source]],
        *,
        single: bool,
    ) -> dict[str, GroupEntry]:
        """Return entries of groups, for `add`. Opens the tier. Waits for the disk."""
        cache = self._open().cache
        objects = {file.path: file.remote for file in files if file.remote is not None}
        tensors = {t.name: t for file in files for t in file.tensors}
        described = {}
        for key, (spec, _) in found.items():
            file_tensors = [tensors[t.name] for t in spec.tensors]
            packing, source = _lay_out_group(file_tensors, objects)
            described[key] = entry = _entry(self.core.new_group(key), file_tensors, packing, single)
            cache.add(entry, source)
        return described

    def add(self, entry: GroupEntry, use_order: UseOrder = UseOrder.LEARNED) -> None:
        """Add a group that is in an object store. Part of a transaction."""
        core, tier = self.core, self._tier
        assert tier is not None, "`describe` has opened the tier"
        left = tier.cache.take(entry)
        entry.use_order, entry.order = use_order, core.next_number()
        core.mover.add(entry)
        if left is not None:
            core.apply(events.Discarded(left.group))
        core.apply(_recovered_event(entry))
        core.current[entry.group.key] = entry.group


def fetch_tensors(
    file: CheckpointFile,
    tensors: Sequence[FileTensor],
    get_derived: Callable[[str], dict[str, torch.Tensor] | None],
    put_derived: Callable[[str, Mapping[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Return tensors of a remote file as maps of cached files, and fetch those that are missing.

    Raises StaleCheckpointError or TransferError, and the errors of `put_derived`.
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
            packing, source = _lay_out_group(run, objects)
            derivation = cache_key(packing, source, 0)[:32]
            views = get_derived(derivation)
            if views is None:
                memory = fresh_memory(slot_bytes(max(packing.nbytes, 1)))
                fetch(source, memory.numpy().data, lambda jobs: run_jobs(pool, jobs))
                group = group_of("", packing.specs(), packing.nbytes)
                offsets = {spec.name: spec.offset for spec in group.tensors}
                views = put_derived(derivation, view_all(group, memory, offsets))
            found.update(views)
            advance(source.nbytes)
    return found


def run_jobs(pool: ThreadPoolExecutor, jobs: Iterable[Job]) -> None:
    """Run jobs in a thread pool. If any fails, raises one of the errors once no job is running."""
    running = [pool.submit(job) for job in jobs]
    try:
        for each in running:
            each.result()
    finally:
        for each in running:
            each.cancel()
        wait(running)


def _runs(tensors: Iterable[FileTensor]) -> Iterator[list[FileTensor]]:
    """Yield runs of adjacent tensors of a file, of up to `RUN_BYTES` each."""
    run: list[FileTensor] = []
    for tensor in sorted(tensors, key=lambda t: t.extent.offset):
        if run and sum(t.extent.nbytes for t in run) + tensor.extent.nbytes > RUN_BYTES:
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _recovered_event(entry: GroupEntry) -> events.Recovered:
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
    """Return the entry of a group, with the layout of an object file.

    Fetched tensors are laid out as in the cached object file, so both are read alike.
    """
    specs = {spec.name: spec for spec in packing.specs()}
    spec = group_of(group.key, [specs[t.name] for t in tensors], packing.nbytes)
    return GroupEntry(group, spec, packing=packing, single=single)


def _lay_out_group(
    tensors: Iterable[FileTensor], objects: Mapping[str, RemoteObject]
) -> tuple[Packing, RemoteSource]:
    """Return the layout of tensors in an object file, and the source of their bytes."""
    tensors = list(tensors)
    packing = pack(block_of([placed(t, 0)], t.extent.nbytes) for t in tensors)
    specs = {spec.name: spec for spec in packing.specs()}
    segments = tuple(Segment(t.extent, specs[t.name].offset) for t in tensors if t.extent.nbytes)
    used = {segment.extent.path for segment in segments}
    return packing, RemoteSource(segments, {url: objects[url] for url in used})
