"""`python -m tools.gpu` at small size, on the pretend accelerator, as a user starts it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import devices
from tests.helpers.processes import run_python
from tierstore.tiers.arena import Arena, host_arena
from tools.gpu import pages
from tools.gpu.bench import Bench, found_device, hardware
from tools.gpu.lines import attempt
from tools.gpu.parts import PARTS

pytestmark = pytest.mark.pretend_only("itself")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(found_device(devices.PRETEND), True, tmp_path, time.monotonic() + 720)


def lines(place: Path) -> dict[str, dict[str, Any]]:
    """Return the entry of each line in the files of a directory."""
    documents = [json.loads(path.read_text()) for path in place.glob("*.json")]
    return {line["name"]: line for document in documents for line in document["lines"]}


def test_gpu_line_of_each_kind_runs(bench: Bench) -> None:
    """The sentinel, in this process: whole parts run in the full lane."""
    names = ("environment", "equal groups", "forks")
    parts = {part.name: part for part in PARTS}
    groups = [g for name in ("per_group", "correctness") for g in parts[name].groups(bench)]
    chosen = [line for group in groups for line in group.lines if line.name in names]
    found = {line.name: attempt(line) for line in chosen}
    wanted = ("measured", "holds", "not run: only CUDA registers memory")
    assert [found[name]["verdict"] for name in names] == list(wanted)
    assert found["equal groups"]["figures"]["readings"] == 48
    assert hardware(bench.device)["name"] == "pretend (no GPU)"


@pytest.mark.parametrize("fails", (False, True))
def test_gpu_part_ends_frees_store_memory(fails: bool, bench: Bench) -> None:
    arenas: list[Arena] = []

    def kept(budget: int | None, device: torch.device) -> Arena:
        arenas.append(host_arena(budget, device))
        return arenas[-1]

    bench.arena = kept
    try:
        with bench.store_memory(1 << 20) as memory:
            assert (arenas[0].bytes_held, memory.nbytes) == (1 << 20, 1 << 20)
            if fails:
                raise OSError
    except OSError:
        assert fails
    assert (arenas[0].bytes_held, arenas[0].frees) == (0, 1)


# Speeds mean nothing without a GPU.
SPEED = {"link", "all in RAM", "half in RAM", "a quarter in RAM", "compared", "offload_activations"}


@pytest.mark.long(
    "runs all parts",
    sentinel="tests/bench/test_gpu_schedule.py::test_schedule_cut_in_a_line_resumes_with_the_rest",
)
@pytest.mark.timeout(1800)
def test_main_cut_in_each_part_resumes_and_measures(bench: Bench, tmp_path: Path) -> None:
    words = ["-m", "tools.gpu", "--device", devices.PRETEND, "--small"]
    words += ["--out", str(tmp_path / "out"), "--dir", str(tmp_path), "--minutes"]
    before: dict[str, Any] = {}
    for minutes in ("0.5", "1", "20"):
        done = run_python(*words, minutes, environment={**os.environ, "OMP_NUM_THREADS": "1"})
        found = lines(tmp_path / "out")
        assert all(found[name] == line for name, line in before.items()), "measured twice"
        assert not list(tmp_path.glob("tierstore-gpu-*")), "files are left behind"
        before = {name: line for name, line in found.items() if line["done"]}
    details = "\n".join(
        f"{n}: {x['verdict']} {x['figures']} {x['error']}" for n, x in found.items()
    )
    missed = any(line["verdict"] == "missed" for line in found.values())
    assert done.returncode == int(missed), details + done.stdout + done.stderr
    assert all(line["done"] for line in found.values()), details
    check_figures(found)
    trial = [*map(str, (tmp_path / "out").glob("*.json")), "--to", str(tmp_path), "--trial"]
    assert pages.main(trial) == 0
    assert len(list(tmp_path.glob("*.md"))) == len(pages.TITLES)


def check_figures(found: dict[str, dict[str, Any]]) -> None:
    """Check the lines of a trial."""
    for name, line in found.items():
        if not line["verdict"].startswith("not run: "):
            assert line["verdict"] in ("holds", "measured") or name in SPEED, (name, line)
            assert line["figures"].get("differing", 0) == 0, name
            assert line["figures"].get("device_budgets_taken", 0) <= 1, name
    for name in ("all in RAM", "half in RAM", "whole blocks", "a budget of 0.8 GB"):
        assert found[name]["figures"]["onloaded_gb"] > 0, "all of it stayed: nothing is compared"
    read = [found[name]["figures"]["read_gb"] for name in ("half in RAM", "all in RAM")]
    assert read[0] > read[1]  # groups are whole pages, which small ones do not fill
    assert found["offload_activations"]["figures"]["shipped_gb"] > 0
    assert found["OffloadModel, RAM for 0.5 x, fused"]["figures"]["read_gb"] > 0
    assert found["OffloadModel, RAM for 2 x, fused"]["figures"]["read_gb"] == 0
    assert found["autocast"]["verdict"] == "not run: pretend has no kernels for autocast"
    assert found["accelerate, cpu_offload"]["verdict"] == "measured"
    for name in ("torchtune OffloadActivations", "DeepSpeed, ZeRO-Offload"):
        assert found[name]["verdict"].endswith("is not installed")
