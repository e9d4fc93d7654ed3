"""Threads that copy for coroutines, whose event loop must not wait for memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")

COUNT = 4
"""Threads, at most."""


class CopyThreads:
    """They are not those of the loop: all of these may wait for a lease that is released next."""

    def __init__(
        self,
        begin: Callable[[], None] = lambda: None,
        current_stream: Callable[[], torch.Stream | None] = lambda: None,
    ) -> None:
        """Each thread calls `begin` first; it must not raise. `current_stream` is of the caller."""
        self._current_stream = current_stream
        self._threads = ThreadPoolExecutor(COUNT, "tierstore-copy", begin)

    async def run(self, job: Callable[[], T]) -> T:
        """Run `job` on one of the threads, in order with the device work of this one.

        Whoever awaits it may be cancelled: that shows once the job is at its end, so that it reads
        nothing any more that was lent to it.
        """
        stream = self._current_stream()
        here: AbstractContextManager[object] = nullcontext() if stream is None else stream

        def in_order() -> T:
            with here:
                return job()

        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, in_order)
        except RuntimeError:  # the interpreter is ending, and there are no new threads any more
            return job()
        cancelled = None
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            running.exception()  # nobody else asks for it
            raise cancelled
        return running.result()

    def stop(self) -> None:
        """End the threads, once they have done what they were given. Does not wait."""
        self._threads.shutdown(wait=False)
