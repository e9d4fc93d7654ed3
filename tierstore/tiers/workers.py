"""Threads that run jobs by priority."""

from __future__ import annotations

import atexit
import functools
import heapq
import itertools
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from tierstore.model.locks import AutoResetEvent, RLock, serve, under

T = TypeVar("T")

URGENT, EARLY = 0, 1

Job = Callable[[], None]
PATIENCE = 10.0
"""Seconds to wait for threads to end; a dead disk may block them forever."""
EXIT_PATIENCE = 1.0
"""Seconds for which interpreter exit waits for threads that no store waits for."""

# Executors whose threads may still run when the interpreter ends.
_started: weakref.WeakSet[Workers | SerialExecutor] = weakref.WeakSet()
os.register_at_fork(after_in_child=_started.clear)  # a forked child has none of the threads


@atexit.register
def _stop_all() -> None:
    """Stop all of these threads before the interpreter is torn down.

    A thread that returns from torch's C++ code after the interpreter has ended kills the process
    ("terminate called without an active exception"). Stores stop their own threads; the others
    belong to stores whose construction failed, or that were abandoned because a disk did not
    answer.
    """
    ends = time.monotonic() + EXIT_PATIENCE
    for each in list(_started):
        each.stop(ends)


RunParallel = Callable[[Iterable[Job]], None]
"""Runs the parts of a job, on one thread or several, and returns when all are done."""


class Workers:
    """Daemon threads that run jobs by priority, then age.

    They are daemons because a thread that is stuck in a dead disk must not keep the interpreter
    from exiting; files that they leave half-written have temporary names. Each calls `begin` first,
    which must not raise.
    """

    def __init__(self, count: int, name: str, begin: Job = lambda: None) -> None:
        self._begin = begin
        self._jobs: list[tuple[tuple[int, int], int, Job]] = []
        self._age = itertools.count()
        self._place = threading.local()  # priority and age of each thread's current job
        self._ready = threading.Condition()
        self._stopping = False
        self.busy_since = time.monotonic()  # when a job, or part of one, last began or ended
        self._threads = [
            threading.Thread(
                target=serve, args=(self._work,), name=f"tierstore-{name}-{i}", daemon=True
            )
            for i in range(count)
        ]
        started: list[threading.Thread] = []
        try:
            for thread in self._threads:
                thread.start()
                started.append(thread)
        except BaseException:  # the system cannot start another thread: end the others
            self._threads = started
            self.stop()
            raise
        _started.add(self)

    def submit(self, priority: int, job: Job) -> None:
        """Queue `job` for some thread. It must not raise."""
        age = next(self._age)
        self._push((priority, age), age, job)

    def _push(self, place: tuple[int, int], age: int, job: Job) -> None:
        with self._ready:
            heapq.heappush(self._jobs, (place, age, job))
            self._ready.notify()

    def run_parallel(self, parts: Iterable[Job], last: Job = lambda: None) -> None:
        """Run the parts of this thread's current job, with the help of idle threads.

        The parts have the priority and age of the whole job: older jobs run before them, newer ones
        after. Returns when every part is done. Raises an error of any part. `last` is called before
        the last part starts; it must not raise.
        """
        shared = _Parts((functools.partial(self._do, part) for part in parts), last)
        place = getattr(self._place, "now", (URGENT, 0))
        for _ in range(min(shared.left, len(self._threads)) - 1):
            self._push(place, next(self._age), shared.do)
        shared.do()
        shared.wait()

    def _work(self) -> None:
        self._begin()
        while True:
            with self._ready:
                while not self._jobs and not self._stopping:
                    self._ready.wait()
                if not self._jobs:
                    return
                self._place.now, _, job = heapq.heappop(self._jobs)
            self._do(job)
            del job  # it may hold the last reference to a buffer

    def _do(self, job: Job) -> None:
        self.busy_since = time.monotonic()
        job()
        self.busy_since = time.monotonic()

    def has(self, thread: threading.Thread) -> bool:
        """Return whether a thread is one of these."""
        return thread in self._threads

    def alive(self) -> bool:
        """Return whether any thread still runs jobs."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self, ends: float | None = None) -> bool:
        """Finish the queued jobs, then end. Returns whether all threads end in time.

        `ends` is the deadline (`time.monotonic`); None means ten seconds from now.
        """
        ends = time.monotonic() + PATIENCE if ends is None else ends
        with self._ready:
            self._stopping = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join(timeout=max(ends - time.monotonic(), 0.0))
        return not self.alive()


class SerialExecutor:
    """A daemon thread for accounting, which runs small jobs in the order submitted.

    Jobs never wait, neither for a disk nor for a lock of their submitters. They run to completion:
    asynchronous exceptions, such as KeyboardInterrupt, reach callers only.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stopping = False
        # The thread is one critical section: a caller's finalizer that runs on it cannot begin a
        # transaction, which might wait for this thread.
        work = functools.partial(under, RLock(), self._work)
        self._thread = threading.Thread(target=work, name="tierstore-serial", daemon=True)
        self._thread.start()
        _started.add(self)

    def submit(self, job: Job) -> None:
        """Queue `job` after all earlier ones. It must not raise. Never blocks."""
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait until all earlier jobs are done."""
        if not self._stopping:
            Future(lambda: None, self.submit, self._thread.is_alive).wait()

    def submit_to(
        self, workers: Workers, compute: Callable[[], T], begin: Job = lambda: None
    ) -> Future[T]:
        """Run `compute` on a thread of `workers`, after all earlier jobs. Returns its future.

        `begin` runs on the executor's own thread, just before.
        """

        def ask(job: Job) -> None:
            begin()
            workers.submit(URGENT, job)

        return Future(compute, lambda job: self.submit(lambda: ask(job)), workers.alive)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it may hold the last reference to a buffer

    def has(self, thread: threading.Thread) -> bool:
        """Return whether a thread is this one."""
        return thread is self._thread

    def stop(self, ends: float | None = None) -> bool:
        """Finish the queued jobs, then end. Returns whether the thread ends in time.

        `ends` is the deadline (`time.monotonic`); None means ten seconds from now.
        """
        ends = time.monotonic() + PATIENCE if ends is None else ends
        self._stopping = True
        self._jobs.put(None)
        self._thread.join(timeout=max(ends - time.monotonic(), 0.0))
        return not self._thread.is_alive()


class Future(Generic[T]):
    """The result of `compute`, which runs as a job on another thread.

    `submit` queues the job; `alive` returns whether the other threads still run jobs.
    """

    def __init__(
        self, compute: Callable[[], T], submit: Callable[[Job], None], alive: Callable[[], bool]
    ) -> None:
        self._compute = compute
        self._alive = alive
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._wakeup = AutoResetEvent()
        self._next: list[Job] = []
        submit(self._job)

    def _job(self) -> None:
        try:
            self._results.append(self._compute())
        except BaseException as error:  # raised by `wait`
            self._error = error
        self._wakeup.set()
        for job in self._next:
            job()

    def then(self, job: Job) -> None:
        """Call `job` once there is a result, maybe twice. It must not raise."""
        self._next.append(job)
        if self._wakeup.wait(0.0):  # the job may have been added too late for `_job`
            job()

    def wait(self) -> T:
        """Wait for the result, once.

        Raises the error of `compute`, or RuntimeError if the threads have ended.
        """
        while not self._wakeup.wait(1.0):
            if not self._alive():
                raise RuntimeError("the store's threads have ended")
        if self._error is not None:
            raise self._error
        return self._results[0]


def run_serially(parts: Iterable[Job]) -> None:
    """Run jobs one after another; `Workers.run_parallel` without workers."""
    for part in parts:
        part()


class _Parts:
    """The parts of one job, which idle threads take one by one."""

    def __init__(self, parts: Iterable[Job], last: Job) -> None:
        self._parts = deque(parts)
        self._last = last
        self.left = len(self._parts)
        self._done = threading.Condition()
        self._error: BaseException | None = None

    def do(self) -> None:
        """Run parts until none is left to start. After a failure, skip the others."""
        while True:
            try:
                part = self._parts.popleft()
            except IndexError:
                return
            if not self._parts:
                self._last()
            try:
                if self._error is None:
                    part()
            except BaseException as error:  # raised by `wait`
                self._error = error
            del part  # before notifying: it may hold a reference to a buffer
            with self._done:
                self.left -= 1
                if not self.left:
                    self._done.notify_all()

    def wait(self) -> None:
        with self._done:
            while self.left:
                self._done.wait()
        if self._error is not None:
            raise self._error
