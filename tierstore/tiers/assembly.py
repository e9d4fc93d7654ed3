"""The tiers of one store: a driver for each, the hops between them, and the threads that copy."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tierstore.model.tiers import Tier
from tierstore.observe.journal import Journal
from tierstore.system.file_table import FileTable
from tierstore.system.files import DISK_THREADS
from tierstore.system.streams import selecting
from tierstore.tiers.arena import Arena, host_arena
from tierstore.tiers.device_tier import DeviceTier
from tierstore.tiers.directory import ObjectDirectory
from tierstore.tiers.disk_tier import DiskTier
from tierstore.tiers.driver import TierDriver
from tierstore.tiers.hop import Hop
from tierstore.tiers.hops import DeviceToHost, HostToDevice, HostToDisk
from tierstore.tiers.host_tier import HostTier
from tierstore.tiers.leased_tier import LeasedHostTier, LeaseOrRead
from tierstore.tiers.mover import Mover, MoverCallbacks
from tierstore.tiers.reading import DiskReader, DiskToHost
from tierstore.tiers.shared_memory import SharedArena
from tierstore.tiers.workers import EARLY, SerialExecutor, Workers

if TYPE_CHECKING:  # it needs a package that not every installation has
    from tierstore.tiers.service_link import ServiceLink


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


@dataclass(frozen=True, kw_only=True)
class TierSettings:
    """What the tiers of a store are like: `budgets` are bytes by tier, None for no limit.

    `extra_tiers` make what is below the disk, each slower than the one before it; each has its
    budget here, too. Host memory lies in `shared_arena`, if there is one: then other processes see
    it. Groups that a service serves are leased behind `link`.
    """

    device: torch.device
    budgets: dict[Tier, int | None]
    verify: str
    extra_tiers: tuple[ExtraTier, ...] = ()
    shared_arena: SharedArena | None = None
    link: ServiceLink | None = None


def build(
    settings: TierSettings, directory: ObjectDirectory, callbacks: MoverCallbacks
) -> tuple[StoreTiers, Mover]:
    """Make the tiers of these settings over the files of `directory`, and the mover between them.

    Raises RuntimeError if the system starts no more threads. Those that did start have ended then.
    """
    with contextlib.ExitStack() as undo:
        built = _build(settings, directory, callbacks, undo)
        undo.pop_all()
    return built


def _build(
    settings: TierSettings,
    directory: ObjectDirectory,
    callbacks: MoverCallbacks,
    undo: contextlib.ExitStack,
) -> tuple[StoreTiers, Mover]:
    """Make the tiers. `undo` stops the threads that were started."""

    def workers(count: int, name: str) -> Workers:
        started = Workers(count, name, begin)
        undo.callback(started.stop)
        return started

    device, budgets = settings.device, settings.budgets
    begin = selecting(device)
    on_device: DeviceTier | None = None
    if Tier.DEVICE in budgets:  # before there are threads: there may be no such device
        on_device = DeviceTier(device, budgets[Tier.DEVICE])
    journal, serial, names = Journal(), SerialExecutor(), Counter[str]()
    undo.callback(serial.stop)
    files, disk_workers = FileTable(directory.path), workers(DISK_THREADS, "disk")
    offload = disk_workers if on_device is None else workers(1, "offload")
    disk = DiskTier(budgets[Tier.DISK], directory, files, names, serial, disk_workers)
    reader = DiskReader(files, disk_workers, settings.verify, disk.fetched)
    arena, link = _host_arena(settings), settings.link
    host: HostTier
    if link is None:
        host = HostTier(arena, on_device, journal, serial, offload)
        reading: Hop = DiskToHost(reader, host)
    else:
        link.table = files
        host = LeasedHostTier(arena, on_device, journal, serial, offload)
        host.link = link
        reading = LeaseOrRead(DiskToHost(reader, host), host)
    tiers = StoreTiers(on_device or host, on_device, host, disk, reader)
    drivers: list[TierDriver] = [host, disk]
    hops: list[Hop] = [reading, HostToDisk(disk)]
    if on_device is not None:
        drivers.insert(0, on_device)
        onload = workers(1, "onload")
        on_device.times.look_on(functools.partial(onload.submit, EARLY))
        hops.append(HostToDevice(on_device, onload))
        hops.append(DeviceToHost(on_device, host, offload))
    for make in settings.extra_tiers:
        driver, more = make(tiers)
        drivers.append(driver)
        hops += more
    return tiers, Mover(drivers, hops, serial, names, journal, callbacks)


def _host_arena(settings: TierSettings) -> Arena:
    """Where copies in host memory lie."""
    budget, shared = settings.budgets[Tier.HOST], settings.shared_arena
    if shared is not None:
        return Arena(budget, shared.make, shared.unmake, close=shared.close)
    on_device = Tier.DEVICE in settings.budgets
    return host_arena(budget, settings.device if on_device else torch.device("cpu"))
