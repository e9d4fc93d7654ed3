"""What Python is about to do, told by its audit events: to act just before it, or to keep it away.

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
    """Each time before `event`, call `act` with its arguments: what that raises, the call raises.

    Such as `before("open", ...)`, with a path, a mode and flags, for `open` and `os.open`. What
    `act` does is no event itself.
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
    """Before an event: the system's error of this number, instead."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@contextmanager
def calls_of(*functions: Callable[..., object]) -> Iterator[list[tuple[str, str]]]:
    """Inside, for each call of these functions of Python: its qualified name, and the thread's.

    Of this thread, and of those that begin inside.
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
