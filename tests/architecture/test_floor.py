"""The oldest torch is tested where there is a network, and what is tested is said by the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import check, floor, newest

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = (ROOT / "tools" / "constraints.txt").read_text(encoding="utf-8")


def test_the_oldest_torch_is_the_one_that_the_package_asks_for() -> None:
    oldest = floor.oldest_torch((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert oldest.count(".") == 2
    decision = (ROOT / "docs" / "decisions" / "0011-dependencies.md").read_text(encoding="utf-8")
    assert f"torch, {oldest.removesuffix('.0')} or later" in decision
    assert floor.oldest_torch('dependencies = ["torch>=3.1.2"]') == "3.1.2"
    with pytest.raises(ValueError, match="does not say"):
        floor.oldest_torch('dependencies = ["torch"]')


def test_what_is_marked_is_found() -> None:
    folders = {file.parent.name for file in floor.marked_files(ROOT / "tests")}
    assert {"store", "tiers", "device", "activations"} <= folders


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pytestmark = pytest.mark.floor\n", True),
        ("pytestmark = [\n    pytest.mark.floor,\n    pytest.mark.alone,\n]\n", True),
        ("@pytest.mark.floor\ndef test_it(): ...\n", True),
        ("pytestmark = pytest.mark.floored\n", False),
        ("# pytest.mark.floor\n", False),
    ],
)
def test_a_mark_counts_where_it_marks(text: str, found: bool, tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(text)
    assert floor.marked_files(tmp_path) == [file] * found


def test_the_other_packages_have_the_versions_of_the_constraints() -> None:
    assert floor.pinned(["numpy"], "numpy==1.2\n") == ["numpy==1.2"]
    assert len(floor.pinned(floor.NEEDED, CONSTRAINTS)) == len(floor.NEEDED)
    with pytest.raises(ValueError, match=r"does not name \['nothing'\]"):
        floor.pinned(["numpy", "nothing"], CONSTRAINTS)


@pytest.mark.full("makes an environment; what is made of its status is tested below")
def test_without_packages_to_reach_it_says_so_and_no_test_counts_as_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert floor.main([], tmp_path / "venv") == floor.NOT_INSTALLED != 0
    assert "could not be installed" in capfd.readouterr().err
    assert not (tmp_path / "venv" / "complete").exists()


def test_what_was_not_tested_is_listed_apart() -> None:
    count = len(check.ELSEWHERE)
    for status, passed, failed, left in (
        (0, count, 0, 0),
        (1, 0, count, 0),
        (floor.NOT_INSTALLED, 0, 0, count),
    ):
        tally = check.Tally()
        check.run_elsewhere(tally, lambda name, command, status=status: status)
        assert (len(tally.passed), len(tally.failed), len(tally.not_run)) == (passed, failed, left)
        assert any("NOT RUN" in line for line in tally.lines()) == bool(left)


def test_an_environment_that_is_there_is_used_again(tmp_path: Path) -> None:
    wanted = ["torch==0.0.1", *floor.pinned(floor.NEEDED, CONSTRAINTS)]
    (tmp_path / "complete").write_text("\n".join(wanted))
    floor.make(tmp_path, "0.0.1")
    assert [file.name for file in tmp_path.iterdir()] == ["complete"]


def test_the_newest_python_is_the_last_that_the_package_names() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert newest.newest_python(text) == "3.13"
    assert newest.newest_python('"Python :: 3.9", "Python :: 3.10"') == "3.10"
    page = (ROOT / "docs" / "guides" / "support.md").read_text(encoding="utf-8")
    for version in newest.named_pythons(text):
        assert version in next(line for line in page.splitlines() if "| Python |" in line)


def test_an_interpreter_counts_if_it_runs_and_is_of_that_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert newest.interpreter(version) is None
    name = tmp_path / f"python{version}"
    name.write_text("#!/bin/sh\nexit 127\n")
    name.chmod(0o755)
    assert newest.interpreter(version) is None, "one that does not run"
    name.unlink()
    name.symlink_to(sys.executable)
    assert newest.interpreter(version) == name
    name.rename(tmp_path / "python3.99")
    assert newest.interpreter("3.99") is None, "one of another version"


def test_without_a_newest_python_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert newest.main([], tmp_path / "venv", lambda version: None) == floor.NOT_INSTALLED
    assert "is not here" in capsys.readouterr().err
