"""The examples run, as a reader would start them, and print the promised results."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT, output_of

EXAMPLES = ROOT / "docs/examples"

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


def test_every_example_is_listed() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SMALLER)


@pytest.mark.full("whole runs of models: the blocks of the documentation use the same calls")
@pytest.mark.parametrize("name", SMALLER)
def test_example_runs(name: str, tmp_path: Path) -> None:
    own = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    there = {"directory": tmp_path, "environment": os.environ | own, "timeout": 300}
    text = output_of(EXAMPLES / name, *SMALLER[name], **there)
    assert text.splitlines()[-1].startswith("OK: ")
    assert not list(tmp_path.glob("tierstore-*"))  # (torch may leave files)
