"""The disk benchmark runs, both ways of starting it, and fills a page without losing its prose."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.test_speed_benches import WHOLE_BENCHMARK
from tests.helpers.processes import output_of
from tools.bench import fio, machine

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object) -> str:
    if not fio.available():
        pytest.skip("fio is not installed: it is the reference")
    return output_of(*command, timeout=300)


@WHOLE_BENCHMARK
@pytest.mark.parametrize("start", [["tools/bench/disk.py"], ["-m", "tools.bench.disk"]])
def test_a_short_run(start: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before <!-- measured: begin -->outdated<!-- measured: end --> after")
    place = tmp_path / "disk"
    place.mkdir()
    text = run(*start, "--small", "--dir", place, "--markdown", page)
    assert os.listdir(place) == [], "files are left behind"
    split = [line.split("|") for line in text.splitlines()]
    rows = {cells[1].strip(): cells for cells in split if len(cells) == 8}
    for name in ("tierstore", "numpy memmap, copied", "aiofiles readinto",
                 "tierstore, spill into room used before"):  # fmt: skip
        _, _, speed, _, ratio, _, used, _ = rows[name]
        assert float(speed) > 0
        assert re.fullmatch(r" *[0-9.]+ \([0-9.]+ to [0-9.]+\) *", ratio)
        assert float(used) >= 0
    assert sum("the best of" in name for name in rows) == 2
    written = page.read_text()
    assert written.startswith("before <!--")
    assert written.endswith("--> after")
    assert "outdated" not in written
    assert text.strip() in written


def test_a_new_page_has_a_title(tmp_path: Path) -> None:
    page = tmp_path / "folder" / "page.md"
    machine.publish(page, "A title", "| a table |")
    assert page.read_text().startswith("# A title\n")
    machine.publish(page, "A title", "| another |")
    assert "| another |" in page.read_text()
    assert "| a table |" not in page.read_text()


def test_runs_take_turns_and_the_median_is_of_ratios_by_round() -> None:
    calls: list[str] = []
    cleared: list[int] = []

    def runs(name: str, *values: float) -> float:
        calls.append(name)
        return values[calls.count(name) - 1]

    results = machine.interleave(
        {"a": lambda: runs("a", 1, 2, 30), "b": lambda: runs("b", 2, 4, 30)},
        3,
        before=lambda: cleared.append(len(calls)),
    )
    assert results == {"a": [1, 2, 30], "b": [2, 4, 30]}
    assert [sorted(calls[i : i + 2]) for i in (0, 2, 4)] == 3 * [["a", "b"]]
    assert cleared == list(range(6))
    assert machine.spread(machine.ratios(results["a"], results["b"])) == "0.50 (0.50 to 1.00)"


def test_cpu_seconds_of_children_count() -> None:
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    with machine.Stopwatch() as watch:
        subprocess.run([sys.executable, "-c", burn], check=True)
    assert watch.cpu_seconds >= 0.3
    assert watch.seconds >= 0.3
