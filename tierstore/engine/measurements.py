"""Durations measured on the accelerator, collected on any thread for the planner.

Work on a device is only queued, so the host's clock does not measure it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from tierstore.model.events import TransferMeasured, UseMeasured
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy


class Measurements:
    """Measurements for the planner. All times are in seconds of `time.monotonic`."""

    def __init__(self) -> None:
        self._noted: deque[TransferMeasured | UseMeasured] = deque()

    def moved(self, copy: Copy, began: float, ended: float) -> None:
        """Record that the device made a copy between these times."""
        self._noted.append(TransferMeasured(copy.src, copy.dst, copy.nbytes, began, ended))

    def ran(self, group: GroupId, asked: float, began: float) -> None:
        """Record that a use of a group began on the device, which had waited since `asked`."""
        self._noted.append(UseMeasured(group, asked, began))

    def take(self) -> Iterator[TransferMeasured | UseMeasured]:
        """Yield the measurements since the last call."""
        while self._noted:
            yield self._noted.popleft()
