"""Processes that are the ranks of one process group and run functions for a test.

They communicate over gloo, and meet at a file. Each call has a timeout. After a timeout or an error
in one rank, all are killed: a rank that waits for a dead one would wait as long as torch does.
"""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT = 120
"""Timeout in seconds of a call, and of a collective."""

_numbers = itertools.count()


class Ranks:
    """`world` processes. `call(function, ...)` runs a function of a module in each of them."""

    def __init__(self, world: int, directory: Path, timeout: float = TIMEOUT) -> None:
        context = multiprocessing.get_context("spawn")
        meeting = str(directory / f"meeting-{next(_numbers)}")
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world, meeting, timeout), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Have each rank run `function(*args, **kwargs)`."""
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))

    def results(self, timeout: float = TIMEOUT) -> list[Any]:
        """Return the result of each rank.

        Raises AssertionError with the tracebacks of those that failed, and kills all.
        """
        until = time.monotonic() + timeout
        found: list[Any] = []
        failed: list[str] = []
        for rank, pipe in enumerate(self._pipes):
            answer = self._answer(pipe, until)
            if answer is None:
                failed.append(f"rank {rank} has not answered")
            elif not answer[0]:
                failed.append(f"rank {rank}: {answer[1]}")
                until = min(until, time.monotonic() + 5)  # others may wait for it forever
            else:
                found.append(answer[1])
        if failed:
            self.kill()
            raise AssertionError("\n".join(failed))
        return found

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run a function in each rank, and return the results by rank."""
        self.start(function, *args, **kwargs)
        return self.results()

    @staticmethod
    def _answer(pipe: Connection, until: float) -> Any:
        try:
            if pipe.poll(max(until - time.monotonic(), 0)):
                return pipe.recv()
        except (EOFError, ConnectionError):
            pass  # it is dead
        return None

    @property
    def alive(self) -> bool:
        """Return whether all processes are alive."""
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        """Kill all processes and remove their files."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self.processes, self._pipes = [], []


def _serve(pipe: Connection, rank: int, world: int, meeting: str, timeout: float) -> None:
    import torch
    import torch.distributed as dist

    import tests.accelerator  # noqa: F401  # loads the device before anything goes backward

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout),
    )
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, function(*args, **kwargs)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
