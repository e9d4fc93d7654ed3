"""Nothing is uploaded before a release is ready."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import release

ROOT = Path(__file__).resolve().parents[2]
READY = {
    "pyproject.toml": 'Source = "https://tierstore.org/source"\n',
    "README.md": "# tierstore\n",
    "docs/changelog.md": "# Changelog\n\n## 1.2.3 (2026-12-01)\n",
    "docs/contributing.md": "# Contributing\n",
    "docs/security.md": "Write to us.\n",
    "tierstore/__init__.py": '__version__ = "1.2.3"\n',
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (None, ""),
        ("tierstore/__init__.py", '__version__ = "1.2.4"'),
        ("docs/changelog.md", "## 1.2.3 (unreleased)"),
        ("docs/changelog.md", "## 1.2.30 (2026-12-01)"),
        ("pyproject.toml", "https://tierstore.example/"),
    ],
)
def test_a_version_may_be_uploaded_once_all_is_ready(
    name: str | None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for each, ready in READY.items():
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text(text if each == name else ready, encoding="utf-8")
    assert release.main(["v1.2.3"], tmp_path) == (name is not None)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(name or "1.2.3 may be uploaded")


def test_nothing_is_uploaded_before_an_address_was_chosen() -> None:
    """The placeholders are those of the files today. This test goes with the first upload."""
    found = "\n".join(release.left_to_do(ROOT, "1.2.3"))
    assert "pyproject.toml has addresses that nobody has" in found
    assert "on a package index" in found and "no way to report" in found


def test_the_workflow_runs_programs_that_are_there() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:tools|docs)/[\w./-]+\w", text))
    assert {"tools/release.py", "tools/constraints.txt"} <= named
    assert [path for path in named if not (ROOT / path).is_file()] == []
