"""Bars for what keeps its caller waiting for seconds, on a terminal only."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

QUIET_SECONDS = 2.0


@functools.cache
def _bars() -> Any:
    from tqdm.auto import tqdm  # when it is needed: the command line must start at once

    # Without an interval of its own: a library should not start a thread for the looks of it.
    return type("Bar", (tqdm,), {"monitor_interval": 0})


def bar(items: Iterable[T], doing: str, unit: str) -> Iterable[T]:
    """The items, with a bar on a terminal if going through them takes over two seconds."""
    shown: Iterable[T] = _bars()(
        items, doing, unit=f" {unit}", delay=QUIET_SECONDS, miniters=1, disable=None, leave=False
    )
    return shown


@contextmanager
def byte_bar(doing: str, nbytes: int, *, at_once: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar for `nbytes` bytes, drawn if it takes over two seconds, or `at_once`.

    Gives a function to tell of every so many bytes more, on any thread.
    """
    delay, lock = 0.0 if at_once else QUIET_SECONDS, threading.Lock()
    unit = {"unit": "iB", "unit_scale": True, "unit_divisor": 1024}
    with _bars()(
        desc=doing, total=nbytes, **unit, delay=delay, miniters=1, disable=None, leave=False
    ) as shown:

        def advance(more: int) -> None:
            with lock:
                shown.update(more)

        yield advance
