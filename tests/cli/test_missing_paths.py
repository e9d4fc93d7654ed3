"""Every command that takes a path says that nothing is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Inspect
from tierstore.cli.commands import inspector

DIRECTORY, FILE = "there is no directory PATH", "there is no file PATH"
SOCKET = "there is no socket or directory PATH"
COMMANDS = [
    (("ls", "PATH"), 2, DIRECTORY),
    (("show", "PATH", "key"), 2, DIRECTORY),
    (("df", "PATH"), 2, DIRECTORY),
    (("verify", "PATH"), 2, DIRECTORY),
    (("verify", "PATH", "--repair"), 2, DIRECTORY),
    (("rm", "PATH", "key"), 2, DIRECTORY),
    (("rm", "PATH", "key", "-y"), 2, DIRECTORY),
    (("prune", "PATH"), 2, DIRECTORY),
    (("prune", "PATH", "-y"), 2, DIRECTORY),
    (("prune", "PATH", "--dry-run"), 2, DIRECTORY),
    (("bench", "PATH"), 2, DIRECTORY),
    (("env", "--dir", "PATH"), 2, DIRECTORY),
    (("plan", "PATH"), 2, "there is no file or directory PATH"),
    (("replay", "PATH"), 1, FILE),
    (("trace", "PATH"), 1, FILE),
    (("ps", "PATH"), 2, SOCKET),
    (("top", "PATH"), 2, SOCKET),
]
FILE_COMMANDS = [("replay", "PATH"), ("trace", "PATH")]
DIRECTORY_COMMANDS = [words for words, _, problem in COMMANDS if problem == DIRECTORY]


def test_every_command_is_in_the_table() -> None:
    assert {words[0] for words, _, _ in COMMANDS} == set(inspector.commands)


@pytest.mark.parametrize("below", ["missing", "file"])
@pytest.mark.parametrize(("words", "code", "problem"), COMMANDS)
def test_path_that_does_not_exist_is_reported(
    words: tuple[str, ...],
    code: int,
    problem: str,
    below: str,
    inspect: Inspect,
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / below / "path"
    result = inspect(*(path if word == "PATH" else word for word in words))
    assert result.exit_code == code
    assert result.stderr.startswith(f"Error: {problem.replace('PATH', str(path))}")
    assert result.stdout == ""


@pytest.mark.parametrize("words", DIRECTORY_COMMANDS)
def test_path_of_a_file_is_not_a_directory(
    words: tuple[str, ...], inspect: Inspect, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.touch()
    result = inspect(*(path if word == "PATH" else word for word in words))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {path} is not a directory")


@pytest.mark.parametrize("words", FILE_COMMANDS)
def test_path_of_a_directory_is_not_a_trace(
    words: tuple[str, ...], inspect: Inspect, tmp_path: Path
) -> None:
    result = inspect(*(tmp_path if word == "PATH" else word for word in words))
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {tmp_path} is a directory\n")
