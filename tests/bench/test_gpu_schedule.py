"""A schedule of tools.gpu ends in time wherever it is cut, and the next one does only the rest."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.bench import gpu_trial
from tests.bench.gpu_trial import DIES, HANGS, POISONS, STEPS, job, names
from tools.gpu.lines import HOLDS, MISSED, TIME
from tools.gpu.schedule import Schedule, environment

FAR = 1e6


def lines(place: Path) -> dict[str, dict[str, Any]]:
    """What the files say of each line."""
    documents = [json.loads((place / f"{part}.json").read_text()) for part in STEPS]
    return {line["name"]: line for document in documents for line in document["lines"]}


def log(place: Path) -> list[str]:
    """The lines that were begun, in order, and the log is empty from then on."""
    path = place / "log"
    found = [entry.rpartition(" ")[0] for entry in path.read_text().splitlines()]
    path.write_text("")
    return found


def clock_until(exists: Path, then: float) -> Callable[[], float]:
    """A clock that leaps by `then` seconds once the file exists, so that no test waits."""

    def clock() -> float:
        return time.monotonic() + then * exists.exists()

    return clock


def run(place: Path, clock: Callable[[], float] = time.monotonic) -> None:
    Schedule([job(part, place) for part in STEPS], time.monotonic() + FAR / 2, clock).run()


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_schedule_uncut_measures_each_line_once(tmp_path: Path) -> None:
    run(tmp_path)
    assert sorted(log(tmp_path)) == sorted(names())
    assert json.loads((tmp_path / "one.json").read_text())["command"] == "trial"
    assert {line["verdict"] for line in lines(tmp_path).values()} == {HOLDS}
    run(tmp_path)
    assert log(tmp_path) == []


@pytest.mark.full("a cut in each line", keep=["one-second", "two-first"])
@pytest.mark.parametrize("cut", names(), ids=lambda name: name.replace(" ", "-"))
def test_schedule_cut_in_a_line_resumes_with_the_rest(
    cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HANGS, cut)
    others = set(psutil.Process().children(recursive=True))  # of other tests
    run(tmp_path, clock_until(tmp_path / "hangs", FAR))
    begun = log(tmp_path)
    assert cut in begun
    assert set(psutil.Process().children(recursive=True)) <= others
    assert gone(int((tmp_path / "hangs").read_text())), "what a line started outlives it"
    found = lines(tmp_path)
    done = {name for name, line in found.items() if line["done"]}
    assert found[cut]["verdict"] == f"{TIME}: it was cut"
    for name in names():
        assert (name in done) == (found[name]["verdict"] == HOLDS)
        if STEPS[name.split()[0]] > STEPS[cut.split()[0]]:
            assert found[name]["verdict"] == f"{TIME}: the others took it"

    monkeypatch.delenv(HANGS)
    run(tmp_path)
    assert sorted(log(tmp_path)) == sorted(set(names()) - done)
    again = lines(tmp_path)
    assert {line["verdict"] for line in again.values()} == {HOLDS}
    assert all(again[name] == found[name] for name in done)


def test_schedule_line_that_dies_is_missed_and_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIES, "one first")
    run(tmp_path)
    found = lines(tmp_path)
    assert found["one first"]["verdict"] == MISSED
    assert found["one first"]["error"] == "the process ended with status -6\n"
    assert {found[name]["verdict"] for name in names() if name != "one first"} == {HOLDS}
    log(tmp_path)
    run(tmp_path)
    assert log(tmp_path) == [], "a fault is a result"


@pytest.mark.full("waits for a line that hangs")
def test_schedule_line_that_hangs_is_missed_and_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HANGS, "two first")
    limit = 40.0  # more than that of a line, less than the time there is
    run(tmp_path, clock_until(tmp_path / "hangs", limit))
    found = lines(tmp_path)
    assert (found["two first"]["verdict"], found["two first"]["error"]) == (MISSED, "it hung\n")
    assert {found[name]["verdict"] for name in names() if name != "two first"} == {HOLDS}


def test_schedule_line_that_poisons_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POISONS, "three first")
    run(tmp_path)
    pids = dict(entry.rsplit(" ", 1) for entry in (tmp_path / "log").read_text().splitlines())
    assert pids["three first"] != pids["three second"]
    assert pids["two first"] == pids["two second"]


def test_schedule_needed_line_missing_is_postponed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = [job(part, tmp_path) for part in ("two", "three")]
    Schedule(only, time.monotonic() + FAR).run()
    line = gpu_trial.report("two", tmp_path, {}).entries["two second"]
    assert (line.verdict, line.done) == ("not run: needs the line 'one second'", False)
    run(tmp_path)
    assert {line["verdict"] for line in lines(tmp_path).values()} == {HOLDS}


def test_schedule_process_that_cannot_start_is_told(tmp_path: Path) -> None:
    broken = job("one", tmp_path)
    broken.words = ["false"]
    Schedule([broken], time.monotonic() + FAR).run()
    entries = broken.report.entries.values()
    assert {entry.verdict for entry in entries} == {"not run: no process reaches it"}
    assert broken.report.remarks == ["a process ended with status 1 between lines"]
    assert broken.report.missed


def test_environment_keeps_the_path_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("/some/torch", "/others")))
    first, *rest = environment()["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "tools" / "gpu").is_dir()
    assert rest == ["/some/torch", "/others"]
    monkeypatch.delenv("PYTHONPATH")
    assert environment()["PYTHONPATH"] == first
