"""Machines that guard changes skip no fault test."""

from __future__ import annotations

import os

import pytest

from tests.faults.facilities import FACILITIES, expected, missing

GUARDED = os.environ.get("CI") == "true"


def test_every_expected_facility_is_known() -> None:
    assert expected()
    assert set(expected()) <= FACILITIES.keys()


@pytest.mark.skipif(not GUARDED, reason="only with CI=true, on a machine that guards changes")
@pytest.mark.parametrize("name", expected())
def test_machine_that_guards_changes_has_every_facility(name: str) -> None:
    assert missing(name) is None
