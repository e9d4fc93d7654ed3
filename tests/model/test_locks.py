"""Critical sections: which threads may enter one, and what may interrupt it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.faults.interrupting import Interrupter
from tierstore.errors import ReentrantCallError
from tierstore.model import signal_handlers
from tierstore.model.locks import (
    RLock,
    check_may_wait,
    exclusively,
    guarded,
    if_free,
    inside,
    may_wait,
    serve,
    under,
)

USUAL = signal.SIGUSR1


class Books:
    def __init__(self) -> None:
        self._lock = RLock()
        self.done: list[str] = []

    @guarded
    def do(self, act: Callable[[], object], name: str = "done") -> str:
        act()
        self.done.append(name)
        return name


@pytest.fixture
def came() -> Iterator[list[str]]:
    """Note whether the handler of a signal ran inside a section."""
    came: list[str] = []
    before = signal.signal(USUAL, lambda *_: came.append("inside" if inside() else "outside"))
    signal_handlers.request_refresh()
    yield came
    signal.signal(USUAL, before)


def send() -> None:
    signal.raise_signal(USUAL)


# Sections -----------------------------------------------------------------------------------------


def test_section_returns_its_result_and_ends() -> None:
    books = Books()
    assert books.do(lambda: None, name="first") == "first"
    assert not inside()
    assert not books._lock._is_owned()


def test_sections_of_different_locks_nest() -> None:
    outer, inner = Books(), Books()
    outer.do(lambda: inner.do(lambda: None))
    assert (inner.done, outer.done) == (["done"], ["done"])


def test_section_within_itself_raises() -> None:
    books = Books()
    with pytest.raises(ReentrantCallError):
        books.do(lambda: books.do(lambda: None))
    assert books.done == []
    assert not books._lock._is_owned()


def test_section_waits_for_another_thread() -> None:
    books, begun, end = Books(), threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        end.wait(10)

    thread = threading.Thread(target=books.do, args=(first, "first"))
    thread.start()
    assert begun.wait(10)
    assert not inside()
    assert if_free(books._lock, lambda: True, 0.01) is None
    end.set()
    books.do(lambda: None, name="second")
    thread.join(10)
    assert books.done == ["first", "second"]


def test_if_free_inside_the_section_does_nothing() -> None:
    lock = RLock()
    assert under(lock, lambda: if_free(lock, lambda: True, 1.0)) is None
    assert if_free(lock, lambda: True, 1.0) is True


def test_thread_in_a_section_may_not_wait() -> None:
    lock = RLock()
    assert may_wait()
    assert under(lock, lambda: (inside(), may_wait())) == (True, False)
    with pytest.raises(ReentrantCallError):
        under(lock, check_may_wait)
    assert may_wait()


def test_exclusive_call_is_no_section_and_may_not_wait() -> None:
    lock = RLock()
    assert exclusively(lock, lambda: (inside(), may_wait())) == (False, False)
    with pytest.raises(ReentrantCallError):
        exclusively(lock, lambda: exclusively(lock, lambda: None))
    assert may_wait()


def test_serving_thread_may_not_wait() -> None:
    found: list[bool] = []
    serve(lambda: found.append(may_wait()))
    assert found == [False]
    assert may_wait()


def test_interrupt_anywhere_leaves_no_section_open() -> None:
    books, other, turn = Books(), Books(), 0
    while True:
        interrupter = Interrupter(turn)
        interrupter.run(lambda: books.do(lambda: other.do(lambda: None)))
        assert not inside()
        assert not books._lock._is_owned()
        assert not other._lock._is_owned()
        if not interrupter.fired:
            break
        turn += 1
    assert turn > 100


# Signal handlers ----------------------------------------------------------------------------------


def test_handler_in_a_section_runs_after_it(came: list[str]) -> None:
    books = Books()
    books.do(lambda: (send(), came.append("still in it")))
    assert came == ["still in it", "outside"]


def test_handler_in_nested_sections_runs_after_the_outermost(came: list[str]) -> None:
    outer, inner = Books(), Books()
    outer.do(lambda: (inner.do(send), came.append("still in it")))
    assert came == ["still in it", "outside"]


def test_handler_outside_of_sections_runs_at_once(came: list[str]) -> None:
    Books().do(lambda: None)
    handler = signal.getsignal(USUAL)
    send()
    assert came == ["outside"]
    assert not isinstance(handler, signal_handlers.HeldHandler)


def test_handlers_exception_is_raised_after_the_section() -> None:
    def refuse(*_: object) -> None:
        raise SystemExit("told to end")

    books, before = Books(), signal.signal(USUAL, refuse)
    signal_handlers.request_refresh()
    try:
        with pytest.raises(SystemExit):
            books.do(send)
        assert signal.getsignal(USUAL) is refuse
    finally:
        signal.signal(USUAL, before)
    assert books.done == ["done"]


def test_every_handler_runs_though_one_raises(came: list[str]) -> None:
    def refuse(*_: object) -> None:
        raise SystemExit

    before = signal.signal(signal.SIGUSR2, refuse)
    signal_handlers.request_refresh()
    try:
        with pytest.raises(SystemExit):
            Books().do(lambda: (signal.raise_signal(signal.SIGUSR2), send()))
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert came == ["outside"]


def test_foreign_and_default_handlers_stay(came: list[str]) -> None:
    found: list[object] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        Books().do(lambda: found.extend(map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))))
        with pytest.raises(KeyboardInterrupt):
            Books().do(lambda: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [signal.default_int_handler, signal.getsignal(signal.SIGTERM)]


def test_other_threads_sections_defer_nothing(came: list[str]) -> None:
    books, begun, end = Books(), threading.Event(), threading.Event()
    thread = threading.Thread(target=books.do, args=(lambda: (begun.set(), end.wait(10)),))
    thread.start()
    assert begun.wait(10)
    send()
    assert came == ["outside"]
    end.set()
    thread.join(10)


def test_interrupt_anywhere_loses_no_handler(came: list[str]) -> None:
    """Check that a replaced handler still runs, and that the next section restores it."""
    handler, turn = signal.getsignal(USUAL), 0
    while True:
        interrupter = Interrupter(turn)
        interrupter.run(lambda: Books().do(lambda: None))
        came.clear()
        send()
        assert came == ["outside"]
        Books().do(send)
        assert came == ["outside", "outside"]
        assert signal.getsignal(USUAL) is handler, interrupter.where
        if not interrupter.fired:
            break
        turn += 1
    assert turn > 50


def test_handler_without_deferral_runs_inside(
    came: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the control."""
    monkeypatch.setattr(signal_handlers, "hold", lambda inside, nested: [])
    Books().do(send)
    assert came == ["inside"]
