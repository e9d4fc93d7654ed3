"""States of the pretend accelerator that a store must handle differently."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.device import pretend


@contextmanager
def captured() -> Iterator[None]:
    """Capture the work that this thread queues inside into a graph."""
    with torch.Stream(pretend.NAME):
        pretend.begin_capture(capture_error_mode="thread_local")
        try:
            yield
        finally:
            pretend.end_capture()


@contextmanager
def pageable() -> Iterator[None]:
    """Disable page-locked host memory.

    Copies from host memory then block their caller, and each store warns once.
    """
    pretend.set_pinned_limit(0)
    try:
        with pytest.warns(RuntimeWarning, match="could not page-lock"):
            yield
    finally:
        pretend.set_pinned_limit(None)
