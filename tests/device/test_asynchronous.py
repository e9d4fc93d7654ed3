"""The asynchronous device is tried in a process of its own: one process can have one device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.helpers import needs_pretend

ROOT = Path(__file__).resolve().parents[2]
CHOSEN = {**os.environ, "TIERSTORE_PRETEND": "asynchronous"}


@needs_pretend
@pytest.mark.full("builds and tries a device that no other test uses yet")
def test_the_asynchronous_device_keeps_what_it_promises() -> None:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/device/asynchronous"],
        cwd=ROOT,
        env={name: value for name, value in CHOSEN.items() if "XDIST" not in name},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 100
