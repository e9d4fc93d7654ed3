"""Threads: starting one, and holding one up where a test wants it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

PATIENCE = 60
"""Seconds after which something that should have happened never will. Nothing is timed."""


class Gate:
    """Holds up whoever comes to it until it is opened. `reached` is set once somebody came."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def hold(self) -> None:
        self.reached.set()
        assert self._opened.wait(PATIENCE)

    def open(self) -> None:
        self._opened.set()


def hold_calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> Gate:
    """From now on, calls of a function of `owner` begin once the gate is open."""
    gate = Gate()
    original = getattr(owner, name)

    def held(*args: Any, **options: Any) -> Any:
        gate.hold()
        return original(*args, **options)

    monkeypatch.setattr(owner, name, held)
    return gate


def start_thread(target: Callable[[], object]) -> threading.Thread:
    """A thread that does this, and that keeps no process from ending."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread
