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

import torch

from tierstore.model.locks import RLock, under
from tierstore.torch_private import stream_of_device

_LOOK_AT = 64
"""So many are told of at once."""
_LOOK_ANYWAY = 16 * _LOOK_AT
"""So many wait at most for another thread to look."""


@dataclass(eq=False, slots=True)
class Mark:
    """An event in a stream, and when it was asked for."""

    event: torch.Event
    asked: float
    stream: torch.Stream | None = None


Told = Callable[[list[float]], None]
_Waiting = tuple[Told, tuple[Mark, ...]]


class DeviceTimes:
    """When marks in the streams of one accelerator passed, in seconds of `time.monotonic`.

    A device that is behind has many marks before it. Those of one stream pass in order, so of each
    stream only the first that has not passed is asked.
    """

    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self.device = device
        self._lock = RLock()
        self._new: deque[_Waiting] = deque()  # any thread may append, without the lock
        self._waiting: dict[torch.Stream | None, deque[_Waiting]] = {}
        self._submit: Callable[[Callable[[], None]], None] | None = None
        self._is_looked_soon = False
        self._known = self.mark(stream).event
        self._known.synchronize()
        self._known_at = time.monotonic()

    def mark(self, stream: torch.Stream | None = None) -> Mark:
        """Mark this place in a stream: the current one, or `stream`."""
        asked = time.monotonic()
        # `blocking`: who waits for it should sleep. (torch 2.13 takes the option and ignores it.)
        event = torch.Event(self.device, enable_timing=True, blocking=True)
        stream = stream or stream_of_device(self.device.index)
        event.record(stream)
        return Mark(event, asked, stream)

    def look_on(self, submit: Callable[[Callable[[], None]], None]) -> None:
        """From now on `submit` has `look` called on another thread: it takes longer than what
        those who tell do, which mostly launch kernels."""
        self._submit = submit

    def tell(self, told: Told, *marks: Mark) -> None:
        """Call `told` with the times of the marks, later, when the last of them has passed."""
        self._new.append((told, marks))
        if len(self._new) < _LOOK_AT:
            return
        if self._submit is None or len(self._new) >= _LOOK_ANYWAY:
            self.look()
        elif not self._is_looked_soon:
            self._is_looked_soon = True
            self._submit(self.look)

    def look(self) -> None:
        """Tell of what has passed meanwhile. Waits for nothing."""
        self._is_looked_soon = False
        under(self._lock, self._look)

    def _look(self) -> None:
        while self._new:
            waiting = self._new.popleft()
            self._waiting.setdefault(waiting[1][-1].stream, deque()).append(waiting)
        for stream, queue in list(self._waiting.items()):
            while queue and self._tell_first(queue):
                pass
            if not queue:
                self._waiting.pop(stream, None)

    def _tell_first(self, queue: deque[_Waiting]) -> bool:
        """Tell of the first that waits in a stream, if it has passed. Returns whether it waits no
        more."""
        told, marks = queue.popleft()
        try:
            passed = marks[-1].event.query()
            times = [self._when(mark) for mark in marks] if passed else []
        except RuntimeError:
            return True  # the device failed, as others will tell: it knows no times any more
        if not passed:
            queue.appendleft((told, marks))
            return False
        told(times)
        return True

    def _when(self, mark: Mark) -> float:
        later: float = self._known.elapsed_time(mark.event) / 1000
        at = min(max(self._known_at + later, mark.asked), time.monotonic())
        self._known, self._known_at = mark.event, at
        return at
