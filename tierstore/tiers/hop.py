"""The interface of a hop, which copies groups from one tier to another."""

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
    """The result of a copy: its bytes, without padding.

    `marks` are its start and end on a device; without them, it took as long as the call.
    """

    nbytes: int
    marks: tuple[Mark, Mark] | None = None


class Hop(Protocol):
    """Copies groups from the tier `src` to the tier `dst`, one per call.

    The driver of `dst` has reserved memory, and the driver of `src` holds a complete copy, which
    does not change. Neither is dropped before the copy ends. `tests/conformance/hops.py` has the
    rules as tests.
    """

    @property
    def src(self) -> Tier:
        """The source tier."""

    @property
    def dst(self) -> Tier:
        """The destination tier."""

    @property
    def workers(self) -> Workers:
        """The threads that copy. Several hops may share them; urgent copies go first."""

    @property
    def times(self) -> DeviceTimes | None:
        """The timer of the marks of its copies; None if no device times them."""

    def copy(self, entry: GroupEntry, ending: Callable[[], None]) -> Copied:
        """Copy a group, on a thread of `workers`. On return, the copy is visible to readers.

        For a device, readers let their stream wait for `entry.arrival`; no whole stream or device
        is ever synchronised. `ending` may be called when the last bytes are requested, to let the
        next copy start; it never raises. Any exception fails the copy, and its memory in `dst` is
        dropped. The hop must not keep references to the memory of the group.
        """


@runtime_checkable
class QueuedHop(Hop, Protocol):
    """A hop whose copies may only need to be queued on a device, which takes microseconds."""

    def only_queues(self, entry: GroupEntry) -> bool:
        """Return whether `copy` only queues now. If so, a caller may run it itself."""
