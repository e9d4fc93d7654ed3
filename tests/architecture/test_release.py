"""Nothing is uploaded before a release is ready."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tools import release

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "pyproject.toml",
    "README.md",
    "docs/changelog.md",
    "docs/contributing.md",
    "docs/security.md",
    "tierstore/__init__.py",
)


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """The files that are looked at, as they would be if all steps were done."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    change(tmp_path, "pyproject.toml", ".example", ".org")
    change(tmp_path, "README.md", "Until it is on a package index", "In a copy of the source")
    change(tmp_path, "docs/security.md", "There is no public address yet", "Write to us")
    change(tmp_path, "tierstore/__init__.py", release.version_of(ours()), "1.2.3")
    (tmp_path / "docs/changelog.md").write_text("# Changelog\n\n## 1.2.3 (2026-12-01)\n")
    return tmp_path


def ours() -> str:
    return (ROOT / "tierstore/__init__.py").read_text(encoding="utf-8")


def change(root: Path, name: str, before: str, after: str) -> None:
    text = (root / name).read_text(encoding="utf-8")
    assert before in text
    (root / name).write_text(text.replace(before, after), encoding="utf-8")


def test_what_is_ready_may_be_uploaded(ready: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["v1.2.3"], ready) == 0
    assert capsys.readouterr().out == "1.2.3 may be uploaded\n"


@pytest.mark.parametrize(
    ("name", "before", "after", "told"),
    [
        ("tierstore/__init__.py", '"1.2.3"', '"1.2.4"', "says that this is 1.2.4, not 1.2.3"),
        ("docs/changelog.md", "(2026-12-01)", "(unreleased)", "has no heading '## 1.2.3"),
        ("docs/changelog.md", "1.2.3", "1.2.30", "has no heading '## 1.2.3"),
        ("pyproject.toml", "tierstore.org/docs/", "tierstore.example/", "addresses that nobody"),
        ("README.md", "# tierstore", "[a](https://a.example/)", "addresses that nobody has"),
        ("README.md", "In a copy of", "Until it is on a package index,", "on a package index"),
        ("docs/security.md", "Write to us", "There is no public address yet", "no way to report"),
    ],
)
def test_what_was_left_out_is_named(
    ready: Path, name: str, before: str, after: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(ready, name, before, after)
    assert release.main(["1.2.3"], ready) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert told in line


def test_as_long_as_no_address_was_chosen_nothing_is_uploaded() -> None:
    """This test goes with the first upload."""
    found = release.left_to_do(ROOT, release.version_of(ours()))
    assert any("pyproject.toml has addresses that nobody has" in line for line in found)


def test_the_workflow_runs_what_is_there() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:tools|docs)/[\w./-]+\w", text))
    assert {"tools/release.py", "tools/constraints.txt"} <= named
    assert [path for path in named if not (ROOT / path).is_file()] == []
