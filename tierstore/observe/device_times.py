"""Timestamps of work on an accelerator, taken with device events.

Nothing here blocks. The device reports only the time between two events, so each timestamp is
computed from the previous event, whose host time is known. It is clamped to the interval between
recording the event and finding it complete, so the two clocks cannot drift apart.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tierstore.model.locks import RLock, under
from tierstore.torch_private import stream_of_device

_POLL_AFTER = 64
"""Callbacks that are collected before the device is polled."""
_POLL_AT_ONCE_AFTER = 16 * _POLL_AFTER
"""Callbacks that may wait for another thread to poll; beyond that, the caller polls."""


@dataclass(eq=False, slots=True)
class Mark:
    """An event in a stream, and the host time at which it was recorded."""

    event: torch.Event
    requested: float
    stream: torch.Stream | None = None


Callback = Callable[[list[float]], None]
_Pending = tuple[Callback, tuple[Mark, ...]]


class DeviceTimes:
    """Converts marks in the streams of one accelerator to seconds of `time.monotonic`.

    A busy device may have many marks pending. The marks of one stream complete in order, so only
    the first pending mark of each stream is queried.
    """

    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self.device = device
        self._lock = RLock()
        self._new: deque[_Pending] = deque()  # any thread may append, without the lock
        self._pending: dict[torch.Stream | None, deque[_Pending]] = {}
        self._submit: Callable[[Callable[[], None]], None] | None = None
        self._poll_scheduled = False
        self._known = self.mark(stream).event
        self._known.synchronize()
        self._known_at = time.monotonic()

    def mark(self, stream: torch.Stream | None = None) -> Mark:
        """Record a mark in `stream`, or in the current one."""
        requested = time.monotonic()
        # `blocking`: a waiter should sleep. (torch 2.13 accepts the option and ignores it.)
        event = torch.Event(self.device, enable_timing=True, blocking=True)
        stream = stream or stream_of_device(self.device.index)
        event.record(stream)
        return Mark(event, requested, stream)

    def poll_on(self, submit: Callable[[Callable[[], None]], None]) -> None:
        """Poll on another thread, through `submit`.

        Polling takes longer than the rest of what `notify`'s callers do, which is mostly launching
        kernels.
        """
        self._submit = submit

    def notify(self, callback: Callback, *marks: Mark) -> None:
        """Call `callback` with the times of the marks once the last of them has completed."""
        self._new.append((callback, marks))
        if len(self._new) < _POLL_AFTER:
            return
        if self._submit is None or len(self._new) >= _POLL_AT_ONCE_AFTER:
            self.poll()
        elif not self._poll_scheduled:
            self._poll_scheduled = True
            self._submit(self.poll)

    def poll(self) -> None:
        """Call the callbacks whose marks have completed. Does not block."""
        self._poll_scheduled = False
        under(self._lock, self._poll)

    def _poll(self) -> None:
        while self._new:
            pending = self._new.popleft()
            self._pending.setdefault(pending[1][-1].stream, deque()).append(pending)
        for stream, queue in list(self._pending.items()):
            while queue and self._notify_first(queue):
                pass
            if not queue:
                self._pending.pop(stream, None)

    def _notify_first(self, queue: deque[_Pending]) -> bool:
        """Call the first callback of a stream if its marks have completed.

        Returns whether it was removed from the queue.
        """
        callback, marks = queue.popleft()
        try:
            passed = marks[-1].event.query()
            times = [self._time_of(mark) for mark in marks] if passed else []
        except RuntimeError:
            return True  # the device failed, which others report: it has no more times
        if not passed:
            queue.appendleft((callback, marks))
            return False
        callback(times)
        return True

    def _time_of(self, mark: Mark) -> float:
        later: float = self._known.elapsed_time(mark.event) / 1000
        at = min(max(self._known_at + later, mark.requested), time.monotonic())
        self._known, self._known_at = mark.event, at
        return at
