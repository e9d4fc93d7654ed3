"""`python -m tools.gpu` in small, on the pretend accelerator, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests import devices
from tierstore.tiers.arena import Arena, host_arena
from tools.gpu import pages
from tools.gpu.__main__ import job_of
from tools.gpu.bench import Bench, found_device, hardware
from tools.gpu.lines import RUNNING, Group, Report, measure
from tools.gpu.parts import PARTS
from tools.gpu.schedule import ROOT, Schedule, environment

pytestmark = pytest.mark.pretend_only("itself")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(found_device(devices.PRETEND), True, tmp_path, time.monotonic() + 720)


def lines(place: Path) -> dict[str, dict[str, Any]]:
    """What the files of a directory say of each line."""
    documents = [json.loads(path.read_text()) for path in place.glob("*.json")]
    return {line["name"]: line for document in documents for line in document["lines"]}


def test_a_line_of_each_kind(bench: Bench, tmp_path: Path) -> None:
    """The sentinel, in this process: whole parts are left to the full lane."""
    names = ("environment", "equal groups", "forks")
    parts = {part.name: part for part in PARTS}
    groups = [g for name in ("per_group", "correctness") for g in parts[name].groups(bench)]
    chosen = [line for group in groups for line in group.lines if line.name in names]
    report = Report(tmp_path / "out.json", [Group("some", chosen)], {})
    measure(report, bench.figures, bench.ends)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    found = {name: line["verdict"] for name, line in lines(tmp_path).items()}
    wanted = ("measured", "holds", "not run: only CUDA registers memory")
    assert found == dict(zip(names, wanted, strict=True))
    assert bench.figures["equal groups"]["readings"] == 48
    assert hardware(bench.device)["name"] == "pretend (no GPU)"


@pytest.mark.parametrize("fails", (False, True))
def test_store_memory_is_unmade_at_the_end(fails: bool, bench: Bench) -> None:
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
    assert (arenas[0].bytes_held, arenas[0].unmade) == (0, 1)


def clock_until_a_line_runs(file: Path) -> Callable[[], float]:
    """A clock that leaps beyond all ends once the part with this file has begun a line."""
    leap = 0.0

    def clock() -> float:
        nonlocal leap
        if file.exists() and RUNNING in file.read_text():
            leap = 1e6
        return time.monotonic() + leap

    return clock


# Speeds say nothing where there is no GPU.
SPEED = {"link", "all in RAM", "half in RAM", "a quarter in RAM", "compared", "offload_activations"}


@pytest.mark.long(
    "runs all parts, each cut once",
    sentinel="tests/bench/test_gpu_schedule.py::test_schedule_cut_in_a_line_resumes_with_the_rest",
)
@pytest.mark.timeout(1800)
def test_main_cut_in_each_part_resumes_and_measures(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    about = {"small": True, "began": "", "hardware": hardware(bench.device)}
    before: dict[str, Any] = {}
    others = set(psutil.Process().children(recursive=True))  # of other tests
    for part in PARTS:
        jobs = [job_of(each, bench, out, about, bench.ends) for each in PARTS]
        if all(line.done for line in jobs[PARTS.index(part)].report.entries.values()):
            continue  # it ran beside another part until that was cut
        Schedule(jobs, bench.ends, clock_until_a_line_runs(out / f"{part.name}.json")).run()
        assert set(psutil.Process().children(recursive=True)) <= others, part.name
        found = lines(out)
        cut = [line for line in jobs[PARTS.index(part)].report.entries.values() if not line.done]
        assert cut, f"all of {part.name} ran"
        assert all(found[name] == line for name, line in before.items()), "measured twice"
        before = {name: line for name, line in found.items() if line["done"]}
    words = [sys.executable, "-m", "tools.gpu", "--minutes", "12", "--device", devices.PRETEND]
    words += ["--small", "--out", str(out), "--dir", str(tmp_path)]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    found = lines(out)
    told = "\n".join(f"{n}: {x['verdict']} {x['figures']} {x['error']}" for n, x in found.items())
    missed = any(line["verdict"] == "missed" for line in found.values())
    assert done.returncode == int(missed), told + done.stdout + done.stderr
    assert all(found[name] == line for name, line in before.items()), "measured twice"
    assert all(line["done"] for line in found.values()), told
    assert not list(tmp_path.glob("tierstore-gpu-*")), "it has left files"
    check_figures(found)
    trial = [*map(str, out.glob("*.json")), "--to", str(tmp_path), "--trial"]
    assert pages.main(trial) == 0
    assert len(list(tmp_path.glob("*.md"))) == len(pages.TITLES)


def check_figures(found: dict[str, dict[str, Any]]) -> None:
    """What the lines of a trial should say."""
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
