"""Bars for what keeps its caller waiting for seconds, where somebody looks.

All of them are drawn in one way: after two seconds, on stderr if that is a terminal, or in a
notebook (that has ipywidgets), one at a time, and gone at the end. Where two would be drawn, as of
a download inside of a loop over files, it is the one that was first. `TIERSTORE_PROGRESS=0` in the
environment draws none. No thread is started: whoever does the work draws.
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

QUIET_SECONDS = 2.0

SWITCH = "TIERSTORE_PROGRESS"
"""The environment variable that says whether bars are drawn; if it is not there, they are."""

_EVERY = 0.1  # seconds between two pictures of a bar
_FIGURES = 37  # columns of what stands beside a bar: how much is done, how fast, what is left
_OFF = ("0", "false", "no", "off")
_screen: dict[str, _Bar] = {}
"""The bar that is being drawn, if any."""


def bar(items: Iterable[T], doing: str, unit: str) -> Iterable[T]:
    """The items, with a bar if going through them takes over two seconds."""
    total = len(items) if isinstance(items, Sized) else None
    with _closing(_Bar(doing, total, unit, QUIET_SECONDS)) as shown:
        for item in items:
            yield item
            shown.advance(1)


@contextmanager
def byte_bar(doing: str, nbytes: int, *, at_once: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar for `nbytes` bytes, drawn if it takes over two seconds, or `at_once`.

    Gives a function to tell of every so many bytes more, on any thread.
    """
    with _closing(_Bar(doing, nbytes, "", 0.0 if at_once else QUIET_SECONDS)) as shown:
        if at_once:
            shown.advance(0)
        yield shown.advance


@contextmanager
def _closing(shown: _Bar) -> Iterator[_Bar]:
    try:
        yield shown
    finally:
        shown.close()


class _Bar:
    """What is done so far of `total` (None: nobody knows) items, or bytes if there is no `unit`."""

    def __init__(self, doing: str, total: int | None, unit: str, delay: float) -> None:
        self._doing = doing
        self._total = total
        self._unit = unit
        self._done = 0
        self._lock = threading.RLock()
        self._drawing = threading.Lock()
        self._next = time.monotonic() + delay
        self._drawn: Any = None

    def advance(self, more: int) -> None:
        """So much more is done. On any thread; who comes while another draws does not wait."""
        with self._lock:
            self._done += more
            whole = self._drawn is not None and self._done == self._total
        now = time.monotonic()
        if (now < self._next and not whole) or not self._drawing.acquire(blocking=False):
            return
        try:
            self._next = now + _EVERY
            self._draw()
        finally:
            self._drawing.release()

    def _draw(self) -> None:
        if self._drawn is None:
            if not is_seen() or _screen.setdefault("bar", self) is not self:
                return
            self._drawn = _drawn(self._doing, self._total, self._unit)
            self._drawn.start()
        self._drawn.update(self._drawn.task_ids[0], completed=self._done, refresh=True)

    def close(self) -> None:
        """Draw it no more."""
        if _screen.get("bar") is self:
            del _screen["bar"]
        if self._drawn is not None:
            self._drawn.stop()
            self._drawn = None


def is_seen() -> bool:
    """Whether bars are drawn now: somebody looks, and has not said that there should be none."""
    if os.environ.get(SWITCH, "").strip().lower() in _OFF:
        return False
    return _is_terminal() or _is_notebook()


def _is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except (AttributeError, ValueError):  # whatever stands in for it, or it is closed
        return False


def _is_notebook() -> bool:
    if "ipykernel" not in sys.modules or importlib.util.find_spec("ipywidgets") is None:
        return False
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _drawn(doing: str, total: int | None, unit: str) -> Any:
    """What rich draws. It is imported where it is needed: the command line must start at once."""
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
    # A process that is killed would leave the terminal without one.
    console.show_cursor = lambda show=True: False  # type: ignore[method-assign]
    length = 40 if console.width >= 110 else 14
    # On one line, whatever is said: what does not fit is left out.
    most = max(console.width - length - _FIGURES, 1)
    doing = doing if len(doing) <= most else f"{doing[: most - 1]}…"
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
    drawn.add_task(doing, total=total)
    return drawn
