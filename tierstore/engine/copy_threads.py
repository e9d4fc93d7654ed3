"""Threads that copy tensors for coroutines, so that the event loop does not block."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")

MAX_THREADS = 4
"""Size of the thread pool."""


class CopyThreads:
    """A thread pool separate from the event loop's default pool.

    All threads of the default pool may be waiting for a lease that a job here releases.
    """

    def __init__(
        self,
        begin: Callable[[], None] = lambda: None,
        current_stream: Callable[[], torch.Stream | None] = lambda: None,
    ) -> None:
        """Each thread first calls `begin`, which must not raise. See `run` for the stream."""
        self._current_stream = current_stream
        self._threads = ThreadPoolExecutor(MAX_THREADS, "tierstore-copy", begin)

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` on a pool thread, in order with device work on the caller's current stream.

        A cancellation is raised only once the job has ended: the job may read leased memory, which
        the caller releases next.
        """
        stream = self._current_stream()
        here: AbstractContextManager[object] = nullcontext() if stream is None else stream

        def in_order() -> T:
            with here:
                return job()

        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, in_order)
        except RuntimeError:  # the interpreter is shutting down, and starts no threads
            return job()
        cancelled = None
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            running.exception()  # mark it as retrieved, or asyncio logs it
            raise cancelled
        return running.result()

    def stop(self) -> None:
        """End the threads once their jobs are done. Does not wait."""
        self._threads.shutdown(wait=False)
