"""What has to be able to copy groups from one tier to another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tierstore.model.tiers import Tier
from tierstore.observe.device_times import DeviceTimes, Mark
from tierstore.tiers.entry import GroupEntry
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
