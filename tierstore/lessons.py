"""How long an accelerator took: noted on any thread, and told to the planner in a step.

Where work is only queued, the clock of whoever queues it says nothing about the work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tierstore.model.moves import Copy
from tierstore.plan.planner import Planner


class Lessons:
    """What a planner is to learn. All times are in seconds of `time.monotonic`."""

    def __init__(self) -> None:
        self._noted: deque[Callable[[Planner], None]] = deque()

    def moved(self, copy: Copy, began: float, ended: float) -> None:
        """The device made a copy between these times."""
        self._noted.append(
            lambda planner: planner.measured(copy.dst, copy.src, copy.nbytes, began, ended)
        )

    def ran(self, version: str, asked: float, began: float) -> None:
        """A use of a group began on the device, which had waited for it since `asked`."""
        self._noted.append(lambda planner: planner.ran(version, asked, began))

    def tell(self, planner: Planner) -> None:
        """Have the planner learn what was noted since the last time."""
        while self._noted:
            self._noted.popleft()(planner)
