"""Damage to the object files of a store.

Each function takes the file, and that of another group. Their names are those of the tests that use
them.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.helpers.files import flip_bit


def flip_header(path: Path, _: Path) -> None:
    """Flip one bit of the header."""
    flip_bit(path, 50)


def truncate(path: Path, _: Path) -> None:
    """Cut the last byte."""
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path, _: Path) -> None:
    """Append a byte."""
    os.truncate(path, path.stat().st_size + 1)


def empty(path: Path, _: Path) -> None:
    """Empty the file."""
    os.truncate(path, 0)
