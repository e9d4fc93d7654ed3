"""Progress bars for operations that take seconds.

A bar is drawn after two seconds, on stderr if that is a terminal, or in a notebook with ipywidgets,
and erased at the end. Only one is drawn at a time: if bars are nested (a download inside a loop
over files), the outermost. `TIERSTORE_PROGRESS=0` in the environment turns bars off. The thread
that does the work draws; no thread is started.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

DELAY_SECONDS = 2.0

ENVIRONMENT_VARIABLE = "TIERSTORE_PROGRESS"
"""The environment variable that turns bars off. They are on by default."""

_REDRAW_SECONDS = 0.1  # between two redraws of a bar
_STATISTICS_WIDTH = 37  # columns beside the bar: amount done, speed, time left
_OFF = ("0", "false", "no", "off")
_active: dict[str, _Bar] = {}
"""The bar on screen, if any."""


def bar(items: Iterable[T], description: str, unit: str) -> Iterable[T]:
    """Yield the items, and draw a bar if the loop over them takes more than two seconds."""
    total = len(items) if isinstance(items, Sized) else None
    with _closing(_Bar(description, total, unit, DELAY_SECONDS)) as shown_bar:
        for item in items:
            yield item
            shown_bar.advance(1)


@contextmanager
def byte_bar(
    description: str, nbytes: int, *, immediately: bool = False
) -> Iterator[Callable[[int], None]]:
    """Draw a bar for `nbytes` bytes, after two seconds or `immediately`.

    Yields a function that adds to the number of bytes done. Any thread may call it.
    """
    with _closing(
        _Bar(description, nbytes, "", 0.0 if immediately else DELAY_SECONDS)
    ) as shown_bar:
        if immediately:
            shown_bar.advance(0)
        yield shown_bar.advance


@contextmanager
def _closing(shown_bar: _Bar) -> Iterator[_Bar]:
    try:
        yield shown_bar
    finally:
        shown_bar.close()


class _Bar:
    """Progress towards `total` items (None: unknown), or bytes if `unit` is empty."""

    def __init__(self, description: str, total: int | None, unit: str, delay: float) -> None:
        self._description = description
        self._total = total
        self._unit = unit
        self._done = 0
        self._lock = threading.RLock()
        self._drawing = threading.Lock()
        self._next = time.monotonic() + delay
        self._progress: Any = None

    def advance(self, more: int) -> None:
        """Add to the amount done. Any thread may call this; it does not wait for a redraw."""
        with self._lock:
            self._done += more
            whole = self._progress is not None and self._done == self._total
        now = time.monotonic()
        if (now < self._next and not whole) or not self._drawing.acquire(blocking=False):
            return
        try:
            self._next = now + _REDRAW_SECONDS
            self._draw()
        finally:
            self._drawing.release()

    def _draw(self) -> None:
        if self._progress is None:
            if not is_visible() or _active.setdefault("bar", self) is not self:
                return
            self._progress = _progress(self._description, self._total, self._unit)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=self._done, refresh=True)

    def close(self) -> None:
        """Erase the bar."""
        if _active.get("bar") is self:
            del _active["bar"]
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def is_visible() -> bool:
    """Return True if bars are drawn: there is a terminal or notebook, and they are not off."""
    if os.environ.get(ENVIRONMENT_VARIABLE, "").strip().lower() in _OFF:
        return False
    return _is_terminal() or _is_notebook()


def _is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except (AttributeError, ValueError):  # stderr is replaced by another object, or is closed
        return False


def _is_notebook() -> bool:
    if "ipykernel" not in sys.modules or importlib.util.find_spec("ipywidgets") is None:
        return False
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _progress(description: str, total: int | None, unit: str) -> Any:
    """Create a rich progress display. Imports rich here, so that the command line starts fast."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount = (
        [MofNCompleteColumn(), TextColumn(unit, markup=False)]
        if unit
        else [DownloadColumn(binary_units=True), TransferSpeedColumn()]
    )
    console = Console(stderr=True)
    # A killed process would leave the terminal without a cursor.
    console.show_cursor = lambda show=True: False  # type: ignore[method-assign]
    length = 40 if console.width >= 110 else 14
    # Keep to one line: cut the description.
    most = max(console.width - length - _STATISTICS_WIDTH, 1)
    description = description if len(description) <= most else f"{description[: most - 1]}…"
    drawn = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(length),
        *amount,
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    drawn.add_task(description, total=total)
    return drawn
