"""Runs a function at the very end of a process, after exit handlers imported later."""

from __future__ import annotations

import atexit
from collections.abc import Callable

LATE: list[Callable[[], None]] = []


def register() -> None:
    """To be called before anything else that registers exit handlers is imported."""
    atexit.register(_run)


def _run() -> None:
    for do in LATE:
        do()
