"""No call on a hung disk waits longer than its timeout.

The file system is in user space, and its server is stopped. The store is in a separate process,
which is killed if it does not end, so nothing here can hang.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.failing_fs import FailingFileSystem, failing_file_system
from tests.faults.hanging import SOON, VALUES

pytestmark = [
    pytest.mark.full(
        "waits until all waiters for the disk give up; test_async.py has one that hangs"
    ),
    pytest.mark.needs("root", "fuse"),
]

PATIENCE = 90.0
"""Limit for anything, in seconds. `close` may take some of these for each kind of thread."""


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[FailingFileSystem]:
    with failing_file_system(tmp_path) as file_system:
        yield file_system


def run_part(part: str, file_system: FailingFileSystem) -> dict[str, Any]:
    """Return results by name; "stuck" if the process did not end."""
    command = [sys.executable, "-m", "tests.faults.hanging", str(file_system.at / "store"), part]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None and process.stdout is not None
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    source = process.stdout
    threading.Thread(target=lambda: [*map(lines.put, source), lines.put("")], daemon=True).start()
    found: dict[str, Any] = {}
    try:
        while line := lines.get(timeout=PATIENCE):
            told = json.loads(line)
            found |= told
            if "wants" in told:
                (file_system.hang if told["wants"] == "hang" else file_system.go_on)()
                process.stdin.write(told["wants"] + "\n")
        found["code"] = process.wait(PATIENCE)
    except (queue.Empty, subprocess.TimeoutExpired):
        found["stuck"] = True
    finally:
        process.kill()
        file_system.go_on()
        process.wait()
        process.stdin.close()
        source.close()
    return found


@pytest.fixture
def while_getting(file_system: FailingFileSystem) -> dict[str, Any]:
    return run_part("getting", file_system)


def assert_timed_out(outcome: dict[str, Any]) -> None:
    """Check that the call raised its documented exception in time."""
    assert outcome["ended"] == "raised", outcome
    assert {"StoreTimeoutError", "TierStoreError", "TimeoutError"} <= set(outcome["names"])
    assert SOON <= outcome["after"] < SOON + 30, outcome


def test_hung_disk_calls_time_out_and_memory_is_served(
    while_getting: dict[str, Any],
) -> None:
    found = while_getting
    assert "stuck" not in found, found
    for call in ("acquire", "flush", "get"):
        assert_timed_out(found[call])
    assert "'far'" in found["acquire"]["text"]
    for call, key in (("near", "near"), ("unsaved", "unsaved"), ("again", "near")):
        assert found[call]["ended"] == VALUES[key], found
        assert found[call]["after"] < 30, "it waited for the disk without needing it"
    assert found["put"]["ended"] is None, found["put"]
    assert found["far"]["ended"] == VALUES["far"], "the store fails although the disk answers again"
    assert found["flushed"]["ended"] is found["closed"]["ended"] is None, found
    assert found["keys"] == {"far": VALUES["far"], "unsaved": VALUES["unsaved"]}
    assert found["code"] == 0


@pytest.mark.long(
    "waits for a minute until close gives up each kind of thread",
    sentinel="tests/faults/test_hung_disk.py::test_hung_disk_calls_time_out_and_memory_is_served",
)
def test_hung_disk_store_closes(file_system: FailingFileSystem) -> None:
    found = run_part("closing", file_system)
    assert "stuck" not in found, found
    assert found["closed"]["ended"] == "raised", "no error was raised for unsaved groups"
    assert "TierStoreError" in found["closed"]["names"], found["closed"]
    assert found["again"]["ended"] is None
    assert "ClosedError" in found["used"]["names"]
    assert found["code"] == 0, "the process did not end as it should"


def test_hung_disk_really_hangs(file_system: FailingFileSystem) -> None:
    """Check the control: a process that reads there does not end before the disk answers again."""
    (file_system.at / "file").write_bytes(b"bytes")
    command = [sys.executable, "-c", f"open({str(file_system.at / 'file')!r}).read()"]
    file_system.hang()
    process = subprocess.Popen(command)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        file_system.go_on()
        assert process.wait(PATIENCE) == 0
    finally:
        file_system.go_on()
        process.kill()
        process.wait()
