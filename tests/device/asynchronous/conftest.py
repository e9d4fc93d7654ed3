"""Each test begins with the same seed, so that the device runs work at the same moments."""

from __future__ import annotations

import pytest

from tests.device import pretend


@pytest.fixture(autouse=True)
def same_moments() -> None:
    pretend.start_over()
