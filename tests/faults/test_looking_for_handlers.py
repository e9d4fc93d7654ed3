"""A finalizer may call a store while another call checks which signals have handlers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from tests.faults.reentering import Visitor
from tierstore.model import signal_handlers

NUMBERS = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]
NEVER = 1_000_000


def never_inside() -> bool:
    return False


def section() -> None:
    signal_handlers.request_refresh()
    signal_handlers.release(signal_handlers.hold(never_inside, nested=False))


def come_and_go(where: str = "") -> None:
    """Install, defer once, and remove handlers."""
    for number in NUMBERS:
        signal.signal(number, handler)
    section()
    for number in NUMBERS:
        signal.signal(number, signal.SIG_DFL)


def handler(number: int, frame: FrameType | None) -> None: ...


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, old in before.items():
        signal.signal(number, old)
    section()


def test_handler_search_survives_a_nested_call_anywhere() -> None:
    visits = 0
    for instruction in range(NEVER):
        come_and_go()  # leaves entries that the next poll forgets
        signal_handlers.request_refresh()

        def nested(where: str) -> None:
            section()  # forgets them
            come_and_go()

        visitor = Visitor(nested, NEVER, first=instruction)
        visitor.run(lambda: signal_handlers.hold(never_inside, nested=False))
        if visitor.visits == 0:  # past the last instruction
            break
        visits += 1
        section()
    assert visits > 100
    assert not any(isinstance(signal.getsignal(n), signal_handlers.HeldHandler) for n in NUMBERS)
