"""Limits and times of a service that are too large to wait for, made smaller for a test."""

from __future__ import annotations

from types import ModuleType

import pytest


def set_limit(patch: pytest.MonkeyPatch, module: ModuleType, name: str, value: float) -> None:
    """Have a module's constant be another number, until the end of the test."""
    assert isinstance(getattr(module, name), int | float)
    patch.setattr(module, name, value)
