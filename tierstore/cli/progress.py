"""The progress bar of long reads. This imports rich, so it is imported only when a bar is drawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from tierstore.cli import words


class _Bytes(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{words.size(task.completed)} of {words.size(task.total or 0)}")


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{words.size(speed)}/s")


@contextmanager
def bar(doing: str, nbytes: int, quiet: float = 0.0) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if it takes over `quiet` seconds.

    Gives a function to tell of every so many bytes more.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), _Bytes(), _Rate())
    console = Console(stderr=True)
    progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = progress.add_task(doing, total=nbytes)
    begin = time.monotonic() + quiet

    def advance(more: int) -> None:
        progress.advance(task, more)
        if time.monotonic() >= begin:
            progress.start()  # once it is drawn, this does nothing

    try:
        advance(0)
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()
