"""Builds the tiers of a store: a driver for each, the hops between them, and their threads."""

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
from tierstore.system.streams import device_selector
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

if TYPE_CHECKING:  # needs an optional dependency
    from tierstore.tiers.service_link import ServiceLink


@dataclass(frozen=True)
class StoreTiers:
    """The tiers that every store has. `device` is None on the CPU.

    `top` is the fastest tier, where leased groups reside. `reader` reads from disk for hops.
    """

    top: DeviceTier | HostTier

    device: DeviceTier | None
    host: HostTier
    disk: DiskTier
    reader: DiskReader


ExtraTier = Callable[[StoreTiers], tuple[TierDriver, Sequence[Hop]]]
"""Factory of the driver of an additional lowest tier, and of the hops to and from it."""


@dataclass(frozen=True, kw_only=True)
class TierSettings:
    """Settings of a store's tiers. `budgets` are bytes by tier, None for no limit.

    `extra_tiers` create the tiers below the disk, each slower than the one before; each has its
    budget in `budgets`. If `shared_arena` is set, host memory lies in it, and other processes can
    read it. With `link`, groups that a service serves are leased from it.
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
    """Build the tiers over the files of `directory`, and the mover between them.

    Raises RuntimeError if the system cannot start another thread; ends those already started.
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
    """Build the tiers. `undo` stops the threads that were started."""

    def workers(count: int, name: str) -> Workers:
        started = Workers(count, name, begin)
        undo.callback(started.stop)
        return started

    device, budgets = settings.device, settings.budgets
    begin = device_selector(device)
    on_device: DeviceTier | None = None
    if Tier.DEVICE in budgets:  # before any thread starts: this fails without such a device
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
        on_device.times.poll_on(functools.partial(onload.submit, EARLY))
        hops.append(HostToDevice(on_device, onload))
        hops.append(DeviceToHost(on_device, host, offload))
    for make in settings.extra_tiers:
        driver, more = make(tiers)
        drivers.append(driver)
        hops += more
    return tiers, Mover(drivers, hops, serial, names, journal, callbacks)


def _host_arena(settings: TierSettings) -> Arena:
    """Return the arena for copies in host memory."""
    budget, shared = settings.budgets[Tier.HOST], settings.shared_arena
    if shared is not None:
        return Arena(budget, shared.make, shared.free, close=shared.close)
    on_device = Tier.DEVICE in settings.budgets
    return host_arena(budget, settings.device if on_device else torch.device("cpu"))
