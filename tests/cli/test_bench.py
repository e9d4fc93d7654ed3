"""`bench` measures a disk, prints and records its speed, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Inspect, command, environment, on_terminal, start
from tests.helpers.files import open_files
from tierstore.model import formatting
from tierstore.tiers.disk_speed import known_speed

SMALL = "--size", "64MiB"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


@pytest.fixture(autouse=True)
def no_disk_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_bench_result_is_known_to_plan(there: Path, inspect: Inspect) -> None:
    assert known_speed(there) is None
    document = inspect.json("bench", there, *SMALL)
    assert document["read"] == round(known_speed(there) or 0) > 0
    assert document["writes"].keys() == {"new", "again"}
    assert all(speed > 0 for speed in document["writes"].values())
    assert document["nbytes"] == 64 << 20
    assert document["directory"] == str(there)
    assert Path(document["remembered_in"]).read_text()
    assert os.listdir(there) == []


def test_bench_output_for_people_is_complete(there: Path, inspect: Inspect) -> None:
    result = inspect("bench", there, *SMALL)
    assert result.exit_code == 0
    reads, writes = result.stdout.splitlines()
    assert (
        reads == f"reads     {formatting.size(known_speed(there) or 0, formatting.Units.DECIMAL)}/s"
    )
    assert re.fullmatch(
        r"writes    \S+ [KMG]B/s into a new file, \S+ [KMG]B/s over existing data", writes
    )
    assert "disks.json" in result.stderr
    assert re.search(
        r"^Wrote 64\.0 MiB twice and read it 5 times, in ", result.stderr, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("size", "why"), [("50%", "is a percentage"), ("8", "no unit"), ("1MB", "too small")]
)
def test_bench_invalid_size_is_usage_error(
    size: str, why: str, there: Path, inspect: Inspect
) -> None:
    result = inspect("bench", there, "--size", size)
    assert result.exit_code == 2
    assert why in result.stderr


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_bench_path_not_a_directory_is_usage_error(
    kind: str, there: Path, inspect: Inspect
) -> None:
    if kind == "a file":
        (there / "place").write_text("mine")
    result = inspect("bench", there / "place", *SMALL)
    assert result.exit_code == 2
    assert str(there / "place") in result.stderr
    assert known_speed(there) is None


@pytest.mark.alone  # space that another test frees counts, too
def test_bench_too_little_space_fails_before_writing(
    there: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = os.statvfs(there).f_bavail * os.statvfs(there).f_frsize
    for size, code in ((str(free // 2 + (1 << 20)) + "B", 1), ("64MiB", 0)):
        result = inspect("bench", there, "--size", size)
        assert result.exit_code == code
        assert ("not enough disk space" in result.stderr) == (code == 1)
        assert ("--size" in result.stderr) == (code == 1)
        assert os.listdir(there) == []


def test_bench_unwritable_cache_is_only_a_warning(
    there: Path, tmp_path: Path, inspect: Inspect
) -> None:
    (tmp_path / "file").write_text("in the place of a directory")
    env = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    result = inspect("bench", there, *SMALL, "--json", **env)
    assert result.exit_code == 0
    assert "could not be saved" in result.stderr
    assert json.loads(result.stdout)["remembered_in"] is None


@pytest.mark.full("runs a benchmark twice")
def test_bench_progress_bar_is_drawn_on_a_terminal_only(there: Path) -> None:
    shown = on_terminal("bench", there, *SMALL, COLUMNS="100")
    assert shown.exit_code == 0
    assert "Writing" in shown.output
    assert "Reading" in shown.output
    run = start("bench", there, *SMALL, "--json")
    assert run.returncode == 0
    assert "Writing" not in run.stdout + run.stderr
    assert json.loads(run.stdout)["read"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_bench_interrupted_leaves_nothing(number: int, there: Path) -> None:
    process = subprocess.Popen(
        command(["bench", there, "--size", "1GiB"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        deadline = time.monotonic() + 60
        while not open_files(there, process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert open_files(there, process.pid)
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()  # otherwise it would read for hours
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert os.listdir(there) == []
    assert known_speed(there) is None
