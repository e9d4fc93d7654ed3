"""Completion at TAB, through click's interface and in a real bash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete

from tests.cli.conftest import ROOT, environment, put
from tests.helpers.files import object_file
from tierstore.cli.commands import inspector
from tierstore.service.cli import serve
from tierstore.tiers.directory import ObjectDirectory


@pytest.fixture
def full(store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a default directory with keys that shells split into words, and a damaged group."""
    directory = ObjectDirectory(store)
    for key in ("run 1", "two\nlines", "a:1", "größe/界", "layers/10"):
        put(directory, key)
    directory.close()
    object_file(store, "b").write_bytes(b"")
    monkeypatch.setenv("TIERSTORE_DIR", str(store))
    return store


def offered(words: list[object], incomplete: str = "", program: click.Command = inspector) -> str:
    """Return the values offered after some words, in one line."""
    asked = BashComplete(program, {}, program.name or "", "_COMPLETE")
    items = asked.get_completions([str(word) for word in words], incomplete)
    return " ".join(f"<{item.type}>" if item.type != "plain" else item.value for item in items)


def test_completion_offers_names(full: Path, tmp_path: Path) -> None:
    keys = "a größe/界 layers/0 layers/10"
    for words, incomplete, expected in (
        ([], "p", "plan prune ps"),
        ([], "zet", "<dir>"),
        (["ls", "--sort"], "s", "size"),
        (["verify", "DIR"], "--re", "--repair"),
        (["ls"], "", "<dir>"),
        (["trace"], "ru", "<file>"),
        (["show", full], "", keys),
        (["rm", full, "layers/0"], "lay", "layers/10"),
        (["show"], "layers/1", "layers/10"),
        (["show"], "elsewhere", "<dir>"),
        (["ls", full, "--prefix"], "", "größe/ layers/"),
        (["show", tmp_path], "", ""),
        (["rm", tmp_path / "nothing"], "", ""),
    ):
        assert offered([*words], incomplete) == expected, (words, incomplete)
    assert offered([], "--disk", serve) == "--disk"
    assert offered(["d", "--socket"], "/r", serve) == "<file>"


def test_completion_loads_no_torch(full: Path) -> None:
    code = (
        "import atexit, sys\n"
        "names = 'torch', 'numpy', 'rich', 'tierstore.store'\n"
        "tell = lambda: print([n for n in names if n in sys.modules], file=sys.stderr)\n"
        "atexit.register(tell)\n"
        "from tierstore.cli import main\nmain()\n"
    )
    asked = {"COMP_WORDS": f"tierstore-inspect show {full} l", "COMP_CWORD": "3"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(_TIERSTORE_INSPECT_COMPLETE="bash_complete", **asked),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["plain,layers/0", "plain,layers/10"]
    assert run.stderr == "[]\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_completion_script_runs_in_bash() -> None:
    code = "from tierstore.cli import main; main()"
    script = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(_TIERSTORE_INSPECT_COMPLETE="bash_source"),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    turned_on = f"{script}\ncomplete -p tierstore-inspect"
    run = subprocess.run(["bash", "-c", turned_on], capture_output=True, text=True, check=True)
    assert "tierstore_inspect_completion" in run.stdout
