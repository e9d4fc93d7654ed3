"""The oldest supported torch is tested where it can be installed, else reported as not tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check, floor


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
def test_floor_mark_counts_only_as_a_mark(text: str, found: bool, tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(text)
    assert floor.marked_files(tmp_path) == [file] * found


@pytest.mark.full("makes an environment")
def test_floor_without_packages_reports_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert floor.main([], tmp_path / "venv") == floor.NOT_INSTALLED != 0
    assert "could not be installed" in capfd.readouterr().err
    assert not (tmp_path / "venv" / "complete").exists()


@pytest.mark.parametrize(
    ("status", "outcome"), [(0, "passed"), (1, "failed"), (floor.NOT_INSTALLED, "not_run")]
)
def test_checks_that_could_not_run_are_listed_separately(status: int, outcome: str) -> None:
    tally = check.Tally()
    check.run_elsewhere(tally, lambda name, command: status)
    lists = {name: getattr(tally, name) for name in ("passed", "failed", "not_run")}
    assert lists == {name: [*check.ELSEWHERE] * (name == outcome) for name in lists}
    assert any("NOT RUN" in line for line in tally.lines()) == (outcome == "not_run")
