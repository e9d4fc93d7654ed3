"""What every hop between two tiers must do. Subclass `HopConformance`, and run pytest.

class TestMyHop(HopConformance):
    @pytest.fixture
    def tiers(self):  # the hop, and the drivers of the tiers that it goes from and to
        yield Way(hop, src, dst)

    def bring(self, way, entry, data):  # let a copy be in the tier that the hop comes from
        ...

    def found(self, way, entry):  # the tensors that have come
        return way.dst.view(entry)
"""

from __future__ import annotations

import functools
import gc
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.conformance.groups import assert_shows, bytes_of, entry_of
from tests.helpers.threads import PATIENCE
from tierstore.tiers.driver import TierDriver
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.hop import Copied, Hop
from tierstore.tiers.workers import EARLY, URGENT, Future


@dataclass
class Way:
    """A hop, and where it comes from and goes to."""

    hop: Hop
    src: TierDriver
    dst: TierDriver

    def begin(self, entry: GroupEntry, priority: int = URGENT, ending: Any = lambda: None) -> Any:
        """Have a copy made as a mover does. Returns the answer, to wait for."""
        self.dst.reserve(entry)
        copy = functools.partial(self.hop.copy, entry, ending)
        submit = functools.partial(self.hop.workers.submit, priority)
        return Future(copy, submit, self.hop.workers.alive)

    def copy(self, entry: GroupEntry) -> Copied:
        return self.begin(entry).wait()


class HopConformance(ABC):
    """The rules of `tierstore.tiers.hop.Hop`, as tests. The way comes from a fixture `way`."""

    patience = PATIENCE

    @abstractmethod
    def bring(self, way: Way, entry: GroupEntry, data: torch.Tensor) -> None:
        """Let a group with these packed bytes be in the tier that the hop comes from."""

    @abstractmethod
    def found(self, way: Way, entry: GroupEntry) -> dict[str, torch.Tensor]:
        """The tensors of the copy that has come."""

    def source(self, way: Way, entry: GroupEntry) -> dict[str, torch.Tensor]:
        """The tensors of the copy that was there before."""
        return way.src.view(entry)

    def entry(self, number: int) -> GroupEntry:
        """What is known of a group."""
        return entry_of(number)

    def brought(self, way: Way, number: int, seed: int = 0) -> GroupEntry:
        """A group that is where the hop comes from."""
        entry = self.entry(number)
        self.bring(way, entry, bytes_of(entry, seed))
        return entry

    def test_it_says_where_it_goes(self, way: Way) -> None:
        assert (way.hop.src, way.hop.dst) == (way.src.tier, way.dst.tier)
        assert way.hop.src != way.hop.dst

    @pytest.mark.parametrize("number", range(4))
    def test_a_copy_is_what_its_source_was_and_still_is(self, number: int, way: Way) -> None:
        entry = self.brought(way, number)
        assert not way.dst.holds(entry)
        way.copy(entry)
        assert way.src.holds(entry)
        assert way.dst.holds(entry)
        assert_shows(self.found(way, entry), entry, bytes_of(entry))
        assert_shows(self.source(way, entry), entry, bytes_of(entry))

    def test_it_says_how_much_it_copied_and_how_long_that_took(self, way: Way) -> None:
        entry = self.brought(way, 2)
        copied = way.copy(entry)
        assert entry.packing is not None
        assert entry.packing.dense_nbytes <= copied.nbytes <= entry.spec.nbytes
        assert (copied.marks is None) == (way.hop.times is None)
        if copied.marks is None or way.hop.times is None:
            return  # it took as long as the call
        told: list[list[float]] = []
        copied.marks[1].event.synchronize()
        way.hop.times.tell(told.append, *copied.marks)
        way.hop.times.look()
        [(began, ended)] = told
        assert copied.marks[0].asked <= began <= ended

    def test_its_end_is_told_of_at_most_once(self, way: Way) -> None:
        told: list[bool] = []
        entry = self.brought(way, 3)
        way.begin(entry, ending=lambda: told.append(True)).wait()
        assert len(told) <= 1

    def test_a_copy_can_be_dropped_and_made_again(self, way: Way) -> None:
        entry = self.brought(way, 1)
        for _ in range(3):
            way.copy(entry)
            assert_shows(self.found(way, entry), entry, bytes_of(entry))
            way.dst.drop(entry)
            assert not way.dst.holds(entry)
        assert_shows(self.source(way, entry), entry, bytes_of(entry))

    def test_copies_under_way_at_once_are_kept_apart(self, way: Way) -> None:
        entries = [self.brought(way, number) for number in range(3)]
        answers = [way.begin(e, EARLY if i else URGENT) for i, e in enumerate(entries)]
        for answer in answers:
            answer.wait()
        for entry in entries:
            assert_shows(self.found(way, entry), entry, bytes_of(entry))

    def test_nothing_is_remembered_of_a_group(self, way: Way) -> None:
        """What is remembered would keep memory from whoever is to have it next."""
        entry = self.brought(way, 0)
        way.copy(entry)
        way.dst.drop(entry)
        way.src.drop(entry)
        gone = weakref.ref(entry)
        del entry
        for _ in range(self.patience * 10):  # the thread that has copied lets go of it in a moment
            gc.collect()
            if gone() is None:
                return
            torch.randn(1000).sort()
        pytest.fail("something still knows the group")
