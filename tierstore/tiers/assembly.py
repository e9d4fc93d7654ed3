"""The tiers of one store: a driver for each, the hops between them, and the threads that copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tierstore.model.tiers import Tier
from tierstore.observe.journal import Journal
from tierstore.system.file_table import FileTable
from tierstore.system.files import DISK_THREADS
from tierstore.system.streams import selecting
from tierstore.tiers.arena import host_arena
from tierstore.tiers.device_tier import DeviceTier
from tierstore.tiers.directory import ObjectDirectory
from tierstore.tiers.disk_tier import DiskTier
from tierstore.tiers.driver import TierDriver
from tierstore.tiers.hop import Hop
from tierstore.tiers.hops import DeviceToHost, HostToDevice, HostToDisk
from tierstore.tiers.host_tier import HostTier
from tierstore.tiers.mover import Mover, MoverCallbacks
from tierstore.tiers.reading import DiskReader, DiskToHost
from tierstore.tiers.workers import SerialExecutor, Workers


@dataclass(frozen=True)
class StoreTiers:
    """The tiers that every store has. `device` is None on the CPU.

    `top` is the fastest: what is leased is there. `reader` reads what is on disk, for hops.
    """

    top: DeviceTier | HostTier

    device: DeviceTier | None
    host: HostTier
    disk: DiskTier
    reader: DiskReader


ExtraTier = Callable[[StoreTiers], tuple[TierDriver, Sequence[Hop]]]
"""Makes the driver of a tier below the others, and the hops between it and the tier above it."""


def build(
    device: torch.device,
    budgets: Mapping[Tier, int | None],
    directory: ObjectDirectory,
    verify: str,
    callbacks: MoverCallbacks,
    extra: Sequence[ExtraTier] = (),
) -> tuple[StoreTiers, Mover]:
    """The tiers of `budgets`, with the files of `directory`, and what moves groups between them.

    `extra` are further tiers below the disk, each slower than the one before it.
    """
    on_device: DeviceTier | None = None
    if Tier.DEVICE in budgets:  # before there are threads: there may be no such device
        on_device = DeviceTier(device, budgets[Tier.DEVICE])
    journal, serial, names = Journal(), SerialExecutor(), Counter[str]()
    begin = selecting(device)
    files, disk_workers = FileTable(directory.path), Workers(DISK_THREADS, "disk", begin)
    offload = disk_workers if on_device is None else Workers(1, "offload", begin)
    disk = DiskTier(budgets[Tier.DISK], directory, files, names, serial, disk_workers)
    target = torch.device("cpu") if on_device is None else device
    arena = host_arena(budgets[Tier.HOST], target)
    host = HostTier(arena, on_device, journal, serial, offload)
    reader = DiskReader(files, disk_workers, verify)
    tiers = StoreTiers(on_device or host, on_device, host, disk, reader)
    drivers: list[TierDriver] = [host, disk]
    hops: list[Hop] = [DiskToHost(reader, host), HostToDisk(disk)]
    if on_device is not None:
        drivers.insert(0, on_device)
        hops.append(HostToDevice(on_device, Workers(1, "onload", begin)))
        hops.append(DeviceToHost(on_device, host, offload))
    for make in extra:
        driver, more = make(tiers)
        drivers.append(driver)
        hops += more
    return tiers, Mover(drivers, hops, serial, names, journal, callbacks)
