"""What has to be able to copy groups from one tier to another, and the hops of every store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tierstore.model.tiers import Tier
from tierstore.observe.device_times import DeviceTimes, Mark
from tierstore.system.files import transfer_errors
from tierstore.system.streams import entered, is_captured, on
from tierstore.tiers.device_tier import DeviceTier, copy_runs
from tierstore.tiers.disk_tier import DiskTier
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.host_tier import HostTier
from tierstore.tiers.reading import DiskReader
from tierstore.tiers.workers import Workers


@dataclass(frozen=True, slots=True)
class Copied:
    """What a hop has copied: so many bytes, without any padding.

    `marks` are where a device begins and ends it; without them it took as long as the call.
    """

    nbytes: int
    marks: tuple[Mark, Mark] | None = None


class Hop(Protocol):
    """Copies groups from the tier `src` to the tier `dst`, one at a call.

    The driver of `dst` has set room aside, and the one of `src` holds a complete copy, which stays
    as it is. Neither is dropped before the copy is over. `tests/conformance/hops.py` has the rules
    as tests.
    """

    @property
    def src(self) -> Tier:
        """From where."""

    @property
    def dst(self) -> Tier:
        """To where."""

    @property
    def workers(self) -> Workers:
        """The threads on which it copies: several hops may share them, urgent copies go first."""

    @property
    def times(self) -> DeviceTimes | None:
        """What tells when the marks of its copies pass; None if no device times them."""

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        """Copy a group, on a thread of `workers`. When it returns, whoever looks sees the copy.

        For a device that means: whoever lets its stream wait for `entry.arrival`, as nothing ever
        synchronises a whole stream or device. `ending` may be called when the last bytes are asked
        for, so that others can come next; it never raises. Whatever is raised fails the copy: the
        room that it has in `dst` is dropped then. Nothing may keep a reference to the memory of the
        group.
        """


@runtime_checkable
class QueuedHop(Hop, Protocol):
    """A hop whose copies may only have to be queued on a device, which takes microseconds."""

    def only_queues(self, entry: GroupEntry) -> bool:
        """Whether `copy` only queues now: then whoever has come to need the copy may call it."""


class DiskToHost:
    """Reads groups from files into host memory, on several threads."""

    src = Tier.DISK
    dst = Tier.HOST
    times = None

    def __init__(self, reader: DiskReader, host: HostTier) -> None:
        self.workers = reader.workers
        self._reader = reader
        self._host = host

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        slot, key = entry.slots[self.dst], entry.group.key
        with transfer_errors("reading", key=key, path=f"group {key!r}"):
            self._host.arena.fill(slot)
        slot.wait()
        return Copied(self._reader.read(entry, slot.bytes(), ending))


class HostToDisk:
    """Writes groups from host memory to the store's directory."""

    src = Tier.HOST
    dst = Tier.DISK
    times = None

    def __init__(self, disk: DiskTier) -> None:
        self.workers = disk.workers
        self._disk = disk

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        slot = entry.slots[self.src]
        slot.wait()
        self._disk.save(entry, slot.bytes())
        return Copied(entry.spec.nbytes)


class HostToDevice:
    """Copies groups from host memory to an accelerator.

    That takes microseconds, so whoever needs a copy queues it: to have another thread do it would
    cost two wake-ups and as many waits for the GIL. Nothing here waits for the device.
    """

    src = Tier.HOST
    dst = Tier.DEVICE

    def __init__(self, device: DeviceTier, workers: Workers) -> None:
        self.workers = workers
        self.times = device.times
        self._device = device

    def only_queues(self, entry: GroupEntry) -> bool:
        """Not from pageable memory: a driver copies that while its caller waits. And what is queued
        by a thread whose work is captured may be refused."""
        src = entry.slots.get(self.src)
        pinned = src is not None and src.memory is not None and src.memory.is_pinned()
        return pinned and not is_captured(self._device.device)

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        src, dst, up = entry.slots[self.src], entry.slots[self.dst], self._device.up
        memory = self._device.arena.fill(dst)
        for event in [*src.look(), *dst.pending]:  # a put may still be filling the source
            up.wait_event(event)
        dst.pending.clear()
        began = self.times.mark(up)
        try:
            on(up, lambda: copy_runs(entry.spec, src.memory, memory, up=True))
        finally:  # if one of them failed, those before it still read the source
            ended = self.times.mark(up)
            src.pending.append(ended.event)
        entry.arrival = ended.event
        return Copied(entry.spec.nbytes, (began, ended))


class DeviceToHost:
    """Copies groups from an accelerator to host memory, and waits for it."""

    src = Tier.DEVICE
    dst = Tier.HOST

    def __init__(self, device: DeviceTier, host: HostTier, workers: Workers) -> None:
        self.workers = workers
        self.times = device.times
        self._device = device
        self._host = host

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        src, dst, down = entry.slots[self.src], entry.slots[self.dst], self._device.down
        memory = self._host.arena.fill(dst)
        dst.wait()
        for event in [*src.pending, entry.arrival]:
            if event is not None:
                down.wait_event(event)
        began = self.times.mark(down)
        with entered(down):
            copy_runs(entry.spec, memory, src.memory, up=False)
        # Host memory has arrived when the bytes are there: a save to disk may read them next.
        ended = self.times.mark(down)
        ended.event.synchronize()
        return Copied(entry.spec.nbytes, (began, ended))
