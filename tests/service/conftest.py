"""Fixtures shared by the tests of a service."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="tierstore.service")
    return caplog
