"""A bar for what keeps its caller waiting for seconds."""

from __future__ import annotations

import functools
from collections.abc import Iterable
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
