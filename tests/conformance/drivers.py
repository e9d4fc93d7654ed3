"""What every driver of a tier must do. Subclass `DriverConformance`, and run pytest.

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
        """Let packed bytes arrive in the room that was reserved for a group, as a hop would."""

    def found(self, driver: TierDriver, entry: GroupEntry) -> dict[str, torch.Tensor]:
        """The tensors of a copy. For tiers whose copies cannot be looked at: read it."""
        return driver.view(entry)

    def entry(self, number: int) -> GroupEntry:
        """What is known of a group."""
        return entry_of(number)

    def test_it_says_what_it_is(self, driver: TierDriver) -> None:
        assert driver.tier.name
        assert {driver.tier: 1}[driver.tier] == 1
        assert driver.capacity is None or driver.capacity > 0
        assert driver.alignment.bit_count() == 1, "only powers of two go together"
        assert not driver.peak_bytes

    def test_a_copy_is_there_from_its_arrival_until_it_is_dropped(self, driver: TierDriver) -> None:
        entry, other = self.entry(0), self.entry(1)
        assert not driver.holds(entry)
        driver.reserve(entry)
        self.bring(driver, entry, bytes_of(entry))
        assert driver.holds(entry)
        assert not driver.holds(other)
        driver.drop(entry)
        assert not driver.holds(entry)

    @pytest.mark.parametrize("for_caller", [False, True])
    def test_room_that_nothing_came_to_can_be_given_back(
        self, driver: TierDriver, for_caller: bool
    ) -> None:
        entry = self.entry(0)
        for _ in range(100):  # of which any four would not fit
            driver.reserve(entry, for_caller=for_caller)
            driver.drop(entry)
            assert not driver.holds(entry)

    def test_groups_are_kept_apart(self, driver: TierDriver) -> None:
        entries = [self.entry(number) for number in range(3)]
        for entry in entries:
            driver.reserve(entry)
            self.bring(driver, entry, bytes_of(entry))
        for entry in entries:
            assert_shows(self.found(driver, entry), entry, bytes_of(entry))

    def test_a_copy_that_comes_again_is_the_new_one(self, driver: TierDriver) -> None:
        entry = self.entry(0)
        for seed in range(3):
            driver.reserve(entry)
            self.bring(driver, entry, bytes_of(entry, seed))
            assert_shows(self.found(driver, entry), entry, bytes_of(entry, seed))
            driver.drop(entry)

    def test_copies_begin_where_they_should(self, driver: TierDriver) -> None:
        for number in range(3):
            entry = self.entry(number)
            driver.reserve(entry)
            self.bring(driver, entry, bytes_of(entry))
            first = min(entry.spec.tensors, key=lambda tensor: tensor.offset)
            shown = self.found(driver, entry)[first.name]
            assert shown.data_ptr() % driver.alignment == 0

    def test_what_is_looked_at_stays_memory_when_its_copy_is_dropped(
        self, driver: TierDriver
    ) -> None:
        """It may hold other bytes by then. But nothing dies of looking at it."""
        entry = self.entry(3)
        driver.reserve(entry)
        self.bring(driver, entry, bytes_of(entry))
        shown = self.found(driver, entry)
        driver.drop(entry)
        driver.close([])
        assert shown["odd"].cpu().numel() == 7

    def test_copies_that_are_there_at_the_end_are_given_back(self, driver: TierDriver) -> None:
        entries = [self.entry(number) for number in range(3)]
        for entry in entries[:2]:
            driver.reserve(entry)
            self.bring(driver, entry, bytes_of(entry))
        driver.reserve(entries[2])
        driver.close(entries)

    @pytest.mark.parametrize("seed", range(10))
    def test_in_any_order_no_copy_is_lost_and_no_memory_exceeds_the_capacity(
        self, seed: int, driver: TierDriver
    ) -> None:
        """Whoever calls keeps to the capacity, as the planner does."""
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
