"""Machines that guard changes skip no test of a fault."""

from __future__ import annotations

import os

import pytest

from tests.faults.facilities import FACILITIES, expected, missing

GUARDED = os.environ.get("CI") == "true"


def test_every_expected_facility_is_known() -> None:
    assert expected()
    assert set(expected()) <= FACILITIES.keys()


@pytest.mark.skipif(not GUARDED, reason="only where CI=true says that changes are guarded here")
@pytest.mark.parametrize("name", expected())
def test_machine_that_guards_changes_has_every_facility(name: str) -> None:
    assert missing(name) is None
