"""The examples run, as a reader would start them, and show what they promise."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT, run_python

EXAMPLES = ROOT / "docs/examples"
SECONDS = 300

# Arguments that make each of them small.
SMALLER = {
    "finetune_lora.py": ["--width", "256", "--layers", "6", "--ram", "6MB", "--steps", "2"],
    "offload_pipeline.py": ["--steps", "2"],
    "run_from_object_store.py": [],
    "run_larger_than_memory.py": ["--size", "20MB", "--tokens", "6"],
    "serve_two_workers.py": ["--size", "20MB", "--passes", "2"],
    "train_in_several_processes.py": ["--width", "256", "--ram", "3MB", "--steps", "2"],
    "train_larger_than_memory.py": ["--size", "20MB", "--ram", "16MB", "--steps", "2"],
    "train_offloaded.py": ["--steps", "1"],
}


def run(name: str, *words: str, temporary: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(temporary),
    }
    words = [EXAMPLES / name, *words]
    return run_python(*words, directory=temporary, environment=environment, timeout=SECONDS)


def test_all_of_them_are_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SMALLER)


@pytest.mark.parametrize("name", SMALLER)
def test_an_example_says_what_it_takes_and_needs(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))) or ""
    assert re.search(r"^Takes .* of disk\. Needs ", docstring, re.MULTILINE)
    assert f"python docs/examples/{name}" in docstring


@pytest.mark.full("whole runs of models: the blocks of the documentation use the same calls")
@pytest.mark.parametrize("name", SMALLER)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    done = run(name, *SMALLER[name], temporary=tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.splitlines()[-1].startswith("OK: ")
    assert not list(tmp_path.glob("tierstore-*"))  # (torch may leave things of its own)


@pytest.mark.full("two whole runs of a model, for a convenience of an example")
def test_a_checkpoint_in_a_directory_is_kept(tmp_path: Path) -> None:
    """The second run finds it, whatever the budget is."""
    directory, temporary = tmp_path / "kept", tmp_path / "temporary"
    temporary.mkdir()
    words = ["--size", "10MB", "--tokens", "5", "--dir", str(directory)]
    first = run("run_larger_than_memory.py", *words, temporary=temporary)
    assert first.returncode == 0, f"{first.stdout}\n{first.stderr}"
    files = {path: path.stat().st_mtime_ns for path in directory.glob("llama-*/*")}
    assert len(files) > 16
    second = run("run_larger_than_memory.py", *words, "--ram", "6MB", temporary=temporary)
    assert second.returncode == 0, f"{second.stdout}\n{second.stderr}"
    assert {path: path.stat().st_mtime_ns for path in directory.glob("llama-*/*")} == files
    assert "writing" in first.stdout and "writing" not in second.stdout
