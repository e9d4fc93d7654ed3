"""States of the pretend accelerator in which a store has to do otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.device import pretend


@contextmanager
def captured() -> Iterator[None]:
    """What this thread queues inside goes into a graph."""
    with torch.Stream(pretend.NAME):
        pretend.begin_capture(capture_error_mode="thread_local")
        try:
            yield
        finally:
            pretend.end_capture()


@contextmanager
def pageable() -> Iterator[None]:
    """No host memory is page-locked: copies from it keep their caller waiting, and one warning for
    each store says so."""
    pretend.set_pinned_limit(0)
    try:
        with pytest.warns(RuntimeWarning, match="could not page-lock"):
            yield
    finally:
        pretend.set_pinned_limit(None)
