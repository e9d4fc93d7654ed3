"""The commands for a GPU run in small, on the pretend accelerator, as a user starts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import devices
from tests.bench.test_gpu_lines import groups_of
from tests.fresh import run_fresh
from tools.gpu import correctness, pages
from tools.gpu.bench import command

ROOT = Path(__file__).resolve().parents[2]
PRETEND = ("--small", "--device", devices.PRETEND, "--setup", "tests.device.pretend")

pytestmark = pytest.mark.pretend_only("itself")


def run(command: str, place: Path, *words: str) -> dict[str, dict[str, Any]]:
    """What the file says of each line."""
    out = place / f"{command}.json"
    done = run_fresh(
        ROOT / "tools" / "gpu" / f"{command}.py",
        *("--out", str(out), "--dir", str(place), *PRETEND, *words),
        directory=ROOT,
        seconds=540,  # a minute alone, but other tests run beside it
        environment={"TIERSTORE_PRETEND": "asynchronous", "OMP_NUM_THREADS": "1"},
    )
    assert out.exists(), done.stdout + done.stderr
    document = json.loads(out.read_text())
    lines = {line["name"]: line for line in document["lines"]}
    told = "\n".join(f"{n}: {x['verdict']} {x['figures']} {x['error']}" for n, x in lines.items())
    missed = any(line["verdict"] == "missed" for line in lines.values())
    assert done.returncode == int(missed), told + done.stderr
    assert not list(place.glob("tierstore-gpu-*")), "it has left files"
    print(told)
    return lines


def verdicts(lines: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: line["verdict"] for name, line in lines.items()}


# What is about speed says nothing where there is none.
SPEED = {"link", "all in RAM", "half in RAM", "compared", "offload_activations"}


def test_a_line_of_each_kind(tmp_path: Path) -> None:
    """The sentinel, in this process: whole commands are left to the full lane."""
    out = tmp_path / "correctness.json"
    names = ("environment", "equal groups", "registration")
    words = [word for name in names for word in ("--only", name)]
    words += ["--out", str(out), "--dir", str(tmp_path), *PRETEND]
    assert command("correctness", "about", correctness.groups, words) == 0
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    document = json.loads(out.read_text())
    assert document["hardware"]["name"] == "pretend (no GPU)"
    lines = {line["name"]: line for line in document["lines"]}
    wanted = ("measured", "holds", "not run: only CUDA registers memory")
    assert verdicts(lines) == dict(zip(names, wanted, strict=True))
    assert lines["equal groups"]["figures"]["readings"] == 48


@pytest.mark.full("runs a whole command")
def test_correctness(tmp_path: Path) -> None:
    rest = [group.name for group in groups_of("correctness") if group.name != "memory"]
    lines = run("correctness", tmp_path, *(word for name in rest for word in ("--only", name)))
    found = verdicts(lines)
    assert found.pop("registration") == found.pop("forks") == "not run: only CUDA registers memory"
    assert found.pop("link") in ("holds", "missed")
    assert set(found.values()) <= {"holds", "measured"}


@pytest.mark.full("runs a whole command")
def test_memory(tmp_path: Path) -> None:
    found = run("correctness", tmp_path, "--only", "memory")
    assert found["autocast"]["verdict"] == "not run: pretend has no kernels for autocast"
    assert found["running ahead"]["verdict"] == "holds"
    assert found["running ahead"]["figures"]["to_allowed"] > 0


@pytest.mark.full("runs a whole command")
def test_inference(tmp_path: Path) -> None:
    lines = run("inference", tmp_path)
    for name, line in lines.items():
        assert line["verdict"] in ("holds", "measured") or name in SPEED or line["error"], name
        assert line["figures"].get("differing", 0) == 0, name
        assert line["figures"].get("device_budgets_taken", 0) <= 1, name
    for name in ("all in RAM", "half in RAM", "whole blocks", "a budget of 0.8 GB"):
        assert lines[name]["figures"]["onloaded_gb"] > 0, "all of it stayed: nothing is compared"
    read = [lines[name]["figures"]["read_gb"] for name in ("half in RAM", "all in RAM")]
    assert read[0] > read[1]  # groups are whole pages, which small ones do not fill
    assert lines["accelerate, cpu_offload"]["verdict"] == "measured"
    assert pages.main([str(tmp_path / "inference.json"), "--to", str(tmp_path), "--trial"]) == 0
    assert "all in RAM" in next(tmp_path.glob("*.md")).read_text()


@pytest.mark.full("runs a whole command")
def test_training(tmp_path: Path) -> None:
    lines = run("training", tmp_path)
    for name, line in lines.items():
        if name in SPEED or line["verdict"].startswith("not run: "):
            continue
        assert line["verdict"] in ("holds", "measured"), name
        assert line["figures"]["differing"] == 0, name
    assert lines["offload_activations"]["figures"]["differing"] == 0
    assert lines["offload_activations"]["figures"]["shipped_gb"] > 0
    assert lines["OffloadModel, RAM for 0.5 x, fused"]["figures"]["read_gb"] > 0
    assert lines["OffloadModel, RAM for 2 x, fused"]["figures"]["read_gb"] == 0
    for name in ("torchtune OffloadActivations", "DeepSpeed, ZeRO-Offload"):
        assert lines[name]["verdict"].endswith("is not installed")
