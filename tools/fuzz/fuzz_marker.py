"""Fuzz the small files of a store's directory: STORE.json and LOCK

    python tools/fuzz/fuzz_marker.py -runs=200000

An input is what the file holds. The marker is of this format, or refused with an error that names
it. Whatever is in LOCK, it can be told in a message who holds it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.fuzz.harness import run, temporary

# isort: split
from tierstore import TierStoreError
from tierstore.system.locking import describe_owner
from tierstore.system.objects import LOCK, MARKER, STORE_FORMAT, read_marker

SEEDS = [
    b'{"format": 1, "uuid": "0", "created_by": "tierstore"}',
    b'{"format": 2}',
    b'{"pid": 1234, "host": "machine"}',
]
PLACE = temporary("marker")


def check(raw: bytes) -> None:
    (PLACE / MARKER).write_bytes(raw)
    try:
        marker = read_marker(PLACE)
    except TierStoreError as error:
        assert str(PLACE / MARKER) in str(error)
    else:
        assert marker is not None and marker["format"] == STORE_FORMAT
    (PLACE / LOCK).write_bytes(raw)
    descriptor = os.open(PLACE / LOCK, os.O_RDONLY)
    try:
        assert describe_owner(descriptor).isprintable()
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    run(check, SEEDS)
