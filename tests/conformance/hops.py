"""Conformance tests for hops between two tiers. Subclass `HopConformance`, and run pytest.

class TestMyHop(HopConformance):
    @pytest.fixture
    def tiers(self):  # the hop, and the drivers of its source and destination tiers
        yield Way(hop, src, dst)

    def bring(self, way, entry, data):  # place a copy in the source tier
        ...

    def found(self, way, entry):  # the tensors that have arrived
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
    """A hop, with its source and destination."""

    hop: Hop
    src: TierDriver
    dst: TierDriver

    def begin(self, entry: GroupEntry, priority: int = URGENT, ending: Any = lambda: None) -> Any:
        """Start a copy as a mover does; return a handle to wait for."""
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
        """Place a group with these packed bytes in the source tier."""

    @abstractmethod
    def found(self, way: Way, entry: GroupEntry) -> dict[str, torch.Tensor]:
        """Return the tensors of the copy in the destination tier."""

    def source(self, way: Way, entry: GroupEntry) -> dict[str, torch.Tensor]:
        """Return the tensors of the copy in the source tier."""
        return way.src.view(entry)

    def entry(self, number: int) -> GroupEntry:
        """Return the entry of a new group."""
        return entry_of(number)

    def brought(self, way: Way, number: int, seed: int = 0) -> GroupEntry:
        """Return a group that is in the source tier."""
        entry = self.entry(number)
        self.bring(way, entry, bytes_of(entry, seed))
        return entry

    def test_hop_names_its_tiers(self, way: Way) -> None:
        assert (way.hop.src, way.hop.dst) == (way.src.tier, way.dst.tier)
        assert way.hop.src != way.hop.dst

    @pytest.mark.parametrize("number", range(4))
    def test_copy_equals_its_source_and_leaves_it(self, number: int, way: Way) -> None:
        entry = self.brought(way, number)
        assert not way.dst.holds(entry)
        way.copy(entry)
        assert way.src.holds(entry)
        assert way.dst.holds(entry)
        assert_shows(self.found(way, entry), entry, bytes_of(entry))
        assert_shows(self.source(way, entry), entry, bytes_of(entry))

    def test_copy_reports_its_bytes_and_times(self, way: Way) -> None:
        entry = self.brought(way, 2)
        copied = way.copy(entry)
        assert entry.packing is not None
        assert entry.packing.dense_nbytes <= copied.nbytes <= entry.spec.nbytes
        assert (copied.marks is None) == (way.hop.times is None)
        if copied.marks is None or way.hop.times is None:
            return  # the copy took as long as the call
        calls: list[list[float]] = []
        copied.marks[1].event.synchronize()
        way.hop.times.notify(calls.append, *copied.marks)
        way.hop.times.poll()
        [(began, ended)] = calls
        assert copied.marks[0].requested <= began <= ended

    def test_copy_end_is_notified_at_most_once(self, way: Way) -> None:
        calls: list[bool] = []
        entry = self.brought(way, 3)
        way.begin(entry, ending=lambda: calls.append(True)).wait()
        assert len(calls) <= 1

    def test_copy_can_be_dropped_and_made_again(self, way: Way) -> None:
        entry = self.brought(way, 1)
        for _ in range(3):
            way.copy(entry)
            assert_shows(self.found(way, entry), entry, bytes_of(entry))
            way.dst.drop(entry)
            assert not way.dst.holds(entry)
        assert_shows(self.source(way, entry), entry, bytes_of(entry))

    def test_concurrent_copies_are_separate(self, way: Way) -> None:
        entries = [self.brought(way, number) for number in range(3)]
        answers = [way.begin(e, EARLY if i else URGENT) for i, e in enumerate(entries)]
        for answer in answers:
            answer.wait()
        for entry in entries:
            assert_shows(self.found(way, entry), entry, bytes_of(entry))

    def test_hop_keeps_no_reference_to_a_group(self, way: Way) -> None:
        """A reference would keep its memory from the next user."""
        entry = self.brought(way, 0)
        way.copy(entry)
        way.dst.drop(entry)
        way.src.drop(entry)
        gone = weakref.ref(entry)
        del entry
        for _ in range(self.patience * 10):  # the copying thread drops its references in a moment
            gc.collect()
            if gone() is None:
                return
            torch.randn(1000).sort()
        pytest.fail("the group is still referenced")
