"""On an unsupported system, the package says so."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from tierstore.model import sizes, systems
from tierstore.model.systems import require_known_system

ROOT = Path(__file__).resolve().parents[2]

ELSEWHERE = """
import sys
sys.platform = {platform!r}
sys.modules["fcntl"] = None  # importing it raises Python's ImportError
sys.modules["resource"] = None
sys.argv = {argv!r}
"""


def start(platform: str, code: str, argv: list[str]) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh Python that believes it is on another system."""
    program = ELSEWHERE.format(platform=platform, argv=argv) + code
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("platform", ["darwin", "win32", "freebsd14"])
def test_import_on_another_system_raises_import_error(platform: str) -> None:
    run = start(platform, "import tierstore", ["program.py"])
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: tierstore supports Linux only, not {platform!r}")
    assert "WSL2" in last
    assert "container" in last
    assert "fcntl" not in run.stderr


@pytest.mark.parametrize(
    ("program", "module"),
    [
        ("/usr/local/bin/tierstore-inspect", "tierstore.cli"),
        (r"C:\Scripts\tierstore-inspect.exe", "tierstore.cli"),
        ("/usr/local/bin/tierstore-serve", "tierstore.service.cli"),
    ],
)
def test_commands_on_another_system_print_one_line(program: str, module: str) -> None:
    run = start("darwin", f"import {module}", [program, "--version"])
    assert run.returncode == 1
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.startswith("tierstore-")
    assert "supports Linux only" in line


def test_unsupported_page_size_raises() -> None:
    """Reject larger pages: the page map has one entry each, so written weights would be missed."""
    with pytest.raises(ImportError, match="kernel has pages of 65536 bytes: boot a kernel"):
        require_known_system("linux", 65536)
    with pytest.raises(SystemExit, match="tierstore-inspect: tierstore supports memory pages"):
        require_known_system("linux", 16384, "/usr/bin/tierstore-inspect")


def test_supported_system_is_silent() -> None:
    require_known_system()
    require_known_system("linux", systems.PAGE, "/usr/bin/tierstore-inspect")
    assert systems.PAGE == sizes.PAGE == mmap.PAGESIZE
