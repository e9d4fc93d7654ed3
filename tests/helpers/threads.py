"""Threads: starting them, and blocking them at a point."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

PATIENCE = 60
"""Seconds after which an expected event counts as failed. Nothing is timed."""


class Gate:
    """Blocks each thread that reaches it until it is opened. `reached` is set once one has."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def hold(self) -> None:
        self.reached.set()
        assert self._opened.wait(PATIENCE)

    def open(self) -> None:
        self._opened.set()


def hold_calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> Gate:
    """Make calls of a function of `owner` wait until the gate is open."""
    gate = Gate()
    original = getattr(owner, name)

    def held(*args: Any, **options: Any) -> Any:
        gate.hold()
        return original(*args, **options)

    monkeypatch.setattr(owner, name, held)
    return gate


def start_thread(target: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread
