"""When an accelerator did what it was told: events with a time, told of once they have passed.

Nothing here waits. Where one event is known to have passed at some moment of the host's clock, the
device tells how much later another one passed. A moment is moved in between the ones at which the
host had asked for it and found it passed, so that the two clocks cannot drift apart.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tierstore.model.locks import RLock, under

_LOOK_AT = 64


@dataclass(frozen=True, slots=True)
class Mark:
    """An event in a stream, and when it was asked for."""

    event: Any
    asked: float


Told = Callable[[list[float]], None]


class DeviceTimes:
    """When marks in the streams of one accelerator passed, in seconds of `time.monotonic`."""

    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self._device = device
        self._lock = RLock()
        self._waiting: deque[tuple[Told, tuple[Mark, ...]]] = deque()
        self._known = self.mark(stream).event
        self._known.synchronize()
        self._known_at = time.monotonic()

    def mark(self, stream: torch.Stream | None = None) -> Mark:
        """Mark this place in a stream: the current one, or `stream`."""
        asked = time.monotonic()
        event = torch.Event(self._device, enable_timing=True)
        event.record(stream or torch.accelerator.current_stream(self._device))
        return Mark(event, asked)

    def tell(self, told: Told, *marks: Mark) -> None:
        """Call `told` with the times of the marks, later, when the last of them has passed."""
        self._waiting.append((told, marks))
        if len(self._waiting) >= _LOOK_AT:
            self.look()

    def look(self) -> None:
        """Tell of what has passed meanwhile. Waits for nothing."""
        under(self._lock, self._look)

    def _look(self) -> None:
        for _ in range(len(self._waiting)):
            told, marks = self._waiting.popleft()
            try:
                passed = marks[-1].event.query()
                times = [self._when(mark) for mark in marks] if passed else []
            except RuntimeError:
                continue  # the device failed, as others will tell: it knows no times any more
            if passed:
                told(times)
            else:
                self._waiting.append((told, marks))

    def _when(self, mark: Mark) -> float:
        later: float = self._known.elapsed_time(mark.event) / 1000
        at = min(max(self._known_at + later, mark.asked), time.monotonic())
        self._known, self._known_at = mark.event, at
        return at
