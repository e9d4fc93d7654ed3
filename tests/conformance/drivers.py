"""Conformance tests for drivers of a tier. Subclass `DriverConformance`, and run pytest.

class TestMyTier(DriverConformance):
    @pytest.fixture
    def driver(self):
        return MyTier()

    def bring(self, driver, entry, data):  # as a hop does it
        driver.copies[entry.group] = data.clone()
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod

import pytest
import torch

from tests.conformance.groups import SIZES, assert_shows, bytes_of, entry_of
from tierstore.tiers.driver import TierDriver
from tierstore.tiers.entry import GroupEntry


class DriverConformance(ABC):
    """The rules of `tierstore.tiers.driver.TierDriver`, as tests.

    The driver comes from a fixture `driver`; if it has a capacity, that is 16 pages of 4 KiB.
    """

    @abstractmethod
    def bring(self, driver: TierDriver, entry: GroupEntry, data: torch.Tensor) -> None:
        """Place packed bytes in the memory that was reserved for a group, as a hop would."""

    def found(self, driver: TierDriver, entry: GroupEntry) -> dict[str, torch.Tensor]:
        """Return the tensors of a copy. Tiers without views must read it."""
        return driver.view(entry)

    def entry(self, number: int) -> GroupEntry:
        """Return the entry of a new group."""
        return entry_of(number)

    def test_driver_attributes_are_consistent(self, driver: TierDriver) -> None:
        assert driver.tier.name
        assert {driver.tier: 1}[driver.tier] == 1
        assert driver.capacity is None or driver.capacity > 0
        assert driver.alignment.bit_count() == 1, "only powers of two go together"
        assert not driver.peak_bytes

    def test_copy_is_held_from_arrival_until_drop(self, driver: TierDriver) -> None:
        entry, other = self.entry(0), self.entry(1)
        assert not driver.holds(entry)
        driver.reserve(entry)
        self.bring(driver, entry, bytes_of(entry))
        assert driver.holds(entry)
        assert not driver.holds(other)
        driver.drop(entry)
        assert not driver.holds(entry)

    @pytest.mark.parametrize("for_caller", [False, True])
    def test_reservation_without_a_copy_can_be_dropped(
        self, driver: TierDriver, for_caller: bool
    ) -> None:
        entry = self.entry(0)
        for _ in range(100):  # any four of them exceed the capacity
            driver.reserve(entry, for_caller=for_caller)
            driver.drop(entry)
            assert not driver.holds(entry)

    def test_copies_of_several_groups_are_separate(self, driver: TierDriver) -> None:
        entries = [self.entry(number) for number in range(3)]
        for entry in entries:
            driver.reserve(entry)
            self.bring(driver, entry, bytes_of(entry))
        for entry in entries:
            assert_shows(self.found(driver, entry), entry, bytes_of(entry))

    def test_copy_brought_again_is_the_new_one(self, driver: TierDriver) -> None:
        entry = self.entry(0)
        for seed in range(3):
            driver.reserve(entry)
            self.bring(driver, entry, bytes_of(entry, seed))
            assert_shows(self.found(driver, entry), entry, bytes_of(entry, seed))
            driver.drop(entry)

    def test_copies_are_aligned(self, driver: TierDriver) -> None:
        for number in range(3):
            entry = self.entry(number)
            driver.reserve(entry)
            self.bring(driver, entry, bytes_of(entry))
            first = min(entry.spec.tensors, key=lambda tensor: tensor.offset)
            shown = self.found(driver, entry)[first.name]
            assert shown.data_ptr() % driver.alignment == 0

    def test_view_of_a_dropped_copy_stays_readable(self, driver: TierDriver) -> None:
        """It may hold other bytes by then, but reading it must not crash."""
        entry = self.entry(3)
        driver.reserve(entry)
        self.bring(driver, entry, bytes_of(entry))
        shown = self.found(driver, entry)
        driver.drop(entry)
        driver.close([])
        assert shown["odd"].cpu().numel() == 7

    def test_close_frees_the_remaining_copies(self, driver: TierDriver) -> None:
        entries = [self.entry(number) for number in range(3)]
        for entry in entries[:2]:
            driver.reserve(entry)
            self.bring(driver, entry, bytes_of(entry))
        driver.reserve(entries[2])
        driver.close(entries)

    @pytest.mark.parametrize("seed", range(10))
    def test_any_order_loses_no_copy_and_respects_the_capacity(
        self, seed: int, driver: TierDriver
    ) -> None:
        """The caller respects the capacity, as the planner does."""
        rng = random.Random(seed)
        there: dict[int, tuple[GroupEntry, int]] = {}
        for turn in range(60):
            number = rng.randrange(12)
            if number in there:
                entry, came = there.pop(number)
                if rng.random() < 0.5:
                    assert_shows(self.found(driver, entry), entry, bytes_of(entry, came))
                driver.drop(entry)
                continue
            entry = self.entry(number)
            taken = sum(entry.spec.nbytes for entry, _ in there.values())
            if driver.capacity is not None and taken + entry.spec.nbytes > driver.capacity:
                continue
            driver.reserve(entry, for_caller=rng.random() < 0.5)
            self.bring(driver, entry, bytes_of(entry, turn))
            there[number] = entry, turn
        for entry, came in there.values():
            assert_shows(self.found(driver, entry), entry, bytes_of(entry, came))
        if driver.peak_bytes is not None and driver.capacity is not None:
            assert min(SIZES) <= driver.peak_bytes <= driver.capacity
