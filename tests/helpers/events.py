"""Run code before, or prevent, operations that Python announces by its audit events.

Nothing of the code under test is replaced, so it makes no difference by which module, or by which
name, it calls the system. The events and their arguments are in Python's "Audit events table".
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Act = Callable[..., object]

_acts: list[tuple[str, Act]] = []
_inside = threading.local()
_hooked = False


@contextmanager
def before(event: str, act: Act) -> Iterator[None]:
    """Call `act` with the event's arguments each time before `event`; its errors propagate.

    For example `before("open", ...)`, with a path, a mode and flags, for `open` and `os.open`.
    Events inside `act` are ignored.
    """
    global _hooked
    if not _hooked:  # a hook stays for as long as the process lives
        sys.addaudithook(_hook)
        _hooked = True
    entry = event, act
    _acts.append(entry)
    try:
        yield
    finally:
        _acts.remove(entry)


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if not _acts or getattr(_inside, "acting", False):
        return
    for wanted, act in list(_acts):
        if wanted == event:
            _inside.acting = True
            try:
                act(*arguments)
            finally:
                _inside.acting = False


def failing(number: int) -> Act:
    """Return an action that raises the system error of this number."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@contextmanager
def calls_of(*functions: Callable[..., object]) -> Iterator[list[tuple[str, str]]]:
    """Record each call of these Python functions: its qualified name and thread name.

    Covers this thread, and threads that start inside.
    """
    codes = {function.__code__ for function in functions}
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, what: str, _: object) -> None:
        if what == "call" and frame.f_code in codes:
            calls.append((frame.f_code.co_qualname, threading.current_thread().name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
