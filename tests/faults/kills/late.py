"""What a process wants to do at its very end, after the exit handlers of what it imported later."""

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
