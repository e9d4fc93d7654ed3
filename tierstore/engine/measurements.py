"""How long an accelerator took: noted on any thread, and told to the planner in a transaction.

Where work is only queued, the clock of whoever queues it says nothing about the work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tierstore.model.events import TransferMeasured, UseMeasured
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy


class Measurements:
    """What a planner is to learn. All times are in seconds of `time.monotonic`."""

    def __init__(self) -> None:
        self._noted: deque[TransferMeasured | UseMeasured] = deque()

    def moved(self, copy: Copy, began: float, ended: float) -> None:
        """The device made a copy between these times."""
        self._noted.append(TransferMeasured(copy.src, copy.dst, copy.nbytes, began, ended))

    def ran(self, group: GroupId, asked: float, began: float) -> None:
        """A use of a group began on the device, which had waited for it since `asked`."""
        self._noted.append(UseMeasured(group, asked, began))

    def take(self) -> Iterator[TransferMeasured | UseMeasured]:
        """What was noted since the last time."""
        while self._noted:
            yield self._noted.popleft()
