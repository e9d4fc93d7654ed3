"""Our own drivers and hops keep the rules, and the rules catch those that do not."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import ACCELERATOR, DEVICES, needs_accelerator
from tests.conformance.archive import ARCHIVE, Archive, archive
from tests.conformance.drivers import DriverConformance
from tests.conformance.groups import CAPACITY, assert_shows, bytes_of, entry_of, tiers_in
from tests.conformance.hops import HopConformance, Way
from tests.helpers.threads import PATIENCE
from tierstore.errors import TransferError
from tierstore.model.moves import Copy, Drop, Forget, Reserve
from tierstore.model.tiers import Tier
from tierstore.observe.journal import Journal
from tierstore.system.views import view_all
from tierstore.tiers.arena import Arena
from tierstore.tiers.device_tier import copy_runs
from tierstore.tiers.driver import CallersDriver, TierDriver
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.hop import Copied, QueuedHop
from tierstore.tiers.host_tier import HostTier
from tierstore.tiers.shared_memory import SharedArena
from tierstore.tiers.workers import SerialExecutor, Workers

both = pytest.mark.parametrize("device", DEVICES)


def to_host(driver: Any, entry: GroupEntry, data: torch.Tensor) -> None:
    driver.arena.fill(entry.slots[Tier.HOST]).copy_(data)


def to_device(driver: Any, entry: GroupEntry, data: torch.Tensor) -> None:
    copy_runs(entry.spec, data, driver.arena.fill(entry.slots[Tier.DEVICE]), up=True)
    torch.accelerator.synchronize(driver.device)


def on_disk(tiers: Any, entry: GroupEntry) -> dict[str, torch.Tensor]:
    """Return a group's copy on disk, read again."""
    memory = torch.zeros(entry.spec.nbytes + 4096, dtype=torch.uint8)
    aligned = memory[-memory.data_ptr() % 4096 :][: entry.spec.nbytes]
    tiers.reader.read(entry, aligned.numpy().data)
    return view_all(entry.spec, aligned, {t.name: t.offset for t in entry.spec.tensors})


# Drivers -----------------------------------------------------------------------------------------


@both
class TestHost(DriverConformance):
    @pytest.fixture
    def driver(self, device: str, tmp_path: Path) -> Iterator[TierDriver]:
        with tiers_in(tmp_path, device) as (tiers, _, _):
            yield tiers.host

    def bring(self, driver: TierDriver, entry: GroupEntry, data: torch.Tensor) -> None:
        to_host(driver, entry, data)


class TestSharedHost(DriverConformance):
    """Host memory that other processes may map."""

    @pytest.fixture
    def driver(self) -> Iterator[TierDriver]:
        shared = SharedArena(CAPACITY)
        arena = Arena(CAPACITY, shared.make, shared.free, close=shared.close)
        serial, makers = SerialExecutor(), Workers(1, "makers")
        host = HostTier(arena, None, Journal(), serial, makers)
        yield host
        host.close([])
        assert serial.stop(time.monotonic() + PATIENCE)
        assert makers.stop()

    def bring(self, driver: TierDriver, entry: GroupEntry, data: torch.Tensor) -> None:
        to_host(driver, entry, data)


@needs_accelerator
class TestDevice(DriverConformance):
    @pytest.fixture
    def driver(self, tmp_path: Path) -> Iterator[TierDriver]:
        with tiers_in(tmp_path, ACCELERATOR) as (tiers, _, _):
            assert tiers.device is not None
            yield tiers.device

    def bring(self, driver: TierDriver, entry: GroupEntry, data: torch.Tensor) -> None:
        to_device(driver, entry, data)

    def test_copy_not_completely_queued_is_not_held(self, driver: CallersDriver) -> None:
        there, coming, torn = (entry_of(number) for number in range(3))
        for entry in (there, coming, torn):
            driver.reserve(entry)
            self.bring(driver, entry, bytes_of(entry))
        there.slots[Tier.DEVICE].arrival = torch.Event()
        driver.rebuild([there, coming, torn], {coming.group})
        assert [driver.holds(entry) for entry in (there, coming, torn)] == [True, True, False]
        assert_shows(driver.view(there), there, bytes_of(there))


@pytest.mark.parametrize("kind", ["settled", "durable", "spilled"])
class TestDisk(DriverConformance):
    @pytest.fixture(autouse=True)
    def tiers(self, kind: str, tmp_path: Path) -> Iterator[None]:
        with tiers_in(tmp_path) as (self._tiers, _, _):
            self._kind = kind
            yield

    @pytest.fixture
    def driver(self) -> TierDriver:
        return self._tiers.disk

    def entry(self, number: int) -> GroupEntry:
        return entry_of(number, mutable=self._kind == "settled", durable=self._kind == "durable")

    def bring(self, driver: TierDriver, entry: GroupEntry, data: torch.Tensor) -> None:
        self._tiers.disk.save(entry, data.numpy().data)

    def found(self, driver: TierDriver, entry: GroupEntry) -> dict[str, torch.Tensor]:
        return driver.view(entry) if self._kind == "settled" else on_disk(self._tiers, entry)


class TestArchive(DriverConformance):
    @pytest.fixture
    def driver(self) -> TierDriver:
        return Archive()

    def bring(self, driver: Any, entry: GroupEntry, data: torch.Tensor) -> None:
        driver.copies[entry.group] = data.clone()


# Hops --------------------------------------------------------------------------------------------


class OursConformance(HopConformance):
    """Hops between any two tiers. A group is brought to host memory, then to the source tier."""

    src: Any
    dst: Any
    device = "cpu"

    @pytest.fixture
    def way(self, tmp_path: Path) -> Iterator[Way]:
        with tiers_in(tmp_path, self.device, [archive]) as (self.tiers, self.mover, _):
            drivers, hop = self.mover.drivers, self.mover.hops[self.src, self.dst]
            yield Way(hop, drivers[self.src], drivers[self.dst])

    def bring(self, way: Way, entry: GroupEntry, data: torch.Tensor) -> None:
        way.src.reserve(entry)
        if self.src is Tier.HOST:
            to_host(way.src, entry, data)
        elif self.src is Tier.DEVICE:
            to_device(way.src, entry, data)
        elif self.src is Tier.DISK:
            self.tiers.disk.save(entry, data.numpy().data)
        else:
            self.mover.drivers[self.src].copies[entry.group] = data.clone()

    def at(self, driver: TierDriver, entry: GroupEntry) -> dict[str, torch.Tensor]:
        if entry.arrival is not None:
            entry.arrival.synchronize()
        return on_disk(self.tiers, entry) if driver.tier is Tier.DISK else driver.view(entry)

    def found(self, way: Way, entry: GroupEntry) -> dict[str, torch.Tensor]:
        return self.at(way.dst, entry)

    def source(self, way: Way, entry: GroupEntry) -> dict[str, torch.Tensor]:
        return self.at(way.src, entry)


class TestDiskToHost(OursConformance):
    src, dst = Tier.DISK, Tier.HOST


class TestHostToDisk(OursConformance):
    src, dst = Tier.HOST, Tier.DISK


class TestDiskToArchive(OursConformance):
    src, dst = Tier.DISK, ARCHIVE


class TestArchiveToDisk(OursConformance):
    src, dst = ARCHIVE, Tier.DISK


@needs_accelerator
class TestDeviceToHost(OursConformance):
    src, dst, device = Tier.DEVICE, Tier.HOST, ACCELERATOR


@needs_accelerator
class TestHostToDevice(OursConformance):
    src, dst, device = Tier.HOST, Tier.DEVICE, ACCELERATOR

    def test_queued_hop_only_queues_from_page_locked_memory(self, way: Way) -> None:
        entry = self.brought(way, 0)
        assert isinstance(way.hop, QueuedHop)
        pinned = entry.slots[Tier.HOST].memory
        assert pinned is not None and pinned.is_pinned()
        assert way.hop.only_queues(entry)
        entry.slots[Tier.HOST].memory = pinned.clone()
        assert not way.hop.only_queues(entry)
        del entry.slots[Tier.HOST]
        assert not way.hop.only_queues(entry)


# A mover with one more tier ----------------------------------------------------------------------


@both
def test_group_moves_to_a_third_party_tier_and_back(device: str, tmp_path: Path) -> None:
    entry = entry_of(2)
    key, nbytes, data = entry.group, entry.spec.nbytes, bytes_of(entry_of(2))
    with tiers_in(tmp_path, device, [archive]) as (tiers, mover, ends):
        run = functools.partial(ends.run, mover)
        move = functools.partial(Copy, key, nbytes)
        drop = functools.partial(Drop, key, nbytes)
        mover.add(entry)
        run(Reserve(key, nbytes, Tier.HOST))
        to_host(tiers.host, entry, data)
        run(move(Tier.HOST, Tier.DISK), drop(Tier.HOST))
        run(move(Tier.DISK, ARCHIVE), drop(Tier.DISK))
        assert mover.tiers_of(entry) == [ARCHIVE]
        run(move(ARCHIVE, Tier.DISK, True), move(Tier.DISK, Tier.HOST, True))
        if device != "cpu":
            run(move(Tier.HOST, Tier.DEVICE))
            entry.arrival.synchronize()
        assert_shows(tiers.top.view(entry), entry, data)
        moved = mover.journal.summary().moved
        assert moved["DISK>ARCHIVE"] == moved["ARCHIVE>DISK"] == nbytes
        for tier in mover.tiers_of(entry):
            run(drop(tier))
        run(Forget(key))
        assert mover.entries() == []


def test_failed_copy_error_names_its_tiers(tmp_path: Path) -> None:
    entry = entry_of(0)
    with tiers_in(tmp_path, extra=[archive]) as (_, mover, ends):
        mover.add(entry)
        with pytest.raises(TransferError, match="from ARCHIVE to DISK failed") as error:
            ends.run(mover, Copy(entry.group, entry.spec.nbytes, ARCHIVE, Tier.DISK))
        assert error.value.key == entry.group.key
        assert not mover.moving()


# Controls ----------------------------------------------------------------------------------------


class Forgets(Archive):
    def holds(self, entry: GroupEntry) -> bool:
        return False


class NeverDrops(Archive):
    def drop(self, entry: GroupEntry) -> None:
        """Keep the copy."""


class MixesGroups(Archive):
    def view(self, entry: GroupEntry) -> dict[str, torch.Tensor]:
        self.copies[entry.group] = (
            torch.stack([copy[:4096] for copy in self.copies.values()])
            .sum(0, dtype=torch.uint8)
            .repeat(8)
        )
        return super().view(entry)


class TakesTooMuch(Archive):
    capacity: Any = 16 * 4096
    peak_bytes: Any = 17 * 4096


@pytest.mark.parametrize("kind", [Forgets, NeverDrops, MixesGroups, TakesTooMuch])
def test_driver_that_breaks_a_rule_fails(kind: type[Archive]) -> None:
    rules = TestArchive()
    with pytest.raises(AssertionError):
        rules.test_copy_is_held_from_arrival_until_drop(kind())
        rules.test_copies_of_several_groups_are_separate(kind())
        rules.test_any_order_loses_no_copy_and_respects_the_capacity(0, kind())


def copies_nothing(copy: Callable[..., Copied], entry: GroupEntry, ending: Any) -> Copied:
    copy(entry, ending)
    entry.slots[Tier.HOST].bytes()[:] = bytes(entry.spec.nbytes)
    return Copied(entry.spec.nbytes)


def takes_its_source(copy: Callable[..., Copied], entry: GroupEntry, ending: Any) -> Copied:
    copied = copy(entry, ending)
    entry.source = None
    return copied


def lies(copy: Callable[..., Copied], entry: GroupEntry, ending: Any) -> Copied:
    return Copied(copy(entry, ending).nbytes * 2)


REMEMBERED: list[GroupEntry] = []


def remembers(copy: Callable[..., Copied], entry: GroupEntry, ending: Any) -> Copied:
    REMEMBERED.append(entry)
    return copy(entry, ending)


CONTROLS: dict[Callable[..., Copied], str] = {
    copies_nothing: "test_copy_can_be_dropped_and_made_again",
    takes_its_source: "test_copy_can_be_dropped_and_made_again",
    lies: "test_copy_reports_its_bytes_and_times",
    remembers: "test_hop_keeps_no_reference_to_a_group",
}


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.__name__)
def test_hop_that_breaks_a_rule_fails(control: Callable[..., Copied], tmp_path: Path) -> None:
    rules = TestDiskToHost()
    rules.patience = 1
    with tiers_in(tmp_path) as (rules.tiers, rules.mover, _):
        drivers, hop = rules.mover.drivers, rules.mover.hops[Tier.DISK, Tier.HOST]
        hop.copy = functools.partial(control, hop.copy)  # type: ignore[method-assign]
        way = Way(hop, drivers[Tier.DISK], drivers[Tier.HOST])
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            getattr(rules, CONTROLS[control])(way)
        REMEMBERED.clear()
