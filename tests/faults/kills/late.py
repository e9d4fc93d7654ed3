"""Runs a function at the very end of a process, after exit handlers imported later."""

from __future__ import annotations

import atexit
from collections.abc import Callable

LATE: list[Callable[[], None]] = []


def register() -> None:
    """Register the function. Call this before importing any module that registers exit handlers."""
    atexit.register(_run)


def _run() -> None:
    for do in LATE:
        do()
