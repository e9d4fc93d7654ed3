"""Under a memory limit of the operating system, a step larger than memory still trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.activations import limited
from tests.helpers.processes import results_in, run_python, without_kept_addresses

pytestmark = [
    pytest.mark.skipif(
        not sys.platform.startswith("linux"),
        reason="only Linux counts private memory for RLIMIT_DATA",
    ),
]


def run(how: str, place: Path) -> subprocess.CompletedProcess[str]:
    words = ["-m", "tests.activations.limited", how, place / "store"]
    return run_python(*words, environment=without_kept_addresses(), timeout=300)


def test_step_of_five_times_the_memory_limit_finishes(tmp_path: Path) -> None:
    done = run("store", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = results_in(done.stdout)
    activations = limited.LAYERS * limited.NUMBERS * 4
    assert activations >= 5 * limited.HEADROOM
    assert result["right"]
    # The first layer's input is a leaf that requires a gradient, and present anyway.
    assert result["shipped"] >= activations - limited.NUMBERS * 4
    assert result["written"] >= activations - limited.HEADROOM
    assert result["peak"] <= limited.BUDGET


@pytest.mark.full("a separate process for each", keep=["nothing"])
@pytest.mark.parametrize("how", ["nothing", "save_on_cpu"])
def test_step_without_the_store_exceeds_the_memory_limit(how: str, tmp_path: Path) -> None:
    """The control."""
    done = run(how, tmp_path)
    assert done.returncode == 1
    assert "RESULT" not in done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(("RuntimeError", "MemoryError")), done.stderr[-3000:]
    assert "memory" in last.lower()
