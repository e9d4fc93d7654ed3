"""Jobs by priority and age, and one job that several threads share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.threads import Gate
from tierstore.tiers.workers import EARLY, URGENT, Workers, run_serially


@pytest.fixture
def workers() -> Iterator[Callable[[int], Workers]]:
    made = []

    def make(count: int) -> Workers:
        made.append(Workers(count, "test"))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def test_urgent_jobs_go_first_then_the_oldest(workers: Callable[[int], Workers]) -> None:
    one = workers(1)
    gate, done, order = Gate(), threading.Event(), []
    one.submit(URGENT, gate.hold)
    assert gate.reached.wait(30)
    for name, priority in [("a", EARLY), ("b", URGENT), ("c", EARLY), ("d", URGENT)]:
        one.submit(priority, lambda name=name: order.append(name))
    one.submit(EARLY, done.set)
    gate.open()
    assert done.wait(30)
    assert order == ["b", "d", "a", "c"]


def test_parts_of_an_older_job_go_before_newer_jobs(workers: Callable[[int], Workers]) -> None:
    """Otherwise four groups that are read at once would all arrive late."""
    two = workers(2)
    gates = [Gate(), Gate()]
    for gate in gates:
        two.submit(URGENT, gate.hold)
    for gate in gates:
        assert gate.reached.wait(30)
    order: list[str] = []
    begun, met = threading.Event(), threading.Barrier(2)

    def part(name: str) -> Callable[[], None]:
        def run() -> None:
            begun.set()  # now the helper is in the queue
            met.wait(30)  # the thread that began the job, and the helper
            order.append(name)

        return run

    done, over = threading.Event(), threading.Event()
    two.submit(EARLY, lambda: (two.run_parallel([part("older") for _ in range(4)]), over.set()))
    two.submit(EARLY, lambda: order.append("newer"))
    two.submit(EARLY, done.set)
    gates[0].open()
    assert begun.wait(30)
    gates[1].open()  # only now is a second thread free to choose
    assert done.wait(30)
    assert over.wait(30)
    assert order.index("newer") >= 3, "a newer job came before the helper"
    assert sorted(order) == ["newer"] + 4 * ["older"]


def test_parts_are_done_by_all_free_threads(workers: Callable[[int], Workers]) -> None:
    three = workers(3)
    met, threads = threading.Barrier(3), set()

    def part() -> None:
        met.wait(30)  # three at once, or it times out
        threads.add(threading.current_thread().name)

    done = threading.Event()
    three.submit(URGENT, lambda: (three.run_parallel([part] * 6), done.set()))
    assert done.wait(30)
    assert threads == {f"tierstore-test-{i}" for i in range(3)}


def test_job_finishes_with_every_other_thread_busy(
    workers: Callable[[int], Workers],
) -> None:
    two = workers(2)
    gate, done, over = Gate(), [], threading.Event()
    two.submit(URGENT, gate.hold)
    assert gate.reached.wait(30)
    two.submit(
        URGENT, lambda: (two.run_parallel(lambda: done.append(1) for _ in range(5)), over.set())
    )
    assert over.wait(30)
    assert len(done) == 5
    gate.open()


@pytest.mark.parametrize("helped", [False, True])
def test_first_error_is_raised_and_unstarted_parts_are_skipped(
    helped: bool, workers: Callable[[int], Workers]
) -> None:
    run_parallel = workers(1).run_parallel if helped else run_serially
    done: list[int] = []

    def failing() -> None:
        raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        run_parallel([lambda: done.append(1), failing, lambda: done.append(2), failing])
    assert done == [1]


def test_call_returns_after_all_started_parts(workers: Callable[[int], Workers]) -> None:
    """Memory must stay while another thread still reads into it."""
    two = workers(2)
    gate, over = Gate(), threading.Event()
    failed = threading.Event()

    def failing() -> None:
        assert gate.reached.wait(30)
        raise ValueError("while the other part is under way")

    def job() -> None:
        try:
            two.run_parallel([gate.hold, failing])
        except ValueError:
            failed.set()
        over.set()

    two.submit(URGENT, job)
    assert gate.reached.wait(30)
    time.sleep(0.05)
    assert not over.is_set()
    gate.open()
    assert over.wait(30)
    assert failed.is_set()


def test_empty_job_does_nothing(workers: Callable[[int], Workers]) -> None:
    workers(2).run_parallel([])
    run_serially([])


def test_queued_jobs_are_finished_before_close() -> None:
    some = Workers(2, "test")
    done: list[int] = []
    for number in range(50):
        some.submit(EARLY, lambda number=number: done.append(number))
    some.stop()
    assert sorted(done) == list(range(50))
