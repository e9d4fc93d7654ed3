"""Tests of faults say what they need of the machine, and are skipped where it is missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.facilities import missing


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if (reason := missing(name)) is not None:
                pytest.skip(f"{name}: {reason}")


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """How often to do something: `rounds(usually, with --long)`."""
    long = request.config.getoption("long")

    def choose(usually: int, at_length: int) -> int:
        return at_length if long else usually

    return choose
