"""Threads that take jobs by priority."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

URGENT, EARLY = 0, 1


class Workers:
    """Daemon threads that take jobs by priority, then age.

    Daemons, because a thread stuck in a dead disk must not keep the interpreter from ending; what
    they leave half-written has a temporary name.
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs: list[tuple[int, int, Callable[[], None]]] = []
        self._age = itertools.count()
        self._ready = threading.Condition()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._work, name=f"tierstore-{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, priority: int, job: Callable[[], None]) -> None:
        """Have `job` run on some thread. It must not raise."""
        with self._ready:
            heapq.heappush(self._jobs, (priority, next(self._age), job))
            self._ready.notify()

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._jobs and not self._stopping:
                    self._ready.wait()
                if not self._jobs:
                    return
                job = heapq.heappop(self._jobs)[2]
            job()
            del job  # it may hold the last reference to a buffer

    def stop(self) -> None:
        """Finish what is queued, then end."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join(timeout=10)
