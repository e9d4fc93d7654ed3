"""Defers signal handlers that arrive in a critical section of the main thread to its end.

Python runs a handler between two instructions of the main thread. In a critical section, a store
call in the handler would deadlock: it would wait for the section, which continues only after the
handler returns. A section takes microseconds and never blocks. So the callers' handlers are
replaced for its duration and restored at its end, in time to run for the signals that arrived. The
replacement is invisible to others: only the main thread can read handlers, and it is in the
section.

The default handler of SIGINT stays installed: it raises KeyboardInterrupt, which a section
survives.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

# The functions of `signal` wrap their results in enumerations, which takes ten times as long.
_handler_of = _signal.getsignal
_install = _signal.signal

Handler = Callable[[int, FrameType | None], Any]

_REFRESH_SECONDS = 0.01
"""Seconds between refreshes of the known handlers.

A newer handler may run in a section; a store call in it raises ReentrantCallError.
"""

_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
_handled: list[int] = []  # signals with a caller's handler, as of the last refresh
_next_refresh = 0.0
_held: dict[int, HeldHandler] = {}  # the latest, by signal
_main: int | None = threading.main_thread().ident

arrived: deque[tuple[int, Handler]] = deque()
"""Signals that arrived in a section, whose handlers are due at its end."""


def _forked() -> None:
    """Record the forking thread, which is the main thread of the child."""
    global _main
    _main = threading.get_ident()
    arrived.clear()


os.register_at_fork(after_in_child=_forked)


class HeldHandler:
    """Replaces the handler of a signal while `inside()` is True, and records arrivals."""

    __slots__ = ("_inside", "handler", "number")

    def __init__(self, number: int, handler: Handler, inside: Callable[[], bool]) -> None:
        self.number = number
        self.handler = handler
        self._inside = inside

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record the arrival, or run the handler at once outside a section."""
        if self._inside():
            arrived.append((number, self.handler))
        else:  # the section is about to begin or has ended, or an interrupt left this installed
            self.handler(number, frame)


def request_refresh() -> None:
    """Refresh the known handlers at the start of the next section."""
    global _next_refresh
    _next_refresh = 0.0


def hold(inside: Callable[[], bool], *, nested: bool) -> list[HeldHandler]:
    """Defer handlers on the main thread while `inside()` is True. Return them, for `release`.

    `nested` is True in a handler that interrupted the entry to a section and enters one itself;
    handlers that are already deferred are then left to the outer section.
    """
    if threading.get_ident() != _main:
        return []
    if time.monotonic() >= _next_refresh:
        _refresh()
    held: list[HeldHandler] = []
    for number in _handled:  # hot path of every unit: known handlers must not cost a call
        handler = _handler_of(number)
        holder = _held.get(number)
        if holder is None or holder.handler is not handler:
            if not _is_callers(handler):
                continue
            if isinstance(handler, HeldHandler):
                if not nested:  # left installed by an interrupt
                    held.append(handler)
                continue
            holder = _held[number] = HeldHandler(number, handler, inside)
        held.append(holder)
        _install(number, holder)
    return held


def _refresh() -> None:
    """Find the signals that have a caller's handler."""
    global _handled, _next_refresh
    # Most signals have no Python handler, which needs no further call to find out.
    callers = [number for number in _SIGNALS if callable(_handler_of(number))]
    _handled = [number for number in callers if _is_callers(_handler_of(number))]
    # A finalizer may run here and call the store, which refreshes again: so iterate over a copy,
    # and tolerate missing entries.
    for number in tuple(_held):
        if number not in _handled:
            _held.pop(number, None)  # this may hold the last reference to the handler
    _next_refresh = time.monotonic() + _REFRESH_SECONDS


def _is_callers(handler: Any) -> bool:
    """Return True for a Python handler other than Python's for SIGINT and those of asyncio."""
    if not callable(handler) or handler is signal.default_int_handler:
        return False
    return getattr(handler, "__module__", None) != "asyncio.unix_events"


def release(held: Iterable[HeldHandler]) -> None:
    """Restore handlers, and run those that are due. Their exceptions propagate."""
    if threading.get_ident() != _main:
        return
    try:
        for each in held:
            if _handler_of(each.number) is each:  # else the caller has installed another
                _install(each.number, each.handler)
    finally:
        if arrived:
            _run_arrived(sys._getframe(1))


def _run_arrived(frame: FrameType) -> None:
    # Collect all before running any, so none runs in another's section. Pop one by one: a handler
    # that interrupts takes the rest, and none runs twice.
    due: list[tuple[int, Handler]] = []
    with contextlib.suppress(IndexError):
        while True:
            due.append(arrived.popleft())
    _run(due, frame)


def _run(due: list[tuple[int, Handler]], frame: FrameType) -> None:
    """Run all due handlers, even if one raises."""
    try:
        while due:
            number, handler = due.pop(0)
            handler(number, frame)
    finally:
        if due:
            _run(due, frame)
