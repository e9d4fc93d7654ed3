"""How the command starts and ends as a process of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import command, environment, start
from tests.helpers.files import object_file

NAMES = "torch", "numpy", "rich", "tierstore.plan", "tierstore.store"
TELL = f"print([name for name in {NAMES!r} if name in sys.modules], file=sys.stderr)"


def test_ls_loads_next_to_nothing(store: Path) -> None:
    run = start("ls", store, "--json", after=TELL)
    assert json.loads(run.stdout)["group_count"] == 3
    assert run.stderr == "[]\n"
    assert start("ls", store, after=TELL).stderr == "[]\n"


@pytest.mark.parametrize(
    "words",
    [
        ("show", "DIR", "a"),
        ("df", "DIR"),
        ("verify", "DIR", "--data"),
        ("prune", "DIR", "-y"),
        ("rm", "DIR", "a", "-y"),
        ("env", "--dir", "DIR"),
        ("--help",),
    ],
)
def test_no_command_loads_torch(store: Path, words: tuple[str, ...]) -> None:
    run = start(*(store if word == "DIR" else word for word in words), after=TELL)
    assert run.returncode == 0, run.stderr
    assert run.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("DIR",), 0),
        (("ls", "DIR/objects"), 2),
        (("verify", "DIR"), 3),
        (("show", "DIR", "a"), 3),
        (("rm", "DIR", "c", "-y"), 4),
    ],
)
def test_exit_codes_of_the_process(store: Path, words: tuple[str, ...], code: int) -> None:
    object_file(store, "a").write_bytes(b"")
    run = start(*(word.replace("DIR", str(store)) for word in words))
    assert run.returncode == code, run.stderr


def test_a_failure_nobody_thought_of_exits_with_1(store: Path) -> None:
    before = (
        "import tierstore.cli.list_commands as listing\n"
        "def fail(_): raise RuntimeError\n"
        "listing.survey = fail\n"
    )
    run = start("ls", store, before=before)
    assert run.returncode == 1
    assert "RuntimeError" in run.stderr


def test_a_reader_that_goes_away_is_no_failure_to_tell_of(store: Path) -> None:
    process = subprocess.Popen(
        command(["ls", store], "import time; time.sleep(0.3)"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) == 1
    assert b"Traceback" not in errors
    process.stderr.close()


def test_the_version_is_told_without_a_directory() -> None:
    run = start("--version")
    assert run.returncode == 0
    assert run.stdout.startswith("tierstore-inspect ")
