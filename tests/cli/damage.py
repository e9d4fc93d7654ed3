"""What befalls the object files of a store that the commands look into.

Each is given the file, and that of another group. Their names are those of the tests they are in.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.helpers.files import flip_bit


def flip_header(path: Path, _: Path) -> None:
    """One bit of the header."""
    flip_bit(path, 50)


def truncate(path: Path, _: Path) -> None:
    """The last byte is missing."""
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path, _: Path) -> None:
    """There is a byte more."""
    os.truncate(path, path.stat().st_size + 1)


def empty(path: Path, _: Path) -> None:
    """There is nothing in it."""
    os.truncate(path, 0)
