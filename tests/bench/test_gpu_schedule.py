"""A schedule of tools.gpu ends in time wherever it is cut, and the next one does only the rest."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.bench.gpu_trial import DIES, HANGS, POISONS, STEPS, job, names
from tools.gpu.lines import HOLDS, MISSED, TIME
from tools.gpu.schedule import Schedule

LONG = 600.0


def lines(place: Path) -> dict[str, dict[str, Any]]:
    """Return the files' entry of each line."""
    documents = [json.loads((place / f"{part}.json").read_text()) for part in STEPS]
    return {line["name"]: line for document in documents for line in document["lines"]}


def log(place: Path) -> list[str]:
    """Return the lines that were begun, in order, and empty the log."""
    path = place / "log"
    found = [entry.rpartition(" ")[0] for entry in path.read_text().splitlines()]
    path.write_text("")
    return found


def run(place: Path, within: float = LONG) -> None:
    Schedule([job(part, place) for part in STEPS], time.monotonic() + within).run()


def has_exited(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_schedule_uncut_measures_each_line_once(tmp_path: Path) -> None:
    run(tmp_path)
    assert sorted(log(tmp_path)) == sorted(names())
    assert json.loads((tmp_path / "one.json").read_text())["command"] == "trial"
    assert {line["verdict"] for line in lines(tmp_path).values()} == {HOLDS}
    run(tmp_path)
    assert log(tmp_path) == []


@pytest.mark.full("waits for lines that hang until the time is over")
@pytest.mark.parametrize("cut", ["one second", "two first"], ids=lambda name: name.split()[0])
def test_schedule_cut_in_a_line_resumes_with_the_rest(
    cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A line's process reads its name from the environment: no parameter reaches it.
    monkeypatch.setenv(HANGS, cut)
    run(tmp_path, within=25.0)
    begun = log(tmp_path)
    assert cut in begun
    assert has_exited(int((tmp_path / "hangs").read_text())), "a process of the line outlives it"
    found = lines(tmp_path)
    done = {name for name, line in found.items() if line["done"]}
    assert found[cut]["verdict"] == f"{TIME}: it was cut"
    for name in names():
        assert (name in done) == (found[name]["verdict"] == HOLDS)
        if STEPS[name.split()[0]] > STEPS[cut.split()[0]]:
            assert found[name]["verdict"].startswith(TIME)
    monkeypatch.delenv(HANGS)
    run(tmp_path)
    assert sorted(log(tmp_path)) == sorted(set(names()) - done)
    again = lines(tmp_path)
    assert {line["verdict"] for line in again.values()} == {HOLDS}
    assert all(again[name] == found[name] for name in done)


@pytest.mark.full("a line takes thirty seconds to be one that hangs")
@pytest.mark.parametrize(
    ("how", "why"), [(DIES, "the process ended with status -6\n"), (HANGS, "it hung\n")]
)
def test_schedule_line_dies_or_hangs_is_missed_others_run(
    how: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(how, "two first")
    run(tmp_path)
    found = lines(tmp_path)
    assert (found["two first"]["verdict"], found["two first"]["error"]) == (MISSED, why)
    assert {found[name]["verdict"] for name in names() if name != "two first"} == {HOLDS}
    log(tmp_path)
    run(tmp_path)
    assert log(tmp_path) == [], "a fault is a result"


def test_schedule_line_that_poisons_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POISONS, "three first")
    Schedule([job(part, tmp_path) for part in ("one", "three")], time.monotonic() + LONG).run()
    pids = dict(entry.rsplit(" ", 1) for entry in (tmp_path / "log").read_text().splitlines())
    assert pids["three first"] != pids["three second"]
    assert pids["one first"] == pids["one second"]


def test_schedule_needed_line_missing_is_postponed(tmp_path: Path) -> None:
    two = job("two", tmp_path)
    Schedule([two], time.monotonic() + LONG).run()
    entry = two.report.entries["two second"]
    assert (entry.verdict, entry.done) == ("not run: needs the line 'one second'", False)
    Schedule([job(part, tmp_path) for part in ("one", "two")], time.monotonic() + LONG).run()
    assert json.loads((tmp_path / "two.json").read_text())["lines"][1]["verdict"] == HOLDS


def test_schedule_line_longer_than_the_time_left_is_skipped(tmp_path: Path) -> None:
    one = job("one", tmp_path, seconds=100.0)
    Schedule([one], time.monotonic() + 20.0).run()
    assert all(entry.verdict.startswith(TIME) for entry in one.report.entries.values())
    assert not (tmp_path / "log").exists()


def test_schedule_process_that_cannot_start_is_reported(tmp_path: Path) -> None:
    broken = job("one", tmp_path)
    broken.arguments = ()
    Schedule([broken], time.monotonic() + LONG).run()
    entries = broken.report.entries.values()
    assert {entry.verdict for entry in entries} == {"not run: no process reaches it"}
    assert "missing" in broken.report.remarks[0]
    assert broken.report.missed
