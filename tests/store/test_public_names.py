"""The public names of the package, before and after anything is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tierstore

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> str:
    """Return the output of a fresh Python that imports the package from here."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_dir_lists_exactly_the_public_names() -> None:
    import tierstore.cli.commands
    import tierstore.plan.planner  # submodules become attributes of the package

    assert {"plan", "cli", "import_module", "annotations"} <= set(vars(tierstore))
    assert dir(tierstore) == sorted([*tierstore.__all__, "errors", "types"])
    assert len(set(tierstore.__all__)) == len(tierstore.__all__)


@pytest.mark.full("imports torch, or all that adapters need")
def test_public_names_are_importable() -> None:
    assert [name for name in dir(tierstore) if not hasattr(tierstore, name)] == []
    assert not hasattr(tierstore, "no_such_name")


@pytest.mark.full("imports torch, or all that adapters need")
def test_star_import_gives_all_names() -> None:
    code = (
        "before = set(globals())\n"
        "from tierstore import *\n"
        "print(*sorted(set(globals()) - before - {'before'}))"
    )
    assert run(code).split() == sorted(tierstore.__all__)


def test_listing_names_imports_nothing_large() -> None:
    code = (
        "import sys, tierstore\n"
        "dir(tierstore), tierstore.__version__, tierstore.errors.BudgetError\n"
        "print([name for name in ('torch', 'numpy', 'diffusers') if name in sys.modules])"
    )
    assert run(code) == "[]\n"


@pytest.mark.full("imports torch, or all that adapters need")
def test_tab_completion_finds_the_store() -> None:
    code = (
        "import rlcompleter, tierstore\n"
        "complete = rlcompleter.Completer({'tierstore': tierstore}).complete\n"
        "found = [complete('tierstore.TierS', number) for number in range(5)]\n"
        "print(*filter(None, found))"
    )
    assert [word.rstrip("()") for word in run(code).split()] == [
        "tierstore.TierStore",
        "tierstore.TierStoreError",
    ]
