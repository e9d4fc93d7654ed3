"""Limits and timeouts of a service, reduced for a test."""

from __future__ import annotations

from types import ModuleType

import pytest


def set_limit(patch: pytest.MonkeyPatch, module: ModuleType, name: str, value: float) -> None:
    """Set a module's constant to another number until the end of the test."""
    assert isinstance(getattr(module, name), int | float)
    patch.setattr(module, name, value)
