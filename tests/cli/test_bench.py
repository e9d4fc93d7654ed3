"""`bench` measures a disk, says what it chose, remembers it, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Inspect, command, environment, on_terminal, start
from tests.helpers.files import open_files
from tierstore.transfer import measure
from tierstore.transfer.figures import known_figures
from tierstore.transfer.measure import BLOCKS, THREADS, measured_bandwidth

SMALL = "--size", "64MiB"
FAST = "import tierstore.transfer.measure as m; m.ROUNDS = 1; m.SECONDS = 0"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "SECONDS", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_it_tells_is_what_a_store_will_know(there: Path, inspect: Inspect) -> None:
    assert measured_bandwidth(there) is None
    document = inspect.json("bench", there, *SMALL)
    chosen, known = document["chosen"], known_figures(there)
    assert known is not None
    assert (known.block, known.threads) == (chosen["block"], chosen["threads"])
    assert round(known.read) == chosen["read"] == round(measured_bandwidth(there) or 0)
    assert round(known.write) == chosen["write"] == document["writes"]["again"]
    assert abs(known.measured - time.time()) < 600
    found = {(row["block"], row["threads"]): row["bytes_per_second"] for row in document["reads"]}
    assert set(found) == {(block, threads) for block in BLOCKS for threads in THREADS}
    assert found[known.block, known.threads] == chosen["read"]
    assert document["nbytes"] == 64 << 20
    assert document["directory"] == str(there)
    assert Path(document["remembered_in"]).read_text()
    assert os.listdir(there) == []


def test_the_table_for_people(there: Path, inspect: Inspect) -> None:
    result = inspect("bench", there, *SMALL)
    assert result.exit_code == 0
    head, *rows = result.stdout.splitlines()
    assert head.split() == ["READS", "OF", "6", "THREADS", "12", "THREADS"]
    assert [row.split()[:2] for row in rows[:4]] == [[f"{n}.0", "MiB"] for n in (4, 8, 16, 32)]
    assert all(row.count("/s") == 2 for row in rows[:4])
    assert rows[4].startswith("writes ")
    assert rows[5].startswith("chosen ")
    known = known_figures(there)
    assert known is not None
    assert f"{known.block >> 20}.0 MiB on {known.threads} threads" in rows[5]
    assert "disks.json" in result.stderr


@pytest.mark.parametrize(
    ("size", "why"), [("50%", "a share of what"), ("8", "no unit"), ("1MB", "too little")]
)
def test_a_size_that_is_none(size: str, why: str, there: Path, inspect: Inspect) -> None:
    result = inspect("bench", there, "--size", size)
    assert result.exit_code == 2
    assert why in result.stderr


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_a_place_that_is_no_directory(kind: str, there: Path, inspect: Inspect) -> None:
    if kind == "a file":
        (there / "place").write_text("mine")
    result = inspect("bench", there / "place", *SMALL)
    assert result.exit_code == 2
    assert str(there / "place") in result.stderr
    assert known_figures(there) is None


@pytest.mark.alone  # what another test deletes is room, too
def test_too_little_room_is_told_before_anything_is_written(
    there: Path, inspect: Inspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = os.statvfs(there).f_bavail * os.statvfs(there).f_frsize
    for size, code in ((str(free // 2 + (1 << 20)) + "B", 1), ("64MiB", 0)):
        result = inspect("bench", there, "--size", size)
        assert result.exit_code == code
        assert ("too little room" in result.stderr) == (code == 1)
        assert ("--size" in result.stderr) == (code == 1)
        assert os.listdir(there) == []


def test_a_cache_that_cannot_be_written_is_no_failure(
    there: Path, tmp_path: Path, inspect: Inspect
) -> None:
    (tmp_path / "file").write_text("in the place of a directory")
    env = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    result = inspect("bench", there, *SMALL, "--json", **env)
    assert result.exit_code == 0
    assert "could not be remembered" in result.stderr
    assert json.loads(result.stdout)["remembered_in"] is None


def test_a_directory_in_which_nothing_may_be_made(there: Path, inspect: Inspect) -> None:
    result = inspect("bench", "/proc", *SMALL)
    assert result.exit_code == 1
    assert "Error" in result.stderr


def test_a_bar_is_drawn_on_a_terminal_only(there: Path) -> None:
    shown = on_terminal("bench", there, *SMALL, before=FAST, COLUMNS="100")
    assert shown.exit_code == 0
    assert "Writing" in shown.output
    assert "Reading" in shown.output
    run = start("bench", there, *SMALL, "--json", before=FAST)
    assert run.returncode == 0
    assert "Writing" not in run.stdout + run.stderr
    assert json.loads(run.stdout)["chosen"]


def test_it_needs_no_torch(there: Path) -> None:
    after = "print([n for n in ('torch', 'numpy') if n in sys.modules], file=sys.stderr)"
    run = start("bench", there, *SMALL, before=FAST, after=after)
    assert run.returncode == 0
    assert run.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind_if_it_is_interrupted(number: int, there: Path) -> None:
    before = "import tierstore.transfer.measure as m; m.ROUNDS = 1000"
    process = subprocess.Popen(
        command(["bench", there, *SMALL], before),
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
        process.kill()  # or else it would go on reading for hours
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert os.listdir(there) == []
    assert known_figures(there) is None
