"""Threads that take jobs by priority."""

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
"""Seconds in which threads that should end must end; a dead disk may hold them for ever."""
EXIT_PATIENCE = 1.0
"""Seconds for which the end of the interpreter waits for threads that no store waits for."""

# Those whose threads may run when the interpreter ends, by no order.
_started: weakref.WeakSet[Workers | SerialExecutor] = weakref.WeakSet()
os.register_at_fork(after_in_child=_started.clear)  # a fork has none of the threads


@atexit.register
def _end_all() -> None:
    """End all threads of ours while the interpreter is whole.

    A thread that comes back from C++ code of torch once the interpreter has ended takes the process
    down with it ("terminate called without an active exception"). Stores end theirs themselves;
    these are of what was not made to the end, or was abandoned because a disk did not answer.
    """
    ends = time.monotonic() + EXIT_PATIENCE
    for each in list(_started):
        each.stop(ends)


RunParallel = Callable[[Iterable[Job]], None]
"""What does the parts of a job, on one thread or several, and returns when all are done."""


class Workers:
    """Daemon threads that take jobs by priority, then age.

    Daemons, because a thread stuck in a dead disk must not keep the interpreter from ending; what
    they leave half-written has a temporary name. Each calls `begin` first; it must not raise.
    """

    def __init__(self, count: int, name: str, begin: Job = lambda: None) -> None:
        self._begin = begin
        self._jobs: list[tuple[tuple[int, int], int, Job]] = []
        self._age = itertools.count()
        self._place = threading.local()  # of the job that a thread does: its priority and age
        self._ready = threading.Condition()
        self._stopping = False
        self.busy_since = time.monotonic()  # when a job, or part of one, last began or was done
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
        except BaseException:  # the system has no thread left: end those that there are
            self._threads = started
            self.stop()
            raise
        _started.add(self)

    def submit(self, priority: int, job: Job) -> None:
        """Have `job` run on some thread. It must not raise."""
        age = next(self._age)
        self._push((priority, age), age, job)

    def _push(self, place: tuple[int, int], age: int, job: Job) -> None:
        with self._ready:
            heapq.heappush(self._jobs, (place, age, job))
            self._ready.notify()

    def run_parallel(self, parts: Iterable[Job], last: Job = lambda: None) -> None:
        """Do the parts of the job that this thread is doing, with the help of idle threads.

        Helpers come in the place of the whole job: what is older is done before its parts, and
        what is newer after them. Returns when every part is done. Raises what one of them raised.
        Who begins with the last part does `last` before; it must not raise.
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
        """Whether a thread is one of these."""
        return thread in self._threads

    def alive(self) -> bool:
        """Whether its threads still take jobs."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self, ends: float | None = None) -> bool:
        """Finish what is queued, then end. Returns whether all threads have ended by then.

        `ends` is a time of `time.monotonic`; None: in ten seconds.
        """
        ends = time.monotonic() + PATIENCE if ends is None else ends
        with self._ready:
            self._stopping = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join(timeout=max(ends - time.monotonic(), 0.0))
        return not self.alive()


class SerialExecutor:
    """A daemon thread that keeps books: it does small jobs, in the order in which they were given.

    None of them waits, for a disk or for a lock of those who give them. What is done here is done
    whole: exceptions that come from outside, such as KeyboardInterrupt, only come to callers.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stopping = False
        # All that it does is one critical section: a finalizer of a caller's that runs there cannot
        # begin a transaction, which may have to wait for this thread.
        work = functools.partial(under, RLock(), self._work)
        self._thread = threading.Thread(target=work, name="tierstore-serial", daemon=True)
        self._thread.start()
        _started.add(self)

    def give(self, job: Job) -> None:
        """Have `job` done, after all that were given before. It must not raise. Never blocks."""
        self._jobs.put(job)

    def catch_up(self) -> None:
        """Wait until all jobs that were given before are done."""
        if not self._stopping:
            Future(lambda: None, self.give, self._thread.is_alive).wait()

    def ask_on(
        self, workers: Workers, question: Callable[[], T], begin: Job = lambda: None
    ) -> Future[T]:
        """What `question` gives on a thread of `workers`, asked after all jobs that were given
        before; `begin` is done here at that time."""

        def ask(job: Job) -> None:
            begin()
            workers.submit(URGENT, job)

        return Future(question, lambda job: self.give(lambda: ask(job)), workers.alive)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it may hold the last reference to a buffer

    def has(self, thread: threading.Thread) -> bool:
        """Whether a thread is this one."""
        return thread is self._thread

    def stop(self, ends: float | None = None) -> bool:
        """Finish what is queued, then end. Returns whether the thread has ended by then.

        `ends` is a time of `time.monotonic`; None: in ten seconds.
        """
        ends = time.monotonic() + PATIENCE if ends is None else ends
        self._stopping = True
        self._jobs.put(None)
        self._thread.join(timeout=max(ends - time.monotonic(), 0.0))
        return not self._thread.is_alive()


class Future(Generic[T]):
    """What a question gives that was given to others as a job.

    `give` gives them the job; `alive` tells whether they still take any.
    """

    def __init__(
        self, question: Callable[[], T], give: Callable[[Job], None], alive: Callable[[], bool]
    ) -> None:
        self._question = question
        self._alive = alive
        self._answers: list[T] = []
        self._error: BaseException | None = None
        self._wakeup = AutoResetEvent()
        self._next: list[Job] = []
        give(self._job)

    def _job(self) -> None:
        try:
            self._answers.append(self._question())
        except BaseException as error:  # raised where somebody waits for the answer
            self._error = error
        self._wakeup.set()
        for job in self._next:
            job()

    def then(self, job: Job) -> None:
        """Have `job` done when there is an answer; twice, maybe. It must not raise."""
        self._next.append(job)
        if self._wakeup.wait(0.0):  # maybe too late for who answers to see it
            job()

    def wait(self) -> T:
        """Wait for the answer, once.

        Raises what the question raises, or RuntimeError if nobody is alive any more to answer.
        """
        while not self._wakeup.wait(1.0):
            if not self._alive():
                raise RuntimeError("the store's threads have ended")
        if self._error is not None:
            raise self._error
        return self._answers[0]


def one_by_one(parts: Iterable[Job]) -> None:
    """`Workers.run_parallel` for who has no workers."""
    for part in parts:
        part()


class _Parts:
    """The parts of one job. Whoever has time takes the next one."""

    def __init__(self, parts: Iterable[Job], last: Job) -> None:
        self._parts = deque(parts)
        self._last = last
        self.left = len(self._parts)
        self._over = threading.Condition()
        self._error: BaseException | None = None

    def do(self) -> None:
        """Do parts until none is left to begin. Once one has failed, the others are left out."""
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
            except BaseException as error:  # raised where somebody waits for the whole
                self._error = error
            del part  # before anybody is told: it may hold a reference to a buffer
            with self._over:
                self.left -= 1
                if not self.left:
                    self._over.notify_all()

    def wait(self) -> None:
        with self._over:
            while self.left:
                self._over.wait()
        if self._error is not None:
            raise self._error
