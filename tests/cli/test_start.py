"""The command as a separate process: imports, exit codes and interrupts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import command, environment, start
from tests.helpers.files import object_file

NAMES = "torch", "numpy", "rich", "tierstore.plan", "tierstore.store"
PRINT_LOADED = f"print([name for name in {NAMES!r} if name in sys.modules], file=sys.stderr)"


def test_ls_loads_next_to_nothing(store: Path) -> None:
    run = start("ls", store, "--json", after=PRINT_LOADED)
    assert json.loads(run.stdout)["group_count"] == 3
    assert run.stderr == "[]\n"
    assert start("ls", store, after=PRINT_LOADED).stderr == "[]\n"


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
    run = start(*(store if word == "DIR" else word for word in words), after=PRINT_LOADED)
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
def test_process_exit_codes_are_right(store: Path, words: tuple[str, ...], code: int) -> None:
    object_file(store, "a").write_bytes(b"")
    run = start(*(word.replace("DIR", str(store)) for word in words))
    assert run.returncode == code, run.stderr


def test_unexpected_error_exits_with_1(store: Path) -> None:
    before = (
        "import tierstore.cli.list_commands as listing\n"
        "def fail(_): raise RuntimeError\n"
        "listing.survey = fail\n"
    )
    run = start("ls", store, before=before)
    assert run.returncode == 1
    assert "RuntimeError" in run.stderr


def test_closed_output_pipe_prints_no_traceback(store: Path) -> None:
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


def test_version_needs_no_directory() -> None:
    run = start("--version")
    assert run.returncode == 0
    assert run.stdout.startswith("tierstore-inspect ")
