"""Threads that take jobs by priority."""

from __future__ import annotations

import heapq
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

URGENT, EARLY = 0, 1

Job = Callable[[], None]
Together = Callable[[Iterable[Job]], None]
"""What does the parts of a job, on one thread or several, and returns when all are done."""


class Workers:
    """Daemon threads that take jobs by priority, then age.

    Daemons, because a thread stuck in a dead disk must not keep the interpreter from ending; what
    they leave half-written has a temporary name.
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs: list[tuple[tuple[int, int], int, Job]] = []
        self._age = itertools.count()
        self._place = threading.local()  # of the job that a thread does: its priority and age
        self._ready = threading.Condition()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._work, name=f"tierstore-{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, priority: int, job: Job) -> None:
        """Have `job` run on some thread. It must not raise."""
        age = next(self._age)
        self._push((priority, age), age, job)

    def _push(self, place: tuple[int, int], age: int, job: Job) -> None:
        with self._ready:
            heapq.heappush(self._jobs, (place, age, job))
            self._ready.notify()

    def together(self, parts: Iterable[Job], last: Job = lambda: None) -> None:
        """Do the parts of the job that this thread is doing, with the help of idle threads.

        Helpers come in the place of the whole job: what is older is done before its parts, and
        what is newer after them. Returns when every part is done. Raises what one of them raised.
        Who begins with the last part does `last` before; it must not raise.
        """
        shared = _Parts(parts, last)
        place = getattr(self._place, "now", (URGENT, 0))
        for _ in range(min(shared.left, len(self._threads)) - 1):
            self._push(place, next(self._age), shared.do)
        shared.do()
        shared.wait()

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._jobs and not self._stopping:
                    self._ready.wait()
                if not self._jobs:
                    return
                self._place.now, _, job = heapq.heappop(self._jobs)
            job()
            del job  # it may hold the last reference to a buffer

    def stop(self) -> None:
        """Finish what is queued, then end."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join(timeout=10)


def one_by_one(parts: Iterable[Job]) -> None:
    """`Workers.together` for who has no workers."""
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


def weakly(method: weakref.WeakMethod[Callable[..., None]]) -> Callable[..., None]:
    """The method, while its object is there: threads must not keep what is forgotten alive."""

    def call(*arguments: Any) -> None:
        found = method()
        if found is not None:
            found(*arguments)

    return call
