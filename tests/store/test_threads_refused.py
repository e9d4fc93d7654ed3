"""A system that starts no more threads: opening raises, and the threads that started end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.helpers.files import open_files
from tests.store.helpers import on_both, open_store


def threads_of_stores() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("tierstore")}


@contextmanager
def refused_start(number: int) -> Iterator[list[threading.Thread]]:
    """Fail the start of the thread of this number. Yields those that were started."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("tierstore"):
            if len(started) == number:
                raise RuntimeError("can't start new thread")
            started.append(thread)
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        yield started


@on_both
def test_store_without_threads_leaves_none(device: str, disk_dir: Path) -> None:
    before, files = threads_of_stores(), open_files()
    for number in range(64):
        with refused_start(number) as started:
            try:
                store = open_store(disk_dir, device=device)
            except RuntimeError as error:
                assert "can't start new thread" in str(error)
                assert threads_of_stores() <= before, "at once, not when garbage is collected"
                assert open_files() == files
                continue
        break
    with store:
        assert number == len(started) > 2, "each start failed once"
        assert threads_of_stores() - before == set(started), "the control"
        store.put("k", torch.arange(3.0))
        assert torch.equal(store.get("k").cpu(), torch.arange(3.0))
    assert threads_of_stores() <= before
