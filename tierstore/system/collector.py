"""Python's garbage collector, for code that creates very many objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Disable garbage collection inside the block.

    Nearly all objects that such a block creates survive it, and the collector would traverse all of
    them again and again. Reference counting frees the rest.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
