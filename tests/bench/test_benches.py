"""Each benchmark runs at small size, as a user starts it, with plausible figures."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.processes import output_of
from tools.bench import fio, memory_group
from tools.bench.followed import PLACES
from tools.bench.page import table

Rows = dict[str, list[str]]

WHOLE_BENCHMARK = pytest.mark.long(
    "runs a whole benchmark; its parts have separate tests",
    sentinel="tests/bench/test_benches.py::test_dispatch_bench_small_compares_each_library",
)
OURS = ("tierstore, all in RAM", "tierstore, 0.5 x", "tierstore, 0.2 x")
FLAGS = ("foreach=False", "foreach=True", "fused=True")


def run(name: str, place: Path, *more: str) -> str:
    """Run a benchmark at small size. Its output must be the text that it writes into a page."""
    page, folder = place / "page.md", place / "files"
    words = ["-m", "tools.bench", name, "--small", "--dir", folder, "--markdown", page]
    output = output_of(*words, *more, timeout=600)
    if page.exists():
        assert output.strip() in page.read_text()
        assert str(place) not in output
        assert {path.name for path in folder.iterdir()} <= {"small"}, "files are left behind"
    return output


def cells(text: str) -> Rows:
    """Return the rows of all tables by their first cell."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in lines}


def number(cell: str) -> float:
    """Return the number that a cell begins with."""
    found = re.match(r"[\d,.]+", cell)
    assert found, cell
    return float(found[0].replace(",", ""))


@pytest.mark.full("runs a whole benchmark; its parts have separate tests")
def test_dispatch_bench_small_compares_each_library(tmp_path: Path) -> None:
    text = run("dispatch", tmp_path)
    below, found, above = text.partition("Above the working set")
    assert found
    for regime, budget in ((below, 8), (above, 64)):
        rows = cells(regime)
        assert "accelerate, disk_offload" in rows
        for name in rows.keys() - {""}:
            seconds, ratio, first, loading, _, written, _, likeness = rows[name]
            assert min(map(number, (seconds, ratio, first, loading))) > 0
            assert likeness.startswith("same"), name
            copies = name.startswith("accelerate")  # the model has 19.9 MB
            assert number(written) >= 19.9 if copies else number(written) <= 0.1
        assert number(rows["tierstore"][6]) < budget + 64
    assert "held: the text equals that of the plain model" in text


def check_activations(text: str) -> None:
    on_cpu = cells(text.partition("On the pretend accelerator")[0])
    assert on_cpu["no hooks"][-1] == "equal"
    for name in ("tierstore, 2 x", "tierstore, 0.5 x", "tierstore, 0.1 x"):
        budget, copied, written, read, peak, seconds, ratio, gradients = on_cpu[name]
        assert gradients == "equal"
        assert min(map(number, (budget, copied, peak, seconds, ratio))) > 0
        assert (number(written) > 0) == (number(copied) > number(budget))
        assert number(read) <= number(written) <= number(copied)
    assert number(on_cpu["save_on_cpu"][1]) == 0, "on a CPU it has nothing to do"
    assert number(on_cpu["save_on_cpu, pin_memory"][1]) > number(on_cpu["tierstore, 2 x"][1])


def check_against_simulation(text: str) -> None:
    for name in ("all", "half", "a quarter"):
        _, _, ratio, read, onloaded = cells(text)[name]
        assert number(ratio) > 0.9, "it is impossibly fast"
        assert (number(read) > 0) == (name != "all")
        assert number(onloaded) > 0


def check_denoise(text: str) -> None:
    rows = cells(text)
    for name in ("in memory", "tierstore", "diffusers"):
        assert min(number(rows[name][0]), number(rows[name][1])) > 0
    assert rows["tierstore"][-1] == "equal"
    read, missing = number(rows["tierstore"][2]), number(rows["least possible misses, MB"][0])
    assert read >= missing > 0, "nothing had to be read, so nothing is compared"


def check_disk(text: str) -> None:
    rows = cells(text)
    for name in ("tierstore", "numpy memmap, copied", "aiofiles readinto",
                 "tierstore, spill into room used before"):  # fmt: skip
        speed, _, ratio, _, used = rows[name]
        assert number(speed) > 0 and number(ratio) > 0 and number(used) >= 0
    assert sum("the best of" in name for name in rows) == 2


def check_edits(text: str) -> None:
    for name in ("load_state_dict", "fuse_lora", "fuse_qkv_projections"):
        assert number(cells(text)[name][-1]) > 0, "nothing was written, so nothing was edited"
        assert f"held: {name}: all weights are correct" in text


def check_experts(text: str) -> None:
    for name, part in zip(("Qwen2-MoE", "Mixtral"), text.split("Mixtral: ", 1), strict=True):
        rows = cells(part)
        assert number(rows["accelerate, disk_offload"][0]) > 0
        assert rows["tierstore"][-1] == "equal"
        chosen, missing, read, *_ = map(number, rows["tierstore, counted"])
        assert read >= missing > 0, "all experts were in RAM, so nothing is measured"
        assert chosen >= missing
        assert f"held: {name}: logits equal those of the plain model" in text
        assert f"held: {name}: the counts of the store and the hooks are equal" in text


def check_finetuning(text: str) -> None:
    rows = cells(text)
    assert rows["tierstore"][-1] == "equal"
    for way in ("checkpointing", "no checkpointing"):
        for budget in ("25%", "50%"):
            _, limit, seconds, _, ratio, missing, read, *_ = rows[f"{budget}, {way}"]
            assert min(map(number, (limit, seconds, ratio))) > 0
            # Not all missing bytes: some may have been read while another model had its turn.
            assert number(read) > number(missing) / 2 > 0, "all was in RAM: nothing is compared"
            assert f"held: {budget}, {way}: losses are equal" in text
    assert "held: memory: losses are bit-identical" in text
    assert "held: memory: bytes that the store wrote in all steps (0)" in text


def check_first_pass(text: str) -> None:
    lines = [line for line in text.splitlines() if line.startswith(("| 1.87", "| 5.61"))]
    assert len(lines) == 5
    assert all(number(line.split("|")[3].strip()) > 0 for line in lines)
    assert "held: slots that were page-locked twice (0)" in text
    assert "held: slots that were page-locked after the first step (0)" in text


def check_followed(text: str) -> None:
    lines = [line.split("|")[1:] for line in text.splitlines() if "| followed" in line]
    moved = {line[0].strip(): number(line[2].strip()) for line in lines}
    assert list(moved) == list(PLACES)
    assert [place for place, tiles in moved.items() if tiles] == [
        "half in RAM",
        "half on the device",
    ]


def check_loading(text: str) -> None:
    assert text.count("bytes written (0)") == 3
    assert text.count(": the same image (1)") == 3
    assert number(cells(text)["bfloat16"][-1]) > 0, "nothing was cast"


def check_models_on_threads(text: str) -> None:
    lines = [line.split("|")[1:] for line in text.splitlines() if line.startswith("| cpu")]
    assert len(lines) == 4
    for line in lines:
        assert number(line[5].strip()) > 0, "nothing was read: all fitted into RAM"


def check_optimizer(text: str) -> None:
    in_ram, found, on_disk = text.partition("## On disk")
    assert found
    for flags in FLAGS:
        torchs, ours, ratio, values = cells(in_ram)[flags]
        assert min(map(number, (torchs, ours, ratio))) > 0
        assert values == "equal"
        step, disk, _, _, read, written, counted, _, share, values = cells(on_disk)[flags]
        assert values == "equal"
        assert min(map(number, (step, disk, share))) > 0
        # four fifths of parameters, gradients and states; all of them but gradients change
        assert 2.8 <= number(read) <= 4.2
        assert 1.8 <= number(written) <= 3.2
        assert number(counted) == pytest.approx(number(read) + number(written), abs=0.3)
    assert "held: everything fits: bytes read and written on disk" in text
    assert "held: parameters and states are bit-identical to torch's" in text


def check_overhead(text: str) -> None:
    assert cells(text)["tiny"][-1] == "equal"


def check_overlap(text: str) -> None:
    for ratio in ("1", "1.5", "2"):
        stalled, read = cells(text)[ratio]
        assert 0 <= number(stalled) < 100
        assert number(read) >= 1, "fewer bytes were read than missed"


def check_queueing(text: str) -> None:
    for tensors in ("1", "12"):
        copies, queued, leased, _ = cells(text)[tensors]
        assert number(copies) > 50
        assert 0 < number(queued) <= number(leased)
    assert "held: copies that another thread queued (0)" in text


def check_remote(text: str) -> None:
    assert "held: outputs are bit-identical to those of the model in memory" in text
    assert "held: bytes fetched with a warm, complete cache (0)" in text


def check_service(text: str) -> None:
    assert text.count("held: number of different images of all workers") == 2
    assert number(cells(text)["service"][2]) > 0, "all was in RAM: nothing is compared"


def check_small_groups(text: str) -> None:
    assert text.count("(0)") == 2, "wrong values"


def check_train_offload(text: str) -> None:
    rows = cells(text)
    state = 4 * number(text.partition(" MB of parameters")[0].rpartition(" ")[2])
    again = [f"{name}, checkpoint_activation" for name in (OURS[0], OURS[2])]
    for name in ("plain", *OURS, "plain, checkpointed", *again):
        seconds, ratio, _, budget, _, peak, tiers, moved, losses = rows[name]
        assert min(map(number, (seconds, ratio, peak))) > 0
        assert losses.endswith(": equal")
        read, written = (number(part) for part in moved.split(", "))
        assert (read > 0) == (written > 0) == bool(budget and number(budget) < state)
        assert not budget or number(tiers) <= number(budget)
    for name in ("FairScale OffloadModel", "FSDP2, CPUOffloadPolicy", "torchao CPUOffloadOptimi"):
        ran = [row for title, row in rows.items() if title.startswith(name)]
        assert f"{name}" in text and all(row[-1].endswith(": equal") for row in ran)


def check_training_bytes(text: str) -> None:
    assert text.count("\n## ") == 6
    assert "MISSED" not in text


CHECKS: dict[str, Callable[[str], None]] = {
    name.removeprefix("check_"): check
    for name, check in dict(globals()).items()
    if name.startswith("check_")
}
NEEDS = {
    "disk": fio.available(),
    "finetuning": os.access(memory_group.ROOT / "memory", os.W_OK),
    "loading": os.access(memory_group.ROOT / "memory", os.W_OK),
}
MORE = {"training_bytes": ["--shares", "0.3", "0.6"], "finetuning": ["--rounds", "1"]}


@WHOLE_BENCHMARK
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*CHECKS, "many_files", "prediction"])
def test_bench_small_has_plausible_figures(name: str, tmp_path: Path) -> None:
    if not NEEDS.get(name, True):
        pytest.skip("needs fio, or control groups of memory")
    CHECKS.get(name, lambda text: None)(run(name, tmp_path, *MORE.get(name, [])))


def test_cells_are_found_by_the_first_of_their_row() -> None:
    text = table(("", "s"), [("one", "1,024.5 (1 to 2)"), ("two", 3)])
    assert cells(text) | {"": []} == {"": [], "one": ["1,024.5 (1 to 2)"], "two": ["3"]}
    assert number(cells(text)["one"][0]) == 1024.5
