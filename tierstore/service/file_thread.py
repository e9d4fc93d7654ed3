"""A thread for calls to the file system of a worker's files, which may hang (NFS, FUSE)."""

from __future__ import annotations

import _thread
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import RLock
from typing import TypeVar

T = TypeVar("T")


class FileThread:
    """Runs jobs in order, on a thread that exists while there are jobs.

    Each worker has its own: a file system that hangs blocks one thread, and the jobs of that worker
    only. The thread is a daemon: the service ends without it.
    """

    def __init__(self) -> None:
        self._jobs: deque[Callable[[], object]] = deque()
        self.running = False
        self._lock = RLock()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job. Raises RuntimeError if no thread can be started."""
        future = Future[T]()
        self._begin(lambda: _fulfil(future, job))
        return future

    def finish(self, job: Callable[[], None]) -> None:
        """Queue a job that never raises; run it here if no thread can start. Safe in finalizers."""
        try:
            self._begin(job)
        except RuntimeError:
            job()

    def _begin(self, job: Callable[[], object]) -> None:
        self._jobs.append(job)
        with self._lock:
            if self.running:
                return
            self.running = True
            try:
                # Unlike `Thread.start`, this takes no lock, and is safe in a finalizer.
                _thread.start_new_thread(self._run, ())
            except RuntimeError:
                self.running = False
                self._jobs.remove(job)
                raise

    def _run(self) -> None:
        while True:
            while self._jobs:
                self._jobs.popleft()()
            with self._lock:
                self.running = False
                if not self._jobs:
                    return
                self.running = True


def _fulfil(future: Future[T], job: Callable[[], T]) -> None:
    """Run a job even if its future was cancelled, because it owns descriptors."""
    try:
        result = job()
    except Exception as error:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
    else:
        if future.set_running_or_notify_cancel():
            future.set_result(result)
