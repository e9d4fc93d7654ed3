"""The benchmarks of whole models run, and say what they are there to say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import output_of
from tools.bench import against_simulation, followed, memory_group
from tools.bench.memory_group import MemoryGroup
from tools.bench.models_on_threads import IN_TURN, TOGETHER
from tools.bench.report import Claim

ROOT = Path(__file__).resolve().parents[2]

needs_groups = pytest.mark.skipif(
    not os.access(memory_group.ROOT / "memory", os.W_OK), reason="may not make control groups"
)

WHOLE_BENCHMARK = pytest.mark.long(
    "runs a whole benchmark; what it is made of has tests of its own",
    sentinel="tests/bench/test_dispatch_bench.py::test_a_short_run",
)
"""Those of dispatch and of training run in the full lane: they are made as all others are."""


def run(name: str, place: Path, *more: str) -> str:
    """What the script prints for a short run, which must be what it puts into the page.

    `more` are arguments of this script's own.
    """
    page = place / "page.md"
    words = [f"tools/bench/{name}.py", "--small", "--dir", place, "--markdown", page]
    output = output_of(*words, *more, timeout=300)
    if page.exists():
        assert output.strip() in page.read_text()
        assert str(place) not in output
    return output


def cells(text: str) -> dict[str, list[str]]:
    """The rows of all tables by their first cell."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines}


def number(cell: str) -> float:
    """The number that a cell begins with."""
    found = re.match(r"[\d,.]+", cell)
    assert found, cell
    return float(found[0].replace(",", ""))


@WHOLE_BENCHMARK
def test_edits(tmp_path: Path) -> None:
    text = run("edits", tmp_path)
    rows = cells(text)
    assert {"load_state_dict", "fuse_lora", "fuse_qkv_projections"} <= rows.keys()
    for name in rows.keys() & {"load_state_dict", "fuse_lora"}:
        assert number(rows[name][-1]) > 0, "nothing was written, so nothing was edited"
        assert f"held: {name}: every weight is right" in text


@WHOLE_BENCHMARK
def test_denoising(tmp_path: Path) -> None:
    text = run("denoise", tmp_path)
    rows = cells(text)
    assert {"in memory", "tierstore", "diffusers"} <= rows.keys()
    for name in ("tierstore", "diffusers"):
        seconds, ratio, *_ = rows[name]
        assert number(seconds) > 0
        assert number(ratio) > 0
    assert rows["tierstore"][-1] == "equal"
    read, missing = number(rows["tierstore"][2]), number(rows["missing at least, MB"][0])
    assert read >= missing > 0, "it did not have to read, so nothing is compared"
    assert "the image is the same bit for bit" in text


@WHOLE_BENCHMARK
def test_overhead(tmp_path: Path) -> None:
    text = run("overhead", tmp_path)
    assert cells(text)["tiny"][-1] == "equal"
    assert "acquire and release take at most 30 us" in text


@WHOLE_BENCHMARK
def test_experts(tmp_path: Path) -> None:
    text = run("experts", tmp_path)
    tables = text.split("Mixtral: ", 1)
    for name, table in zip(("Qwen2-MoE", "Mixtral"), tables, strict=True):
        rows = cells(table)
        for contender in ("tierstore", "accelerate, disk_offload"):
            assert number(rows[contender][0]) > 0
        assert rows["tierstore"][-1] == "equal"
        chosen, missing, read, *_ = map(number, rows["tierstore, counted"])
        assert read >= missing > 0, "all experts were in RAM, so nothing is shown"
        assert chosen >= missing
        assert f"held: {name}: logits are those of the plain model" in text
        assert f"held: {name}: the store counts as the hooks do" in text


@needs_groups
@WHOLE_BENCHMARK
def test_finetuning(tmp_path: Path) -> None:
    text = run("finetuning", tmp_path, "--rounds", "1")
    rows = cells(text)
    assert rows["tierstore"][-1] == "equal"
    for budget in ("25%", "50%"):
        for way in ("checkpointing", "no checkpointing"):
            _, limit, seconds, _, ratio, missing, read, *_ = rows[f"{budget}, {way}"]
            assert min(map(number, (limit, seconds, ratio))) > 0
            # Not all that is missing: some may have been read while another model had its turn.
            assert number(read) > number(missing) / 2 > 0, "all was in RAM: nothing is compared"
            assert f"held: {budget}, {way}: losses are equal" in text
    assert "held: memory: losses are those of the ordinary run" in text
    assert "held: memory: bytes that the store wrote in all steps (0)" in text


@pytest.mark.pretend_only("itself")
@WHOLE_BENCHMARK
def test_small_groups(tmp_path: Path) -> None:
    text = run("small_groups", tmp_path)
    assert "wrong values with 64 MiB (0)" in text
    assert "wrong values with 2 GiB (0)" in text


@pytest.mark.pretend_only("itself")
@WHOLE_BENCHMARK
def test_many_files(tmp_path: Path) -> None:
    text = run("many_files", tmp_path)
    assert {"opened", "`ls`", "`df`"} <= cells(text).keys()


@WHOLE_BENCHMARK
def test_queueing(tmp_path: Path) -> None:
    text = run("queueing", tmp_path)
    for tensors in ("1", "12"):
        copies, queued, leased, _ = cells(text)[tensors]
        assert number(copies) > 50
        assert 0 < number(queued) <= number(leased)
    assert "held: copies that another thread queued (0)" in text


@WHOLE_BENCHMARK
def test_first_pass(tmp_path: Path) -> None:
    text = run("first_pass", tmp_path)
    lines = [line for line in text.splitlines() if line.startswith(("| 1.87", "| 5.61"))]
    assert len(lines) == 5
    assert all(number(line.split("|")[3].strip()) > 0 for line in lines)
    assert "held: slots that were page-locked twice (0)" in text
    assert "held: slots that were page-locked after the first step (0)" in text


@WHOLE_BENCHMARK
def test_models_on_threads(tmp_path: Path) -> None:
    text = run("models_on_threads", tmp_path)
    lines = [line.split("|")[1:] for line in text.splitlines() if line.startswith("| cpu")]
    assert [cell.strip() for line in lines for cell in line[1:3]] == [
        word for count in "24" for way in (IN_TURN, TOGETHER) for word in (count, way)
    ]
    for line in lines:
        assert number(line[5].strip()) > 0, "nothing was read: RAM had room for all"


@WHOLE_BENCHMARK
def test_followed(tmp_path: Path) -> None:
    text = run("followed", tmp_path)
    lines = [line.split("|")[1:] for line in text.splitlines() if "| followed" in line]
    assert [line[0].strip() for line in lines] == list(followed.PLACES)
    moved = {line[0].strip(): number(line[2].strip()) for line in lines}
    assert [place for place, tiles in moved.items() if tiles] == [
        "half in RAM",
        "half on the device",
    ]


@WHOLE_BENCHMARK
def test_against_simulation(tmp_path: Path) -> None:
    rows = cells(run("against_simulation", tmp_path))
    for name in against_simulation.SHARES:
        _, _, ratio, read, onloaded = rows[name]
        assert number(ratio) > 0.9, "it is faster than can be"
        assert (number(read) > 0) == (name != "all")
        assert number(onloaded) > 0


@WHOLE_BENCHMARK
def test_overlap(tmp_path: Path) -> None:
    rows = cells(run("overlap", tmp_path))
    for ratio in ("1", "1.5", "2"):
        stalled, read = rows[ratio]
        assert 0 <= number(stalled) < 100
        assert number(read) >= 1, "less was read than can be missed"


def test_a_claim_is_held_within_its_bounds() -> None:
    assert Claim("fast", 3.0, at_least=3.0).verdict() == "held: fast (3)"
    assert Claim("fast", 2.999, at_least=3.0).verdict().startswith("MISSED")
    assert Claim("short", 1.13, at_most=1.12).verdict() == "MISSED: short (1.13)"


@needs_groups
def test_what_takes_more_than_a_group_may_have_is_ended() -> None:
    take = "x = bytearray({}); print(len(x))"
    with MemoryGroup(64 << 20) as group:
        for mebibytes, expected in ((16, 0), (128, -9)):
            words = group.command([sys.executable, "-c", take.format(mebibytes << 20)])
            done = subprocess.run(words, capture_output=True, text=True, timeout=60)
            assert done.returncode == expected, done.stderr
        assert 16 << 20 < group.peak <= 64 << 20
    assert not group.path.exists()
