"""A release that is not ready uploads nothing."""

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
def test_release_may_be_uploaded_once_all_is_ready(
    name: str | None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for each, ready in READY.items():
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text(text if each == name else ready, encoding="utf-8")
    assert release.main(["v1.2.3"], tmp_path) == (name is not None)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(name or "1.2.3 can be released")


def test_release_without_an_address_is_not_ready() -> None:
    """The placeholders are those of the files today. Delete this test with the first upload."""
    found = "\n".join(release.remaining_tasks(ROOT, "1.2.3"))
    assert "pyproject.toml has placeholder addresses" in found
    assert "on a package index" in found and "no address for reports" in found


def test_release_workflow_runs_existing_programs() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:tools|docs)/[\w./-]+\w", text))
    assert {"tools/release.py", "tools/constraints.txt"} <= named
    assert [path for path in named if not (ROOT / path).is_file()] == []
