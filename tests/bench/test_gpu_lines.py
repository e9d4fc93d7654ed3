"""Verdicts, results and pages of tools.gpu."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.gpu import pages
from tools.gpu.__main__ import main
from tools.gpu.bench import Bench, checksum, installed
from tools.gpu.correctness import outcome
from tools.gpu.lines import (
    HOLDS,
    MEASURED,
    MISSED,
    TIME,
    Failed,
    Goal,
    Group,
    Line,
    Postponed,
    Report,
    Unavailable,
    attempt,
    verdict,
)
from tools.gpu.parts import PARTS
from tools.gpu.training import deterministic

BENCH = Bench(torch.device("cpu"), True, Path("/nowhere"), 0.0)
LINES = {
    part.name: [line for group in part.groups(BENCH) for line in group.lines] for part in PARTS
}
"""The lines of each part. Nothing is measured yet."""

PROMISES = [
    pytest.param(line, id=f"{name}-{line.name}")
    for name, lines in LINES.items()
    for line in lines
    if line.goals
]


# Verdicts -----------------------------------------------------------------------------------------


def bounds(line: Line) -> dict[str, float]:
    """Figures that are just good enough."""
    return {
        goal.figure: goal.at_most if goal.at_most < math.inf else goal.at_least
        for goal in line.goals
    }


@pytest.mark.parametrize("line", PROMISES)
def test_verdict_on_the_bounds_holds_and_beyond_is_missed(line: Line) -> None:
    enough = bounds(line)
    assert verdict(line.goals, enough) == HOLDS
    for goal in line.goals:
        for bound, beyond in (
            (goal.at_most, goal.at_most + 0.001),
            (goal.at_least, goal.at_least - 0.001),
        ):
            if math.isfinite(bound):
                assert verdict(line.goals, {**enough, goal.figure: beyond}) == MISSED
        assert verdict(line.goals, {**enough, goal.figure: math.nan}) == MISSED
        others = {name: value for name, value in enough.items() if name != goal.figure}
        assert verdict(line.goals, others).startswith("not run: needs")


def test_lines_have_unique_names_and_goals_have_bounds() -> None:
    lines = [line for part in LINES.values() for line in part]
    names = [line.name for line in lines]
    assert len(names) == len(set(names))
    for goal in (goal for line in lines for goal in line.goals):
        assert math.isfinite(goal.at_least) or math.isfinite(goal.at_most)


def test_parts_are_in_order_of_importance() -> None:
    assert [(part.step, part.name) for part in PARTS] == [
        (1, "suite"),
        (1, "correctness"),
        (1, "hazards"),
        (2, "per_group"),
        (3, "inference"),
        (4, "activations"),
        (5, "training"),
        (6, "disk_peers"),
    ]
    assert {part.page for part in PARTS} == set(pages.TITLES)


def test_goals_of_the_first_run_are_still_set() -> None:
    """The goals that were set before anything ran on a GPU."""
    goals_by_line = {
        line.name: [str(goal) for goal in line.goals] for x in LINES.values() for line in x
    }
    assert goals_by_line["link"] == [
        "onload_to_pin_memory at least 0.95",
        "offload_to_pin_memory at least 0.95",
    ]
    assert "wrong at least 1" in goals_by_line["without the event of a release"]
    assert "to_allowed at most 1.1" in goals_by_line["running ahead"]
    assert "to_bound at most 1.15" in goals_by_line["all in RAM"]
    assert "to_bound at most 1.2" in goals_by_line["half in RAM"]
    assert "to_bound at most 1.2" in goals_by_line["a quarter in RAM"]
    assert "to_bound at most 1.3" in goals_by_line["offload_activations"]
    assert "differing at most 0" in goals_by_line["OffloadModel, RAM for 0.5 x, fused"]


def test_verdict_without_goals_is_measured() -> None:
    assert verdict([], {"seconds": 1.0}) == MEASURED


# Results ------------------------------------------------------------------------------------------


def figures(**found: float) -> Callable[[], dict[str, float]]:
    return lambda: found


def failing(error: Exception) -> Callable[[], dict[str, float]]:
    def measure() -> dict[str, float]:
        raise error

    return measure


GOOD = Goal("wrong", at_most=0)


def test_attempt_returns_figures_and_verdicts() -> None:
    good = attempt(Line("good", "is right", figures(wrong=0, seconds=2.5), [GOOD]))
    assert (good["verdict"], good["figures"]) == (HOLDS, {"wrong": 0, "seconds": 2.5})
    assert attempt(Line("plain", "has no goal", figures(seconds=1.0)))["verdict"] == MEASURED
    away = attempt(Line("away", "", failing(Unavailable("x is not installed")), [GOOD]))
    assert (away["verdict"], away["done"]) == ("not run: x is not installed", True)
    later = attempt(Line("later", "", failing(Postponed("time\nas far as it came")), [GOOD]))
    assert (later["verdict"], later["error"]) == ("not run: time", "as far as it came")
    assert not later["done"]
    other = attempt(Line("other", "of others", failing(OSError("no such thing")), peer=True))
    assert other["verdict"] == "not run: OSError: no such thing"
    assert "no such thing" in other["error"]


@pytest.mark.parametrize("failure", (KeyError("wrong"), Failed("KeyError", {"wrong": 3})))
def test_attempt_of_a_failing_line_is_missed(failure: Exception) -> None:
    bad = attempt(Line("bad", "", failing(failure), [GOOD]))
    assert (bad["verdict"], bad["done"]) == (MISSED, True)
    assert "KeyError" in bad["error"]


def test_report_keeps_finished_lines(tmp_path: Path) -> None:
    groups = [Group("g", [Line("one", "", figures(), [GOOD]), Line("two", "", figures())])]
    report = Report(tmp_path / "out.json", groups, {"command": "trial"})
    report.note("one", HOLDS, figures={"wrong": 0.0}, done=True)
    report.note("two", f"{TIME}: it was cut")
    again = Report(tmp_path / "out.json", groups, {"command": "other"})
    assert [line.name for line in again.left] == ["two"]
    assert (again.figures, again.missed) == ({"one": {"wrong": 0.0}}, False)
    again.ended(groups[0].lines[1], "it hung")
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["command"] == "trial"
    assert [line["verdict"] for line in document["lines"]] == [HOLDS, MISSED]
    assert again.missed
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_figures_of_other_lines_are_known_or_postponed(tmp_path: Path) -> None:
    bench = Bench(torch.device("cpu"), True, tmp_path, 0.0)
    with pytest.raises(Postponed, match="needs the line 'link'"):
        bench.figure("link", "speed")
    bench.figures["link"] = {"speed": 2.0, "checksum": 7}
    assert bench.figure("link", "speed") == 2.0
    assert (bench.differing(7, "link"), bench.differing(8, "link")) == (0.0, 1.0)
    with pytest.raises(Unavailable, match="needs the line 'link'"):
        bench.figure("link", "other")


def test_checksum_changes_with_any_bit() -> None:
    tensors = [torch.arange(100.0), torch.arange(9).to(torch.bfloat16)]
    found = checksum(tensors)
    assert found == checksum([tensor.clone() for tensor in tensors])
    tensors[0].view(torch.int32)[17] ^= 1
    assert checksum(tensors) != found


@pytest.mark.parametrize(
    ("text", "status", "cut", "raised"),
    [
        ("2 failed, 30 passed, 4 skipped in 12.0s", 1, False, Failed),
        ("2 failed, 30 passed, 4 skipped in 12.0s", 2, True, Postponed),
        ("error: unrecognized arguments: --device", 4, False, Unavailable),
    ],
)
def test_outcome_of_failed_tests_raises_with_counts(
    text: str, status: int, cut: bool, raised: type[Exception]
) -> None:
    with pytest.raises(raised) as caught:
        outcome(text, status, cut)
    if isinstance(caught.value, Failed):
        expected = {"passed": 30, "failed": 2, "skipped": 4, "error": 0}
        assert caught.value.figures == expected
    assert (text in str(caught.value)) or raised is Unavailable


def test_outcome_of_passed_tests_has_counts() -> None:
    found = outcome("....\n30 passed, 4 skipped in 12.0s", 0, False)
    assert found == {"passed": 30, "failed": 0, "skipped": 4, "error": 0}


def test_gradients_are_compared_under_deterministic_attention() -> None:
    """cuDNN's attention adds in any order. The others do too, unless torch is set to raise."""

    def state() -> tuple[bool, bool, bool]:
        return (
            torch.backends.cuda.cudnn_sdp_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    before = state()
    with deterministic():
        assert state() == (False, True, False)
        assert torch.backends.cuda.flash_sdp_enabled()
    assert state() == before == (True, False, False)


def test_installed_missing_package_raises() -> None:
    installed("json")
    with pytest.raises(Unavailable, match="no_such_package is not installed"):
        installed("no_such_package")


# The command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--device", "cuda"], "there is no cuda device"),
        (["--device", "nonsense"], "nonsense"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU here")
def test_main_without_the_device_exits_with_the_reason(
    words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "x"), *words])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# Pages --------------------------------------------------------------------------------------------

DOCUMENT = {
    "command": "inference",
    "small": False,
    "began": "2031-02-03 04:05:06",
    "seconds": 512.3,
    "hardware": {
        "name": "NVIDIA H100 80GB HBM3",
        "device_gib": 79.1,
        "cuda": "13.0",
        "link": "580.1, 5, 16",
        "cores": 16,
        "memory_gib": 128.0,
        "system": "Linux 6.8",
        "python": "3.12.3",
        "versions": {"torch": "2.11.0"},
        "commit": "0123456789abcdef",
    },
    "lines": [
        {
            "group": "ours",
            "name": "all in RAM",
            "about": "a store",
            "goals": ["to_bound at most 1.15"],
            "verdict": HOLDS,
            "figures": {"seconds": 0.51234, "to_bound": 1.1},
            "seconds": 12.0,
            "error": "",
        },
        {
            "group": "ours",
            "name": "half in RAM",
            "about": "a store",
            "goals": ["to_bound at most 1.2"],
            "verdict": MISSED,
            "figures": {"to_bound": 1.3},
            "seconds": 12.0,
            "error": "Traceback: it went wrong\n",
        },
        {
            "group": "peers",
            "name": "diffusers",
            "about": "theirs",
            "goals": [],
            "verdict": "not run: diffusers is not installed",
            "figures": {},
            "seconds": 0.0,
            "error": "",
        },
    ],
}


def write(document: Any, place: Path) -> str:
    file = place / "result.json"
    file.write_text(json.dumps(document))
    return str(file)


def test_page_names_the_hardware_and_missed_goals(tmp_path: Path) -> None:
    file = write(DOCUMENT, tmp_path)
    assert pages.main([file, "--to", str(tmp_path)]) == 0
    page = tmp_path / "gpu-inference_nvidia-h100-80gb-hbm3_2031-02-03.md"
    text = page.read_text()
    assert "NVIDIA H100 80GB HBM3, 79.1 GiB, CUDA 13.0; driver" in text
    assert "torch 2.11.0; commit 0123456789ab" in text
    assert "python -m tools.gpu --minutes 12 --out gpu" in text
    assert re.search(r"all in RAM +\| a store \| holds .*seconds 0.5123; to_bound 1.1", text)
    assert re.search(r"half in RAM +\| a store \| MISSED", text)
    assert "not run: diffusers is not installed" in text
    assert "it went wrong" in text
    assert "- holds: all in RAM: to_bound at most 1.15" in text
    assert "- MISSED: half in RAM: to_bound at most 1.2" in text
    page.write_text(text.replace("<!-- measured: begin -->", "Words.\n\n<!-- measured: begin -->"))
    pages.main([file, "--to", str(tmp_path)])
    assert "Words." in page.read_text()


def test_pages_files_of_one_subject_are_joined(tmp_path: Path) -> None:
    other = {**DOCUMENT["lines"][0], "group": "disk peers", "figures": {"checksum_8": 5, "x": 6}}  # type: ignore[index]
    documents = [DOCUMENT, {**DOCUMENT, "seconds": 7.7, "lines": [other]}]
    (joined,) = pages.merged(documents)
    assert joined["seconds"] == 520
    text = pages.text_of(joined)
    assert "## Ours" in text
    assert re.search(r"## Disk peers\n\n.*\n.*\n\| all in RAM .* x 6 +\|", text)
    assert "checksum" not in text


@pytest.mark.parametrize("why", ("small", "no GPU"))
def test_pages_of_a_trial_are_not_written(
    why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {**DOCUMENT, "small": why == "small"}
    if why == "no GPU":
        hardware = {k: v for k, v in DOCUMENT["hardware"].items() if k != "device_gib"}  # type: ignore[attr-defined]
        document["hardware"] = {**hardware, "name": "pretend (no GPU)"}
    file = write(document, tmp_path)
    pages.main([file, "--to", str(tmp_path)])
    assert "no page" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.md"))
    pages.main([file, "--to", str(tmp_path), "--trial"])
    assert list(tmp_path.glob("*.md"))
