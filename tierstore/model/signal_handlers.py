"""Signal handlers that come in a critical section of the main thread run right after it.

Python runs a handler between two instructions of the main thread. If that is in the middle of a
section, a call of the store in the handler cannot work: what it waits for is done once the handler
returns. A section takes microseconds and waits for nothing, so the handlers that callers have
installed are exchanged for its time, and put back at its end, in time for what has arrived. Nobody
else sees it: only the main thread may look at handlers, and it is inside.

SIGINT's own handler stays: it raises KeyboardInterrupt, which a section survives.
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

# Those of `signal` make members of enumerations of all that they return, in ten times the time.
_handler_of = _signal.getsignal
_install = _signal.signal

Handler = Callable[[int, FrameType | None], Any]

_LOOK_EVERY = 0.01
"""Seconds between looks for new handlers. One that is newer may come in a section: a call of the
store there raises ReentrantCallError."""

_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
_handled: list[int] = []  # signals that have a caller's handler, as of the last look
_next_look = 0.0
_stand_ins: dict[int, HeldHandler] = {}  # the latest, by signal
_main: int | None = threading.main_thread().ident

arrived: deque[tuple[int, Handler]] = deque()
"""Signals that have come in a section, and whose handlers are due at its end."""


def _forked() -> None:
    """The thread that has forked is the main thread of the child."""
    global _main
    _main = threading.get_ident()
    arrived.clear()


os.register_at_fork(after_in_child=_forked)


class HeldHandler:
    """Stands in for the handler of a signal while `inside`, and notes what arrives."""

    __slots__ = ("_inside", "handler", "number")

    def __init__(self, number: int, handler: Handler, inside: Callable[[], bool]) -> None:
        self.number = number
        self.handler = handler
        self._inside = inside

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """A signal has arrived."""
        if self._inside():
            arrived.append((number, self.handler))
        else:  # the section is about to begin or over, or an interrupt has left this here
            self.handler(number, frame)


def look_again() -> None:
    """Have the next section look for new handlers."""
    global _next_look
    _next_look = 0.0


def hold(inside: Callable[[], bool], *, nested: bool) -> list[HeldHandler]:
    """Hold handlers back while `inside` says so, on the main thread. Returns them, for `let_go`.

    `nested`: a handler that came just before a section begins one itself, and what that holds back
    already is left to it.
    """
    if threading.get_ident() != _main:
        return []
    if time.monotonic() >= _next_look:
        _look()
    held: list[HeldHandler] = []
    for number in _handled:  # calls nothing for a handler that was held before: units come by here
        handler = _handler_of(number)
        stand_in = _stand_ins.get(number)
        if stand_in is None or stand_in.handler is not handler:
            if not _is_callers(handler):
                continue
            if isinstance(handler, HeldHandler):
                if not nested:  # an interrupt has left it there
                    held.append(handler)
                continue
            stand_in = _stand_ins[number] = HeldHandler(number, handler, inside)
        held.append(stand_in)
        _install(number, stand_in)
    return held


def _look() -> None:
    """See which signals have a caller's handler."""
    global _handled, _next_look
    # Most signals have no handler of Python's: that is told without a call.
    callers = [number for number in _SIGNALS if callable(_handler_of(number))]
    _handled = [number for number in callers if _is_callers(_handler_of(number))]
    # A finalizer may run here and call the store, which looks again: so walk a copy, and expect
    # that an entry is gone.
    for number in tuple(_stand_ins):
        if number not in _handled:
            _stand_ins.pop(number, None)  # nobody else may keep the handler
    _next_look = time.monotonic() + _LOOK_EVERY


def _is_callers(handler: Any) -> bool:
    """Whether it is Python's, and does more than raise KeyboardInterrupt or wake an event loop."""
    if not callable(handler) or handler is signal.default_int_handler:
        return False
    return getattr(handler, "__module__", None) != "asyncio.unix_events"


def let_go(held: Iterable[HeldHandler]) -> None:
    """Put handlers back, and run those that are due. Raises what they raise."""
    if threading.get_ident() != _main:
        return
    try:
        for each in held:
            if _handler_of(each.number) is each:  # it may be the caller's again
                _install(each.number, each.handler)
    finally:
        if arrived:
            _run_arrived(sys._getframe(1))


def _run_arrived(frame: FrameType) -> None:
    # All of them first, so that they do not run in each other's sections. One by one: a handler
    # that comes in between takes what is left, and nothing runs twice.
    due: list[tuple[int, Handler]] = []
    with contextlib.suppress(IndexError):
        while True:
            due.append(arrived.popleft())
    _run(due, frame)


def _run(due: list[tuple[int, Handler]], frame: FrameType) -> None:
    """Run every one of them, also if one raises."""
    try:
        while due:
            number, handler = due.pop(0)
            handler(number, frame)
    finally:
        if due:
            _run(due, frame)
