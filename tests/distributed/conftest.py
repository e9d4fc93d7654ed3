"""Fixtures: ranks that all tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """Return a function that starts this many ranks, or reuses live ones."""
    known: dict[int, Ranks] = {}

    def of(world: int) -> Ranks:
        if world not in known or not known[world].alive:
            if world in known:
                known[world].kill()
            known[world] = Ranks(world, tmp_path_factory.mktemp("ranks"))
        return known[world]

    try:
        yield of
    finally:
        for each in known.values():
            each.kill()


@pytest.fixture
def place(tmp_path: Path) -> str:
    """Return a directory for files of the ranks."""
    return str(tmp_path)
